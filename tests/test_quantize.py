"""Rounding to one-byte numbers, value by value."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxsample.quantize import encode

FINITE = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
FINITE = np.unique(FINITE[np.isfinite(FINITE)])


def test_fp8_codes_are_the_nearest_numbers_with_ties_to_even():
    # Every number of the format, every midpoint between two, and the floats on both sides of these.
    midpoints = ((FINITE[1:].astype(np.float64) + FINITE[:-1]) / 2).astype(np.float32)
    edges = np.concatenate([FINITE, midpoints])
    near = [np.nextafter(edges, np.float32(sign * 1000)) for sign in (-1, 1)]
    spread = np.random.default_rng(0).uniform(-448, 448, 10_000).astype(np.float32)
    x = np.clip(np.concatenate([edges, *near, spread, spread * np.float32(1e-3)]), -448, 448)
    x[np.abs(x) < np.finfo(np.float32).tiny] = 0
    codes = jax.jit(lambda x: encode(x[:, None], jnp.ones(x.shape), jnp.uint8))(x)
    expected = x.astype(ml_dtypes.float8_e4m3fn)
    got = np.asarray(codes)[:, 0].view(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


def test_int8_codes_are_the_nearest_integers_with_ties_to_even():
    x = np.concatenate([np.arange(-127, 127.1, 0.5), np.random.default_rng(0).uniform(-127, 127, 1000)])
    codes = encode(jnp.asarray(x, jnp.float32)[:, None], jnp.ones(x.size), jnp.int8)
    np.testing.assert_array_equal(np.asarray(codes)[:, 0], np.rint(x.astype(np.float32)).astype(np.int8))
