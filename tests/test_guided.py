"""The guided step on lookup models, exactly: against a loop without caches, among neighbours, through an engine."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsample as js
from jaxsample import rng
from jaxsample.buckets import Buckets
from models.lookup import init_lookup_cache, lookup_forward, lookup_functions, table

V, S, SLOTS, G = 101, 48, 4, 6
LIMITS = js.Limits(V, max_length=S, num_guided=G)
FEATURES = js.Features(num_candidates=16, full_rows=False)
WEIGHTS, VALUE_WEIGHTS = jnp.asarray([7, 11], jnp.uint32), jnp.asarray([5, 3], jnp.uint32)
forward, unembed = lookup_functions(V)
TINY = js.CatchUp(2, 3)
UNGUIDED = (2, 4)  # of REQUESTS


def value(weights, hidden):
    """z in [-2, 2) of a token and the one before it; a fault of mask or cache gives another."""
    return 0.25 * table(weights, hidden[..., 0], hidden[..., 1], hidden[..., 2], 1)[..., 0]


step_of = functools.partial(
    js.make_guided_step, forward, unembed, lookup_forward, value, limits=LIMITS, features=FEATURES
)
guided_step = step_of(catch_up=TINY)
admit = jax.jit(js.admit, static_argnames="limits")
admit_guided = jax.jit(js.admit_guided)
value_prefill = js.make_value_prefill(lookup_forward)

# (parameters, guidance, prompt); a guided request has a top_k.
REQUESTS = [
    (dict(seed=1, top_k=5, max_tokens=12, allowed_token_ids=list(range(3, 8))), dict(mode="centered_exp", scale=-3.0), [3, 4, 5, 6, 7, 8, 9]),
    (dict(seed=2, top_k=4, temperature=1.3, max_tokens=9, eos_token_ids=[1, 2, 3]),
     dict(mode="length_mul", scale=0.5), [1, 2]),
    (dict(seed=3, top_k=12, top_p=0.9, max_tokens=14), {}, [9, 9]),
    (dict(seed=4, top_k=6, min_p=0.02, max_tokens=10), dict(target_length=8, constraint="eq_soft"), list(range(20, 31))),
    (dict(temperature=0, max_tokens=6), dict(mode="centered_exp", scale=4.0), [50]),
    (dict(seed=6, top_k=3, max_tokens=11, frequency_penalty=0.5), dict(target_length=4, constraint="le"), [60, 61, 62]),
    (dict(seed=7, top_k=5, max_tokens=12), dict(mode="value_bias", scale=1.5, entropy_threshold=0.8), [70, 71]),
]  # fmt: skip


def start(chosen, slots):
    """(requests, cache, values): REQUESTS[chosen[i]] in slots[i]; nothing in the value model's cache."""
    words = [REQUESTS[i] for i in chosen]
    params, stop = js.stack_rows([js.make_params(LIMITS, **asked) for asked, _, _ in words])
    rows = [js.make_guidance(LIMITS, js.make_params(LIMITS, **asked)[0], **how) for asked, how, _ in words]
    guidance = jax.tree.map(lambda *parts: np.concatenate(parts), *rows)
    prompts = np.full((len(words), S), js.PAD, np.int32)
    lengths = np.array([len(prompt) for _, _, prompt in words], np.int32)
    tokens, counts = np.zeros((SLOTS, S), np.int32), np.zeros(SLOTS, np.int32)
    for row, (slot, (_, _, prompt)) in enumerate(zip(slots, words, strict=True)):
        prompts[row, : len(prompt)] = tokens[slot, : len(prompt)] = prompt
        counts[slot] = len(prompt) - 1
    slots = np.asarray(slots, np.int32)
    requests = admit(js.empty_requests(LIMITS, SLOTS), slots, params, stop, prompts, lengths, limits=LIMITS)
    cache = js.make_prefill(forward, LIMITS)(
        WEIGHTS, init_lookup_cache(SLOTS, S), tokens[:, :16], np.zeros(SLOTS, np.int32), counts
    )
    values = admit_guided(js.init_guided(init_lookup_cache(SLOTS, S)), slots, guidance)
    return (requests, cache, values), tokens, counts


def run(step, state, weights=WEIGHTS):
    """Tokens of each slot to the end, the counts of each step, and the values that are left."""
    requests, cache, values = state
    texts, counts = [[] for _ in range(SLOTS)], []
    for _ in range(60):
        requests, cache, values, record = step(weights, VALUE_WEIGHTS, requests, cache, values)
        told = js.unpack(record, FEATURES)
        counts.append(told.count)
        for slot, count in enumerate(told.count):
            texts[slot].extend(told.tokens[slot, :count].tolist())
        if not (told.status == js.RUNNING).any():
            return texts, np.array(counts), values
    raise AssertionError("the run does not end")


