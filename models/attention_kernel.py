"""Attention of a step's new tokens on a GPU: the committed slots in one kernel, the staged tokens beside it.

The kernel reads a contiguous cache where it lies, up to each row's own length; matrix products as XLA runs
them want the heads of a row beside one another, and copy the cache first. It is in Pallas' Triton dialect,
which JAX keeps but no longer develops: a stop-gap until one in its successor is as fast. Pallas is imported
where the kernel is used: half a second that runs on a CPU need not wait for.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models.attention import attend, precision_of

_MOST_QUERIES = 64  # a key-value head's, of all new tokens: a program holds them all
_SLOTS = 64  # of a block
_PROGRAMS = 264  # two for each multiprocessor of an H200: a row's slots are split until there are as many


def attention_of(head_size: int, mesh: Any = None) -> Callable:
    """The attention for a decoder: the kernel on one GPU, else `attend`, which XLA can split over a mesh.

    Args:
      head_size: D; the kernel takes powers of two from 16 to 256.
      mesh: where the weights lie; None: on one device.
    """
    by_kernel = jax.default_backend() == "gpu" and mesh is None and head_size in (16, 32, 64, 128, 256)
    return attend_by_kernel if by_kernel else attend


def attend_by_kernel(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    staged_keys: jax.Array,
    staged_values: jax.Array,
    mask: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """`attend` for steps whose nodes all see the same committed slots, the first ones of their row.

    That is what `attention_mask` and the guided step ask for. Steps of many tokens take `attend` itself.

    Args, Returns: as for `models.attention.attend`. D is a power of two, at least 16.
    """
    B, N, H, D = query.shape
    S, G = keys.shape[1], keys.shape[2]
    num_queries = H // G * N
    if num_queries > _MOST_QUERIES:
        return attend(query, keys, values, staged_keys, staged_values, mask)
    lengths = mask[:, 0, :S].sum(axis=-1, dtype=jnp.int32)
    grouped = query.reshape(B, N, G, H // G, D).transpose(0, 2, 3, 1, 4)
    size = max(16, 1 << (num_queries - 1).bit_length())
    padded = jnp.pad(grouped.reshape(B, G, num_queries, D), ((0, 0), (0, 0), (0, size - num_queries), (0, 0)))
    keys, values = keys.astype(query.dtype), values.astype(query.dtype)
    parts = _committed(padded, keys, values, lengths, interpret)
    mixed, top, total = (part[:, :, :, :num_queries] for part in parts)  # [B, G, P, Q, D or nothing]

    seen = mask[:, None, None, :, S:]
    finite = jnp.isfinite(staged_values)
    poison = jnp.where(finite.all(axis=-1), 0.0, jnp.nan).astype(jnp.float32)  # [B, N, G]
    staged_values = jnp.where(finite, staged_values, jnp.zeros((), staged_values.dtype)).astype(query.dtype)
    contract = functools.partial(
        jnp.einsum, precision=precision_of(query.dtype), preferred_element_type=jnp.float32
    )
    scores = contract("bgqnd,bmgd->bgqnm", grouped, staged_keys.astype(query.dtype))
    scores = scores + poison.transpose(0, 2, 1)[:, :, None, None, :]
    scores = jnp.where(seen, scores * D**-0.5, -jnp.inf).reshape(B, G, num_queries, N)

    highest = jnp.maximum(top.max(axis=2), scores.max(axis=-1))
    highest = jnp.where(highest == -jnp.inf, 0.0, highest)
    weights, own = jnp.exp(top - highest[:, :, None]), jnp.exp(scores - highest[..., None])
    total = (weights * total).sum(axis=2) + own.sum(axis=-1)
    result = (weights[..., None] * mixed).sum(axis=2)
    result = result + contract("bgqm,bmgd->bgqd", own.astype(query.dtype), staged_values)
    result = result / jnp.where(total == 0, 1.0, total)[..., None]
    result = result.reshape(B, G, H // G, N, D).transpose(0, 3, 1, 2, 4)
    return result.astype(query.dtype).reshape(B, N, H * D)


def _committed(query, keys, values, lengths, interpret: bool):
    """Of P parts of the slots: sum of exp(score - max) value f32[B, G, P, Q, D], max, sum f32[B, G, P, Q]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    B, G, Q, D = query.shape
    num_blocks = -(-keys.shape[1] // _SLOTS)
    num_parts = min(num_blocks, max(1, _PROGRAMS // (B * G)))
    blocks = -(-num_blocks // num_parts)  # of a part
    of_part = lambda *block: pl.BlockSpec(
        (None, None, None, *block), lambda b, g, p: (b, g, p, *(0 for _ in block))
    )
    of_row = pl.BlockSpec((None, keys.shape[1], None, D), lambda b, g, p: (b, 0, g, 0))
    shape = lambda *block: jax.ShapeDtypeStruct((B, G, num_parts, *block), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, scale=1 / math.sqrt(D)),
        grid=(B, G, num_parts),
        in_specs=[
            pl.BlockSpec((None, None, Q, D), lambda b, g, p: (b, g, 0, 0)),
            of_row,
            of_row,
            pl.BlockSpec((None,), lambda b, g, p: (b,)),
        ],
        out_specs=[of_part(Q, D), of_part(Q), of_part(Q)],
        out_shape=[shape(Q, D), shape(Q), shape(Q)],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="attend_committed",
    )(query, keys, values, lengths)


def _kernel(query_ref, keys_ref, values_ref, length_ref, mixed_ref, top_ref, total_ref, *, blocks, scale):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    length, query = length_ref[...], query_ref[...]
    first = pl.program_id(2) * blocks
    last = jnp.minimum(first + blocks, pl.cdiv(length, _SLOTS))

    product = functools.partial(
        jnp.dot, precision=precision_of(query.dtype), preferred_element_type=jnp.float32
    )

    def add_block(index, state):
        mixed, top, total = state
        slots = pl.ds(index * _SLOTS, _SLOTS)
        seen = index * _SLOTS + jnp.arange(_SLOTS, dtype=jnp.int32) < length
        # What lies behind the length is never read.
        read = lambda ref: plt.load(ref.at[slots, :], mask=seen[:, None], other=0)
        scores = product(query, read(keys_ref).T) * scale
        scores = jnp.where(seen[None, :], scores, -jnp.inf)
        highest = jnp.maximum(top, scores.max(axis=1))
        weights, before = jnp.exp(scores - highest[:, None]), jnp.exp(top - highest)
        new = product(weights.astype(query.dtype), read(values_ref))
        return mixed * before[:, None] + new, highest, total * before + weights.sum(axis=1)

    size, width = query.shape
    empty = (
        jnp.zeros((size, width), jnp.float32),
        jnp.full((size,), -jnp.inf),
        jnp.zeros((size,), jnp.float32),
    )
    mixed_ref[...], top_ref[...], total_ref[...] = jax.lax.fori_loop(first, last, add_block, empty)
