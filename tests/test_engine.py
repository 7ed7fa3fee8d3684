"""The engine on the lookup model, exactly: every request gets what it gets alone, whatever else goes on."""

import functools
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsample as js
from jaxsample.buckets import Buckets, make_buckets
from jaxsample.engine import Engine, QueueFull, Request
from models.lookup import init_lookup_cache, lookup_functions

V, S, PAGE, SLOTS = 101, 48, 8, 24
BAD = V - 1  # after this token the logits are NaN
LIMITS = js.Limits(V, max_length=S, num_logprobs=3, num_logit_bias=4, num_bad_words=2, bad_word_length=2)
FEATURES = (
    js.Features(tier="plain", full_rows=False, num_candidates=32),
    js.Features(num_candidates=32, num_logprobs=3),
)
BUCKETS = Buckets(rows=(4, SLOTS), lengths=(S,), prefill=((4, 16),), features=FEATURES, updates=(SLOTS,))
WEIGHTS = jnp.asarray([7, 11], jnp.uint32)
forward, _unembed = lookup_functions(V)


def unembed(weights, hidden):
    return jnp.where(hidden[..., 1:2] == BAD, jnp.nan, _unembed(weights, hidden))


def new_cache(num_pages, page_size, table):
    return js.init_paged_cache(1, num_pages, page_size, 1, 1, jnp.float32, table)


def make_engine(**given):
    return Engine(
        forward,
        unembed,
        WEIGHTS,
        new_cache,
        **{"limits": LIMITS, "buckets": BUCKETS, "num_pages": 60, "page_size": PAGE, **given},
    )


@pytest.fixture(scope="module")
def engine():
    """One engine for all tests that leave it idle; too few pages for all slots."""
    return make_engine(max_waiting=64)


@functools.cache
def _alone_programs():
    features = FEATURES[-1]
    step = js.make_decode_step(forward, unembed, limits=LIMITS, features=features)
    admit = jax.jit(js.admit, static_argnames="limits")
    return step, js.make_prefill(forward, LIMITS), admit


def alone(requests):
    """[(tokens, logprobs, status)] of each sample of each request, by the plain step without an engine."""
    step, prefill, admit = _alone_programs()
    rows = [
        (request, index, *js.make_params(LIMITS, **request.params))
        for request in requests
        for index in range(request.params.get("n", 1))
    ]
    results = []
    for start in range(0, len(rows), 64):
        part = rows[start : start + 64]
        pick = lambda tree, index: jax.tree.map(lambda leaf: leaf[index : index + 1], tree)
        chosen = [(pick(params, index), pick(stop, index)) for _, index, params, stop in part]
        spare = [js.neutral_params(LIMITS, 64 - len(part))] if len(part) < 64 else []
        params, stop = js.stack_rows(chosen + spare)
        prompts, lengths = np.zeros((64, S), np.int32), np.ones(64, np.int32)
        for row, (request, *_) in enumerate(part):
            lengths[row] = len(request.prompt)
            prompts[row, : lengths[row]] = request.prompt
        state = admit(
            js.empty_requests(LIMITS, 64),
            np.arange(64, dtype=np.int32),
            params,
            stop,
            prompts,
            lengths,
            limits=LIMITS,
        )
        state = js.release(state, np.arange(len(part), 64, dtype=np.int32))
        cache = prefill(WEIGHTS, init_lookup_cache(64, S), prompts, np.zeros(64, np.int32), lengths - 1)
        tokens, logprobs = [[] for _ in part], [[] for _ in part]
        while True:
            state, cache, record = step(WEIGHTS, state, cache)
            told = js.unpack(record, FEATURES[-1])
            for row in np.flatnonzero(told.count[: len(part)]):
                tokens[row].append(int(told.tokens[row, 0]))
                logprobs[row].append(float(told.logprobs[row, 0]))
            if not (told.status == js.RUNNING).any():
                break
        results += [(tokens[row], logprobs[row], int(told.status[row])) for row in range(len(part))]
    return iter(results)


