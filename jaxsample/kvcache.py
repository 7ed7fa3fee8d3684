"""Keys and values: the committed ones in a cache, the staged ones beside it until a verdict.

Knows nothing about tokens or why a row was accepted. The model reads the cache and returns `Staged`; `commit`
writes exactly the accepted rows, in place on a donated cache. Rejected and idle rows are never written, so
nothing is rolled back. An uncommitted `Staged` is a cancelled one.

A cache is contiguous (`KVCache`) or paged (`PagedKVCache`), its numbers are floats or one byte each with
scales beside them; every function here takes any of these. It is stacked by layer, [L, ...]: the one
exception to "rows first", so that one scatter commits all layers.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsample.draft import Tree
from jaxsample.paged import PagedKVCache
from jaxsample.quantize import (
    dequantize,
    empty_storage,
    is_quantized,
    quantize,
    storage_dtype,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Committed keys and values; S slots a row, of which each row's own length counts.

    Fields:
      keys: [L, B, S, H, D], any float dtype, int8, or uint8 for float8_e4m3fn.
      values: [L, B, S, H, D], the same dtype.
      key_scales, value_scales: f32[L, B, S, H] where the dtype has one byte, else None.
    """

    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None

    @property
    def num_rows(self) -> int:
        return self.keys.shape[1]

    @property
    def num_slots(self) -> int:
        return self.keys.shape[2]

    def places(self, slot, kept, rows=None):
        """The two indices behind the layer at which slots lie: row and slot, i32[b, M] each.

        Args:
          slot: i32[b, M], slots of each row, distinct along M.
          kept: bool[b, M]; where False the slot lies beyond the end.
          rows: i32[b], the rows they are slots of, distinct; None for all rows, b = B.
        """
        num_rows, num_steps = slot.shape
        rows = jnp.arange(num_rows, dtype=jnp.int32) if rows is None else rows
        row = jnp.broadcast_to(rows[:, None], slot.shape)
        # A slot of its own for each index that is dropped, so that all stay unique.
        beyond = self.num_slots + jnp.arange(num_steps, dtype=jnp.int32)[None, :]
        return row, jnp.where(kept, slot, beyond)

    def read(self, array, layer):
        """One layer of a stacked array [L, B, S, ...]: [B, S, ...], a slice."""
        return array[layer]

    def take(self, rows) -> "KVCache":
        """A copy of some rows, i32[b], to read from."""
        return jax.tree.map(lambda array: jnp.take(array, rows, axis=1, mode="clip"), self)


Cache = KVCache | PagedKVCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Staged:
    """New keys and values of the N nodes of a step, not yet in the cache.

    Fields:
      keys: [L, B, N, H, D], float, or the codes of a one-byte cache.
      values: [L, B, N, H, D], the same dtype.
      key_scales, value_scales: f32[L, B, N, H] of codes, None of floats.
    """

    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None


def init_cache(
    num_layers: int, num_rows: int, num_slots: int, num_heads: int, head_size: int, dtype
) -> KVCache:
    """An empty contiguous cache of zeros.

    Args:
      num_layers: L. num_rows: B. num_slots: S. num_heads: H, key-value heads. head_size: D.
      dtype: a float dtype, int8 or float8_e4m3fn.

    Raises:
      ValueError: another dtype.
    """
    shape = (num_layers, num_rows, num_slots, num_heads, head_size)
    keys, key_scales = empty_storage(shape, dtype)
    values, value_scales = empty_storage(shape, dtype)
    return KVCache(keys, values, key_scales, value_scales)


def attention_mask(lengths, tree: Tree, num_slots: int):
    """What each node of a step may attend to: bool[B, N, S + N].

    Node i sees the committed slots below its row's length, then of the staged nodes itself and its ancestors.

    Args:
      lengths: i32[B], committed slots of each row.
      tree: the static tree of the N nodes.
      num_slots: S.
    """
    num_rows = lengths.shape[0]
    slots = jax.lax.broadcasted_iota(jnp.int32, (num_rows, tree.num_nodes, num_slots), 2)
    committed = slots < lengths[:, None, None]
    staged = jnp.broadcast_to(jnp.asarray(tree.ancestors)[None], (num_rows, tree.num_nodes, tree.num_nodes))
    return jnp.concatenate([committed, staged], axis=2)


