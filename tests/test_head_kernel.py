"""The kernel of the head against lanes made from its logits by NumPy: interpreted on a CPU, as it is on a GPU."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxsample as js
from jaxsample import kernel_math, rng
from jaxsample.head import Head, KernelBlocks, head_logits
from jaxsample.head_kernel import Noise, blocks_of, head_lanes, takes
from jaxsample.lanes import noise_factors
from jaxsample.params import neutral_params
from tests.meshes import mesh_of
from tests.test_head import held, run, run_logits
from tests.test_sharded_sample import LIMITS, PROGRAMS, arguments

ON_GPU = jax.default_backend() == "gpu"
NUM_IDS, NUM_ROWS, WIDTH = 300, 20, 64
NUM_LANES, DEPTH = 3, 4
BLOCKS = KernelBlocks(16, 32, 4, 2)  # two blocks of rows, the second one not full; two of inputs
LAST_ID = np.iinfo(np.int32).max
SUM_ERROR = 2.0**-17


@functools.cache
def given():
    """(hidden, weight, temperature, seed, position, is_off), products exact in bfloat16, ties and bad numbers."""
    generator = np.random.default_rng(5)
    weight = generator.integers(-3, 4, (NUM_IDS + 20, WIDTH)).astype(ml_dtypes.bfloat16)
    hidden = (generator.integers(-4, 5, (NUM_ROWS, WIDTH)) / 8).astype(ml_dtypes.bfloat16)
    weight[NUM_IDS:] = np.nan  # nobody looks at them
    weight[40:44] = weight[1]  # ties, within a lane and across lanes
    weight[12:14] = weight[1]
    hidden[3] = 0  # a row of ties alone
    hidden[4, 2] = np.nan
    hidden[17, 0] = 3e38  # infinite logits of both signs, and finite ones
    temperature = generator.choice([0.25, 0.7, 1.0, 2.0], NUM_ROWS).astype(np.float32)
    seed = generator.integers(0, 2**32, (NUM_ROWS, 2), dtype=np.uint32)
    is_off = np.arange(NUM_ROWS) % 5 == 0
    position = np.arange(NUM_ROWS, dtype=np.int32)
    return hidden, weight, np.where(is_off, np.float32(1), temperature), seed, position, is_off


def factors_of(temperature):
    return jax.tree.map(np.asarray, jax.jit(noise_factors)(temperature))


def by_lane(x, fill):
    """[B, V] as [B, L, 128], the tokens of each lane in ascending order."""
    wide = np.full((len(x), 128 * NUM_LANES), fill, x.dtype)
    wide[:, : x.shape[1]] = x
    return wide.reshape(len(x), 32, NUM_LANES, 4).transpose(0, 2, 1, 3).reshape(len(x), NUM_LANES, 128)


def lanes_of(logit_scale, softcap, has_noise):
    """What the kernel finds, the products before scale and cap, and the head."""
    hidden, weight, temperature, *rest = given()
    head = Head(kernel=BLOCKS, logit_scale=logit_scale, softcap=softcap)
    given_noise = jax.tree.map(jnp.asarray, (*rest, *factors_of(temperature)))
    noise = Noise(*given_noise) if has_noise else None

    def call(hidden, weight, temperature, noise):
        times = (temperature, None)
        return head_lanes(hidden, weight, NUM_IDS, head, DEPTH, times, noise, interpret=not ON_GPU)

    found = jax.tree.map(np.asarray, jax.jit(call)(hidden, weight, temperature, noise))
    with np.errstate(over="ignore", invalid="ignore"):
        logits = hidden.astype(np.float32) @ weight[:NUM_IDS].astype(np.float32).T
    return found, logits, head


def test_lanes_hold_the_first_tokens_the_sums_and_the_noisy_winners_of_their_logits():
    (lanes, noise, bad), logits, _ = lanes_of(0.5, None, True)
    _, _, temperature, seed, position, is_off = given()
    raw = by_lane(logits * np.float32(0.5), -np.inf)
    np.testing.assert_array_equal(bad, (np.isnan(raw) | (raw == np.inf)).any(axis=2))
    assert bad[4].all()
    assert bad[17].any()
    z = np.where(np.isnan(raw) | (raw == np.inf), -np.inf, raw) + np.float32(0)
    ids = np.broadcast_to(by_lane(np.arange(128 * NUM_LANES, dtype=np.int32)[None], 0), z.shape)

    order = np.argsort(-z, axis=2, kind="stable")[:, :, :DEPTH]
    values = np.take_along_axis(z, order, axis=2)
    tokens = np.where(values > -np.inf, np.take_along_axis(ids, order, axis=2), LAST_ID)
    np.testing.assert_array_equal(np.stack(lanes.values, axis=2), values)
    np.testing.assert_array_equal(np.stack(lanes.ids, axis=2), tokens)
    first = np.where(values[..., :1] > -np.inf, values[..., :1], 0).astype(np.float64)
    for total, divisor in zip(lanes.sums, (temperature, np.ones_like(temperature)), strict=True):
        exact = np.exp((z - first) / divisor[:, None, None]).sum(axis=2)
        np.testing.assert_allclose(total, exact, rtol=SUM_ERROR)

    whole = jax.jit(rng.gumbel_range, static_argnums=(2, 3))(seed, position, rng.TARGET, 128 * NUM_LANES)
    gumbel = by_lane(np.where(is_off[:, None], np.float32(0), whole), 0)
    z_factor, noise_factor = (x[:, None, None] for x in factors_of(temperature))
    scores = z * z_factor + gumbel * noise_factor
    there = z.max(axis=2) > -np.inf
    assert not there[4].any()
    np.testing.assert_array_equal(noise.id == LAST_ID, ~there)
    is_winner = ids == noise.id[..., None]
    np.testing.assert_array_equal(is_winner.any(axis=2), there)
    of_winner = lambda x: np.where(is_winner, x, -np.inf).max(axis=2)
    np.testing.assert_array_equal(noise.value, of_winner(z))
    np.testing.assert_array_equal(noise.noise, of_winner(gumbel))
    # What a token with a larger score would have to be near: see lanes.winner_is_sure.
    close = functools.partial(np.testing.assert_allclose, rtol=2.0**-20, atol=2.0**-15)
    close(of_winner(scores), scores.max(axis=2))
    close(noise.score, of_winner(scores))
    close(noise.second, np.where(is_winner, -np.inf, scores).max(axis=2))
    # Without noise it is the first of the order, ties or not.
    np.testing.assert_array_equal(noise.id[is_off], lanes.ids[0][is_off])


def test_the_scale_and_the_cap_are_those_of_the_logits():
    (lanes, noise, _), logits, head = lanes_of(2.0, 3.0, False)
    hidden, weight, *_ = given()
    rows = np.isfinite(logits).all(axis=1)
    capped = jax.jit(head_logits, static_argnums=2)(hidden, weight[:NUM_IDS], head)
    capped = by_lane(np.asarray(capped)[rows], -np.inf)
    assert noise is None
    np.testing.assert_allclose(lanes.values[0][rows], capped.max(axis=2), rtol=2.0**-18)
    assert np.abs(lanes.values[0][rows]).max() <= 3


# What a GPU multiplies with; interpreted, the kernel takes the product of `rng`.
def test_words_of_wide_products():
    numbers = np.random.default_rng(6).integers(0, 2**32, 100, dtype=np.uint32)
    numbers[:3] = 0, 1, 2**32 - 1
    high, low = jax.jit(kernel_math.multiply_wide, static_argnums=1)(numbers, 0xD2511F53)
    exact = [int(x) * 0xD2511F53 for x in numbers]
    assert high.dtype == low.dtype == np.uint32
    assert high.tolist() == [x >> 32 for x in exact]
    assert low.tolist() == [x & 0xFFFFFFFF for x in exact]


@functools.cache
def exact_rows(program):
    """(hidden, weight, logits) in bfloat16 whose product has the logits exactly: one-hot states."""
    (logits, *_), _ = arguments(program)
    logits = np.where(np.isnan(logits) | (logits == np.inf), 0, np.maximum(logits, np.float32(-1e30)))
    logits[::8, 16:32] += 25  # more tokens of lanes of depth 4 than they hold: eight of each of two lanes
    logits = logits.astype(ml_dtypes.bfloat16)
    hidden = np.eye(len(logits), dtype=ml_dtypes.bfloat16)
    hidden[5], logits[5] = np.nan, np.nan  # a bad row
    return hidden, np.where(np.isnan(logits), 0, logits).T, logits.astype(np.float32)


# Every kind of row; 1,000 tokens in 8 lanes: most rows with filters are computed whole, the others are not.
@pytest.mark.parametrize("program", ["plain", pytest.param("served", marks=pytest.mark.large)])
def test_tokens_and_logprobs_are_those_of_the_logits(program):
    hidden, weight, logits = exact_rows(program)
    (_, params, position), _ = arguments(program)
    options = dict(limits=LIMITS, features=PROGRAMS[program])
    found = run(hidden, weight, params, position, **options, head=Head(kernel=True))
    held(found, run_logits(logits, params, position, **options))


def test_what_the_kernel_is_made_for():
    few, many = (jax.ShapeDtypeStruct((n, 64), jnp.bfloat16) for n in (1000, 40_000))
    assert takes(few, Head(kernel=True), DEPTH)
    assert takes(few, Head(kernel=BLOCKS), DEPTH)
    assert not takes(many, Head(kernel=False), DEPTH)
    assert not takes(many, Head(kernel=True), DEPTH, axes=("x",))
    assert not takes(many, Head(kernel=True), 9)
    assert not takes(many, Head(kernel=BLOCKS._replace(inputs=128)), DEPTH)
    assert not takes(jax.ShapeDtypeStruct((1000, 96), jnp.bfloat16), Head(kernel=True), DEPTH)
    assert not takes(jax.ShapeDtypeStruct((1000, 64), jnp.float32), Head(kernel=True), DEPTH)
    assert takes(many, Head(), DEPTH) == (ON_GPU and jax.device_count() == 1)
    assert not takes(few, Head(), DEPTH)
    for num_rows, has_noise in ((1, False), (16, True), (17, False), (64, True), (65, True), (1000, False)):
        blocks = blocks_of(num_rows, 192, Head(), has_noise)
        assert blocks.rows >= min(num_rows, 128 if has_noise else 256)
        assert 192 % blocks.inputs == 0
    head_of = lambda kernel: Head(kernel=kernel)
    for kernel, message in (
        (BLOCKS._replace(rows=24), "kernel's rows is 24, allowed are powers of two from 16"),
        (BLOCKS._replace(stages=0), "kernel's stages is 0, allowed are integers from 1"),
        ("triton", "kernel is 'triton', allowed are None, True, False and KernelBlocks"),
    ):
        with pytest.raises(ValueError, match=message):
            head_of(kernel)


# Masks and penalties are words and counts of every token; a shard's tokens do not begin at 0.
def test_shaped_rows_and_shards_go_through_chunks():
    params, _ = neutral_params(LIMITS, 2)
    hidden, weight = jnp.zeros((2, 64), jnp.bfloat16), jnp.zeros((1024, 64), jnp.bfloat16)

    def uses_kernel(features, **options):
        call = functools.partial(js.sample_head, limits=LIMITS, features=features, **options)
        return "pallas_call" in str(jax.make_jaxpr(call)(hidden, weight, params, np.zeros(2, np.int32)))

    assert uses_kernel(PROGRAMS["served"], head=Head(kernel=True))
    assert not uses_kernel(PROGRAMS["full"], head=Head(kernel=True))
    assert not uses_kernel(PROGRAMS["plain"], head=Head(kernel=True), mesh=mesh_of(x=2), axis="x")
    assert not uses_kernel(PROGRAMS["plain"], head=Head(kernel=False))
    assert not uses_kernel(PROGRAMS["plain"])
