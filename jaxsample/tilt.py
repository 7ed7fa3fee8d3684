"""Distributions tilted by values: q(i) exp(t v(i)), normalised, with t given or found for a wanted mean.

Values are v = sigmoid(z) and are told by z, so that differences of values near 0 and near 1 keep their
relative precision. Rows have at most a few entries, and every sum over them has one order. Knows nothing
about tokens, requests or modes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample import rng

_BITS = 4  # of a solution that one pass finds
_MOST = np.int32(0x53800000)  # key of 2^40, the largest tilt
_TINY = np.finfo(np.float32).tiny


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Values:
    """Values of the entries of R rows, as places between the smallest and the largest of the row.

    Fields:
      width: f32[R], largest - smallest value. above: f32[R, G], (v - smallest) / width; below: f32[R, G],
        (largest - v) / width. Both lie in [0, 1] and add up to 1; each has its own relative precision.
        Entries that do not count, and rows of width 0, hold anything finite.
      lowest, highest: f32[R], z of the smallest and of the largest value.
    """

    width: Any
    above: Any
    below: Any
    lowest: Any
    highest: Any


def place(z, counts) -> Values:
    """Values of logits z f32[R, G], -inf for value 0; counts: bool[R, G], at least one in each row."""
    lowest = jnp.min(jnp.where(counts, z, jnp.inf), axis=1)
    highest = jnp.max(jnp.where(counts, z, -jnp.inf), axis=1)
    z = jnp.where(counts, z, lowest[:, None])
    width = difference(highest, lowest)
    divisor = jnp.where(width > 0, width, 1)[:, None]
    above = difference(z, lowest[:, None]) / divisor
    below = difference(highest[:, None], z) / divisor
    return Values(width, above, below, lowest, highest)


def difference(upper, lower):
    """sigmoid(upper) - sigmoid(lower) for upper >= lower, -inf allowed, to a few ulp of the result.

    s(a) - s(b) = s(a) s(-b) (1 - exp(b - a)).
    """
    gap = jnp.where(upper == lower, 0, lower - upper)
    return sigmoid(upper) * sigmoid(-lower) * -jnp.expm1(gap)


def sigmoid(z):
    """1 / (1 + exp(-z)) to a few ulp on both sides; -inf gives 0, inf gives 1."""
    small = rng.exp(-jnp.abs(z))
    return jnp.where(z >= 0, 1, small) / (1 + small)


def softplus(z):
    """ln(1 + exp(z)) = -ln(1 - sigmoid(z)): the discounted length of a value, in units of -1 / ln gamma."""
    return jnp.maximum(z, 0) + jnp.log1p(rng.exp(-jnp.abs(z)))


def inverse_softplus(x):
    """z with softplus(z) = x >= 0; 0 gives -inf."""
    small = jnp.maximum(x, _TINY)
    # Near 0 expm1(x) is x and its logarithm finite; from 1 on the other form cannot overflow.
    below_one = rng.log(jnp.maximum(jnp.expm1(jnp.minimum(small, 1)), _TINY))
    z = jnp.where(x < 1, below_one, x + jnp.log1p(-rng.exp(-jnp.maximum(x, 1))))
    return jnp.where(x < _TINY, -jnp.inf, z)


def normalise(log_weights):
    """log softmax over the entries of each row: f32[R, G] or [..., G]; -inf counts nothing."""
    top = largest(log_weights)
    centred = log_weights - jnp.where(top > -jnp.inf, top, 0)
    return centred - rng.log(total(rng.exp(centred)))


def tilted(log_q, above, below, tilt):
    """ln q + t v, less t v at the end that t favours, so that no t overflows; not normalised: f32[..., G].

    Args:
      log_q, above, below: f32[..., G], see `Values`.
      tilt: f32[..., 1], t times the width.
    """
    return log_q - jnp.where(tilt >= 0, tilt * below, -tilt * above)


def solve(log_q, values: Values, mean_above, mean_below):
    """The tilt, t times the width, at which the mean of `above` is a wanted one.

    The mean grows with t, so t is found digit by digit in the order of the float32 numbers up to 2^40: 8
    passes of 15 trials whatever the values, which halve the bracket 32 times and end at neighbouring numbers.
    Whether a trial lies below is told by a sum of q(i) exp(t v(i)) (v(i) - T), of which no difference
    cancels. So the mean is the wanted one to 2^-20 widths, and to what a step of t by 2^-23 of itself moves.

    Args:
      log_q: f32[R, G], -inf for entries that do not count.
      values: Values of the rows.
      mean_above: f32[R], the wanted mean of `above`, in (0, 1).
      mean_below: f32[R], 1 - mean_above with a relative precision of its own.

    Returns:
      f32[R].
    """
    log_q, above, below = (x[:, None, :] for x in (log_q, values.above, values.below))
    wanted_above, wanted_below = mean_above[:, None, None], mean_below[:, None, None]
    offset = jnp.where(wanted_above < 0.5, above - wanted_above, wanted_below - below)
    digits = jnp.arange(1, 1 << _BITS, dtype=jnp.uint32)[None, :]

    def find_digit(number, key):
        shift = jnp.uint32(32 - _BITS) - jnp.uint32(_BITS) * number.astype(jnp.uint32)
        trial = _tilt_of_key(key[:, None] + (digits << shift))[:, :, None]
        weights = tilted(log_q, above, below, trial)
        weights = rng.exp(weights - largest(weights))
        too_low = total(weights * offset)[:, :, 0] < 0
        return key + (jnp.sum(too_low, axis=1, dtype=jnp.uint32) << shift)

    # Made from the data: in a caller's shard_map it then varies over the mesh as the loop's result does.
    first = jnp.where(mean_above < 0, jnp.uint32(1), jnp.uint32(0))
    return _tilt_of_key(jax.lax.fori_loop(0, 32 // _BITS, find_digit, first))


def total(x):
    """Sum over the last axis, kept as an axis of 1, by halving: [..., 1] of [..., G]."""
    return _fold(jnp.add, x, 0)


def largest(x):
    """Maximum over the last axis, kept: [..., 1] of [..., G]."""
    return _fold(jnp.maximum, x, -np.inf)


def _fold(operation, x, neutral):
    """Elementwise operations on halves: one order for any batch, no reduction for a compiler to split."""
    size = x.shape[-1]
    padded = 1 << (size - 1).bit_length()
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padded - size)], constant_values=neutral)
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = operation(x[..., :half], x[..., half:])
    return x


def _tilt_of_key(key):
    """The float32 number at a place in the order of all of them (u32, 2^31 is 0), held within 2^40 of 0."""
    signed = jax.lax.bitcast_convert_type(key ^ np.uint32(0x80000000), jnp.int32)
    signed = jnp.clip(signed, -_MOST - 1, _MOST)
    return jax.lax.bitcast_convert_type(signed ^ ((signed >> 31) & 0x7FFFFFFF), jnp.float32)
