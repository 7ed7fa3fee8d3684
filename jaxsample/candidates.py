"""The streaming summary of a row of logits: its C first tokens, its maximum and its sum of exponentials.

Everything after shaping works on this summary where it can. Knows nothing about requests or randomness.

Order of tokens, everywhere: value descending, then id ascending. Sums over the vocabulary have one order,
whatever the batch: tiles of 128 ids, halving adds inside a tile, a halving tree over the tiles. A plain
reduction takes another order for another shape, and its last bits move.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample import rng
from jaxsample.params import TILE

_GROUP = 32
_MOST_SELECTED = 2**15 - 1  # two counts of so many fit into an int32
_HAS_UNSTABLE = "is_stable" in inspect.signature(jax.lax.top_k).parameters  # jax 0.11 and later


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Candidates:
    """The summary of B rows.

    Fields:
      values: f32[B, C], the C first values of the order, descending; -inf behind the last token that can be
        drawn.
      ids: i32[B, C], their token ids.
      max: f32[B], the largest value (0 where nothing can be drawn).
      sum: f32[B], sum of exp(z - max) over the row, in tile order.
    """

    values: jax.Array
    ids: jax.Array
    max: jax.Array
    sum: jax.Array


def tidy(x):
    """float32 of a model's logits: NaN and +inf to -inf, -0.0 and subnormals to 0.

    Equal values then have equal bits on every backend. Elementwise, to be applied where logits are read.
    """
    x = x.astype(jnp.float32)
    x = jnp.where(jnp.isnan(x) | (x == jnp.inf), -jnp.inf, x)
    return jnp.where(jnp.abs(x) < np.finfo(np.float32).tiny, 0, x)


def summarize(logits, num_candidates: int) -> Candidates:
    """Summary of shaped logits.

    Args:
      logits: f32[B, V'], V' a multiple of 128, -inf where a token cannot be drawn, no NaN, no +inf, no -0.0.
      num_candidates: C; at most V' are returned.
    """
    highest, total = normaliser(logits)
    values, ids = first_tokens(logits, num_candidates)
    return Candidates(values, ids, highest, total)


def normaliser(logits):
    """(max f32[B], sum f32[B] of exp(z - max) in tile order); log-sum-exp = max + log(sum)."""
    highest = row_max(logits)
    return highest, tile_sum(jnp.exp(logits - highest[:, None]))


def log_sum_exp(candidates: Candidates):
    """Log-sum-exp of each row: f32[B]."""
    return candidates.max + rng.log(candidates.sum)


def row_max(logits):
    """The largest value of each row, 0 where all are -inf: f32[B]."""
    highest = jnp.max(logits, axis=1)
    return jnp.where(highest > -jnp.inf, highest, 0)


def first_tokens(logits, count: int, prepare: Callable[..., Any] = lambda x: x):
    """The `count` first tokens of the order: (values f32[B, C], ids i32[B, C]), C = min(count, V').

    Every one of the first C tokens lies in one of the first C groups of neighbouring ids, groups ordered by
    (maximum descending, group ascending): if its group is not among them, each of those C groups holds a
    token that comes before it. So one pass for maxima, then only C groups are sorted.

    Args:
      logits: f32[B, V'] as in `summarize`, after `prepare`.
      count: C.
      prepare: elementwise function of the logits, applied where they are read, so that no prepared copy of
        the row is made.
    """
    num_rows, width = logits.shape
    count = min(count, width)
    num_groups = width // _GROUP
    if num_groups <= 2 * count:
        return _top_k(prepare(logits), count)
    grouped = logits.reshape(num_rows, num_groups, _GROUP)

    def of_groups(groups, first: Callable[..., Any]):
        """The first tokens of groups in ascending order, so that ties in `first` fall to the smaller id."""
        chosen = jnp.take_along_axis(grouped, groups[:, :, None], axis=1, mode="clip")
        values, index = first(prepare(chosen).reshape(num_rows, count * _GROUP), count)
        group = jnp.take_along_axis(groups, index // _GROUP, axis=1, mode="clip")
        return values, group * _GROUP + index % _GROUP

    def by_sorting(maxima):
        return of_groups(jnp.sort(_top_k(maxima, count)[1], axis=1), _top_k)

    def by_selecting(maxima):
        return of_groups(select_first(maxima, count), sorted_selection)

    maxima = jnp.max(prepare(grouped), axis=2)
    if not _HAS_UNSTABLE or count == 0 or max(num_groups, count * _GROUP) > _MOST_SELECTED:
        return by_sorting(maxima)
    return jax.lax.platform_dependent(maxima, cuda=by_selecting, default=by_sorting)


def select_first(x, count: int):
    """Places of the `count` first entries of the order, ascending: i32[B, C] of f32[B, n], n < 2^15.

    A GPU's stable top-k sorts whole rows. The value of the last entry needs no stability, and what lies above
    it, or is equal and comes early enough, is counted off.
    """
    unstable = {"is_stable": False} if _HAS_UNSTABLE else {}
    last = jax.lax.top_k(x, count, **unstable)[0][:, -1:]
    above, equal = x > last, x == last
    counts = (above.astype(jnp.int32) << 16) + equal.astype(jnp.int32)  # both in one sum
    counted = jnp.cumsum(counts, axis=1, dtype=jnp.int32)
    num_above, num_equal = counted >> 16, counted & 0xFFFF
    room = count - num_above[:, -1:]
    taken = above | (equal & (num_equal <= room))
    place = jnp.where(taken, num_above + jnp.minimum(num_equal, room) - 1, count)
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.zeros((x.shape[0], count), jnp.int32).at[rows, place].set(index, mode="drop")


def sorted_selection(x, count: int):
    """(values, places) of the `count` first entries, in order: as `_top_k`."""
    places = select_first(x, count)
    values = jnp.take_along_axis(x, places, axis=1, mode="clip")
    negative, places = jax.lax.sort((-values, places), dimension=1, num_keys=2)
    return jnp.where(negative == 0, 0, -negative), places


def _top_k(x, count: int):
    # Behind barriers: XLA:CPU turns a slice of top_k's result into a full sort. One for each result, since
    # jax 0.10.2 aborts on a barrier over the pair inside a shard_map.
    values, ids = jax.lax.top_k(x, count)
    return jax.lax.optimization_barrier(values), jax.lax.optimization_barrier(ids)


def tile_sum(x):
    """Sum of each row in tile order: f32[B].

    Args:
      x: f32[B, V'], V' a multiple of 128.
    """
    return sum_tiles(tile_sums(x))


def tile_sums(x):
    """The sum of each tile of 128 ids: f32[B, V' / 128] of f32[B, V']."""
    num_rows, width = x.shape
    num_tiles = width // TILE
    parts = _halve(x.reshape(num_rows, num_tiles, 8, TILE // 8), axis=2)
    # The barriers change no value: they keep XLA from inlining a whole tile's exponentials into one
    # expression, which compiles and runs slowly.
    parts = jax.lax.optimization_barrier(parts)
    return jax.lax.optimization_barrier(_halve(parts, axis=2))


def sum_tiles(tiles):
    """Sum of each row by a halving tree over its tiles: f32[B] of f32[B, T]; zeros behind change no bit."""
    num_tiles = tiles.shape[1]
    padded = 1 << (num_tiles - 1).bit_length()
    return _halve(jnp.pad(tiles, ((0, 0), (0, padded - num_tiles))), axis=1)


def merge(values, ids, tiles, highest, num_candidates: int) -> Candidates:
    """One summary of each row from those of the shards of its vocabulary, with the bits of the whole row's.

    Args:
      values, ids: f32[B, P * C], i32[B, P * C], `first_tokens` of each shard, shards in order.
      tiles: f32[B, T], `tile_sums` of exp(z - highest), shards in order.
      highest: f32[B], the row's maximum.
      num_candidates: C.
    """
    return Candidates(*first_of_shards(values, ids, num_candidates), highest, sum_tiles(tiles))


def first_of_shards(values, ids, count: int):
    """The first tokens of each row, (f32[B, C], i32[B, C]), from those of its shards, shards in order."""
    # Equal values keep their order, which is that of their ids.
    values, place = _top_k(values, min(count, values.shape[1]))
    return values, jnp.take_along_axis(ids, place, axis=1)


def prefix_sum(x):
    """Inclusive sums along the last axis by doubling: f32[B, C]; entry j depends on j alone, not on C."""
    shift = 1
    while shift < x.shape[1]:
        x = x + jnp.pad(x[:, :-shift], ((0, 0), (shift, 0)))
        shift *= 2
    return x


def _halve(x, axis: int):
    """Sum along an axis whose size is a power of two: first half plus second half, again and again."""
    while x.shape[axis] > 1:
        half = x.shape[axis] // 2
        first = jax.lax.slice_in_dim(x, 0, half, axis=axis)
        x = first + jax.lax.slice_in_dim(x, half, 2 * half, axis=axis)
    return jnp.squeeze(x, axis)
