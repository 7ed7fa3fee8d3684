"""The draw from whole rows on a GPU: noise for every token, in the one read of the logits.

A quick noise, by two logarithms of the hardware, finds the winner of each part of a row; where the runner-up
comes closer than that can tell apart, the part is gone through again with the noise of `rng`. Knows nothing
about filters.

In Pallas' Triton dialect, a stop-gap; imported where it is used.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample import kernel_math, rng
from jaxsample.candidates import tidy
from jaxsample.kernel_math import (
    LAST_ID,
    LOG2_E,
    TINY,
    kept_scale,
    pallas,
    row_of,
    whole_of,
    word_of,
    words_of,
)

# A part of a row, the same in every batch: so many calls of the noise generator at a time, so many times.
_CALLS, _CHUNKS, _WARPS = 128, 8, 4
# Bounds of the quick noise's error, in units of log 2: of itself, and of the scores it is part of.
_NOISE_ERROR, _SCORE_ERROR = np.float32(6e-5), np.float32(2.0**-21)


class Whole(NamedTuple):
    """What `draw_whole` found in S parts of B rows; of rows that were not asked for it means nothing.

    Fields:
      max: f32[B, S], the largest logit; +inf where a part holds NaN or +inf.
      value, noise, id: f32[B, S], f32[B, S], i32[B, S], of its winner; noise is 0 for greedy rows.
    """

    max: jax.Array
    value: jax.Array
    noise: jax.Array
    id: jax.Array


def draw_whole(
    logits, temperature, asked, seed, position, *, vocab_size: int, interpret: bool = False
) -> Whole:
    """The winners of z / temperature + noise in the parts of rows.

    Args:
      logits: f32, bf16 or f16 [B, Vp], Vp >= V; columns at V and beyond are never looked at.
      temperature: f32[B]. asked: bool[B]; the programs of other rows leave at once.
      seed: u32[B, 2]. position: i32[B]. vocab_size: V.
    """
    pl, plt = pallas()
    num_rows, width = logits.shape
    num_parts = -(-vocab_size // (4 * _CALLS * _CHUNKS))
    each, part = whole_of(pl, num_rows), row_of(pl, num_parts, 1)
    found = lambda dtype: jax.ShapeDtypeStruct((num_rows, num_parts), dtype)
    results = pl.pallas_call(
        functools.partial(_draw, vocab_size=vocab_size, compiled=not interpret),
        grid=(num_parts, num_rows),
        in_specs=[row_of(pl, width, 1), each, each, row_of(pl, 2, 1), each],
        out_specs=[part] * 4,
        out_shape=[found(jnp.float32)] * 3 + [found(jnp.int32)],
        compiler_params=plt.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="draw_whole",
    )(logits, temperature, asked.astype(jnp.int32), jax.lax.bitcast_convert_type(seed, jnp.int32), position)
    return Whole(*results)


def _draw(
    x_ref,
    temperature_ref,
    asked_ref,
    seed_ref,
    position_ref,
    max_ref,
    value_ref,
    noise_ref,
    id_ref,
    *,
    vocab_size,
    compiled,
):
    pl, plt = pallas()
    part, row = pl.program_id(0), pl.program_id(1)

    @pl.when(plt.load(asked_ref.at[row]) != 0)
    def _():
        temperature = plt.load(temperature_ref.at[row])
        greedy, scale = temperature < TINY, kept_scale(temperature)
        rate, weight = LOG2_E / scale, jnp.where(greedy, 0, jnp.float32(1))
        seed = [plt.load(seed_ref.at[jnp.int32(word)]) for word in range(2)]
        draws = plt.load(position_ref.at[row]), *seed
        own_call, word = jnp.arange(_CALLS, dtype=jnp.int32), jnp.arange(4, dtype=jnp.int32)[None, :]

        def tokens_of(chunk):
            """i32[_CALLS, 4] ids, of one chunk or of a chunk for each."""
            return ((part * _CHUNKS + chunk) * _CALLS + own_call[:, None]) * 4 + word

        def read(chunk):
            """Logits and random words of a chunk."""
            chunk = chunk.astype(jnp.int32)
            token = tokens_of(chunk)
            x = plt.load(x_ref.at[token], mask=token < vocab_size, other=-jnp.inf).astype(jnp.float32)
            words = words_of((part * _CHUNKS + chunk) * _CALLS + own_call, *draws)
            return x, word_of([x[:, None] for x in words], word)

        def quick(chunk, state):
            best, second, at, top = state
            x, bits = read(chunk)
            score = x * rate - weight * _log2_of_exponential(bits, compiled)
            at = jnp.where(score > best, chunk.astype(jnp.int32), at)
            second = jnp.maximum(second, jnp.minimum(best, score))
            top = jnp.maximum(top, jnp.where(x == x, x, jnp.inf))
            return jnp.maximum(best, score), second, at, top

        def winner(best, at):
            highest, token = _over_both(jnp.max, best), tokens_of(at)
            return highest, token, _over_both(jnp.min, jnp.where(best == highest, token, LAST_ID))

        lowest = jnp.full((_CALLS, 4), -jnp.inf, jnp.float32)
        nowhere = jnp.zeros((_CALLS, 4), jnp.int32)
        best, second, at, top = jax.lax.fori_loop(0, _CHUNKS, quick, (lowest, lowest, nowhere, lowest))
        top = _over_both(jnp.max, top)
        highest, token, first = winner(best, at)
        runner_up = _over_both(jnp.max, jnp.where(token == first, second, best))
        clear = highest - runner_up > _NOISE_ERROR + _SCORE_ERROR * jnp.abs(highest)

        def exact(chunk, state):
            best, at = state
            x, bits = read(chunk)
            finite = jnp.where((top > -jnp.inf) & (top < jnp.inf), top, 0)
            z = jnp.where(scale == 1, tidy(x), (tidy(x) - finite) / scale)
            score = z + weight * rng.gumbel_of_bits(bits)
            return jnp.maximum(best, score), jnp.where(score > best, chunk.astype(jnp.int32), at)

        def again():
            return winner(*jax.lax.fori_loop(0, _CHUNKS, exact, (lowest, nowhere)))[2]

        first = jax.lax.cond(clear | (top == -jnp.inf), lambda: first, again)
        bits = word_of(words_of(first >> 2, *draws), first & 3)
        plt.store(max_ref.at[part], top)
        plt.store(value_ref.at[part], tidy(plt.load(x_ref.at[first])))
        plt.store(noise_ref.at[part], weight * rng.gumbel_of_bits(bits))
        plt.store(id_ref.at[part], first)


def _log2_of_exponential(bits, compiled):
    """log2(-log(1 - u)) within half of _NOISE_ERROR: Gumbel noise is -log 2 times it."""
    log2 = kernel_math.log2 if compiled else jnp.log2
    u = rng.uniform_of(bits)
    small = u * (1 + u * (np.float32(1 / 2) + u * np.float32(1 / 3)))  # as 1 - u would round it away
    return log2(jnp.where(u < 2.0**-6, small, log2(1 - u) * np.float32(-np.log(2))))


def _over_both(reduce, x):
    return reduce(reduce(x, axis=1), axis=0)
