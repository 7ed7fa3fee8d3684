"""The attention of a layer's new tokens on a GPU, from the projections to the mixed heads, in two kernels.

The first adds the biases, norms and rotates queries and keys, stages keys and values, and takes in the
committed slots where the cache holds them, up to each row's own length; the slots of a row are split among
programs, whose parts the second one joins. Written with XLA's operations the same is ten kernels and a copy
of the layer's cache. In Pallas' Triton dialect, which JAX keeps but no longer develops: a stop-gap until one
in its successor is as fast. Pallas is imported where a kernel is used: half a second that runs on a CPU need
not wait for.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jaxsample.kvcache import Cache, PagedKVCache, Staged
from jaxsample.quantize import is_quantized
from models.attention import precision_of
from models.heads import Heads, Norms

_MOST_QUERIES = 64  # a key-value head's, of all new tokens: a program holds them all
_SLOTS, _FEW_SLOTS = 64, 32  # of a block, the latter where that gives more multiprocessors work
_PROGRAMS = 132  # the multiprocessors of an H200: a row's slots are split until there are as many


def takes(cache: Cache, query: Heads) -> bool:
    """Whether `attend_new` is made for the step: few tokens, a cache of floats, heads of a power of two."""
    size, num_queries = query.array.shape[-1], query.array.shape[1] * query.count
    fits = size in (32, 64, 128, 256) and num_queries <= _MOST_QUERIES
    return fits and not is_quantized(cache.keys.dtype)


def attend_new(
    query: Heads,
    key: Heads,
    value: Heads,
    norms: Norms | None,
    cos: jax.Array,
    sin: jax.Array,
    cache: Cache,
    layer: jax.Array,
    mask: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, Staged]:
    """What `rotate`, `stage`, `gather_layer` and `models.attention.attend` give together, to rounding.

    For steps whose nodes all see the same committed slots, the first ones of their row: what
    `attention_mask` and the guided step ask for.

    Args:
      query, key, value: of B rows with N new tokens and G key-value heads; `takes` says how many.
      norms: of each head of queries and keys, before the rotation; None for none.
      cos, sin: f32[B, N, 1, D/2].
      cache: KVCache or PagedKVCache of floats, S slots a row.
      layer: i32[], the one to read.
      mask: bool[B, N, S+N].

    Returns:
      mixed [B, N, H * D] in query's dtype, and the layer's Staged in the cache's.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    B, N, G, _, D = query.array.shape
    S, num_queries = cache.num_slots, N * query.count
    size, num_nodes = _power_of_two(num_queries), _power_of_two(N)
    slots = _SLOTS if B * G * -(-S // _SLOTS) >= _PROGRAMS else _FEW_SLOTS
    num_blocks = -(-S // slots)
    num_parts = min(num_blocks, max(1, _PROGRAMS // (B * G)))
    dtype, storage = query.array.dtype, cache.keys.dtype

    inputs, specs = [], []

    def give(array, block, index):
        inputs.append(array)
        specs.append(pl.BlockSpec(block, index))

    for heads in (query, key, value):
        rows = heads.array.shape[3]
        give(heads.array, (None, N, None, rows, D), lambda b, g, p: (b, 0, g, 0, 0))
        if heads.bias is not None:
            give(heads.bias, (None, rows, D), lambda b, g, p: (g, 0, 0))
    if norms is not None:
        give(norms.query, (D,), lambda b, g, p: (0,))
        give(norms.key, (D,), lambda b, g, p: (0,))
    for angles in (cos, sin):
        give(angles[:, :, 0], (None, N, D // 2), lambda b, g, p: (b, 0, 0))
    give(mask[:, :, S:].astype(jnp.int32), (None, N, N), lambda b, g, p: (b, 0, 0))
    give(mask[:, 0, :S].sum(axis=-1, dtype=jnp.int32), (None,), lambda b, g, p: (b,))
    give(layer.reshape(1), (1,), lambda b, g, p: (0,))
    if isinstance(cache, PagedKVCache):
        pages = cache.page_table.shape[1]
        give(cache.page_table, (None, pages), lambda b, g, p: (b, 0))
    for array in (cache.keys, cache.values):
        flat = array.reshape(array.shape[0], -1, G, D)  # the slots of all rows or pages on one axis
        give(flat, (*flat.shape[:2], None, D), lambda b, g, p: (0, 0, g, 0))

    of_part = lambda *block: pl.BlockSpec(
        (None, None, None, *block), lambda b, g, p: (b, g, p, *(0 for _ in block))
    )
    part = lambda *block: jax.ShapeDtypeStruct((B, G, num_parts, *block), jnp.float32)
    staged = (
        jax.ShapeDtypeStruct((B, N, G, D), storage),
        pl.BlockSpec((None, N, None, D), lambda b, g, p: (b, 0, g, 0)),
    )
    kernel = functools.partial(
        _attend_kernel,
        heads=[(h.first, h.count, h.bias is not None) for h in (query, key, value)],
        eps=None if norms is None else norms.eps,
        page_size=cache.keys.shape[2] if isinstance(cache, PagedKVCache) else None,
        num_slots=S,
        slots=slots,
        blocks=-(-num_blocks // num_parts),
        size=size,
        num_nodes=num_nodes,
    )
    call = functools.partial(pl.pallas_call, interpret=interpret)
    keys, values, mixed, top, total = call(
        kernel,
        grid=(B, G, num_parts),
        in_specs=specs,
        out_specs=[staged[1], staged[1], of_part(size, D), of_part(size), of_part(size)],
        out_shape=[staged[0], staged[0], part(size, D), part(size), part(size)],
        compiler_params=plt.CompilerParams(
            num_warps=8 if num_parts > 1 else 4, num_stages=3 if slots == _SLOTS else 4
        ),
        name="attend_new",
    )(*inputs)

    count = query.count
    of_query = lambda *block: pl.BlockSpec(
        (None, None, num_parts, None, *block), lambda b, g, i: (b, g, 0, i, *(0 for _ in block))
    )
    joined = call(
        functools.partial(_join_kernel, num_parts=num_parts),
        grid=(B, G, num_queries),
        in_specs=[of_query(D), of_query(), of_query()],
        out_specs=pl.BlockSpec((None, None, None, None, D), lambda b, g, i: (b, i // count, g, i % count, 0)),
        out_shape=jax.ShapeDtypeStruct((B, N, G, count, D), dtype),
        compiler_params=plt.CompilerParams(num_warps=1),
        name="join_parts",
    )(mixed, top, total)
    return joined.reshape(B, N, G * count * D), Staged(keys, values)


def _attend_kernel(*refs, heads, eps, page_size, num_slots, slots, blocks, size, num_nodes):
    """One part of the slots of a row and key-value head; the first part also has the staged tokens."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    given, (keys_out, values_out, mixed_ref, top_ref, total_ref) = iter(refs[:-5]), refs[-5:]
    arrays = [(next(given), next(given) if has_bias else None) for _, _, has_bias in heads]
    norms = (next(given), next(given)) if eps is not None else (None, None)
    cos_ref, sin_ref, mask_ref, length_ref, layer_ref = (next(given) for _ in range(5))
    table_ref = next(given) if page_size is not None else None
    keys_ref, values_ref = given
    num_tokens, _, width = arrays[0][0].shape
    dtype, half = arrays[0][0].dtype, width // 2
    dims = jnp.arange(width, dtype=jnp.int32)[None, :]
    partner = jnp.where(dims < half, dims + half, dims - half)  # what a rotation mixes a number with

    # Every load of the new tokens comes first, so that they are on their way together.
    def read(which, node, row, dims):
        ref, bias_ref = arrays[which]
        row = row + heads[which][0]
        x = plt.load(ref.at[node, row, dims], mask=node < num_tokens, other=0)
        return x, None if bias_ref is None else plt.load(bias_ref.at[row, dims])

    def read_rotated(which, node, row):
        known = node < num_tokens
        angles = [
            plt.load(ref.at[node, jnp.where(dims < half, dims, partner)], mask=known, other=0)
            for ref in (cos_ref, sin_ref)
        ]
        weights = [None if eps is None else plt.load(norms[which].at[at]) for at in (dims, partner)]
        return [read(which, node, row, at) for at in (dims, partner)], weights, angles

    length, layer = length_ref[...], layer_ref[0]
    at = jnp.arange(size, dtype=jnp.int32)[:, None]
    node, other = (
        jnp.arange(num_nodes, dtype=jnp.int32)[:, None],
        jnp.arange(num_nodes, dtype=jnp.int32)[None, :],
    )
    count = heads[0][1]
    query_parts, key_parts = read_rotated(0, at // count, at % count), read_rotated(1, node, 0)
    value_parts = read(2, node, 0, dims)
    shown = plt.load(
        mask_ref.at[at // count, other], mask=(at // count < num_tokens) & (other < num_tokens), other=0
    )

    def biased(x, bias):
        return x if bias is None else x + bias

    def rotated(parts, weights, angles):
        x, mate = (biased(*part).astype(jnp.float32) for part in parts)
        if eps is not None:
            scale = jax.lax.rsqrt((x * x).sum(axis=1) / width + eps)[:, None]
            x, mate = (
                (x * scale * weight.astype(jnp.float32)).astype(dtype).astype(jnp.float32)
                for x, weight in zip((x, mate), weights, strict=True)
            )
        cos, sin = angles
        return x * cos + mate * jnp.where(dims < half, -sin, sin)

    product = functools.partial(jnp.dot, precision=precision_of(dtype), preferred_element_type=jnp.float32)
    scale, query = 1 / math.sqrt(width), rotated(*query_parts).astype(dtype)

    def add(state, scores, values):
        mixed, top, total = state
        highest = jnp.maximum(top, scores.max(axis=1))
        shift = jnp.where(highest == -jnp.inf, 0.0, highest)
        weights, before = jnp.exp(scores - shift[:, None]), jnp.exp(top - shift)
        new = product(weights.astype(dtype), values)
        return mixed * before[:, None] + new, highest, total * before + weights.sum(axis=1)

    row_start = pl.program_id(0) * num_slots

    def add_block(index, state):
        slot = index * slots + jnp.arange(slots, dtype=jnp.int32)
        seen = held = slot < length  # what lies behind the length is never read
        place = row_start + slot
        if table_ref is not None:
            page = plt.load(table_ref.at[slot // page_size], mask=seen, other=0)
            place, held = page * page_size + slot % page_size, seen & (page >= 0)  # no page reads as zeros
        block = lambda ref: plt.load(ref.at[layer, place[:, None], dims], mask=held[:, None], other=0).astype(
            dtype
        )
        scores = jnp.where(seen[None, :], product(query, block(keys_ref).T) * scale, -jnp.inf)
        return add(state, scores, block(values_ref))

    begin = pl.program_id(2) * blocks
    end = jnp.minimum(begin + blocks, pl.cdiv(length, slots))
    empty = jnp.zeros((size, width)), jnp.full((size,), -jnp.inf), jnp.zeros((size,))
    state = jax.lax.fori_loop(begin, end, add_block, empty)

    # Rounded as the cache stores them: attention sees what later steps will read.
    is_first = pl.program_id(2) == 0
    key = rotated(*key_parts).astype(dtype).astype(keys_out.dtype)
    value = biased(*value_parts).astype(values_out.dtype)
    for ref, x in ((keys_out, key), (values_out, value)):
        plt.store(ref.at[node, dims], x, mask=is_first & (node < num_tokens) & (dims >= 0))

    # Staged tokens differ in who sees them: one that is not finite becomes zero and its score NaN, which only
    # queries that see it take in.
    wide = value.astype(jnp.float32)
    finite = wide - wide == 0
    poison = jnp.where(jnp.where(finite, 0.0, 1.0).max(axis=1) > 0, jnp.nan, 0.0)
    scores = (product(query, key.astype(dtype).T) + poison[None, :]) * scale
    scores = jnp.where((shown != 0) & is_first, scores, -jnp.inf)
    state = add(state, scores, jnp.where(finite, wide, 0.0).astype(dtype))
    mixed_ref[...], top_ref[...], total_ref[...] = state


def _join_kernel(mixed_ref, top_ref, total_ref, joined_ref, *, num_parts):
    """One query of all parts."""
    from jax.experimental.pallas import triton as plt

    part = jnp.arange(1 << (num_parts - 1).bit_length(), dtype=jnp.int32)
    known, width = part < num_parts, mixed_ref.shape[1]
    dims = jnp.arange(width, dtype=jnp.int32)[None, :]
    top = plt.load(top_ref.at[part], mask=known, other=-jnp.inf)
    highest = top.max(axis=0)
    weights = jnp.exp(top - jnp.where(highest == -jnp.inf, 0.0, highest))
    total = (weights * plt.load(total_ref.at[part], mask=known, other=0)).sum(axis=0)
    mixed = plt.load(mixed_ref.at[part[:, None], dims], mask=known[:, None], other=0)
    result = (weights[:, None] * mixed).sum(axis=0) / jnp.where(total == 0, 1.0, total)
    joined_ref[...] = result.astype(joined_ref.dtype)


def _power_of_two(number: int) -> int:
    """The least that a product on a matrix unit takes: 16, 32, ..."""
    return max(16, 1 << (number - 1).bit_length())
