"""The lanes of a head's logits on a GPU, in the kernel that makes the product: no logit is written.

A program multiplies some rows with the 128 tokens of one lane, as a product library would, and then keeps
what `lanes` would have kept of them. The four tokens of a call of the noise generator share a lane: token i
lies in lane (i // 4) mod L, L = V / 128 rounded up; nothing behind asks for another place. In Pallas' Triton
dialect, which JAX keeps but no longer develops: a stop-gap until one in its successor is as fast. Pallas is
imported where the kernel is used: half a second that runs on a CPU need not wait for.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample import kernel_math, rng
from jaxsample.candidates import tidy
from jaxsample.head import Head, KernelBlocks, scale_logits
from jaxsample.kernel_math import multiply_wide
from jaxsample.lanes import Lanes, NoiseLanes

_IDS = 128  # of a lane
_FEWEST_IDS = 2**15  # of a vocabulary that the kernel is chosen for: few lanes overflow soon
_MOST_DEPTH = 8
_LAST_ID = np.iinfo(np.int32).max
# The first one that holds all rows, else the last: other programs of the lane then take the rest, and find
# the head's rows in a cache. 16 rows are a block of the matrix units. Few rows wait for the head alone and
# have more of it under way. Noise takes registers: with it a thread is to hold fewer sums.
_BLOCKS = (
    KernelBlocks(16, 128, 4, 4),
    KernelBlocks(32, 128, 4, 3),
    KernelBlocks(64, 64, 4, 3),
    KernelBlocks(128, 64, 8, 3),
    KernelBlocks(256, 64, 8, 4),
)
_NOISE_BLOCKS = (*_BLOCKS[:2], KernelBlocks(64, 64, 8, 4), KernelBlocks(128, 64, 8, 3))
_LN2, _NUM_TERMS = np.float32(np.log(2)), 6
_FEW_INPUTS = 64  # of a block, where the width is no multiple of more


class Noise(NamedTuple):
    """What the noise of B rows comes from.

    Fields:
      seed: u32[B, 2]. position: i32[B]. is_off: bool[B], rows whose noise is 0.
      z_factor, noise_factor: f32[B], as `lanes.noise_factors` gives them.
    """

    seed: jax.Array
    position: jax.Array
    is_off: jax.Array
    z_factor: jax.Array
    noise_factor: jax.Array


def takes(weight, head: Head, depth: int, axes: tuple[str, ...] = ()) -> bool:
    """Whether `head_lanes` is used: asked for and made for it.

    Args:
      weight: float [Vp, W]. head: Head. depth: tokens a lane keeps. axes: as in `summarize_head`.
    """
    if head.kernel is False or axes:
        return False
    if head.kernel is None:
        # Where there are more devices, arrays may lie on several, and a compiler splits no kernel.
        is_alone = jax.device_count() == 1 and kernel_math.runs_here()
        if not is_alone or weight.shape[0] < _FEWEST_IDS:
            return False
    inputs = head.kernel.inputs if isinstance(head.kernel, KernelBlocks) else _FEW_INPUTS
    return weight.dtype == jnp.bfloat16 and weight.shape[1] % inputs == 0 and depth <= _MOST_DEPTH


def blocks_of(num_rows: int, width: int, head: Head, has_noise: bool) -> KernelBlocks:
    """The sizes of a program's blocks: the head's own, or those for so many rows."""
    if isinstance(head.kernel, KernelBlocks):
        return head.kernel
    known = _NOISE_BLOCKS if has_noise else _BLOCKS
    blocks = next((blocks for blocks in known if blocks.rows >= num_rows), known[-1])
    return blocks if width % blocks.inputs == 0 else blocks._replace(inputs=_FEW_INPUTS)


def head_lanes(
    hidden,
    weight,
    vocab_size: int,
    head: Head,
    depth: int,
    temperatures: tuple[jax.Array | None, ...],
    noise: Noise | None,
    *,
    interpret: bool = False,
) -> tuple[Lanes, NoiseLanes | None, jax.Array]:
    """What L lanes keep of tidy logits, L = vocab_size / 128 rounded up.

    Args:
      hidden: float [B, W]. weight: bf16[Vp, W], `takes` says of which shapes.
      vocab_size: V; tokens from there on count as -inf.
      head: Head, of which the scale, the cap and the kernel are looked at.
      depth: tokens a lane keeps.
      temperatures: f32[B], at least the smallest normal number, or None for 1, of each sum.
      noise: None for no noise lanes.
      interpret: run the kernel's operations by XLA, on any device, slowly.

    Returns:
      (Lanes, NoiseLanes, bool[B, L]: lanes that hold NaN or +inf). A noise lane's best token is found, and
      `second` made, with noise within 2^-16 of that of `rng`: a token whose score is as close as
      `lanes.winner_is_sure` allows for may be better. `noise` itself is exact.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    (num_rows, width), num_lanes = hidden.shape, -(-vocab_size // _IDS)
    blocks = blocks_of(num_rows, width, head, noise is not None)
    num_floats = depth + len(temperatures) + (0 if noise is None else 2)
    num_ints = depth + 1 + (noise is not None)
    rows = [1 / t for t in temperatures if t is not None]
    if noise is not None:
        factor = jnp.where(noise.is_off, 0, noise.noise_factor)
        rows += [noise.seed[:, 0], noise.seed[:, 1], noise.position, noise.z_factor, factor]
    whole = lambda x: pl.BlockSpec(x.shape, lambda block, lane: (0,) * len(x.shape))
    inputs = [hidden.astype(weight.dtype), weight, *rows]
    outputs = [
        jax.ShapeDtypeStruct((num_floats, num_rows, num_lanes), jnp.float32),
        jax.ShapeDtypeStruct((num_ints, num_rows, num_lanes), jnp.int32),
    ]
    body = functools.partial(
        _kernel,
        blocks=blocks,
        vocab_size=vocab_size,
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        depth=depth,
        is_divided=tuple(t is not None for t in temperatures),
        has_noise=noise is not None,
        interpret=interpret,
    )
    floats, ints = pl.pallas_call(
        body,
        # Programs of one lane are neighbours: its rows of the head are read once.
        grid=(-(-num_rows // blocks.rows), num_lanes),
        in_specs=[whole(x) for x in inputs],
        out_specs=[whole(x) for x in outputs],
        out_shape=outputs,
        compiler_params=plt.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name="head_lanes",
    )(*inputs)
    lanes = Lanes(tuple(floats[:depth]), tuple(ints[:depth]), tuple(floats[depth:][: len(temperatures)]))
    return lanes, None if noise is None else _noise_lanes(floats, ints, noise), ints[depth] != 0


def _noise_lanes(floats, ints, noise: Noise) -> NoiseLanes:
    """The kernel's winners with the noise that every other route gives them."""
    value, second, token = floats[-2], floats[-1], ints[-1]
    there = value > -jnp.inf
    exact = rng.gumbel(noise.seed, noise.position, rng.TARGET, jnp.where(there, token, 0))
    exact = jnp.where(noise.is_off[:, None], 0, exact)
    score = value * noise.z_factor[:, None] + exact * noise.noise_factor[:, None]
    lowest = lambda x: jnp.where(there, x, -jnp.inf)
    return NoiseLanes(lowest(score), value, lowest(exact), token, second)


def _kernel(
    hidden_ref,
    weight_ref,
    *refs,
    blocks,
    vocab_size,
    logit_scale,
    softcap,
    depth,
    is_divided,
    has_noise,
    interpret,
):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    *row_refs, floats_ref, ints_ref = refs
    (num_rows, width), num_lanes, lane = hidden_ref.shape, floats_ref.shape[2], pl.program_id(1)
    row = pl.program_id(0) * blocks.rows + jnp.arange(blocks.rows, dtype=jnp.int32)
    # What is loaded goes to the product as it is: anything computed on it would keep it from being on its way
    # in advance. So rows and tokens that are not there are copies of the last one, dropped afterwards.
    own_row, (call, word) = jnp.minimum(row, num_rows - 1), _tokens_of_lane(lane, num_lanes)
    own_id = jnp.minimum(4 * call + word, weight_ref.shape[0] - 1)

    def add_block(index, total):
        at = index * blocks.inputs + jnp.arange(blocks.inputs, dtype=jnp.int32)[None, :]
        hidden = plt.load(hidden_ref.at[own_row[:, None], at])
        weight = plt.load(weight_ref.at[own_id[:, None], at])
        return total + jnp.dot(hidden, weight.T, preferred_element_type=jnp.float32)

    empty = jnp.zeros((blocks.rows, _IDS), jnp.float32)
    product = jax.lax.fori_loop(0, width // blocks.inputs, add_block, empty)
    row_values = [plt.load(ref.at[own_row])[:, None] for ref in row_refs]
    call, word = call[None, :], word[None, :]
    ids = 4 * call + word
    raw = jnp.where(ids < vocab_size, scale_logits(product, logit_scale, softcap), -jnp.inf)
    is_bad = jnp.isnan(raw) | (raw == jnp.inf)
    z = tidy(raw)

    kept, rest = [], z
    for _ in range(depth):
        value, token = _first(rest, ids)
        kept.append((value, jnp.where(value > -jnp.inf, token, _LAST_ID)))
        rest = jnp.where(ids == token[:, None], -jnp.inf, rest)
    floats, ints = [value for value, _ in kept], [token for _, token in kept]
    difference = z - jnp.where(floats[0] > -jnp.inf, floats[0], 0)[:, None]
    for divided in is_divided:
        weights = jnp.exp(difference * row_values.pop(0) if divided else difference)
        floats.append(jnp.sum(weights, axis=1))
    ints.append(jnp.max(is_bad.astype(jnp.int32), axis=1))
    if has_noise:
        low, high, position, z_factor, noise_factor = row_values
        score = z * z_factor + _gumbel(call, word, low, high, position, interpret) * noise_factor
        best, token = _first(score, ids)
        is_best = ids == token[:, None]
        floats.append(jnp.max(jnp.where(is_best, z, -jnp.inf), axis=1))
        floats.append(jnp.max(jnp.where(is_best, -jnp.inf, score), axis=1))
        ints.append(jnp.where(best > -jnp.inf, token, _LAST_ID))
    for ref, arrays in ((floats_ref, floats), (ints_ref, ints)):
        for index, array in enumerate(arrays):
            plt.store(ref.at[index, row, lane], array, mask=row < num_rows)


def _tokens_of_lane(lane, num_lanes):
    """Calls i32[128] and words i32[128] of a lane's tokens, in the order of a program's columns.

    Columns j, j + 1, j + 8 and j + 9, j even, are one thread's where a block has 64 rows and more: they get
    the tokens of one call of the generator, so that the compiler finds it to be one.
    """
    column = jnp.arange(_IDS, dtype=jnp.int32)
    call = ((column >> 1) & 3) | ((column >> 4) << 2)
    word = (column & 1) | ((column >> 2) & 2)
    return call * num_lanes + lane, word


def _first(values, ids):
    """The first token of the order in each row: (f32[B], i32[B]) of f32[B, n], i32[1, n]."""
    best = jnp.max(values, axis=1)
    return best, jnp.min(jnp.where(values == best[:, None], ids, _LAST_ID), axis=1)


def _gumbel(call, word, low, high, position, interpret):
    """`rng.gumbel` within 2^-16: f32[B, n] of i32[1, n], twice, and columns u32, u32, i32[B, 1]."""
    purpose, node = (jnp.full((1, 1), number, jnp.uint32) for number in (rng.TARGET, 0))
    counter = (call.astype(jnp.uint32), position.astype(jnp.uint32), purpose, node)
    words = rng.philox4x32(counter, (low, high), None if interpret else multiply_wide)
    if interpret:  # XLA:CPU takes long to compile the generator together with what follows it
        words = jax.lax.optimization_barrier(words)
    bits = jnp.where(word < 2, jnp.where(word == 0, *words[:2]), jnp.where(word == 2, *words[2:]))
    u = rng.uniform_of(bits)
    log2 = jnp.log2 if interpret else kernel_math.log2
    # -log(1 - u): below 1/8 the first terms of its series, as 1 - u would round u away.
    series = jnp.zeros_like(u)
    for power in range(_NUM_TERMS, 0, -1):
        series = u * (np.float32(1 / power) + series)
    return -_LN2 * log2(jnp.where(u < 0.125, series, -_LN2 * log2(1 - u)))