def candidate_mask(lengths, num_pending, max_pending: int, num_candidates: int, num_slots: int):
    """Tokens not in the cache yet, then candidates for the one behind them: where they stand, what they see.

    Nodes are D pending slots and G candidates. A pending token sees the committed slots and the pending ones
    up to itself; a candidate sees the committed slots, the row's pending tokens and itself, never another
    candidate. To keep the pending tokens and candidate j, commit the path 0 ... num_pending - 1, D + j.

    Args:
      lengths: i32[B], committed slots of each row.
      num_pending: i32[B], pending tokens of each row, at most D; what lies behind them is padding.
      max_pending: D, may be 0. num_candidates: G.
      num_slots: S.

    Returns:
      (positions i32[B, D + G], mask bool[B, D + G, S + D + G]).
    """
    num_rows, size = lengths.shape[0], max_pending + num_candidates
    node = jnp.arange(size, dtype=jnp.int32)
    depth = jnp.where(node[None, :] < max_pending, node[None, :], num_pending[:, None])
    slots = jax.lax.broadcasted_iota(jnp.int32, (num_rows, size, num_slots), 2)
    is_pending = node[None, :] < jnp.minimum(num_pending, max_pending)[:, None]
    behind = (node[:, None] >= max_pending) | (node[None, :] <= node[:, None])
    staged = (is_pending[:, None, :] & behind[None]) | (node[None, :] == node[:, None])[None]
    return lengths[:, None] + depth, jnp.concatenate([slots < lengths[:, None, None], staged], axis=2)


def gather_layer(cache: Cache, layer):
    """The keys and values of one layer in the order of the slots, as a model attends to them.

    A contiguous float cache is sliced, nothing is copied; pages are gathered, one-byte numbers dequantised.

    Args:
      cache: either kind.
      layer: an int, or i32[] on the device, 0 ... L - 1.

    Returns:
      keys, values [B, S, H, D] in the cache's dtype, float32 where that has one byte. What lies at a row's
      length and beyond is meaningless and must be masked.
    """
    keys, values = cache.read(cache.keys, layer), cache.read(cache.values, layer)
    if cache.key_scales is None or cache.value_scales is None:
        return keys, values
    keys = dequantize(keys, cache.read(cache.key_scales, layer))
    return keys, dequantize(values, cache.read(cache.value_scales, layer))


def stage(keys, values, storage) -> Staged:
    """New keys and values as the cache stores them: codes and scales where that has one byte.

    A model attends to `read_staged` of these and returns them, so that the step that stages a token sees it
    as later steps do.

    Args:
      keys, values: float[..., H, D].
      storage: the dtype of the cache's keys, or the one that `init_cache` was given.

    Returns:
      Staged in the dtype of the cache's keys, with scales f32[..., H] where that has one byte.

    Raises:
      ValueError: another dtype.
    """
    storage = storage if is_quantized(storage) else storage_dtype(storage)
    if not is_quantized(storage):
        return Staged(keys.astype(storage), values.astype(storage))
    (keys, key_scales), (values, value_scales) = quantize(keys, storage), quantize(values, storage)
    return Staged(keys, values, key_scales, value_scales)


def read_staged(staged: Staged):
    """The keys and values [..., H, D] of staged rows with the bits that `gather_layer` gives once committed.

    Args:
      staged: of `stage`; floats without scales are returned as they are.

    Returns:
      keys, values, float32 where staged holds codes.
    """
    if staged.key_scales is None or staged.value_scales is None:
        return staged.keys, staged.values
    return dequantize(staged.keys, staged.key_scales), dequantize(staged.values, staged.value_scales)


def as_stored(staged: Staged, cache: Cache) -> Staged:
    """`stage` of rows that are staged already, for this cache; rows that have scales are left as they are."""
    if staged.key_scales is not None:
        return staged
    return stage(staged.keys, staged.values, cache.keys.dtype)


