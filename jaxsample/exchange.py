"""`sample` on a mesh with less traffic: devices exchange what they found in their columns, not the columns.

Each device reads its own [B, V / P] once. Of every row it hands the row's owner one winner, the first of
z + noise, and in programs with filters its C first tokens and the sums of its tiles; the owner merges the
summaries of P shards into the row's. For raw logprobs the raw row's sums and first tokens travel too; ranks
are counted where the columns are. Tokens are those of `sample`, to the bit, and so are logprobs. What a row
can tell only as a whole is not served: see `sample_by_exchange`. Knows nothing of models or caches.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxsample import rng
from jaxsample.candidates import first_of_shards, first_tokens, merge, sum_tiles, tidy, tile_sums
from jaxsample.draw import draw_candidates, first_scored
from jaxsample.logprobs import Logprobs, first_processed, limit_top
from jaxsample.params import PAD, TILE, Features, Limits, SamplingParams
from jaxsample.sample import Sampled, check_given
from jaxsample.shaping import divide, keeps_scale
from jaxsample.sharding import (
    Axis,
    axis_names,
    axis_size,
    check_axes,
    check_rows,
    join_batch,
    over_mesh,
    own_rows,
    split_batch,
)
from jaxsample.truncation import is_filtered, is_greedy, truncate


def sample_by_exchange(
    logits,
    params: SamplingParams,
    position,
    *,
    limits: Limits,
    features: Features,
    mesh: Any = None,
    axis: Axis,
    batch_axis: Axis = (),
) -> Sampled:
    """Draw one token for each row, exchanging candidates: one all-reduce, one all-to-all and one all-gather.

    Logprobs take a second all-reduce, of one count a row.

    Args:
      logits: f32, bf16 or f16 [B, Vp], split over `axis`, padded with zeros to whole tiles on every device;
        with no mesh the device's own [B, n], n a multiple of 128, in a shard_map of the caller's.
      params, position, limits: as in `sample`.
      features: tier "plain" or "filtered", with full_rows False. `required_features` says whether rows allow
        it.
      mesh, axis, batch_axis: as in `sample`.

    Returns:
      Sampled.

    Raises:
      ValueError: features that need whole rows, or shapes that do not fit the mesh.
    """
    if features.shapes or features.full_rows:
        raise ValueError(
            f"features have tier {features.tier!r} and full_rows {features.full_rows}; an exchange serves "
            "'plain' and 'filtered', and False"
        )
    axes, batch_axes = axis_names(axis), axis_names(batch_axis)
    logits, position = jnp.asarray(logits), jnp.asarray(position)
    params = jax.tree.map(jnp.asarray, params)
    body = functools.partial(_on_shard, axes=axes, vocab_size=limits.vocab_size, features=features)
    num_shards = jax.lax.axis_size(axes) if mesh is None else axis_size(mesh, axes)
    width = logits.shape[-1] * (num_shards if mesh is None else 1)
    check_given(logits, width, params, position, None, None, None, None, limits)
    if mesh is None:
        if batch_axes:
            raise ValueError(f"batch_axis is {batch_axis!r}, but in a shard_map rows are split already")
        if logits.shape[1] % TILE:
            raise ValueError(f"logits have {logits.shape[1]} columns a device, expected a multiple of {TILE}")
        return body(logits, params, position)
    check_axes(mesh, axis, batch_axis)
    check_rows(mesh, logits.shape[0], batch_axes)
    logits = jnp.pad(logits, ((0, 0), (0, -width % (TILE * num_shards))))
    rows = PartitionSpec(batch_axes)
    in_specs = (PartitionSpec(batch_axes, axes), jax.tree.map(lambda _: rows, params), rows)
    return over_mesh(body, mesh, in_specs, rows)(logits, params, position)


def _on_shard(logits, params: SamplingParams, position, *, axes, vocab_size: int, features: Features):
    num_rows, width = logits.shape
    first = jax.lax.axis_index(axes) * width
    raw, raw_highest, valid = _at_the_door(logits, first, axes, vocab_size)
    z = tidy(divide(raw, params, raw_highest))
    # The largest value of a row that was divided is (max - max) / T.
    highest = jnp.where(keeps_scale(params), raw_highest, 0)

    words = rng.gumbel_words(params.seed, position, rng.TARGET, width // 4, first_call=first // 4)
    words = tuple(jnp.where(is_greedy(params)[:, None], 0, word) for word in words)
    score, winner = first_scored(z, words)
    found = winner[:, None]
    columns = {"score": score[:, None], "token": first + found}
    tells, processed = features.num_logprobs >= 0, features.logprobs_mode == "processed"
    if features.filters or (tells and processed):
        values, ids = first_tokens(z, features.num_candidates)
        columns |= {"values": values, "ids": first + ids, "tiles": tile_sums(jnp.exp(z - highest[:, None]))}
        if features.filters:
            found = jnp.concatenate([found, ids], axis=1)
    told = z if processed else raw  # whose logprobs are told
    if tells:
        columns["found"] = first + found
        columns["told"] = jnp.take_along_axis(told, found, axis=1, mode="clip")
    if tells and not processed:
        top, top_ids = first_tokens(raw, features.num_logprobs)
        columns |= {"top": top, "top_ids": first + top_ids}
        columns["raw_tiles"] = tile_sums(jnp.exp(raw - raw_highest[:, None]))

    columns = _exchange(columns, axes)
    asked = params.num_logprobs
    params, position, highest, raw_highest = own_rows((params, position, highest, raw_highest), axes)
    best = jnp.max(columns["score"], axis=1, keepdims=True)
    tokens = jnp.min(jnp.where(columns["score"] == best, columns["token"], jnp.iinfo(jnp.int32).max), axis=1)
    candidates = cut = None
    if "values" in columns:
        count = min(features.num_candidates, -(-vocab_size // TILE) * TILE)
        candidates = merge(columns["values"], columns["ids"], columns["tiles"], highest, count)
        cut, num_kept = truncate(z, candidates, params, vocab_size=vocab_size, features=features)
        if features.filters:
            noise = rng.gumbel(params.seed, position, rng.TARGET, candidates.ids)
            noise = jnp.where(is_greedy(params)[:, None], 0, noise)
            among = draw_candidates(candidates, noise, num_kept)
            tokens = jnp.where(is_filtered(params, vocab_size), among, tokens)
    if not tells:
        return Sampled(jnp.where(valid, join_batch(tokens, axes, num_rows), PAD), valid, None)

    value = jnp.max(jnp.where(columns["found"] == tokens[:, None], columns["told"], -jnp.inf), axis=1)
    if candidates is not None and cut is not None and processed:
        top, top_ids = first_processed(candidates, cut, features.num_logprobs)
        logprob = value - candidates.max - cut.log_mass
    else:
        norm = rng.log(sum_tiles(columns["raw_tiles"]))
        count = min(features.num_logprobs, -(-vocab_size // TILE) * TILE)
        top, top_ids = first_of_shards(columns["top"], columns["top_ids"], count)
        top = top - raw_highest[:, None] - norm[:, None]
        logprob = value - raw_highest - norm
    tokens, value, logprob, top, top_ids = join_batch((tokens, value, logprob, top, top_ids), axes, num_rows)
    rank = 1 + jax.lax.psum(_count_before(told, value, tokens - first), axes)
    logprobs = Logprobs(
        token=jnp.where(valid, logprob, -jnp.inf), rank=jnp.where(valid, rank, 0), top_ids=top_ids, top=top
    )
    return Sampled(jnp.where(valid, tokens, PAD), valid, limit_top(logprobs, jnp.where(valid, asked, -1)))


def _at_the_door(logits, first, axes, vocab_size: int):
    """(raw f32[B, n], the whole rows' max f32[B], 0 where all are -inf, validity bool[B]), by columns."""
    real = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) < vocab_size
    raw = jnp.where(real, logits, -jnp.inf)
    bad = jnp.any(jnp.isnan(raw) | (raw == jnp.inf), axis=1)
    raw = tidy(raw)
    highest, bad = jax.lax.pmax(jnp.stack([jnp.max(raw, axis=1), bad.astype(jnp.float32)]), axes)
    there = highest > -jnp.inf
    return raw, jnp.where(there, highest, 0), (bad == 0) & there


def _count_before(raw, value, token):
    """How many of a shard's columns come before a value at a column, which may lie outside: i32[B]."""
    column = jax.lax.broadcasted_iota(jnp.int32, raw.shape, 1)
    before = (raw > value[:, None]) | ((raw == value[:, None]) & (column < token[:, None]))
    return jnp.sum(before, axis=1, dtype=jnp.int32)


def _exchange(columns: dict[str, jax.Array], axes) -> dict[str, jax.Array]:
    """Every shard's columns of the rows a device owns, shards in order, by one all-to-all."""
    parts = {
        name: jax.lax.bitcast_convert_type(x, jnp.int32) if x.dtype == jnp.float32 else x
        for name, x in columns.items()
    }
    packed = jnp.concatenate(list(parts.values()), axis=1)
    packed = split_batch(packed, axes).reshape(-1, jax.lax.axis_size(axes), packed.shape[1])
    found, at = {}, 0
    for name, x in columns.items():
        part = packed[:, :, at : at + x.shape[1]].reshape(packed.shape[0], -1)
        found[name] = jax.lax.bitcast_convert_type(part, x.dtype) if x.dtype == jnp.float32 else part
        at += x.shape[1]
    return found
