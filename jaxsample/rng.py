"""Noise as a pure function of (seed, position, purpose, lane); no key is carried, split or lost.

Knows nothing about tokens, logits or batches beyond "one seed and one position a row". The generator is
Philox4x32-10 in plain uint32 arithmetic, so that the same bits come out of XLA code, NumPy and kernels:

    counter = (lane // 4, position, purpose, node), key = (low word of seed, high word of seed)

and lane n takes word n % 4 of the four that one call makes. A lane is a token id, or a tree node for
acceptance tests; node is 0 but for DRAFT noise, which a step draws for many nodes at one position. Any slice
of the lanes has the bits of the same lanes in the full range.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# What a number is for. TARGET, ACCEPT and RESIDUAL are keyed by the absolute position of the token being
# chosen, DRAFT by the position of the step's root: see docs/contract.md, section 2.
TARGET, ACCEPT, RESIDUAL, DRAFT = 0, 1, 2, 3
_CHILD = 4  # seeds of the n > 1 children of one request

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10

# ln 2 = HIGH + LOW to 2^-29. HIGH has 10 significant bits and LOW 14, so that their products with an exponent
# (8 bits) are exact: a compiler that contracts multiply-add here then changes no bit.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-14240 * 2.0**-26)
_SQRT_HALF_BITS = 0x3F3504F3


def gumbel(seed, position, purpose, lane, node: Any = 0):
    """Gumbel noise of given lanes: -log(-log1p(-u)).

    The uniform is small where the noise is large, so the winning tail lies where float32 is fine: the
    largest value is 22.87 and a token of probability 1e-7 can win.

    Args:
      seed: u32[B, 2], low and high word of each row's 64-bit seed.
      position: i32[B], absolute index of the token being chosen.
      purpose: TARGET, ACCEPT, RESIDUAL or DRAFT; one for all rows, or i32[B].
      lane: i32[k] or i32[B, k], lanes (token ids), each in [0, 2^31).
      node: tree node the noise is drawn at; one for all rows, or i32[B].

    Returns:
      f32[B, k].
    """
    return gumbel_of_bits(noise_bits(seed, position, purpose, lane, node))


def gumbel_range(seed, position, purpose, num_lanes: int):
    """Gumbel noise of the lanes 0 ... num_lanes - 1: f32[B, num_lanes]."""
    return gumbel_of_bits(noise_range(seed, position, purpose, num_lanes))


def gumbel_words(seed, position, purpose, num_calls: int, node: Any = 0, first_call: Any = 0):
    """Gumbel noise of 4 * num_calls lanes in a row, as the four words of each generator call.

    The form for whole rows: interleaving the words would make XLA run the generator once a lane.

    Args:
      seed, position, purpose, node: as for `gumbel`.
      num_calls: calls of the generator.
      first_call: the first of them, an int or i32[]; the lanes begin with 4 * first_call.

    Returns:
      Four f32[B, num_calls]; entry [b, c] of word w is lane 4 * (first_call + c) + w.
    """
    words = _range_words(seed, position, purpose, num_calls, node, first_call)
    # XLA:CPU takes ten times as long to compile the generator together with what follows it.
    words = jax.lax.platform_dependent(*words, cpu=_materialised, default=lambda *words: words)
    return tuple(gumbel_of_bits(word) for word in words)


def uniform(seed, position, purpose, lane):
    """Uniform noise (bits + 0.5) * 2^-32 in float32, in (0, 1 - 2^-24]: f32[B, k]. Args as for `gumbel`."""
    return uniform_of(noise_bits(seed, position, purpose, lane))


def uniform_of(bits):
    """The uniform numbers of `uniform` from their bits: f32 of u32, of any shape."""
    # The conversion rounds to 24 bits; adding half a unit matters only for small values, where it keeps
    # zero out. The product is with a power of two, hence exact.
    value = (bits.astype(jnp.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return jnp.minimum(value, np.float32(1 - 2.0**-24))


def noise_bits(seed, position, purpose, lane, node: Any = 0):
    """32 random bits a lane: u32[B, k]. Args as for `gumbel`."""
    lane = jnp.asarray(lane).astype(jnp.uint32)
    if lane.ndim == 1:
        lane = lane[None, :]
    words = philox4x32(_counter(lane >> 2, position, purpose, node), (seed[:, 0:1], seed[:, 1:2]))
    word = lane & 3
    first = jnp.where(word == 0, words[0], words[1])
    return jnp.where(word < 2, first, jnp.where(word == 2, words[2], words[3]))


def noise_range(seed, position, purpose, num_lanes: int):
    """32 random bits for each of the lanes 0 ... num_lanes - 1: u32[B, num_lanes]."""
    num_calls = -(-num_lanes // 4)
    words = _range_words(seed, position, purpose, num_calls)
    bits = jnp.stack(words, axis=-1).reshape(seed.shape[0], num_calls * 4)
    return bits if num_calls * 4 == num_lanes else bits[:, :num_lanes]


def philox4x32(counter, key, multiply: Callable[..., Any] | None = None):
    """Philox4x32-10: four random words for a counter of four words and a key of two.

    Args:
      counter: four u32 arrays (NumPy or JAX) of shapes that broadcast.
      key: two u32 arrays.
      multiply: (u32 array, int) -> high and low word of their product; None for one of 32-bit operations.

    Returns:
      Four u32 arrays.

    Source: Salmon et al. 2011, section 4; the constants are the paper's.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    multiply = multiply or multiply_wide
    for round_index in range(_NUM_ROUNDS):
        if round_index > 0:
            k0 = k0 + np.uint32(_WEYL[0])
            k1 = k1 + np.uint32(_WEYL[1])
        high0, low0 = multiply(c0, _MULTIPLIERS[0])
        high1, low1 = multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def child_seed(seed: int, child: int) -> int:
    """The 64-bit seed of child `child` of a request with n > 1; child 0 keeps the request's own seed.

    Args:
      seed: any integer, taken modulo 2^64.
      child: index of the child, >= 0.

    Returns:
      An integer in [0, 2^64).
    """
    seed %= 1 << 64
    if child == 0:
        return seed
    one = [np.array([word], np.uint32) for word in (child & 0xFFFFFFFF, child >> 32, _CHILD, 0)]
    key = [np.array([word], np.uint32) for word in (seed & 0xFFFFFFFF, seed >> 32)]
    low, high, _, _ = philox4x32(one, key)
    return int(low[0]) | int(high[0]) << 32