def commit(cache: Cache, staged: Staged, lengths, path, count, rows=None):
    """Write the accepted rows: node path[b, m] goes to slot lengths[b] + m, for m < count[b].

    Nothing else changes. Donate the cache to the jitted function that calls this and the write is in place.
    One-byte caches store codes, and their scales under the same mask.

    Args:
      cache: KVCache or PagedKVCache.
      staged: Staged of the same layers, rows and heads, of the same dtype; where that has one byte, with
        scales, or floats without, which are quantised here.
      lengths: i32[B], committed slots before this call.
      path: i32[B, M], nodes along the accepted path, the root first; entries at m >= count are ignored.
      count: i32[B], rows to write, 0 ... M. A slot outside 0 ... S - 1 or on a page not allocated is dropped.
      rows: i32[b], distinct rows of the cache, where staged, lengths, path and count are of these b alone;
        one outside 0 ... B - 1 is dropped. None for all.

    Returns:
      The cache, of the same type.

    Raises:
      ValueError: shapes or dtypes that do not fit, at trace time.
    """
    _check_shapes(cache, staged, lengths, path, count, rows)
    staged = as_stored(staged, cache)
    num_layers, num_nodes, num_emitted = cache.keys.shape[0], staged.keys.shape[2], path.shape[1]
    step = jnp.arange(num_emitted, dtype=jnp.int32)[None, :]
    slot = lengths[:, None] + step
    kept = (step < count[:, None]) & (slot >= 0) & (slot < cache.num_slots)
    if rows is not None:
        kept &= ((rows >= 0) & (rows < cache.num_rows))[:, None]
    major, minor = cache.places(slot, kept, rows)

    layer = jnp.arange(num_layers, dtype=jnp.int32)[:, None, None]
    row = jnp.arange(path.shape[0], dtype=jnp.int32)[None, :, None]
    node = jnp.clip(path, 0, num_nodes - 1)

    def write(committed, new):
        if committed is None:
            return None
        chosen = None if num_nodes == num_emitted == 1 else (layer, row, node[None])
        return _scatter(committed, new, (layer, major[None], minor[None]), chosen)

    return dataclasses.replace(
        cache,
        keys=write(cache.keys, staged.keys),
        values=write(cache.values, staged.values),
        key_scales=write(cache.key_scales, staged.key_scales),
        value_scales=write(cache.value_scales, staged.value_scales),
    )


def _scatter(committed, new, at, chosen):
    """`committed` [L, B, S, ...] with new[chosen] at distinct indices; those beyond the end are dropped."""

    def plain(committed, new):
        new = new if chosen is None else new[chosen]
        return committed.at[at].set(new, mode="drop", unique_indices=True)

    def by_words(committed, new):
        # A GPU's scatter spends a thread on each number, whatever its size: words of 32 bits take fewer.
        # Reading arrays in another width is free there, elsewhere it copies them.
        words = plain(_words(committed), _words(new))
        return jax.lax.bitcast_convert_type(words, committed.dtype).reshape(committed.shape)

    if committed.dtype.itemsize >= 4 or committed.shape[-1] * committed.dtype.itemsize % 4:
        return plain(committed, new)
    return jax.lax.platform_dependent(committed, new, cuda=by_words, default=plain)


