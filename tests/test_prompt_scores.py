"""Prompt logprobs of an engine: what `score` says of the same logits, each token scored once, whatever goes on."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxsample as js
from jaxsample.buckets import Buckets
from jaxsample.engine import Engine, Request
from jaxsample.prompt_scores import make_scorer
from models.lookup import init_lookup_cache, lookup_functions
from models.programs import make_watched_prefill
from tests.meshes import mesh_of

V, S, PAGE, SLOTS, MOST, CHUNK = 90, 40, 4, 6, 3, 8
LIMITS = js.Limits(V, max_length=S, num_logprobs=4)
BUCKETS = Buckets(
    rows=(SLOTS,),
    lengths=(S,),
    prefill=((2, CHUNK),),
    features=(js.Features(tier="plain", full_rows=False),),
    updates=(SLOTS,),
    prompt_logprobs=MOST,
)
WEIGHTS = jnp.asarray([3, 5], jnp.uint32)
forward, unembed = lookup_functions(V, padded_size=V + 7)


def make_engine(unembed=unembed, forward=forward, weights=WEIGHTS, **given):
    return Engine(
        forward,
        unembed,
        weights,
        lambda pages, size, table: js.init_paged_cache(1, pages, size, 1, 1, jnp.float32, table),
        **{"limits": LIMITS, "buckets": BUCKETS, "num_pages": 16, "page_size": PAGE, **given},
    )


@pytest.fixture(scope="module")
def engine():
    """With pages for two long requests; `calls` counts its programs by what they do."""
    engine = make_engine()
    engine.calls = collections.Counter()

    def counted(name, program):
        def call(*arguments):
            engine.calls[name[0]] += 1
            return program(*arguments)

        return call

    engine._programs = {name: counted(name, program) for name, program in engine._programs.items()}
    return engine


@pytest.fixture(scope="module")
def expected():
    """A function: a prompt -> its Logprobs by the path without an engine, MOST top columns."""
    prefill = make_watched_prefill(forward, unembed, V, MOST)

    def scored(prompt):
        tokens = np.zeros((1, S), np.int32)
        tokens[0, : len(prompt)] = prompt
        count = np.asarray([len(prompt) - 1], np.int32)
        successors = np.roll(tokens, -1, axis=1)
        _, told = prefill(WEIGHTS, init_lookup_cache(1, S), tokens, successors, np.zeros(1, np.int32), count)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[0, : len(prompt) - 1], told)

    return scored


def check(stream, expected):
    got, n = stream.prompt_logprobs, stream.request.params["prompt_logprobs"]
    told = expected(stream.request.prompt)
    assert got.token_ids.tolist() == stream.request.prompt[1:].tolist()
    pairs = ((got.logprobs, told.token), (got.ranks, told.rank))
    for left, right in (*pairs, (got.top_ids, told.top_ids[:, :n]), (got.top_logprobs, told.top[:, :n])):
        assert left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def random_prompt(generator, length):
    return generator.integers(0, V, length).tolist()


def test_prompts_of_any_length_and_number_are_scored_once_and_as_without_an_engine(engine, expected):
    generator, streams = np.random.default_rng(0), []
    for index in range(40):
        length = int(generator.integers(1, 30))
        params = {"seed": index, "max_tokens": int(generator.integers(1, 10)), "n": 1 + index % 3}
        if index % 4:
            params["prompt_logprobs"] = int(generator.integers(0, MOST + 1))
        streams.append(engine.submit(Request(random_prompt(generator, length), params)))
    preempted = engine.stats.num_preempted
    alone = [Request(stream.request.prompt, dict(stream.request.params)) for stream in streams]
    while engine.step():
        for stream in streams:
            if any(len(sample.tokens()) for sample in stream.samples) and stream.scores is not None:
                assert len(stream.prompt_logprobs) == len(stream.request.prompt) - 1, "before the first token"
    assert engine.stats.num_preempted > preempted
    for stream, request in zip(streams, alone, strict=True):
        if "prompt_logprobs" in request.params:
            check(stream, expected)
            del request.params["prompt_logprobs"]
        else:
            assert stream.prompt_logprobs is None
        again = engine.submit(request)
        engine.run()
        for left, right in zip(stream.samples, again.samples, strict=True):
            assert left.tokens().token_ids.tolist() == right.tokens().token_ids.tolist()


def test_only_chunks_with_such_rows_are_scored_and_no_token_twice(engine, expected):
    prompt = list(range(1, 1 + 2 * CHUNK + 3))
    engine.calls.clear()
    engine.submit(Request(prompt, {"seed": 1, "max_tokens": 2}))
    engine.run()
    assert (engine.calls["prefill"], engine.calls["prefill scored"]) == (3, 0)
    first = engine.submit(Request(prompt, {"seed": 1, "max_tokens": 2, "n": 2, "prompt_logprobs": 1}))
    engine.step()
    engine.step()  # two chunks are launched, one is taken in; then all begins anew
    assert engine.calls["prefill scored"] == 2 and len(first.prompt_logprobs) == CHUNK
    engine.cancel(first.samples[1])
    engine.calls.clear()
    engine.run()
    assert (engine.calls["prefill"], engine.calls["prefill scored"]) == (2, 1)
    check(first, expected)
    assert first.samples[0].finish_reason == "length" and first.samples[1].finish_reason == "cancelled"


def test_what_cannot_be_scored_is_refused_and_nothing_is_compiled_where_nobody_may_ask(engine, monkeypatch):
    for number, words in (
        (MOST + 1, r"allowed are integers in \[0, 3\]"),
        (np.int32(7), r"is 7, allowed are integers in \[0, 3\]"),
        (-1, r"is -1, allowed are integers in \[0, 3\]"),
        (True, "True"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.submit(Request([1, 2], {"prompt_logprobs": number}))
    stream = engine.submit(Request([1, 2], {"prompt_logprobs": 2, "max_tokens": 1}))
    with pytest.raises(ValueError, match="prompt_logprobs is 1, allowed is 2: it cannot change"):
        engine.change(stream, prompt_logprobs=1)
    engine.run()
    monkeypatch.setattr("jaxsample.engine.compile_ahead", lambda programs: programs)
    plain = dataclasses.replace(BUCKETS, prompt_logprobs=-1)
    names, all_names = make_engine(buckets=plain)._programs, make_engine()._programs
    assert sorted(name[0] for name in all_names) == sorted([*(name[0] for name in names), "prefill scored"])
    assert len(all_names) == BUCKETS.num_programs - 2 and len(names) == plain.num_programs - 2
    with pytest.raises(
        ValueError, match=r"prompt_logprobs is 0, allowed is None: the engine was made without"
    ):
        make_engine(buckets=plain).submit(Request([1, 2], {"prompt_logprobs": 0}))
    with pytest.raises(ValueError, match=r"buckets.prompt_logprobs is 5, allowed is at most"):
        make_engine(buckets=dataclasses.replace(BUCKETS, prompt_logprobs=5))
    with pytest.raises(ValueError, match="prompt_logprobs is -2"):
        dataclasses.replace(BUCKETS, prompt_logprobs=-2)


def test_scores_from_a_head_are_those_of_its_logits():
    generator = np.random.default_rng(1)
    hidden = jnp.asarray(generator.integers(-4, 5, (2, 3, 8)), jnp.float32)  # sums are exact
    weight = jnp.asarray(generator.integers(-4, 5, (V, 8)), jnp.float32)
    ids = jnp.asarray(generator.integers(0, V, (2, 3)), jnp.int32)
    whole = jax.jit(make_scorer(lambda weight, hidden: hidden @ weight.T, V, MOST))(weight, hidden, ids)
    chunks = jax.jit(make_scorer(js.Head(chunk=128, num_lanes=128), V, MOST))(weight, hidden, ids)
    assert whole.shape == (2, 3, 2 + 2 * MOST)
    assert (whole[..., 1 : 2 + MOST] == chunks[..., 1 : 2 + MOST]).all()
    as_float = lambda words: np.asarray(words)[..., [0, *range(2 + MOST, 2 + 2 * MOST)]].view(np.float32)
    np.testing.assert_allclose(as_float(whole), as_float(chunks), rtol=1e-5)
    direct = js.score((hidden @ weight.T).reshape(6, V), ids.reshape(6), MOST)
    assert np.asarray(whole)[..., 0].view(np.float32).ravel().tolist() == np.asarray(direct.token).tolist()


@pytest.mark.parametrize("shape", [(2, 3), (1, 4)])  # the six devices divide the rows, or do not
def test_scores_of_split_logits_are_those_of_one_device(shape):
    generator = np.random.default_rng(2)
    logits = generator.normal(0, 3, (*shape, 384)).astype(np.float32)
    logits[..., V:] = np.nan  # padding
    ids = generator.integers(0, V, shape).astype(np.int32)
    alone = jax.jit(make_scorer(lambda _, hidden: hidden, V, MOST))((), logits, ids)
    mesh = mesh_of("auto", data=2, tensor=3)
    split = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, None, "tensor")))
    scorer = make_scorer(lambda _, hidden: hidden, V, MOST, mesh, "tensor", "data")
    assert np.asarray(jax.jit(scorer)((), split, ids)).tolist() == np.asarray(alone).tolist()