def log(x):
    """Natural logarithm of a positive float32, the same bits for every array length and on every route.

    XLA's own `log` may take a different last bit in the vector body of a loop and in its remainder; `log1p`
    does not, and the rest of this formula is exact or a single addition. Relative error at most 2^-22.

    Args:
      x: f32 array of positive normal numbers (0 gives about -88, not -inf; negative ones are undefined).
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    mantissa = jax.lax.bitcast_convert_type(bits - (exponent << 23), jnp.float32)  # in [sqrt 1/2, sqrt 2)
    exponent = exponent.astype(jnp.float32)
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + jnp.log1p(mantissa - 1))


def exp(x):
    """Exponential of a float32, the same bits for every array length and on every route, as `log` has them.

    XLA's own `exp` may take a different last bit in the vector body of a loop and in its remainder, which
    shows where rows are shorter than a vector. Relative error at most 2^-21.

    Args:
      x: f32 array, at most 88. Below -87.33 (and at -inf) the result is 0: there are no subnormal ones.
    """
    within = jnp.clip(x, -87.33, 88)
    exponent = jnp.round(within * np.float32(1 / np.log(2)))
    rest = (
        within - exponent * _LN2_HIGH
    ) - exponent * _LN2_LOW  # in +- ln(2) / 2, products exact as in `log`
    power = jax.lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)
    return jnp.where(x < -87.33, 0, (1 + jnp.expm1(rest)) * power)


def _range_words(seed, position, purpose, num_calls: int, node: Any = 0, first_call: Any = 0):
    call = jax.lax.broadcasted_iota(jnp.uint32, (1, num_calls), 1)
    if not isinstance(first_call, int) or first_call != 0:
        call = call + jnp.asarray(first_call).astype(jnp.uint32)
    return philox4x32(_counter(call, position, purpose, node), (seed[:, 0:1], seed[:, 1:2]))


def _materialised(*arrays):
    return jax.lax.optimization_barrier(arrays)


def gumbel_of_bits(bits):
    """Gumbel noise of random words u32[...]: f32[...]."""
    return -log(-jnp.log1p(-uniform_of(bits)))


def _counter(call, position, purpose, node):
    column = lambda x: jnp.asarray(x).astype(jnp.uint32).reshape(-1, 1)
    position = column(position)
    wide = lambda x: jnp.broadcast_to(column(x), position.shape)
    return call, position, wide(purpose), wide(node)


def multiply_wide(x, constant: int):
    """High and low word of the 64-bit product x * constant, from 16-bit halves.

    `lax.mulhi` would take fewer instructions, but jax 0.10.2 cannot compile it inside a shard_map.
    """
    low_half, high_half = np.uint32(constant & 0xFFFF), np.uint32(constant >> 16)
    x_low, x_high = x & np.uint32(0xFFFF), x >> np.uint32(16)
    low_low = x_low * low_half
    middle = x_high * low_half + (low_low >> np.uint32(16))  # < 2^32: (2^16-1)^2 + 2^16 - 1
    middle_low = x_low * high_half + (middle & np.uint32(0xFFFF))
    high = x_high * high_half + (middle >> np.uint32(16)) + (middle_low >> np.uint32(16))
    return high, x * np.uint32(constant)