@jax.jit
def draw_alone(params, stop, guidance, history, root, previous):
    """The next token of one row, by the tables of both models."""
    logits = table(WEIGHTS, previous, root, jnp.zeros_like(root), V)
    position = history.num_prompt + history.num_emitted
    shaped = js.shape(logits, params, position, stop=stop, history=history, limits=LIMITS, features=FEATURES)
    target = js.make_target(shaped, params, position, vocab_size=V, features=FEATURES)
    listed = js.shortlist(target, guidance, G)
    before = jnp.broadcast_to(root[:, None], listed.ids.shape)
    z = 0.25 * table(VALUE_WEIGHTS, before, listed.ids, jnp.zeros_like(before), 1)[..., 0]
    listed = js.guide(listed, z, js.ends_row(listed.ids, stop), guidance, history.num_emitted)
    return js.draw_target(js.guided_target(target, listed))


begin, append = jax.jit(js.start, static_argnums=0), jax.jit(js.append)


def alone(asked, how, prompt, child=0):
    """The tokens of one request by a loop without caches: logits and values by their tables."""
    seed = rng.child_seed(asked.get("seed", 0), child)
    params, stop = js.make_params(LIMITS, **{**asked, "n": 1, "seed": seed})
    guidance = js.make_guidance(LIMITS, params, **how)
    padded = np.full((1, S), js.PAD, np.int32)
    padded[0, : len(prompt)] = prompt
    history = begin(LIMITS, padded, np.array([len(prompt)], np.int32))
    said = [-1, *prompt]
    for _ in range(min(asked["max_tokens"], S + 1 - len(prompt))):
        root, previous = np.array(said[-1:], np.int32), np.array(said[-2:-1], np.int32)
        token = draw_alone(params, stop, guidance, history, root, previous)
        history = append(history, np.asarray(token)[:, None], np.ones(1, np.int32))
        said.append(int(token[0]))
        if said[-1] in asked.get("eos_token_ids", []):
            break
    return said[1 + len(prompt) :]


@functools.cache
def reference(guided=True):
    """The tokens of each of REQUESTS, alone."""
    return [alone(asked, how if guided else {}, prompt) for asked, how, prompt in REQUESTS]


@pytest.mark.parametrize("chosen", [[0, 1, 2, 3], [4, 5, 6, 0]])
def test_rows_of_a_mixed_batch_get_what_a_loop_without_caches_draws(chosen):
    state, _, _ = start(chosen, range(SLOTS))
    texts, counts, values = run(guided_step, state)
    for slot, request in enumerate(chosen):
        assert texts[slot] == reference()[request]
    for slot, request in enumerate(chosen):
        first = int(np.argmax(counts[:, slot] > 0))
        if request in UNGUIDED:  # goes on at once, and takes no room
            assert first == 0 and values.length[slot] == 0
        elif len(REQUESTS[request][2]) > TINY.num_tokens:
            assert first > 0
        assert (counts[first : first + len(texts[slot]), slot] == 1).all(), (
            "a row that is up to date stays so"
        )


def test_guidance_changes_the_text_of_the_rows_that_ask_for_it_alone():
    same = [ours == theirs for ours, theirs in zip(reference(), reference(guided=False), strict=True)]
    assert same == [request in UNGUIDED for request in range(len(REQUESTS))]


def test_a_row_behind_waits_and_the_others_do_not():
    """The prompt of 11 tokens takes four chunks of three; its neighbour's cache is filled beforehand."""
    state, tokens, _ = start([3, 1], [1, 2])
    requests, cache, values = state
    counts = np.where(np.arange(SLOTS) == 2, 2, 0).astype(np.int32)
    values = value_prefill(VALUE_WEIGHTS, values, tokens[:, :4], counts)
    texts, counts, _ = run(guided_step, (requests, cache, values))
    assert (texts[1], texts[2]) == (reference()[3], reference()[1])
    assert js.num_catch_up_steps(11, TINY) == 4
    assert counts[:4, 1].tolist() == [0, 0, 0, 1] and counts[0, 2] == 1


