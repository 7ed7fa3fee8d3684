"""One token a row from hidden states and the LM head: `sample` without its logits.

A row is drawn from its summary where that is certain to give what its logits would; the logits of the other
rows are computed, a few rows at a time, for `sample`. Knows nothing about requests, caches or finishing.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxsample import rng
from jaxsample.draw import draw_candidates
from jaxsample.head import SHARD_UNIT, Head, check_head, head_logits, without_gradient
from jaxsample.head_summary import HeadSummary, summarize_head
from jaxsample.history import History
from jaxsample.logprobs import Logprobs, limit_top
from jaxsample.params import MAX_SERVED_TOP_K, PAD, Features, Limits, SamplingParams, StopRule
from jaxsample.sample import Sampled, sample
from jaxsample.sharding import Axis, axis_names, axis_size, check_axes, check_rows, over_mesh
from jaxsample.truncation import cut_candidates, effective_top_k, is_filtered, is_greedy, is_kept

# A crossing so close to top_p is left to the row's logits: a sum by lanes, whose roundings grow with the
# number of chunks, could cut elsewhere there than a sum by tiles.
_MARGIN, _MARGIN_OF_CHUNK = 2.0**-16, 2.0**-22
_AT_ONCE = 8  # rows computed whole, where many may be


def sample_head(
    hidden,
    weight,
    params: SamplingParams,
    position,
    *,
    stop: StopRule | None = None,
    history: History | None = None,
    allowed=None,
    limits: Limits,
    features: Features,
    head: Head | None = None,
    mesh: Any = None,
    axis: Axis | None = None,
    batch_axis: Axis = (),
) -> Sampled:
    """Draw one token for each row from its hidden state; no array as large as the logits exists.

    A plain function: call it inside your own jit, with limits, features, head, mesh and axes static. It holds
    a loop over the rows whose summaries do not suffice, most often none.

    Args:
      hidden: float [B, W], the states that the LM head takes.
      weight: float [Vp, W], Vp >= V, the head's rows; what head.weight_of takes, if that is given.
      params, position, stop, history, allowed: as in `sample`.
      limits, features: as in `sample`; features without transforms.
      head: Head.
      mesh, axis, batch_axis: the head's rows are split over `axis` of the mesh, Vp a multiple of 4 P, and
        the rows of everything else beforehand along batch_axis. With an axis and no mesh the call stands in a
        shard_map of the caller's, and weight is the device's own [Vp / P, W].

    Returns:
      Sampled: the tokens of `sample`, to the bit, given equal logits; logprobs as near as `summarize_head`'s
        sums.

    Raises:
      ValueError: shapes or dtypes that do not fit, transforms; differentiation.
    """
    head = Head() if head is None else head
    rows = (hidden, params, position, stop, history, allowed)
    body = functools.partial(_sample, limits=limits, features=features, head=head)
    return over_head(body, weight, rows, head, limits.vocab_size, mesh, axis, batch_axis)


def over_head(
    body: Callable[..., Any], weight, rows, head: Head, vocab_size: int, mesh, axis, batch_axis
) -> Any:
    """body(matrix, *rows, axes=()) of a head's matrix and of arrays with B rows, or that over a mesh.

    Args:
      body: a function of the device's rows of the matrix and its rows of the others, the same along `axes`.
      weight, mesh, axis, batch_axis: as in `sample_head`.
      rows: a tuple of pytrees, the first one hidden [B, W].
      head: Head. vocab_size: V.
    """
    if head.weight_of is not None:
        weight = head.weight_of(weight)
    weight, rows = jnp.asarray(weight), jax.tree.map(jnp.asarray, rows)
    axes = () if axis is None else axis_names(axis)
    on_shard = lambda weight, rows: body(weight, *rows, axes=axes)
    if mesh is None:
        if batch_axis:
            raise ValueError(f"batch_axis is {batch_axis!r}, but no mesh is given")
        return on_shard(weight, rows)
    if axis is None:
        raise ValueError("axis is None, expected the axes of the mesh that the head's rows are split over")
    num_shards, batch_axes = axis_size(mesh, axes), axis_names(batch_axis)
    check_head(rows[0], weight, vocab_size)
    if weight.shape[0] % (SHARD_UNIT * num_shards):
        raise ValueError(
            f"the head has {weight.shape[0]} rows, expected a multiple of {SHARD_UNIT} on each of "
            f"{num_shards} devices: pad it with zeros"
        )
    check_axes(mesh, axis, batch_axis)
    check_rows(mesh, rows[0].shape[0], batch_axes)
    by_row = PartitionSpec(batch_axes)
    in_specs = (PartitionSpec(axes), jax.tree.map(lambda _: by_row, rows))
    return over_mesh(on_shard, mesh, in_specs, by_row)(weight, rows)


def complete(
    result, done, rows, from_logits: Callable[..., Any], weight, head: Head, axes, at_once: int
) -> Any:
    """A result whose rows that are not done come from their logits, `at_once` rows at a time.

    Args:
      result: pytree of arrays with B rows. done: bool[B].
      rows: a tuple of pytrees with B rows, the first one hidden [B, W].
      from_logits: (logits f32[n, V'], *rows) -> result of these n rows.
      weight, head, axes: as in `summarize_head`.
    """
    count = min(at_once, done.shape[0])

    def some_rows(carry):
        result, done = carry
        index = jnp.argsort(done, stable=True)[:count].astype(jnp.int32)
        take = lambda tree: jax.tree.map(lambda leaf: jnp.take(leaf, index, axis=0, mode="clip"), tree)
        own = take(rows)
        logits = head_logits(own[0], weight, head)
        if axes:
            logits = jax.lax.all_gather(logits, axes, axis=1, tiled=True)
        found, is_done = from_logits(logits, *own[1:]), take(done)

        def write(leaf, new):
            keep = is_done.reshape(-1, *(1,) * (new.ndim - 1))
            return leaf.at[index].set(jnp.where(keep, jnp.take(leaf, index, axis=0, mode="clip"), new))

        return jax.tree.map(write, result, found), done.at[index].set(True)

    return jax.lax.while_loop(lambda carry: ~jnp.all(carry[1]), some_rows, (result, done))[0]


def _sample(weight, hidden, params, position, stop, history, allowed, *, limits, features, head, axes):
    hidden, weight = without_gradient(hidden), without_gradient(weight)
    options = dict(limits=limits, features=features)
    rows = (hidden, params, position, stop, history, allowed)
    given = dict(stop=stop, history=history, allowed=allowed)
    summary = summarize_head(
        hidden, weight, params, position, **given, **options, head=head, axes=axes, sums=False
    )
    num_chunks = -(-weight.shape[0] // head.chunk)
    margin = np.float32(_MARGIN + num_chunks * _MARGIN_OF_CHUNK)
    sampled, done = _draw(summary, params, position, margin, **options)

    def from_logits(logits, params, position, stop, history, allowed):
        return sample(logits, params, position, stop=stop, history=history, allowed=allowed, **options)

    at_once = head.num_recomputed or (_AT_ONCE if features.full_rows else max(1, hidden.shape[0] // 64))
    return complete(sampled, done, rows, from_logits, weight, head, axes, at_once)


def _draw(
    summary: HeadSummary, params: SamplingParams, position, margin, *, limits: Limits, features: Features
):
    """(Sampled, bool[B]: rows whose result is that of their logits)."""
    vocab_size, valid = limits.vocab_size, summary.valid
    filtered = is_filtered(params, vocab_size)
    processed = features.num_logprobs >= 0 and features.logprobs_mode == "processed"
    if features.filters or processed:
        tokens, cut, done = _draw_filtered(summary, params, position, filtered, margin, vocab_size, features)
        if summary.winner is not None:
            tokens = jnp.where(filtered, tokens, summary.winner)
            done &= filtered | summary.winner_sure
    elif summary.winner is not None:
        # Nothing cuts a row here; greedy ones have no noise.
        tokens, cut, done = summary.winner, None, summary.winner_sure
    else:
        tokens, cut, done = summary.candidates.ids[:, 0], None, summary.num_sure > 0
    tokens = jnp.where(valid, tokens, PAD)
    if features.num_logprobs < 0:
        return Sampled(tokens, valid, None), done | ~valid
    logprobs, known = _logprobs(summary, tokens, cut, params, features)
    return Sampled(tokens, valid, limit_top(logprobs, jnp.where(valid, params.num_logprobs, -1))), (
        (done & known) | ~valid
    )


def _draw_filtered(summary, params, position, filtered, margin, vocab_size, features):
    """Tokens drawn among candidates i32[B], the cut, and which rows that serves bool[B]."""
    greedy = is_greedy(params)
    candidates, order = summary.candidates, features.filter_order
    count = candidates.values.shape[1]
    top_k = jnp.where(greedy, 1, params.top_k)
    cut, num_kept, exact = cut_candidates(
        candidates,
        top_k,
        params.top_p,
        params.min_p,
        vocab_size=vocab_size,
        filter_order=order,
        margin=margin,
    )
    num_top_k = effective_top_k(top_k, vocab_size)
    # A top_k bounds what a row looks at, but for "joint", where top_p is measured on more.
    needed = jnp.where((num_top_k <= count) & (greedy | (order != "joint")), num_top_k, count)
    served = ~filtered | (summary.num_sure >= needed)
    if features.full_rows:
        by_count = num_top_k <= min(count, MAX_SERVED_TOP_K)
        served &= exact | greedy | (by_count if order != "joint" else False)
    noise = rng.gumbel(params.seed, position, rng.TARGET, candidates.ids)
    noise = jnp.where(greedy[:, None], 0, noise)
    return draw_candidates(candidates, noise, num_kept), cut, served


def _logprobs(summary: HeadSummary, tokens, cut, params, features: Features):
    """(Logprobs, bool[B]: rows whose numbers are known): those whose token is among the first ones."""
    num_top = features.num_logprobs
    if features.logprobs_mode == "raw":
        found, sure = summary.raw, summary.num_raw_sure
        assert found is not None
        assert sure is not None
        values = found.values - found.max[:, None] - rng.log(found.sum)[:, None]
    else:
        found, sure = summary.candidates, summary.num_sure
        assert cut is not None
        values = found.values - found.max[:, None] - cut.log_mass[:, None]
        values = jnp.where(is_kept(found.values, found.ids, cut), values, -jnp.inf)
    is_token = (found.ids == tokens[:, None]) & (found.values > -jnp.inf)
    place = jnp.argmax(is_token, axis=1).astype(jnp.int32)
    there = jnp.any(is_token, axis=1)
    value = jnp.max(jnp.where(is_token, values, -jnp.inf), axis=1)
    logprobs = Logprobs(
        token=value,
        rank=jnp.where(tokens >= 0, place + 1, 0),
        top_ids=jnp.where(found.values > -jnp.inf, found.ids, PAD)[:, :num_top],
        top=values[:, :num_top],
    )
    return logprobs, there & (sure > place) & (sure >= num_top)
