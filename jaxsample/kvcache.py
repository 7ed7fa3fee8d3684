"""Keys and values: the committed ones in a contiguous cache, the staged ones beside it until a verdict.

Knows nothing about tokens or why a row was accepted. The model reads the cache and returns `Staged`; `commit`
writes exactly the accepted rows, in place on a donated cache. Rejected and idle rows are never written, so
nothing is rolled back. An uncommitted `Staged` is a cancelled one.

The cache is stacked by layer, [L, B, S, H, D]: the one exception to "rows first", so that one scatter commits
all layers.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsample.draft import Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Committed keys and values; S slots a row, of which each row's own length counts.

    Fields:
      keys: [L, B, S, H, D], any float dtype.
      values: [L, B, S, H, D], the same dtype.
    """

    keys: jax.Array
    values: jax.Array

    @property
    def num_slots(self) -> int:
        return self.keys.shape[2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Staged:
    """New keys and values of the N nodes of a step, not yet in the cache.

    Fields:
      keys: [L, B, N, H, D].
      values: [L, B, N, H, D].
    """

    keys: jax.Array
    values: jax.Array


def init_cache(
    num_layers: int, num_rows: int, num_slots: int, num_heads: int, head_size: int, dtype
) -> KVCache:
    """An empty cache of zeros.

    Args:
      num_layers: L. num_rows: B. num_slots: S. num_heads: H, key-value heads. head_size: D.
      dtype: a float dtype.
    """
    shape = (num_layers, num_rows, num_slots, num_heads, head_size)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


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


def commit(cache: KVCache, staged: Staged, lengths, path, count) -> KVCache:
    """Write the accepted rows: node path[b, m] goes to slot lengths[b] + m, for m < count[b].

    Nothing else changes. Donate the cache to the jitted function that calls this and the write is in place.

    Args:
      cache: KVCache.
      staged: Staged of the same layers, rows, heads and dtype.
      lengths: i32[B], committed slots before this call.
      path: i32[B, M], nodes along the accepted path, the root first; entries at m >= count are ignored.
      count: i32[B], rows to write, 0 ... M. A slot at S or above is dropped.

    Returns:
      KVCache.

    Raises:
      ValueError: shapes or dtypes that do not fit, at trace time.
    """
    _check_shapes(cache, staged, lengths, path, count)
    num_layers, num_rows, num_slots = cache.keys.shape[:3]
    num_emitted = path.shape[1]
    step = jnp.arange(num_emitted, dtype=jnp.int32)[None, :]
    slot = lengths[:, None] + step
    # Rows that must not land get an index beyond the end, one of their own each, so that indices stay unique.
    dropped = (step >= count[:, None]) | (slot >= num_slots)
    slot = jnp.where(dropped, num_slots + step, slot)

    layer = jnp.arange(num_layers, dtype=jnp.int32)[:, None, None]
    row = jnp.arange(num_rows, dtype=jnp.int32)[None, :, None]
    node = jnp.clip(path, 0, staged.keys.shape[2] - 1)

    def write(committed, new):
        if new.shape[2] != 1 or num_emitted != 1:
            new = new[layer, row, node[None]]
        return committed.at[layer, row, slot[None]].set(new, mode="drop", unique_indices=True)

    return KVCache(write(cache.keys, staged.keys), write(cache.values, staged.values))


def _check_shapes(cache, staged, lengths, path, count):
    num_layers, num_rows, _, num_heads, head_size = cache.keys.shape
    for name, new, old in (("keys", staged.keys, cache.keys), ("values", staged.values, cache.values)):
        expected = (num_layers, num_rows, staged.keys.shape[2], num_heads, head_size)
        if old.shape != cache.keys.shape or new.ndim != 5 or new.shape != expected:
            raise ValueError(
                f"staged {name} have shape {new.shape}, the cache {old.shape}: expected {expected}"
            )
        if new.dtype != old.dtype:
            raise ValueError(f"staged {name} are {new.dtype}, the cache is {old.dtype}: they must be equal")
    for name, array, ndim in (("lengths", lengths, 1), ("path", path, 2), ("count", count, 1)):
        if array.ndim != ndim or array.shape[0] != num_rows or array.dtype != jnp.int32:
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}, expected int32 with {ndim} axes, "
                f"{num_rows} rows first"
            )