@pytest.mark.large
def test_drafts_leave_the_text_as_it_is_and_filled_caches_need_no_chunk():
    chosen = [0, 1, 2, 5]
    step = step_of(proposer=js.ngram_proposer(js.chain(2), max_ngram=1))
    (requests, cache, values), tokens, counts = start(chosen, range(SLOTS))
    whole = np.array([0 if request in UNGUIDED else n + 1 for request, n in zip(chosen, counts)], np.int32)
    values = value_prefill(VALUE_WEIGHTS, values, tokens[:, :4], np.minimum(whole, 4))
    values = value_prefill(VALUE_WEIGHTS, values, tokens[:, 4:8], np.maximum(whole - 4, 0))
    texts, counts, values = run(step, (requests, (cache, ()), values), (WEIGHTS, ()))
    assert texts == [reference()[request] for request in chosen]
    assert (counts[0] > 0).all() and counts.max() > 1, "proposals are kept"
    for slot, request in enumerate(chosen):
        size = 0 if request in UNGUIDED else len(REQUESTS[request][2]) + len(texts[slot])
        assert values.length[slot] == size, "prompt and output"


def test_what_does_not_fit_is_refused():
    for features in (js.Features(tier="plain"), js.Features(num_candidates=G - 1)):
        with pytest.raises(ValueError, match="num_guided = 6"):
            step_of(features=features)
    with pytest.raises(ValueError, match="catch_up is"):
        step_of(catch_up=js.CatchUp(0, 8))
    state, _, _ = start([2], [0])
    short = js.init_guided(init_lookup_cache(SLOTS, S - 1))
    with pytest.raises(ValueError, match="max_length = 48"):
        guided_step(WEIGHTS, VALUE_WEIGHTS, *state[:2], short)
    with pytest.raises(ValueError, match=f"tokens have {S} columns, allowed are the cache's {S - 1}"):
        value_prefill(VALUE_WEIGHTS, short, np.zeros((SLOTS, S), np.int32), np.zeros(SLOTS, np.int32))


# --- through an engine --------------------------------------------------------------------------------------

PAGE, SEATS = 8, 6


def new_pages(num_pages, page_size, page_table):
    return js.init_paged_cache(1, num_pages, page_size, 1, 1, jnp.float32, page_table)


def make_engine(num_pages, **given):
    return js.Engine(
        forward,
        unembed,
        WEIGHTS,
        new_pages,
        limits=LIMITS,
        buckets=Buckets((SEATS,), (S,), ((2, 8),), (FEATURES,), (SEATS,)),
        num_pages=num_pages,
        page_size=PAGE,
        scorer=js.Scorer(lookup_forward, value, VALUE_WEIGHTS, new_pages),
        **given,
    )


@pytest.fixture(scope="module")
def engine():
    """Too few pages for all slots."""
    return make_engine(11)


def ask(asked, how, prompt):
    return js.Request(prompt, asked, guidance=how)


def random_request(generator):
    """Some are guided; prompts that end with a page, begin one, and have one token are among them."""
    prompt = generator.integers(0, V, int(generator.choice([1, 2, 7, 8, 9, 16, 17, 25]))).tolist()
    asked = {"seed": int(generator.integers(1 << 40)), "max_tokens": int(generator.integers(1, 24))}
    asked |= {
        "top_k": int(generator.integers(2, G + 1)),
        "temperature": float(generator.choice([0, 0.8, 1.4])),
    }
    if generator.random() < 0.3:
        asked |= {"n": int(generator.integers(2, 4))}
    if generator.random() < 0.3:
        asked |= {"eos_token_ids": generator.integers(0, V, 4).tolist(), "frequency_penalty": 0.4}
    hows = [{}, {"mode": "centered_exp", "scale": -4.0}, {"mode": "length_mul", "scale": 2.0}]
    hows += [
        {"target_length": 9, "constraint": "eq"},
        {"mode": "value_bias", "scale": 1.0, "entropy_threshold": 1.0},
    ]
    return asked, hows[int(generator.integers(len(hows)))], prompt


def check(stream, words, cancelled=False):
    for sample in stream.samples:
        got, expected = sample.tokens().token_ids.tolist(), alone(*words, child=sample.index)
        if cancelled and sample.status == js.CANCELLED:
            expected = expected[: len(got)]
        assert (got, sample.error) == (expected, None)


def test_an_engine_gives_guided_and_other_requests_what_they_get_alone(engine):
    """With prompts in chunks, children, cancellation, slots used again, and pages that run out."""
    generator = np.random.default_rng(5)
    words = [*REQUESTS, *(random_request(generator) for _ in range(40))]
    streams, cancelled = [], set()
    for asked in words:
        streams.append(engine.submit(ask(*asked)))
        for _ in range(int(generator.integers(0, 3))):
            engine.step()
        if generator.random() < 0.15:
            chosen = int(generator.integers(max(len(streams) - 5, 0), len(streams)))
            cancelled.add(chosen)
            engine.cancel(streams[chosen])
    engine.run()
    for index, (stream, asked) in enumerate(zip(streams, words, strict=True)):
        check(stream, asked, index in cancelled)
    stats = engine.stats
    assert stats.num_preempted > 0 and stats.num_free_pages == stats.num_pages and stats.num_seated == 0
    assert [alone(*asked) for asked in words] != [alone(asked, {}, prompt) for asked, _, prompt in words]


