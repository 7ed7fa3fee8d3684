"""The guided step on lookup models, exactly: against a loop without caches, among neighbours, behind and caught up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsample as js
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


@functools.cache
def reference(guided=True):
    """The tokens of each request by a loop without caches: logits and values by their tables, a row at a time."""

    @jax.jit
    def one(params, stop, guidance, history, root, previous):
        logits = table(WEIGHTS, previous, root, jnp.zeros_like(root), V)
        position = history.num_prompt + history.num_emitted
        shaped = js.shape(
            logits, params, position, stop=stop, history=history, limits=LIMITS, features=FEATURES
        )
        target = js.make_target(shaped, params, position, vocab_size=V, features=FEATURES)
        listed = js.shortlist(target, guidance, G)
        before = jnp.broadcast_to(root[:, None], listed.ids.shape)
        z = 0.25 * table(VALUE_WEIGHTS, before, listed.ids, jnp.zeros_like(before), 1)[..., 0]
        listed = js.guide(listed, z, js.ends_row(listed.ids, stop), guidance, history.num_emitted)
        return js.draw_target(js.guided_target(target, listed))

    begin, append = jax.jit(js.start, static_argnums=0), jax.jit(js.append)
    texts = []
    for asked, how, prompt in REQUESTS:
        params, stop = js.make_params(LIMITS, **asked)
        guidance = js.make_guidance(LIMITS, params, **how if guided else {})
        padded = np.full((1, S), js.PAD, np.int32)
        padded[0, : len(prompt)] = prompt
        history = begin(LIMITS, padded, np.array([len(prompt)], np.int32))
        said = [-1, *prompt]
        for _ in range(asked["max_tokens"]):
            root, previous = np.array(said[-1:], np.int32), np.array(said[-2:-1], np.int32)
            token = one(params, stop, guidance, history, root, previous)
            history = append(history, np.asarray(token)[:, None], np.ones(1, np.int32))
            said.append(int(token[0]))
            if said[-1] in asked.get("eos_token_ids", []):
                break
        texts.append(said[1 + len(prompt) :])
    return texts


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