def _words(array):
    """The same bytes as u32, the last axis shorter."""
    split = array.reshape(*array.shape[:-1], -1, 4 // array.dtype.itemsize)
    return jax.lax.bitcast_convert_type(split, jnp.uint32)


def bytes_per_row(cache: Cache) -> int:
    """Bytes that committing one row writes: keys, values and scales of one token in all layers."""
    arrays = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    return sum(x.size // (x.shape[1] * x.shape[2]) * x.dtype.itemsize for x in arrays if x is not None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WriteMetrics:
    """What the steps of each row staged and wrote so far; staged = committed + rejected.

    The bytes that were not written are rejected * bytes_per_row(cache).

    Fields:
      windows: i32[B], steps the row took part in.
      staged: i32[B], rows of keys and values that were made, the root's among them.
      committed: i32[B], rows that were written.
      rejected: i32[B], rows that were not.
      accepted: i32[B], proposals among the committed rows, the root not being one.
    """

    windows: jax.Array
    staged: jax.Array
    committed: jax.Array
    rejected: jax.Array
    accepted: jax.Array


def init_write_metrics(num_rows: int) -> WriteMetrics:
    """Zeros for B = num_rows rows, each field a buffer of its own."""
    return WriteMetrics(*(jnp.zeros((num_rows,), jnp.int32) for _ in dataclasses.fields(WriteMetrics)))


def count_writes(metrics: WriteMetrics, num_staged, verdict_count, running) -> WriteMetrics:
    """Add one step.

    Args:
      metrics: WriteMetrics of B rows.
      num_staged: i32[B], rows that count as staged: the root and the live proposals.
      verdict_count: i32[B], rows committed, 0 ... num_staged; 0 for a step that failed or was cancelled.
      running: bool[B]; a row that idles adds nothing, whatever its other numbers are.
    """
    staged = jnp.where(running, num_staged, 0)
    committed = jnp.where(running, verdict_count, 0)
    return WriteMetrics(
        windows=metrics.windows + running.astype(jnp.int32),
        staged=metrics.staged + staged,
        committed=metrics.committed + committed,
        rejected=metrics.rejected + staged - committed,
        accepted=metrics.accepted + jnp.maximum(committed - 1, 0),
    )


def _check_shapes(cache: Cache, staged, lengths, path, count, rows):
    if rows is not None and (rows.ndim != 1 or rows.dtype != jnp.int32):
        raise ValueError(f"rows are {rows.dtype}{list(rows.shape)}, expected int32 with 1 axis")
    num_layers, num_rows = cache.keys.shape[0], cache.num_rows if rows is None else rows.shape[0]
    storage, heads = cache.keys.dtype, cache.keys.shape[3:]
    has_codes = staged.key_scales is not None
    for name, new, old in (("keys", staged.keys, cache.keys), ("values", staged.values, cache.values)):
        expected = (num_layers, num_rows, *staged.keys.shape[2:3], *heads)
        if old.shape != cache.keys.shape or new.ndim != 5 or new.shape != expected:
            raise ValueError(
                f"staged {name} have shape {new.shape}, the cache {old.shape}: expected {expected}"
            )
        is_float = jnp.issubdtype(new.dtype, jnp.floating) and new.dtype.itemsize > 1
        if is_quantized(storage) and not has_codes and not is_float:
            raise ValueError(
                f"staged {name} are {new.dtype}, a cache of {old.dtype} takes floats of two bytes or more, "
                "or codes with scales"
            )
        if old.dtype != storage or (new.dtype != storage and (has_codes or not is_quantized(storage))):
            raise ValueError(f"staged {name} are {new.dtype}, the cache is {old.dtype}: they must be equal")
    scales = (cache.key_scales, cache.value_scales)
    expected = cache.keys.shape[:4] if is_quantized(storage) else None
    if any((None if x is None else x.shape) != expected for x in scales):
        found = [None if x is None else x.shape for x in scales]
        raise ValueError(f"scales have shapes {found}, a cache of {storage} needs {expected} for both")
    expected = (
        (num_layers, num_rows, *staged.keys.shape[2:4]) if is_quantized(storage) and has_codes else None
    )
    for new, name in ((staged.key_scales, "key_scales"), (staged.value_scales, "value_scales")):
        if (None if new is None else new.shape) != expected:
            raise ValueError(
                f"staged {name} have shape {None if new is None else new.shape}, expected {expected}: "
                "both or none, and none for a cache of floats"
            )
        if new is not None and new.dtype != jnp.float32:
            raise ValueError(f"staged {name} are {new.dtype}, expected float32")
    for name, array, ndim in (("lengths", lengths, 1), ("path", path, 2), ("count", count, 1)):
        if array.ndim != ndim or array.shape[0] != num_rows or array.dtype != jnp.int32:
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}, expected int32 with {ndim} axes, "
                f"{num_rows} rows first"
            )