def test_requests_that_are_not_guided_do_not_touch_the_value_model(engine, monkeypatch):
    engine.run()
    for name in engine._programs:
        if name[0] in ("guided step", "prefill values"):
            monkeypatch.setitem(engine._programs, name, None)
    words = [*(REQUESTS[i] for i in UNGUIDED), (*REQUESTS[0][:1], {"mode": "mul", "scale": 1}, [3, 4])]
    streams = [engine.submit(ask(*asked)) for asked in words]
    engine.run()
    for stream, asked in zip(streams, words, strict=True):
        check(stream, asked)


def test_a_request_that_is_guided_later_has_its_value_cache_filled_then(engine):
    """Greedy requests are not guided; other parameters make them so, and not, and so again."""
    asked, how, prompt = (
        {"top_k": 5, "seed": 9, "max_tokens": 20},
        {"mode": "value_bias", "scale": 3.0},
        [5] * 9,
    )
    stream = engine.submit(ask({**asked, "temperature": 0.0}, how, prompt))
    changes = [1.0, 0.0, 1.0]
    sizes = []
    for temperature in changes:
        for _ in range(6):
            engine.step()
        sizes.append(len(stream.samples[0].tokens()))
        engine.change(stream, temperature=temperature)
    engine.run()
    said = stream.samples[0].tokens().token_ids.tolist()
    assert len(said) == 20 and sizes == sorted(set(sizes)) and sizes[0] > 0 and sizes[-1] < 20
    # Each part is what the request says after all before it; a step may be in flight at a change.
    start = 0
    for temperature, end in zip([0.0, *changes], [*sizes, 20], strict=True):
        rest = alone({**asked, "temperature": temperature}, how, prompt + said[:start])
        same = int(np.argmin([*(x == y for x, y in zip(rest, said[start:], strict=False)), False]))
        assert start + same >= end
        start = end if end == 20 else min(start + same, end + 1)


def test_guidance_that_an_engine_cannot_serve_is_refused(engine):
    for asked, how, named in (
        ({"top_k": G + 1}, {"scale": 2.0}, "top_k is 7"),
        ({}, {"scale": 2.0}, "top_k is 0"),
        ({"top_k": 2}, {"scale": float("nan")}, "scale is nan"),
        ({"top_k": 2}, "longer", "guidance is 'longer'"),
    ):
        with pytest.raises(ValueError, match=named):
            engine.submit(ask(asked, how, [1]))
    stream = engine.submit(ask({"top_k": 2, "max_tokens": 1}, {"scale": 2.0}, [1]))
    with pytest.raises(ValueError, match="top_k is 9"):
        engine.change(stream, top_k=9)
    engine.run()
    with pytest.raises(ValueError, match="scorer and mesh are given"):
        make_engine(16, mesh=jax.make_mesh((1,), ("x",)))
    assert engine.stats.num_seated == 0


class Only:
    """A grammar that allows the same tokens everywhere."""

    def __init__(self, token_ids):
        self.bits = np.zeros(LIMITS.num_words * 32, bool)
        self.bits[token_ids] = True

    def fill(self, mask):
        mask |= np.packbits(self.bits, bitorder="little").view(np.uint32)

    def accept(self, token):
        return bool(self.bits[token])

    def rollback(self, num_tokens):
        pass


@pytest.mark.large
def test_drafts_and_grammars_leave_guided_text_as_it_is():
    engine = make_engine(14, proposer=js.ngram_proposer(js.chain(2), max_ngram=1), grammars=True)
    generator = np.random.default_rng(8)
    words = [*REQUESTS, *(random_request(generator) for _ in range(24))]
    streams = []
    for index, (asked, how, prompt) in enumerate(words):
        request, few = ask(asked, how, prompt), list(range(3, 8))
        if index % 3 == 0:
            request = dataclasses.replace(request, grammar=functools.partial(Only, few))
            words[index] = {**asked, "allowed_token_ids": few}, how, prompt
        streams.append(engine.submit(request))
        engine.step()
    engine.run()
    for stream, asked in zip(streams, words, strict=True):
        check(stream, asked)
    assert engine.stats.num_accepted > 0 and engine.stats.num_preempted > 0
