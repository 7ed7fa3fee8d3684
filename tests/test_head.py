"""Tokens, log-probabilities and ranks from hidden states are those of the logits that nobody stored."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxsample as js
from jaxsample import rng
from jaxsample.head import Head, head_logits
from jaxsample.head_sample import sample_head
from jaxsample.head_score import _score_rows, score_head
from jaxsample.head_summary import summarize_head
from jaxsample.logprobs import score
from jaxsample.params import Features, Limits, neutral_params
from jaxsample.sample import sample
from models.decoder import DecoderConfig, decoder_functions, decoder_head, weight_shapes
from models.lookup import init_lookup_cache, lookup_forward
from tests import batches
from tests.meshes import mesh_of
from tests.test_sharded_sample import LIMITS, PROGRAMS, WIDTH, arguments

HEAD = Head(chunk=512, num_lanes=128)
RAW = {"raw": Features(num_candidates=32, num_logprobs=6)}
STATIC = ("limits", "features", "head", "mesh", "axis", "batch_axis")
run = jax.jit(sample_head, static_argnames=STATIC)
run_logits = jax.jit(sample, static_argnames=("limits", "features"))
scored = jax.jit(
    score_head, static_argnames=("num_top", "vocab_size", "head", "rows_at_once", "mesh", "axis")
)
scored_logits = jax.jit(score, static_argnums=2)

# Sums of a row by lanes, within 2^-17 + 2^-23 a chunk, and by tiles.
CLOSE = 2.0**-16


@functools.cache
def rows_as_head(program):
    """(hidden, weight, logits) whose product has the given rows exactly: one-hot states, logits as weights."""
    (logits, *_), _ = arguments("full" if program == "raw" else program)
    logits = np.where(np.isnan(logits) | (logits == np.inf), 0, np.maximum(logits, np.float32(-1e30)))
    hidden = np.eye(len(logits), dtype=np.float32)
    hidden[5] = np.nan  # a bad row
    logits[5] = np.nan
    return hidden, np.where(np.isnan(logits), 0, logits).T, logits


def held(found, expected):
    """Tokens, validity, ranks and ids to the bit, log-probabilities as near as sums are."""
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.valid, expected.valid)
    if expected.logprobs is None:
        assert found.logprobs is None
        return
    there = np.asarray(expected.logprobs.top) > -np.inf
    np.testing.assert_array_equal(found.logprobs.rank, expected.logprobs.rank)
    np.testing.assert_array_equal(
        np.where(there, found.logprobs.top_ids, -1), np.where(there, expected.logprobs.top_ids, -1)
    )
    for name in ("token", "top"):
        one, other = (np.asarray(getattr(x.logprobs, name)) for x in (found, expected))
        np.testing.assert_array_equal(one == -np.inf, other == -np.inf)
        apart = np.where(other == -np.inf, 0, one - np.where(other == -np.inf, 0, other))
        limit = CLOSE * (1 + np.where(other == -np.inf, 0, np.abs(other)))
        assert (np.abs(np.where(other == -np.inf, 0, apart)) <= limit).all()


def given_of(program):
    (_, params, position), rest = arguments("full" if program == "raw" else program)
    return params, position, rest, {**PROGRAMS, **RAW}[program]


@functools.cache
def compiled_of(program):
    hidden, weight, _ = rows_as_head(program)
    params, position, rest, features = given_of(program)
    return run.lower(
        hidden, weight, params, position, limits=LIMITS, features=features, head=HEAD, **rest
    ).compile()


# Every parameter, every kind of row: many of these rows keep more tokens than lanes hold, or tie.
@pytest.mark.parametrize(
    "program", ["full", "plain", *(pytest.param(name, marks=pytest.mark.large) for name in ("served", "raw"))]
)
def test_tokens_and_logprobs_are_those_of_the_logits(program):
    hidden, weight, logits = rows_as_head(program)
    params, position, rest, features = given_of(program)
    options = dict(limits=LIMITS, features=features)
    compiled = compiled_of(program)
    found = compiled(hidden, weight, params, position, **rest)
    held(found, run_logits(logits, params, position, **options, **rest))
    # Chunks of 512 and eight rows of logits exist, never all rows of all columns.
    assert f"f32[64,{HEAD.chunk}]" in compiled.as_text()
    assert not re.search(rf"(f32|bf16)\[64,({WIDTH}|{LIMITS.vocab_size})\]", compiled.as_text())


@jax.jit
def summary_of_logits(logits, params, position):
    shaped = js.shape(logits, params, position, limits=LIMITS, features=PROGRAMS["served"])
    return js.summarize(shaped.logits, PROGRAMS["served"].num_candidates)


# The first tokens of a row share lanes here: what lanes must drop would be drawn, so they have to say so.
def test_rows_whose_lanes_overflow_say_so_and_are_drawn_from_their_logits():
    params, position, _, features = given_of("served")
    logits = np.random.default_rng(0).normal(0, 1, (64, WIDTH)).astype(np.float32)
    logits[::2, 3::128] += 9  # eight tokens of one lane of depth 4
    hidden = np.eye(64, dtype=np.float32)
    given = params, position
    summary = jax.jit(summarize_head, static_argnames=STATIC[:3])(
        hidden, logits.T, *given, limits=LIMITS, features=features, head=HEAD
    )
    expected = summary_of_logits(logits, *jax.tree.map(jnp.asarray, given))
    sure = np.asarray(summary.num_sure)
    assert sure[::2].max() <= 8 and sure[1::2].min() >= 16
    for row in range(64):
        for name in ("values", "ids"):
            one, other = (getattr(x, name)[row, : sure[row]] for x in (summary.candidates, expected))
            np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(summary.candidates.max, expected.max)
    np.testing.assert_allclose(summary.candidates.sum, expected.sum, rtol=CLOSE)
    held(
        compiled_of("served")(hidden, logits.T, params, position),
        run_logits(logits, params, position, limits=LIMITS, features=features),
    )


# Two tokens of one noise lane whose scores agree but for roundings: which is larger is not the lane's to say.
def test_winners_that_roundings_could_change_are_not_sure():
    temperature, features = np.float32(0.7), PROGRAMS["plain"]
    params, _ = batches.params_of(LIMITS, [dict(seed=row, temperature=0.7) for row in range(64)])
    position = np.arange(64, dtype=np.int32)
    noise = np.asarray(rng.gumbel_range(jnp.asarray(params.seed), position, rng.TARGET, WIDTH))
    logits = np.full((64, WIDTH), -30, np.float32)
    logits[:, 5] = 10
    logits[:, 5 + 128] = 10 + temperature * (noise[:, 5] - noise[:, 5 + 128])
    logits[::4, 5 + 128] = 8  # a clear row among four
    hidden = np.eye(64, dtype=np.float32)
    given = hidden, logits.T, params, position
    options = dict(limits=LIMITS, features=features)
    summary = jax.jit(summarize_head, static_argnames=STATIC[:3])(*given, **options, head=HEAD)
    sure = np.asarray(summary.winner_sure)
    clear = np.abs(noise[:, 5] + 10 / 0.7 - noise[:, 133] - logits[:, 133] / 0.7) > 1e-3
    np.testing.assert_array_equal(sure, clear)
    assert not sure[1] and sure.sum() >= 8
    held(compiled_of("plain")(*given), run_logits(logits, params, position, **options))


@pytest.mark.parametrize(
    ("program", "kind", "sizes", "axis", "batch_axis"),
    [
        ("served", "explicit", dict(data=2, tensor=4), "tensor", "data"),
        # 500 columns a device: masks do not begin with a word there.
        pytest.param("full", "auto", dict(a=2, b=2), "a", "b", marks=pytest.mark.large),
        pytest.param("plain", "auto", dict(a=4, b=2), ("b", "a"), (), marks=pytest.mark.large),
    ],
)
@pytest.mark.usefixtures("on_cpu")
def test_shards_of_the_head_give_the_same_tokens(program, kind, sizes, axis, batch_axis):
    hidden, weight, logits = rows_as_head(program)
    weight = weight[: LIMITS.vocab_size] if program == "full" else weight
    params, position, rest, features = given_of(program)
    placed = dict(mesh=mesh_of(kind, **sizes), axis=axis, batch_axis=batch_axis)
    head = dataclasses.replace(HEAD, chunk=128)
    options = dict(limits=LIMITS, features=features)
    found = run(hidden, weight, params, position, **options, head=head, **placed, **rest)
    held(found, run_logits(logits, params, position, **options, **rest))


@pytest.fixture(scope="module")
def positions():
    """(hidden, weight, ids) of 40 positions, 300 tokens, with exact products in bfloat16 too."""
    generator = np.random.default_rng(3)
    weight = generator.integers(-3, 4, (300, 32)).astype(ml_dtypes.bfloat16)
    hidden = (generator.integers(-4, 5, (40, 32)) / 8).astype(ml_dtypes.bfloat16)
    # Token 250 beside position 7's equal logits: ties decide ranks.
    weight[250] = weight[11]
    ids = generator.integers(0, 300, 40).astype(np.int32)
    ids[:4] = [-1, 300, 250, 11]
    return hidden, weight, ids


def assert_scores(found, expected, num_top):
    np.testing.assert_array_equal(found.rank, expected.rank)
    np.testing.assert_array_equal(found.top_ids, expected.top_ids)
    assert found.top.shape == (40, num_top)
    there = np.asarray(expected.token) > -np.inf
    np.testing.assert_array_equal(np.asarray(found.token) > -np.inf, there)
    np.testing.assert_allclose(found.token[there], expected.token[there], atol=CLOSE, rtol=CLOSE)
    np.testing.assert_allclose(found.top, expected.top, atol=CLOSE, rtol=CLOSE)


# bfloat16 factors, a scale and a cap, blocks of positions, logits that tie.
def test_scores_are_those_of_the_logits(positions):
    hidden, weight, ids = positions
    head = Head(chunk=128, num_lanes=128, num_recomputed=1, logit_scale=0.5, softcap=6.0)
    found = scored(hidden, weight, ids, num_top=5, head=head, rows_at_once=16)
    logits = jax.jit(head_logits, static_argnums=2)(hidden, weight, head)
    plain = 6 * jnp.tanh((hidden.astype(np.float32) @ weight.astype(np.float32).T) * 0.5 / 6)
    np.testing.assert_allclose(logits, plain, atol=1e-6)
    assert_scores(found, scored_logits(logits, ids, 5), 5)


def test_scores_of_clear_rows_need_no_logits(positions):
    generator = np.random.default_rng(4)
    hidden = generator.normal(0, 1, (40, 32)).astype(np.float32)
    weight = generator.normal(0, 0.5, (300, 32)).astype(np.float32)
    ids = np.where(positions[2] < 300, positions[2], -1)
    head = Head(chunk=128, num_lanes=128)
    rows = functools.partial(_score_rows, num_top=0, vocab_size=300, head=head, axes=())
    found, done = jax.jit(rows)(weight, hidden, ids)
    assert done.all()
    logits = jax.jit(head_logits, static_argnums=2)(hidden, weight, head)
    assert_scores(found, scored_logits(logits, ids, 0), 0)


@pytest.mark.large
def test_scores_on_shards_of_the_head_are_the_same(positions):
    hidden, weight, ids = positions
    weight = np.pad(weight, ((0, 84), (0, 0)))
    head = Head(chunk=128, num_lanes=128)
    placed = dict(mesh=mesh_of("auto", x=3), axis="x")
    found = scored(hidden, weight, ids, num_top=5, vocab_size=300, head=head, **placed)
    logits = head_logits(hidden, weight[:300], head)
    assert_scores(found, scored_logits(logits, ids, 5), 5)


def test_a_program_computes_only_what_its_rows_need():
    params, position, _, features = given_of("served")
    hidden, weight = np.zeros((64, 8), np.float32), np.zeros((WIDTH, 8), np.float32)

    def text(features, **fields):
        head = dataclasses.replace(HEAD, **fields)
        traced = functools.partial(summarize_head, limits=LIMITS, features=features, head=head, sums=False)
        return str(jax.make_jaxpr(traced)(hidden, weight, params, position))

    tokens = dataclasses.replace(features, num_logprobs=-1)
    generator, exponential = str(0xD2511F53), re.compile(r"= exp ")
    filtered, greedy = text(tokens, unfiltered=False), text(PROGRAMS["plain"], unfiltered=False)
    assert generator not in filtered and not exponential.search(filtered)
    assert generator not in greedy and not exponential.search(greedy)
    assert generator in text(tokens) and exponential.search(text(features))


def test_a_decoders_head_gives_its_logits():
    config = DecoderConfig(
        vocab_size=40, width=16, num_layers=1, num_heads=2, num_kv_heads=1, head_size=8, mlp_width=16,
        norm_eps=1e-6, rope_theta=1e4, logit_scale=0.25, final_logit_softcapping=5.0,
    )  # fmt: skip
    generator = np.random.default_rng(0)
    for tied in (False, True):
        config = dataclasses.replace(config, tied_embeddings=tied)
        make = lambda leaf: jnp.asarray(generator.normal(0, 1, leaf.shape), jnp.bfloat16)
        weights = jax.tree.map(make, weight_shapes(config))
        hidden = jnp.asarray(generator.normal(0, 3, (3, 2, 16)), jnp.bfloat16)
        head = decoder_head(config, chunk=512)
        assert head == decoder_head(config, chunk=512) and hash(head) == hash(decoder_head(config, chunk=512))
        _, unembed = decoder_functions(config)
        found = head_logits(hidden.reshape(6, 16), head.weight_of(weights), head)
        np.testing.assert_array_equal(found.reshape(3, 2, 40), unembed(weights, hidden))


def test_what_does_not_fit_is_refused_by_name():
    params, _ = neutral_params(LIMITS, 2)
    hidden, weight = np.zeros((2, 8), np.float32), np.zeros((WIDTH, 8), np.float32)
    position = np.zeros(2, np.int32)
    plain = dict(limits=LIMITS, features=PROGRAMS["plain"])
    doubled = Features(transforms=(lambda z, argument, position: 2 * z,))
    calls = {
        "hidden is 7 wide and the head's rows 8": lambda: sample_head(hidden[:, :7], weight, params, position, **plain),
        "the head has 512 rows, expected at least": lambda: sample_head(hidden, weight[:512], params, position, **plain),
        "hidden is int32": lambda: sample_head(hidden.astype(np.int32), weight, params, position, **plain),
        "hidden has no rows": lambda: sample_head(hidden[:0], weight, params, position, **plain),
        "features.transforms has 1 entries": lambda: sample_head(
            hidden, weight, params, position, limits=LIMITS, features=doubled
        ),
        "allowed is given, but tier 'plain'": lambda: sample_head(
            hidden, weight, params, position, allowed=np.zeros((2, 32), np.uint32), **plain
        ),
        "position is int32": lambda: sample_head(hidden, weight, params, position[:1], **plain),
        "expected a multiple of 4 on each of 3 devices": lambda: sample_head(
            hidden, weight, params, position, mesh=mesh_of(x=3), axis="x", **plain
        ),
        "batch_axis is 'data', but no mesh": lambda: sample_head(
            hidden, weight, params, position, batch_axis="data", **plain
        ),
        "num_top is 1001": lambda: score_head(hidden, weight, position, 1001, vocab_size=1000),
        "expected [T, W] and [T]": lambda: score_head(hidden, weight, position[:1]),
        "rows_at_once is 0": lambda: score_head(hidden, weight, position, rows_at_once=0),
        "chunk is 500": lambda: Head(chunk=500),
        "num_lanes is 100": lambda: Head(chunk=500, num_lanes=100),
        "softcap is 0": lambda: Head(softcap=0),
        "it serves verify_match": lambda: js.make_decode_step(
            lookup_forward, Head(), verify=js.verify_rejection, **plain
        ),
    }  # fmt: skip
    for message, call in calls.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_there_are_no_gradients_and_that_is_said():
    params, _ = neutral_params(LIMITS, 2)
    hidden, weight = np.zeros((2, 8), np.float32), np.zeros((WIDTH, 8), np.float32)
    ids = np.zeros(2, np.int32)
    rows = functools.partial(summarize_head, limits=LIMITS, features=PROGRAMS["plain"], head=HEAD)
    losses = [
        lambda hidden, weight: score_head(hidden, weight, ids, head=HEAD).token.sum(),
        lambda hidden, weight: rows(hidden, weight, params, ids).candidates.sum.sum(),
    ]
    for loss in losses:
        for argument in (0, 1):
            with pytest.raises(ValueError, match="has no gradients"):
                jax.grad(loss, argnums=argument)(hidden, weight)


STEP_LIMITS = Limits(211, max_length=48, num_logprobs=4)


def hidden_forward(weights, tokens, positions, cache, mask):
    """The lookup model with 16 small numbers as hidden states, so that products are exact."""
    told, staged = lookup_forward(weights, tokens, positions, cache, mask)
    mixed = weights["embedding"][told[..., 1]] + weights["embedding"][jnp.maximum(told[..., 0], 0)][..., ::-1]
    return mixed / 8, staged


def unembed(weights, hidden):
    return jnp.einsum("bnw,vw->bnv", hidden, weights["embedding"])


# A step without logits, with proposals and without.
@pytest.mark.parametrize(
    ("tier", "proposer"),
    [
        ("plain", js.ngram_proposer(js.chain(2))),
        pytest.param("filtered", js.ngram_proposer(js.chain(2)), marks=pytest.mark.large),
        pytest.param("full", js.ngram_proposer(js.chain(3)), marks=pytest.mark.large),
        pytest.param("full", None, marks=pytest.mark.large),
    ],
)
def test_a_step_with_a_head_emits_what_the_step_with_logits_does(tier, proposer):
    features = Features(tier, full_rows=False, num_candidates=32, num_logprobs=4)
    weights = {"embedding": jnp.asarray(np.random.default_rng(1).integers(-3, 4, (224, 16)), jnp.float32)}
    head = Head(weight_of=lambda weights: weights["embedding"], chunk=128, num_lanes=128)
    asked = [
        dict(seed=1, logprobs=4), dict(temperature=0, logit_bias={9: 50.0}, logprobs=1), dict(seed=2, top_k=5, top_p=0.8, logprobs=2),
        dict(seed=3, temperature=0.7, repetition_penalty=1.5, bad_words_ids=[[3, 3], [17]], top_k=30),
    ]  # fmt: skip
    params, stop = js.stack_rows([js.make_params(STEP_LIMITS, max_tokens=12, **one) for one in asked])
    prompts = np.array([[5, 6, 5, 6], [9, 9, 9, 9], [1, 2, 1, 2], [3, 3, 3, 3]], np.int32)
    lengths, slots = np.full(4, 4, np.int32), np.arange(4, dtype=np.int32)
    admit = jax.jit(js.admit, static_argnames="limits")
    prefill = js.make_prefill(hidden_forward, STEP_LIMITS)
    records = []
    for output in (unembed, head):
        options = dict(limits=STEP_LIMITS, features=features, proposer=proposer)
        step = js.make_decode_step(hidden_forward, output, **options)
        requests = admit(
            js.empty_requests(STEP_LIMITS, 4), slots, params, stop, prompts, lengths, limits=STEP_LIMITS
        )
        cache = prefill(weights, init_lookup_cache(4, 48), prompts, np.zeros(4, np.int32), lengths - 1)
        both = weights
        if proposer is not None:
            both, cache = (weights, ()), (cache, ())
        told = []
        for _ in range(6):
            requests, cache, record = step(both, requests, cache)
            told.append(js.unpack(record, features))
        records.append(told)
    assert proposer is None or sum(step.accepted.sum() for step in records[0])
    for one, other in zip(*records):
        for name in ("tokens", "count", "status", "accepted", "ranks", "top_ids"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        there = one.tokens >= 0
        np.testing.assert_allclose(one.logprobs[there], other.logprobs[there], atol=CLOSE, rtol=CLOSE)