def random_request(generator):
    length = int(generator.integers(1, 2 + generator.integers(1, S - 2)))
    params = {"seed": int(generator.integers(1 << 60)), "max_tokens": int(generator.integers(1, 24))}
    params["temperature"] = float(generator.choice([0.0, 0.7, 1.3]))
    if generator.random() < 0.2:
        del params["max_tokens"]
    if generator.random() < 0.4:
        params |= {"eos_token_ids": [int(x) for x in generator.integers(0, V, 3)], "top_p": 0.9}
    if generator.random() < 0.2:
        params |= {"top_k": int(generator.integers(1, 40)), "min_p": 0.02, "logprobs": 2}
    if generator.random() < 0.2:
        params |= {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": -0.2}
    if generator.random() < 0.2:
        words = [[int(x)] for x in generator.integers(0, V, 4)]
        params |= {"stop_sequences": [*words[:2], [3, 4]], "min_tokens": min(3, params.get("max_tokens", 3))}
    if generator.random() < 0.2:
        params |= {"logit_bias": {5: 3.0, 6: -np.inf}, "bad_words_ids": [[1, 2], [9]], "logprobs": 0}
    if generator.random() < 0.1:
        params["n"] = int(generator.integers(2, 5))
    return Request([int(x) for x in generator.integers(0, V, length)], params)


def bad_request(generator):
    """A request that is refused."""
    good = random_request(generator)
    wrong = [
        Request([], good.params),
        Request([*good.prompt[:3], V], good.params),
        Request([1] * (S + 1), good.params),
        Request(good.prompt, {**good.params, "temperature": float("nan")}),
        Request(good.prompt, {**good.params, "top_p": 2.0}),
        Request(good.prompt, {**good.params, "n": SLOTS + 1}),
        Request(good.prompt, {**good.params, "logprobs": 4}),
    ]
    return wrong[int(generator.integers(len(wrong)))]


def idle(engine):
    """Whether every slot and page is free, on the host and on the device."""
    stats = engine.stats
    device = engine._state
    return (
        stats.num_free_pages == stats.num_pages
        and stats.num_seated == stats.num_waiting == 0
        and not engine._scheduler.seats.pool.holders.any()
        and (np.asarray(device.requests.status) == js.IDLE).all()
        and (np.asarray(device.cache.page_table) == -1).all()
    )


@pytest.mark.parametrize("num_requests", [500, pytest.param(10_000, marks=pytest.mark.large)])
def test_random_requests_get_what_they_get_alone(engine, num_requests):
    generator = np.random.default_rng(num_requests)
    before = engine.stats
    waiting = [random_request(generator) for _ in range(num_requests)]
    streams, cancelled, refused = [], set(), 0
    more = True
    while more or len(streams) < num_requests:
        while len(streams) < num_requests and engine.room:
            if generator.random() < 0.05:
                with pytest.raises(ValueError):
                    engine.submit(bad_request(generator))
                refused += 1
            streams.append(engine.submit(waiting[len(streams)]))
            if generator.random() < 0.3:
                break  # now and then requests come one by one
        if generator.random() < 0.1:
            stream = streams[int(generator.integers(max(len(streams) - 80, 0), len(streams)))]
            if not stream.done:
                cancelled.add(id(stream))
            engine.cancel(stream)
        more = engine.step()
    assert refused > 0 and len(cancelled) > num_requests // 100
    assert engine.stats.num_preempted > before.num_preempted, "the pages never ran out"
    assert idle(engine)

    expected = alone(waiting)
    statuses = set()
    for request, stream in zip(waiting, streams, strict=True):
        assert len(stream.samples) == request.params.get("n", 1)
        for sample in stream.samples:
            tokens, logprobs, status = next(expected)
            got = sample.tokens()
            statuses.add(sample.status)
            if sample.status == js.CANCELLED:
                assert id(stream) in cancelled
                tokens, logprobs = tokens[: len(got)], logprobs[: len(got)]
            else:
                assert sample.status == status
            assert got.token_ids.tolist() == tokens
            assert (sample.error is not None) == (sample.status == js.ERROR)
            if "logprobs" in request.params:
                assert got.logprobs.tolist() == np.float32(logprobs).tolist()
                assert got.top_ids.shape == (len(tokens), request.params["logprobs"])
            else:
                assert got.logprobs is None
    assert statuses == {
        js.STOP_EOS, js.STOP_SEQUENCE, js.LENGTH, js.CANCELLED, js.ERROR,
    }  # fmt: skip


def test_a_stream_gives_every_token_once_and_in_order(engine):
    stream = engine.submit(Request([5, 6], {"seed": 3, "max_tokens": 9, "n": 2, "logprobs": 1}))
    pieces = [[], []]
    for sample, tokens in stream:
        assert len(tokens) == len(tokens.logprobs) == len(tokens.top_ids) > 0
        pieces[sample.index] += tokens.token_ids.tolist()
    assert pieces == [sample.tokens().token_ids.tolist() for sample in stream.samples]
    assert stream.done and [sample.finish_reason for sample in stream.samples] == ["length"] * 2
    assert [sample.read().token_ids.size for sample in stream.samples] == [0, 0]


def test_children_share_the_pages_of_their_prompt(engine):
    prompt = list(range(1, 30))  # 28 committed tokens: three whole pages and one begun
    engine.run()
    stream = engine.submit(Request(prompt, {"seed": 1, "n": 10, "max_tokens": 6}))
    engine.step()
    engine.step()
    holders = engine._scheduler.seats.pool.holders
    assert sorted(holders[holders > 0].tolist()) == [1] * 10 + [10] * 3
    engine.run()
    expected = list(alone([stream.request]))
    assert [sample.tokens().token_ids.tolist() for sample in stream.samples] == [x[0] for x in expected]
    assert len({tuple(x[0]) for x in expected}) == 10


def test_cancelling_one_child_leaves_the_others(engine):
    stream = engine.submit(Request([1] * 40, {"seed": 8, "n": 4, "max_tokens": 7}))
    engine.cancel(stream.samples[2])
    later = engine.submit(Request([2], {"seed": 8, "max_tokens": 20}))
    for _ in range(5):
        engine.step()
    engine.cancel(later)
    engine.run()
    expected = list(alone([stream.request]))
    for sample, (tokens, _, status) in zip(stream.samples, expected):
        if sample.index == 2:
            assert sample.status == js.CANCELLED and sample.tokens().token_ids.size == 0
        else:
            assert sample.status == status and sample.tokens().token_ids.tolist() == tokens
    assert later.samples[0].finish_reason == "cancelled"
    assert 0 < later.samples[0].tokens().token_ids.size < 20
    assert idle(engine)


def test_changed_parameters_hold_from_the_next_step_on(engine):
    asked = {"seed": 21, "max_tokens": 30}
    stream = engine.submit(Request([4], asked))
    plain = next(x[0] for x in alone([stream.request]))
    for _ in range(6):
        engine.step()
    engine.change(stream, allowed_token_ids=[50, 51, 52], max_tokens=12)
    with pytest.raises(ValueError, match="temperature"):
        engine.change(stream, temperature=-1)
    with pytest.raises(ValueError, match="n is 3"):
        engine.change(stream, n=3)
    engine.run()
    tokens = stream.samples[0].tokens().token_ids.tolist()
    changed = next(at for at, token in enumerate(tokens) if token in (50, 51, 52))
    assert 3 <= changed <= 7 and tokens[:changed] == plain[:changed]
    assert set(tokens[changed:]) <= {50, 51, 52} and len(tokens) == 12


def test_a_change_holds_for_a_request_that_gives_way_before_it_runs(engine):
    stream = engine.submit(Request(list(range(1, 41)), {"seed": 3, "n": 2, "max_tokens": 6}))
    engine.step()
    engine.step()
    assert stream.samples[0].status == js.RUNNING
    engine.change(stream, allowed_token_ids=[50, 51, 52])  # needs other stages than the request came with
    engine.cancel(stream.samples[1])  # the prompt is not committed yet: all begins anew
    engine.run()
    tokens, _, status = next(alone([stream.request]))
    assert stream.samples[0].tokens().token_ids.tolist() == tokens and set(tokens) <= {50, 51, 52}
    assert stream.samples[0].status == status and idle(engine)


class Interrupting:
    """NumPy for the engine, whose every second wait for the device ends in `error`."""

    def __init__(self, engine, error):
        self.engine, self.error, self.num_waits = engine, error, 0

    def __getattr__(self, name):
        return getattr(np, name)

    def asarray(self, value):
        self.num_waits += self.engine._reading
        if self.engine._reading and self.num_waits % 2:
            raise self.error
        return np.asarray(value)


def run_interrupted(engine, monkeypatch):
    """`run`, gone on with after every interrupt; how many there were."""
    num_interrupts = 0
    with monkeypatch.context() as patch:
        patch.setattr("jaxsample.engine.np", Interrupting(engine, KeyboardInterrupt()))
        while True:
            try:
                if not engine.step():
                    return num_interrupts
            except KeyboardInterrupt:
                num_interrupts += 1


def test_a_step_interrupted_while_it_waits_is_gone_on_with(engine, monkeypatch):
    requests = [Request([3, seed], {"seed": seed, "max_tokens": 12}) for seed in range(6)]
    streams = [engine.submit(request) for request in requests]
    assert run_interrupted(engine, monkeypatch) > 5
    for stream, (tokens, _, status) in zip(streams, alone(requests), strict=True):
        assert stream.samples[0].tokens().token_ids.tolist() == tokens
        assert stream.samples[0].status == status
    assert idle(engine)


def test_targets_of_other_engines_are_refused_and_an_engine_whose_device_fails_says_so(engine, monkeypatch):
    buckets = Buckets(rows=(2,), lengths=(S,), prefill=((1, 16),), features=FEATURES[:1], updates=(2,))
    other = make_engine(buckets=buckets)
    streams = [other.submit(Request([1], {"seed": seed, "max_tokens": 9})) for seed in range(3)]
    for target in (streams[0], streams[0].samples[0], None):
        with pytest.raises(ValueError, match="of this engine"):
            engine.cancel(target)
    with pytest.raises(ValueError, match="of this engine"):
        engine.change(streams[0], max_tokens=2)
    for _ in range(4):
        other.step()
    emitted = [stream.samples[0].tokens().token_ids.tolist() for stream in streams]
    monkeypatch.setattr("jaxsample.engine.np", Interrupting(other, ArithmeticError("the device is gone")))
    late = other.submit(Request([2], {"max_tokens": 3}))
    with pytest.raises(ArithmeticError):
        other.run()
    for stream, tokens in zip([*streams, late], [*emitted, []], strict=True):
        sample = stream.samples[0]
        assert sample.finish_reason == "error" and "ArithmeticError: the device is gone" in sample.error
        assert sample.tokens().token_ids.tolist()[: len(tokens)] == tokens
    for act in (other.step, other.run, lambda: other.submit(Request([1]))):
        with pytest.raises(RuntimeError, match="the device is gone"):
            act()
    assert other.stats.num_seated == other.stats.num_waiting == 0


def test_the_queue_is_bounded_and_a_refused_request_changes_nothing(engine):
    streams = [engine.submit(Request([1], {"seed": seed, "max_tokens": 2})) for seed in range(64)]
    assert engine.room == 0
    with pytest.raises(QueueFull, match="64 requests"):
        engine.submit(Request([1], {"max_tokens": 2}))
    engine.step()
    assert engine.room == SLOTS
    for request, kind, words in [
        (Request([V], {"max_tokens": 2}), ValueError, "prompt holds 101"),
        (Request([1], {"warmth": 2}), TypeError, "warmth"),
        (Request([1], {"prompt_logprobs": 2}), ValueError, "prompt_logprobs"),
        (Request([1], {}, grammar=object), ValueError, "grammars=False"),
    ]:
        with pytest.raises(kind, match=words):
            engine.submit(request)
    assert engine.room == SLOTS
    engine.run()
    assert all(stream.done for stream in streams) and idle(engine)


def test_features_are_chosen_by_what_a_request_needs():
    assert BUCKETS.level_of(js.Features(tier="plain", full_rows=False, num_candidates=32)) == 0
    assert BUCKETS.level_of(js.Features(tier="filtered", full_rows=False, num_candidates=32)) == 1
    with pytest.raises(ValueError, match="the engine's programs have"):
        BUCKETS.level_of(js.Features(num_candidates=32, num_logprobs=4))
    with pytest.raises(ValueError, match="the engine's programs have"):
        BUCKETS.level_of(js.Features(num_candidates=32, filter_order="hf"))


def test_nothing_is_compiled_once_the_engine_is_made(engine, caplog):
    generator = np.random.default_rng(5)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for _ in range(40):
            engine.submit(random_request(generator))
        engine.run()
    assert not [record for record in caplog.records if "ompil" in record.getMessage()]


def test_requests_may_come_from_other_threads(engine):
    requests = [Request([1 + seed], {"seed": seed, "max_tokens": 12}) for seed in range(40)]
    streams = [None] * len(requests)

    def submit(first):
        for index in range(first, len(requests), 4):
            streams[index] = engine.submit(requests[index])

    threads = [threading.Thread(target=submit, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or engine.step():
        engine.step()
    expected = [x[0] for x in alone(requests)]
    assert [stream.samples[0].tokens().token_ids.tolist() for stream in streams] == expected


class Alternating:
    """A grammar in which even and odd tokens alternate, and which fails after token 13."""

    def __init__(self):
        self.said = []

    def fill(self, mask):
        if self.said and self.said[-1] == 13:
            raise RuntimeError("thirteen")
        last = self.said[-1] if self.said else 1
        bits = np.zeros(mask.size * 32, bool)
        bits[(last + 1) % 2 : V : 2] = True
        mask |= np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token):
        fits = not self.said or (self.said[-1] + token) % 2 == 1
        self.said += [token] if fits else []
        return fits

    def rollback(self, num_tokens):
        del self.said[len(self.said) - num_tokens :]


@pytest.mark.parametrize("num_drafts", [pytest.param(0, marks=pytest.mark.large), 2])
def test_grammars_hold_their_own_rows_and_touch_no_others(num_drafts, monkeypatch):
    proposer = js.ngram_proposer(js.chain(num_drafts), max_ngram=2) if num_drafts else None
    buckets = Buckets(rows=(6,), lengths=(S,), prefill=((2, 16),), features=FEATURES[1:], updates=(6,))
    engine = make_engine(buckets=buckets, grammars=True, proposer=proposer, num_pages=30)
    free = [Request([3, 4, 3, 4], {"seed": seed, "max_tokens": 20}) for seed in range(6)]
    ruled = [
        Request([3, 4, 3, 4], {"seed": seed, "max_tokens": 20, "temperature": 0.3, "n": 2}, Alternating)
        for seed in range(12)
    ]
    streams = [engine.submit(request) for pair in zip(free, ruled) for request in pair]
    streams += [engine.submit(request) for request in ruled[6:]]
    run_interrupted(engine, monkeypatch)
    for stream, (tokens, _, status) in zip(streams[:12:2], alone(free), strict=True):
        assert stream.samples[0].tokens().token_ids.tolist() == tokens
        assert stream.samples[0].status == status
    failed = 0
    for stream in [*streams[1:12:2], *streams[12:]]:
        for sample in stream.samples:
            tokens = sample.tokens().token_ids
            assert len(tokens) == 20 or sample.status == js.ERROR
            assert tokens[0] % 2 == 0
            assert ((tokens[1:] + tokens[:-1]) % 2 == 1).all()
            if sample.error == "RuntimeError: thirteen":
                failed += 1
                assert 13 in tokens[-2:], "one step was in flight at most"
    assert failed > 0
    assert idle(engine)


@pytest.mark.large
def test_speculation_leaves_the_text_as_it_is():
    proposer = js.ngram_proposer(js.chain(3), max_ngram=2)
    buckets = Buckets(rows=(8,), lengths=(S,), prefill=((4, 16),), features=FEATURES[1:], updates=(8,))
    engine = make_engine(buckets=buckets, proposer=proposer, num_pages=26)
    generator = np.random.default_rng(77)
    requests = [random_request(generator) for _ in range(60)]
    streams = []
    for request in requests:
        # Text that repeats itself, so that n-grams are found and accepted.
        request.params.update(temperature=0.0, allowed_token_ids=list(range(8)))
        request.params.pop("repetition_penalty", None)
        for name in ("bad_words_ids", "logit_bias", "eos_token_ids", "frequency_penalty", "presence_penalty"):
            request.params.pop(name, None)
        streams.append(engine.submit(request))
    engine.run()
    expected = alone(requests)
    for stream in streams:
        for sample in stream.samples:
            tokens, _, status = next(expected)
            assert sample.tokens().token_ids.tolist() == tokens and sample.status == status
    assert engine.stats.num_accepted > 100 and engine.stats.num_preempted > 0
    assert idle(engine)


draft_forward, draft_unembed = lookup_functions(V)


def head_forward(weights, tokens, hidden, positions, cache, mask):
    """The hidden state that comes next, with a fault where the head's cache has another token before this one."""
    outputs, staged = draft_forward(weights, tokens, positions, cache, mask)
    wrong = (outputs[..., 0] >= 0) & (outputs[..., 0] != hidden[..., 1])  # it begins where the output does
    return jnp.stack([hidden[..., 1], tokens, wrong.astype(jnp.int32)], axis=-1), staged


@pytest.mark.large
@pytest.mark.parametrize("drafter", ["model", "head"])
def test_a_drafters_cache_lies_in_the_same_pages(drafter):
    features = FEATURES[1]
    options = dict(limits=LIMITS, features=features, pick=js.draw_proposals(js.rng.TARGET))
    proposer = (
        js.model_proposer(draft_forward, draft_unembed, js.chain(2), **options)
        if drafter == "model"
        else js.chained_head_proposer(head_forward, draft_unembed, js.chain(2), **options)
    )
    buckets = Buckets(rows=(4,), lengths=(S,), prefill=((2, 16),), features=(features,), updates=(4,))
    num_pages = 18

    def new_drafts(num_slots):
        cache = new_cache(num_pages, PAGE, np.full((num_slots, S // PAGE), -1, np.int32))
        return cache if drafter == "model" else js.empty_head_state(cache, 3, jnp.int32)

    engine = make_engine(
        buckets=buckets,
        num_pages=num_pages,
        proposer=proposer,
        draft_weights=WEIGHTS,
        draft_forward=draft_forward if drafter == "model" else None,
        new_drafts=new_drafts,
    )
    requests = [
        Request([1 + seed] * (2 + 3 * seed), {"seed": seed, "max_tokens": 20, "n": 1 + seed % 2})
        for seed in range(10)
    ]
    streams = [engine.submit(request) for request in requests]
    engine.run()
    expected = alone(requests)
    for stream in streams:
        for sample in stream.samples:
            tokens, _, status = next(expected)
            assert sample.tokens().token_ids.tolist() == tokens and sample.status == status
    # The drafter is the model itself, or foretells its hidden states: only what lies behind a request's end is rejected, through preemption
    # and copied pages alike.
    num_samples = sum(len(stream.samples) for stream in streams)
    # A head proposes nothing in a first step, which leaves one token to the last.
    most = 2 if drafter == "model" else 3
    assert engine.stats.num_drafted - engine.stats.num_accepted <= most * num_samples
    assert engine.stats.num_accepted > 6 * num_samples
    assert engine.stats.num_preempted > 0 and idle(engine)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": 7}, "multiples of page_size = 7"),
        ({"num_pages": 0}, "num_pages is 0"),
        ({"max_waiting": 0}, "max_waiting is 0"),
        ({"limits": js.Limits(V, max_length=S + 1, num_logprobs=3)}, "max_length = 49"),
        ({"limits": js.Limits(V, max_length=S, num_logprobs=2)}, "limits.num_logprobs = 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(given, words):
    with pytest.raises(ValueError, match=words):
        make_engine(**given)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("rows", (), "rows is"),
        ("rows", (4, 4), "rows is"),
        ("lengths", (0, 8), "lengths is"),
        ("prefill", ((30, 16),), "30 prompts"),
        ("features", (), "features is empty"),
        ("features", FEATURES[::-1], "do not serve"),
        ("updates", (2,), "updates end at 2"),
        ("lengths", tuple(range(8, 8000, 8)), "programs"),
    ],
)
def test_buckets_that_do_not_fit_are_refused_by_name(field, value, words):
    fields = {name: getattr(BUCKETS, name) for name in ("rows", "lengths", "prefill", "features", "updates")}
    with pytest.raises(ValueError, match=words):
        Buckets(**{**fields, field: value})


def test_buckets_for_a_start_cover_what_the_engine_has():
    buckets = make_buckets(LIMITS, 10, PAGE, FEATURES)
    assert buckets.rows == (1, 4, 10) and buckets.lengths == (16, 48) and buckets.updates == (4, 10)
    assert buckets.prefill == ((10, 16), (5, 48))
