"""Noise: the published generator, the same bits on every route, and independence along every axis of its key."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxsample import rng
from tests import reference

ALPHA = 1e-4  # of each goodness-of-fit test; the seeds are fixed, so a test passes always or never

# Known-answer vectors of the Random123 distribution, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


# Compiled: an eager call compiles each of its hundred operations for each shape.
noise_bits = jax.jit(rng.noise_bits, static_argnums=2)
noise_range = jax.jit(rng.noise_range, static_argnums=(2, 3))
uniform = jax.jit(rng.uniform, static_argnums=2)
gumbel = jax.jit(rng.gumbel, static_argnums=2)
gumbel_range = jax.jit(rng.gumbel_range, static_argnums=(2, 3))


def words(seeds):
    """u32[B, 2], low and high words of integer seeds."""
    return np.array([[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds], np.uint32)


def same_bits(x, y):
    x, y = np.asarray(x), np.asarray(y)
    return x.dtype == y.dtype and x.shape == y.shape and (x.view(np.uint32) == y.view(np.uint32)).all()


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
@pytest.mark.parametrize("module", [np, jnp])
def test_philox_gives_the_published_known_answers(module, counter, key, expected):
    array = lambda word: module.asarray([word], dtype=module.uint32)
    result = rng.philox4x32(tuple(map(array, counter)), tuple(map(array, key)))
    assert tuple(int(word[0]) for word in result) == expected
    assert reference.philox4x32(counter, key) == expected


def test_bits_are_those_of_the_stated_counter_and_key():
    seeds = [0, 1, 42, 2**32 - 1, 2**32, 2**63 + 12345, 2**64 - 1]
    positions = np.array([0, 1, 7, 4095, 2**20, 2**31 - 2, 2**31 - 1], np.int32)
    lanes = np.array([0, 1, 2, 3, 4, 7, 100, 151935, 2**31 - 1], np.int32)
    for purpose in (rng.TARGET, rng.ACCEPT, rng.RESIDUAL, rng.DRAFT):
        result = np.asarray(noise_bits(words(seeds), positions, purpose, lanes))
        expected = [
            [reference.noise_bits(seed, int(position), purpose, int(lane)) for lane in lanes]
            for seed, position in zip(seeds, positions)
        ]
        assert result.dtype == np.uint32
        assert (result == np.array(expected, np.uint32)).all()


def test_rows_may_have_purposes_and_nodes_of_their_own():
    seeds, position = [5, 6, 2**60], np.array([1, 2, 3], np.int32)
    purpose, node = np.array([rng.DRAFT, rng.TARGET, rng.ACCEPT], np.int32), np.array([0, 7, 63], np.int32)
    lanes = np.array([0, 1, 6, 400], np.int32)
    result = np.asarray(jax.jit(rng.noise_bits)(words(seeds), position, purpose, lanes, node))
    expected = [
        [
            reference.noise_bits(seeds[b], int(position[b]), int(purpose[b]), int(lane), int(node[b]))
            for lane in lanes
        ]
        for b in range(3)
    ]
    assert (result == np.array(expected, np.uint32)).all()


@pytest.mark.parametrize("num_calls", [1, 7, 32, 250])
def test_the_words_of_whole_rows_have_the_bits_of_the_range(num_calls):
    seed, position = words([3, 2**40 + 5]), np.array([11, 12], np.int32)
    parts = jax.jit(rng.gumbel_words, static_argnums=(2, 3))(seed, position, rng.TARGET, num_calls)
    interleaved = np.stack([np.asarray(part) for part in parts], axis=-1).reshape(2, -1)
    assert same_bits(interleaved, gumbel_range(seed, position, rng.TARGET, 4 * num_calls))


def test_purposes_are_four_different_numbers():
    assert len({rng.TARGET, rng.ACCEPT, rng.RESIDUAL, rng.DRAFT}) == 4


@pytest.mark.parametrize("num_lanes", [1, 4, 5, 31, 1000])
def test_a_slice_of_lanes_has_the_bits_of_the_full_range(num_lanes):
    seed, position = words([3, 2**40 + 5]), np.array([11, 12], np.int32)
    full = np.asarray(noise_range(seed, position, rng.TARGET, 1003))
    assert (np.asarray(noise_range(seed, position, rng.TARGET, num_lanes)) == full[:, :num_lanes]).all()
    for start in (0, 1, 2, 3, 1003 - num_lanes):
        lanes = np.arange(start, start + num_lanes, dtype=np.int32)
        assert (np.asarray(noise_bits(seed, position, rng.TARGET, lanes)) == full[:, lanes]).all()


def test_lanes_of_their_own_for_each_row_have_the_bits_of_the_full_range():
    seed, position = words([3, 2**40 + 5, 9]), np.array([11, 12, 11], np.int32)
    lanes = np.random.default_rng(0).permutation(600).reshape(3, 200).astype(np.int32)
    full = noise_range(seed, position, rng.DRAFT, 600)
    expected = np.take_along_axis(np.asarray(full), lanes, axis=1)
    assert (np.asarray(noise_bits(seed, position, rng.DRAFT, lanes)) == expected).all()
    full = gumbel_range(seed, position, rng.DRAFT, 600)
    assert same_bits(
        rng.gumbel(seed, position, rng.DRAFT, lanes), np.take_along_axis(np.asarray(full), lanes, 1)
    )


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_a_row_of_noise_does_not_depend_on_the_rows_beside_it(num_rows):
    seed, position = words(range(100, 164)), np.arange(64, dtype=np.int32)
    full = gumbel_range(seed, position, rng.TARGET, 333)
    assert same_bits(gumbel_range(seed[:num_rows], position[:num_rows], rng.TARGET, 333), full[:num_rows])


@pytest.mark.parametrize("num_lanes", [1, 3, 7, 8, 17, 31, 127, 128, 4099])
def test_gumbel_bits_do_not_depend_on_the_shape(num_lanes):
    seed, position = words([2604]), np.array([5], np.int32)
    full = np.asarray(gumbel_range(seed, position, rng.TARGET, 8192))
    lanes = np.arange(8192 - num_lanes, 8192, dtype=np.int32)
    assert same_bits(gumbel(seed, position, rng.TARGET, lanes), full[:, lanes])
    assert same_bits(gumbel_range(seed, position, rng.TARGET, num_lanes), full[:, :num_lanes])


def test_an_eager_call_gives_the_bits_of_a_compiled_one():
    args = words([2604]), np.array([5], np.int32), rng.TARGET
    assert same_bits(rng.gumbel(*args, np.arange(77, dtype=np.int32)), gumbel_range(*args, 77))


def test_uniform_and_gumbel_follow_their_formulas():
    seed, position, lanes = words([2**50 + 1]), np.array([9], np.int32), np.arange(100_000, dtype=np.int32)
    bits = np.asarray(noise_range(seed, position, rng.ACCEPT, 100_000))[0].astype(np.float64)
    exact = np.minimum((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)
    u = np.asarray(uniform(seed, position, rng.ACCEPT, lanes))[0]
    assert u.dtype == np.float32
    # One rounding to 24 bits on the way to float32.
    np.testing.assert_allclose(u, exact, rtol=2.0**-23, atol=0)
    noise = np.asarray(gumbel(seed, position, rng.ACCEPT, lanes))[0]
    # Taken at the uniform that float32 holds. The outer logarithm has a relative error of 2^-22 (1 + the
    # inner one's), and where it is near zero the absolute error of its argument shows.
    expected = -np.log(-np.log1p(-u.astype(np.float64)))
    np.testing.assert_allclose(noise, expected, rtol=2.0**-21, atol=2.0**-22)


def test_uniforms_stay_inside_their_bounds_and_the_largest_gumbel_is_finite(monkeypatch):
    extreme = np.array(
        [[0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFF7F, 0xFFFFFF80, 0xFFFFFFFE, 0xFFFFFFFF]], np.uint32
    )
    monkeypatch.setattr(rng, "noise_bits", lambda *_: jnp.asarray(extreme))
    u = np.asarray(rng.uniform(None, None, rng.TARGET, None))[0]
    assert u[0] == np.float32(2.0**-33)
    assert u[-1] == np.float32(1 - 2.0**-24)
    assert (u > 0).all() and (u < 1).all() and (np.diff(u) >= 0).all()
    noise = np.asarray(rng.gumbel(None, None, rng.TARGET, None))[0]
    assert np.isfinite(noise).all() and (np.diff(noise) <= 0).all()
    expected = [reference.gumbel(int(bits)) for bits in extreme[0]]
    np.testing.assert_allclose(noise, expected, rtol=2.0**-20, atol=2.0**-20)


def test_gumbel_noise_is_fine_in_the_tail_that_wins(monkeypatch):
    # Near the maximum neighbouring values of the bits must give different noise, or rare tokens would tie.
    smallest = np.arange(4096, dtype=np.uint32)[None]
    monkeypatch.setattr(rng, "noise_bits", lambda *_: jnp.asarray(smallest))
    noise = np.asarray(rng.gumbel(None, None, rng.TARGET, None))[0]
    assert (np.diff(noise) < 0).all()
    assert noise[0] == pytest.approx(33 * math.log(2), rel=1e-6)


def contingency(first, second, num_cells=16):
    table, _, _ = np.histogram2d(first, second, bins=num_cells, range=[[0, 1], [0, 1]])
    return table


AXES = {
    "purposes": lambda n: [(7, n, rng.TARGET, 0), (7, n, rng.ACCEPT, 0)],
    "target and residual": lambda n: [(7, n, rng.TARGET, 0), (7, n, rng.RESIDUAL, 0)],
    "draft and accept": lambda n: [(7, n, rng.DRAFT, 0), (7, n, rng.ACCEPT, 0)],
    "positions": lambda n: [(7, n, rng.TARGET, 0), (7, n + 1, rng.TARGET, 0)],
    "seeds": lambda n: [(n, 7, rng.TARGET, 0), (n + 1, 7, rng.TARGET, 0)],
    "high words of seeds": lambda n: [(n, 7, rng.TARGET, 0), (n + 2**32, 7, rng.TARGET, 0)],
    "neighbouring lanes": lambda n: [(n, 7, rng.TARGET, 0), (n, 7, rng.TARGET, 1)],
    "lanes of neighbouring calls": lambda n: [(n, 7, rng.TARGET, 0), (n, 7, rng.TARGET, 4)],
    "seed and position": lambda n: [(n, 0, rng.TARGET, 0), (0, n, rng.TARGET, 0)],
    "position and lane": lambda n: [(7, n, rng.TARGET, 0), (7, 0, rng.TARGET, 4 * n)],
}


def draws(keys):
    """Uniforms of (seed, position, purpose, lane) with NumPy columns."""
    seed, position, purpose, lane = (np.asarray(x, np.int64) for x in keys)
    size = max(np.size(x) for x in (seed, position, lane))
    seed, position, lane = (np.broadcast_to(x, size) for x in (seed, position, lane))
    seed_words = np.stack([seed & 0xFFFFFFFF, seed >> 32], axis=1).astype(np.uint32)
    return np.asarray(
        uniform(seed_words, position.astype(np.int32), int(purpose), lane[:, None].astype(np.int32))
    )[:, 0]


@pytest.mark.parametrize("axis", AXES)
def test_noise_is_uniform_and_independent_along_each_axis(axis):
    # One stream may not be told from a fair one, nor may its pairs: 16 cells each way, 200,000 pairs.
    first, second = (draws(keys) for keys in AXES[axis](np.arange(1, 200_001)))
    for stream in (first, second):
        counts = np.histogram(stream, bins=256, range=(0, 1))[0]
        assert scipy.stats.chisquare(counts).pvalue > ALPHA
    assert scipy.stats.chisquare(contingency(first, second).ravel()).pvalue > ALPHA


def test_low_bits_are_as_fair_as_high_ones():
    bits = np.asarray(noise_range(words([99]), np.array([3], np.int32), rng.TARGET, 1_000_000))[0]
    for shift in (0, 8, 16, 24):
        counts = np.bincount((bits >> shift) & 0xFF, minlength=256)
        assert scipy.stats.chisquare(counts).pvalue > ALPHA


def test_gumbel_noise_has_its_law():
    noise = np.asarray(gumbel_range(words([1]), np.array([1], np.int32), rng.TARGET, 1_000_000))[0]
    cells = scipy.stats.gumbel_r.cdf(noise.astype(np.float64))
    assert scipy.stats.chisquare(np.histogram(cells, bins=200, range=(0, 1))[0]).pvalue > ALPHA
    # The upper tail: as many values above the quantile of 1e-5 as a Poisson law of mean 10 allows.
    num_above = int((noise > scipy.stats.gumbel_r.isf(1e-5)).sum())
    assert scipy.stats.poisson.ppf(ALPHA / 2, 10) <= num_above <= scipy.stats.poisson.isf(ALPHA / 2, 10)


def test_exponentials_are_accurate_and_have_the_same_bits_in_an_array_of_any_length():
    exp = jax.jit(rng.exp)
    x = np.append(np.linspace(-100, 88, 30011), [-np.inf, -87.33, 0.0]).astype(np.float32)
    found = np.asarray(exp(x))
    normal = x >= np.float32(-87.33)
    assert np.abs(found[normal] / np.exp(x[normal].astype(np.float64)) - 1).max() <= 2.0**-21
    assert not found[~normal].any() and found[-1] == 1
    for length in (1, 3, 7, 13):
        assert np.asarray(exp(x[9000 : 9000 + length])).tobytes() == found[9000 : 9000 + length].tobytes()


def test_child_zero_keeps_the_seed_and_seeds_count_modulo_two_to_the_64():
    for seed in (0, 1, 42, 2**64 - 1, 2**64, 2**64 + 42, -1, -(2**70) + 3):
        assert rng.child_seed(seed, 0) == seed % 2**64
        assert rng.child_seed(seed, 3) == rng.child_seed(seed % 2**64, 3)


def test_children_have_distinct_independent_streams():
    seeds = [rng.child_seed(parent, child) for parent in range(50) for child in range(50)]
    assert len(set(seeds)) == 2500
    assert all(0 <= seed < 2**64 for seed in seeds)
    noise = np.asarray(noise_range(words(seeds), np.zeros(2500, np.int32), rng.TARGET, 160)) / 2.0**32
    parents = noise.reshape(50, 50, 160)
    table = contingency(parents[:, :-1].ravel(), parents[:, 1:].ravel())
    assert scipy.stats.chisquare(table.ravel()).pvalue > ALPHA
