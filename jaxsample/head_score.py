"""Log-probabilities, ranks and first tokens of given ids from hidden states and the LM head: `score` without
logits.

A position's target logit is known roughly beforehand, from one row of the head, and its rank counted in the
same pass as everything else. A count is right where no other logit lies as close to the rough one as the
true one may. The logits of other positions are computed, some positions at a time, for `score`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample import rng
from jaxsample.candidates import tidy
from jaxsample.head import Head, check_head, filled, head_logits, over_chunks, without_gradient
from jaxsample.head_sample import complete, over_head
from jaxsample.head_summary import Join
from jaxsample.lanes import Lanes, add_columns, empty_lanes, first_of_lanes, highest, lane_sum
from jaxsample.logprobs import Logprobs, score
from jaxsample.params import PAD, TILE
from jaxsample.sharding import Axis, axis_names

_BAND = np.float32(2.0**-19)  # of 1 + the logit: how far its two products may lie apart without a recount


def score_head(
    hidden,
    weight,
    ids,
    num_top: int = 0,
    *,
    vocab_size: int | None = None,
    head: Head | None = None,
    rows_at_once: int = 1024,
    mesh: Any = None,
    axis: Axis | None = None,
    batch_axis: Axis = (),
) -> Logprobs:
    """Raw log-probabilities of given tokens, their ranks and the first tokens there, from hidden states.

    A plain function, to be called inside your own jit. It holds a loop over the positions whose summaries do
    not suffice.

    Args:
      hidden: float [T, W], one position a row. weight: as in `sample_head`.
      ids: i32[T]; outside [0, V) gives the values of no token.
      num_top: n, at most V.
      vocab_size: V; None: all rows of the head.
      head: Head.
      rows_at_once: positions whose logits of a chunk exist at a time, at least 1.
      mesh, axis, batch_axis: as in `sample_head`.

    Returns:
      Logprobs, as `score` of the logits: ranks and top ids equal, given equal logits; log-probabilities
      as near as `summarize_head`'s sums.

    Raises:
      ValueError: shapes, dtypes or numbers that do not fit; differentiation.
    """
    head = Head() if head is None else head
    hidden, ids = jnp.asarray(hidden), jnp.asarray(ids)
    if hidden.ndim != 2 or ids.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {list(hidden.shape)} and ids {list(ids.shape)}, expected [T, W] and [T]")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"ids are {ids.dtype}, expected integers")
    if rows_at_once < 1:
        raise ValueError(f"rows_at_once is {rows_at_once}, allowed are integers from 1")
    if vocab_size is None:
        matrix = weight if head.weight_of is None else head.weight_of(weight)
        in_shard_map = axis is not None and mesh is None
        vocab_size = int(matrix.shape[0]) * (jax.lax.axis_size(axis_names(axis or ())) if in_shard_map else 1)
    if not 0 <= num_top <= vocab_size:
        raise ValueError(f"num_top is {num_top}, allowed are 0 ... {vocab_size}, the vocabulary")
    body = functools.partial(
        _score, num_top=num_top, vocab_size=vocab_size, head=head, rows_at_once=rows_at_once
    )
    return over_head(body, weight, (hidden, ids), head, vocab_size, mesh, axis, batch_axis)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    lanes: Lanes
    value: jax.Array  # f32[R, L], the target's logit in its lane, else -inf
    num_above: jax.Array  # i32[R, L], tokens above the band around the rough logit
    num_not_below: jax.Array  # i32[R, L], those and the ones in it


def _score(weight, hidden, ids, *, num_top, vocab_size, head: Head, rows_at_once: int, axes):
    check_head(hidden, weight, vocab_size, jax.lax.axis_size(axes) if axes else 1)
    hidden, weight = without_gradient(hidden), without_gradient(weight)
    ids = jnp.where((ids >= 0) & (ids < vocab_size), ids, PAD).astype(jnp.int32)
    some = functools.partial(
        _score_rows, weight, num_top=num_top, vocab_size=vocab_size, head=head, axes=axes
    )
    num_rows = hidden.shape[0]
    if num_rows <= rows_at_once:
        found, done = some(hidden, ids)
    else:
        missing = -num_rows % rows_at_once
        blocks = lambda x: x.reshape(-1, rows_at_once, *x.shape[1:])
        block_hidden = blocks(jnp.pad(hidden, ((0, missing), (0, 0))))
        block_ids = blocks(jnp.pad(ids, (0, missing), constant_values=PAD))
        found = jax.lax.map(lambda block: some(*block), (block_hidden, block_ids))
        found, done = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_rows], found)

    def from_logits(logits, ids):
        return score(logits[:, :vocab_size], ids, num_top)

    at_once = 8 * head.num_recomputed if head.num_recomputed else max(8, num_rows // 128)
    return complete(found, done, (hidden, ids), from_logits, weight, head, axes, at_once)


def _score_rows(weight, hidden, ids, *, num_top: int, vocab_size: int, head: Head, axes):
    """(Logprobs, bool[R]: rows whose numbers are those of their logits)."""
    num_rows, num_columns = hidden.shape[0], weight.shape[0]
    first = jax.lax.axis_index(axes) * num_columns if axes else 0
    join = Join(axes)
    rough = _rough(hidden, weight, ids - first, head, join)
    reach = _BAND * (1 + jnp.abs(rough))
    low, high = (rough - reach)[:, None], (rough + reach)[:, None]
    num_lanes = min(head.num_lanes, -(-num_columns // TILE) * TILE)

    def add(state: _State, logits, at):
        token = first + at + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        z = filled(jnp.where(token < vocab_size, tidy(logits), -jnp.inf), num_lanes)
        state_value, above, not_below = state.value, state.num_above, state.num_not_below
        lane = jax.lax.broadcasted_iota(jnp.int32, state.value.shape, 1)
        for start in range(0, z.shape[1], num_lanes):
            part = jax.lax.slice_in_dim(z, start, start + num_lanes, axis=1)
            is_target = first + at + start + lane == ids[:, None]
            state_value = jnp.where(is_target, part, state_value)
            above = above + (part > high).astype(jnp.int32)
            not_below = not_below + (part >= low).astype(jnp.int32)
        return _State(add_columns(state.lanes, z, first + at, [None]), state_value, above, not_below)

    zeros = jnp.zeros((num_rows, num_lanes), jnp.int32)
    lanes = empty_lanes(num_rows, num_lanes, head.depth if num_top else 1, 1)
    empty = _State(lanes, jnp.full(zeros.shape, -jnp.inf), zeros, zeros)
    state = over_chunks(add, empty, hidden, weight, head)

    value = jnp.max(state.value, axis=1)
    value, largest = join.largest(jnp.stack([value, highest(state.lanes)]))
    largest = jnp.where(largest > -jnp.inf, largest, 0)
    norm = rng.log(join.sum(lane_sum(state.lanes, 0, largest)))
    counts = jnp.stack([state.num_above, state.num_not_below]).sum(axis=2, dtype=jnp.int32)
    num_above, num_not_below = join.count(counts)
    there = ids >= 0
    # Only the target itself lies in the band, so that whatever is above the band is what is above the target.
    inside = (value >= low[:, 0]) & (value <= high[:, 0]) & (num_not_below - num_above == 1)
    strict = jnp.zeros_like(there)
    top = join.firsts(*first_of_lanes(state.lanes, num_top), strict) if num_top else None
    found = Logprobs(
        token=jnp.where(there, value - largest - norm, -jnp.inf),
        rank=jnp.where(there, 1 + num_above, 0),
        top_ids=jnp.zeros((num_rows, 0), jnp.int32) if top is None else top.ids,
        top=jnp.zeros((num_rows, 0)) if top is None else top.values - largest[:, None] - norm[:, None],
    )
    return found, (inside | ~there) & (True if top is None else top.num_sure >= num_top)


def _rough(hidden, weight, row, head: Head, join: Join):
    """The logit of one row of the head for each position, or 0 where the row is another device's: f32[R]."""
    inside = (row >= 0) & (row < weight.shape[0])
    rows = jnp.take(weight, jnp.where(inside, row, 0), axis=0, mode="clip")
    logits = head_logits(hidden, rows, head, "tw,tw->t")
    return join.count(jnp.where(inside, tidy(logits), 0))
