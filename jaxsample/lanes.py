"""Summaries of rows whose columns come in chunks: what each lane of the vocabulary has seen so far.

With L lanes, token i belongs to lane i mod L. A lane keeps its first tokens of the order (value
descending, id ascending), sums of exponentials relative to the first of them, and the best noisy score
with the runner-up's. To add a chunk is elementwise over lanes: no reduction, no sort, nothing as wide as
the vocabulary. What a lane had to drop comes behind what it keeps, and that tells how many tokens of the
merged order are certain. Knows nothing about where logits come from.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample.candidates import tile_sum
from jaxsample.draw import split_words
from jaxsample.params import TILE

_SPARE_LANES = 8
_LAST_ID = np.iinfo(np.int32).max
# Of a noisy score's terms: a bound of what roundings make of it, several times what they can, those of
# `head_kernel`'s noise among them.
_SCORE_ERROR = np.float32(2.0**-20)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lanes:
    """The first D tokens of each of L lanes.

    Fields:
      values: D arrays f32[B, L], in order; -inf where there are fewer tokens that can be drawn.
      ids: D arrays i32[B, L].
      sums: f32[B, L] for each temperature asked for: the sum of exp((z - first) / T) over the lane.
    """

    values: tuple[jax.Array, ...]
    ids: tuple[jax.Array, ...]
    sums: tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoiseLanes:
    """The best of a z + b noise in each lane of four neighbours a call: f32[B, L] each, id i32[B, L].

    Fields:
      score, value, noise, id: of the best token, value being its logit z.
      second: the largest score among the lane's other tokens.
    """

    score: jax.Array
    value: jax.Array
    noise: jax.Array
    id: jax.Array
    second: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Firsts:
    """The first C tokens of rows, as far as lanes know them.

    Fields:
      values: f32[B, C], keys in descending order, equal ones by id; -inf behind. ids: i32[B, C].
      num_sure: i32[B]: so many are those of the whole row.
    """

    values: jax.Array
    ids: jax.Array
    num_sure: jax.Array


def empty_lanes(num_rows: int, num_lanes: int, depth: int, num_sums: int) -> Lanes:
    """Lanes that have seen nothing."""
    shape = (num_rows, num_lanes)
    values = tuple(jnp.full(shape, -jnp.inf) for _ in range(depth))
    ids = tuple(jnp.full(shape, _LAST_ID, jnp.int32) for _ in range(depth))
    sums = tuple(jnp.zeros(shape) for _ in range(num_sums))
    return Lanes(values, ids, sums)


def empty_noise_lanes(num_rows: int, num_lanes: int) -> NoiseLanes:
    """Noise lanes that have seen nothing."""
    lowest = jnp.full((num_rows, num_lanes), -jnp.inf)
    ids = jnp.full((num_rows, num_lanes), _LAST_ID, jnp.int32)
    return NoiseLanes(lowest, lowest, lowest, ids, lowest)


def add_columns(lanes: Lanes, z, first, temperatures: Sequence[Any] = ()) -> Lanes:
    """The lanes after some columns more.

    Args:
      lanes: Lanes.
      z: f32[B, n], n a multiple of L, of the tokens from `first` on, which is a multiple of L beyond those
        seen before; no NaN, no +inf, no -0.0.
      first: i32[] or int.
      temperatures: f32[B], or None for 1, for each of lanes.sums.
    """
    num_lanes = lanes.values[0].shape[1]
    lane = jax.lax.broadcasted_iota(jnp.int32, lanes.values[0].shape, 1)
    part = lambda x, at: jax.lax.slice_in_dim(x, at, at + num_lanes, axis=1)
    kept = (lanes.values, lanes.ids)
    for at in range(0, z.shape[1], num_lanes):
        kept = _apart_on_cpu(_insert(kept, (part(z, at), first + at + lane)))
    values, ids = kept
    before, highest = lanes.values[0], jnp.where(values[0] > -jnp.inf, values[0], 0)
    sums = []
    for total, temperature in zip(lanes.sums, temperatures, strict=True):
        weight = lambda x, t=temperature: _weight(x - highest, t)
        added = [weight(part(z, at)) for at in range(0, z.shape[1], num_lanes)]
        sums.append(total * weight(before) + _tree_sum(added))
    return Lanes(values, ids, _apart_on_cpu(tuple(sums)))


def add_noisy(lanes: NoiseLanes, z, noise, first, z_factor, noise_factor) -> NoiseLanes:
    """The noise lanes after some columns more.

    Args:
      lanes: NoiseLanes.
      z: f32[B, n], n a multiple of 4 L. noise: four f32[B, n / 4], as `rng.gumbel_words` gives them.
      first: i32[] or int, the first token's id.
      z_factor, noise_factor: f32[B], see `noise_factors`.
    """
    num_lanes = lanes.score.shape[1]
    call = jax.lax.broadcasted_iota(jnp.int32, noise[0].shape, 1)
    factors = z_factor[:, None], noise_factor[:, None]
    lowest = jnp.full(noise[0].shape, -jnp.inf)
    best = NoiseLanes(lowest, lowest, lowest, jnp.full(noise[0].shape, _LAST_ID, jnp.int32), lowest)
    for word, (value, noise_word) in enumerate(zip(split_words(z), noise, strict=True)):
        score = value * factors[0] + noise_word * factors[1]
        best = _better(best, NoiseLanes(score, value, noise_word, first + 4 * call + word, lowest))
    best = _apart_on_cpu(best)
    part = lambda x, at: jax.lax.slice_in_dim(x, at, at + num_lanes, axis=1)
    for at in range(0, best.score.shape[1], num_lanes):
        lanes = _apart_on_cpu(_better(lanes, jax.tree.map(lambda x, at=at: part(x, at), best)))
    return lanes


def noise_factors(temperature):
    """(a, b) with a z + b noise in the order of (z - max) / T + noise up to rounding, and no overflow.

    Exactly so at T = 1.

    Args:
      temperature: f32[B].
    """
    above = temperature > 1
    return jnp.where(above, 1 / temperature, 1), jnp.where(above, 1, temperature)


def any_of_lanes(flags, num_lanes: int):
    """Which lanes hold a flag: bool[B, L] of bool[B, n], n a multiple of L."""
    found = flags[:, :num_lanes]
    for at in range(num_lanes, flags.shape[1], num_lanes):
        found = found | flags[:, at : at + num_lanes]
    return found


def highest(lanes: Lanes):
    """The largest value of each row, -inf where there is none: f32[B]."""
    return jnp.max(lanes.values[0], axis=1)


def lane_sum(lanes: Lanes, index: int, row_max, temperature=None):
    """The sum of exp((z - row_max) / T) over all lanes, in a fixed order: f32[B]; row_max is finite."""
    weights = lanes.sums[index] * _weight(lanes.values[0] - row_max[:, None], temperature)
    return tile_sum(jnp.pad(weights, ((0, 0), (0, -weights.shape[1] % TILE))))


def first_of_lanes(lanes: Lanes, count: int, key: Callable[..., Any] = lambda z: z, strict=None):
    """The first tokens of all lanes, in order.

    Only `count` lanes and a few more can hold any: those that come first by their first token.

    Args:
      lanes: Lanes.
      count: C.
      key: a monotone elementwise function of values f32[B, n]: the order is that of (key, id).
      strict: bool[B], rows where the key may make different values equal; what is dropped then counts as in
        front of tokens of equal keys. None: no row.

    Returns:
      (Firsts, bound): the bound (key f32[B], id i32[B]) has every dropped token behind it.
    """
    num_rows, num_lanes = lanes.values[0].shape
    chosen = count + _SPARE_LANES
    bounds = []
    if num_lanes > 2 * chosen:
        lane = jax.lax.broadcasted_iota(jnp.int32, lanes.values[0].shape, 1)
        lead = jax.lax.sort((-lanes.values[0], lanes.ids[0], lane), dimension=1, num_keys=2)
        lane = lead[2][:, :chosen]
        lanes = jax.tree.map(lambda x: jnp.take_along_axis(x, lane, axis=1, mode="clip"), lanes)
        bounds.append((lanes.values[0][:, -1], lanes.ids[0][:, -1]))
    bounds.append(first_in_order(lanes.values[-1], lanes.ids[-1]))
    value, last_id = bounds[0] if len(bounds) == 1 else first_in_order(*map(_columns, zip(*bounds)))
    flat = lambda parts: jnp.concatenate(parts, axis=1)
    keys = key(flat(lanes.values))
    values, ids = sort_tokens(keys, flat(lanes.ids), count)
    bound = jnp.where(value > -jnp.inf, key(value[:, None])[:, 0], -jnp.inf), last_id
    strict = jnp.zeros((num_rows,), jnp.bool_) if strict is None else strict
    return Firsts(values, ids, num_sure(values, ids, bound, strict)), bound


def sort_tokens(values, ids, count: int):
    """The first `count` of tokens f32[B, n], i32[B, n] in order, -inf behind where there are fewer."""
    values, ids = jax.lax.sort((-values, ids), dimension=1, num_keys=2)
    values, ids = jnp.where(values == 0, 0, -values)[:, :count], ids[:, :count]
    ids = jnp.where(values > -jnp.inf, ids, 0)  # of what cannot be drawn a lane knows no id
    missing = ((0, 0), (0, count - values.shape[1]))
    return jnp.pad(values, missing, constant_values=-jnp.inf), jnp.pad(ids, missing)


def num_sure(values, ids, bound, strict):
    """How many tokens f32[B, C], i32[B, C] are not behind a bound: i32[B], C where it is -inf."""
    value, last_id = bound[0][:, None], bound[1][:, None]
    inside = (values > value) | ((values == value) & (ids <= last_id) & ~strict[:, None])
    return jnp.sum(inside | (value == -jnp.inf), axis=1, dtype=jnp.int32)


def winner_of_lanes(lanes: NoiseLanes, divided: Callable[..., Any]):
    """The best token by its exact score, z + noise with z divided, the smaller id first.

    Args:
      lanes: NoiseLanes.
      divided: f32[B, L] logits to f32[B, L].

    Returns:
      (score f32[B], id i32[B], second f32[B]): second is the largest score, by the factors, of all tokens
      whose exact scores were not looked at.
    """
    scores = jnp.where(lanes.value > -jnp.inf, divided(lanes.value) + lanes.noise, -jnp.inf)
    best = jnp.max(scores, axis=1, keepdims=True)
    winner = jnp.min(jnp.where(scores == best, lanes.id, _LAST_ID), axis=1)
    return best[:, 0], winner, jnp.max(lanes.second, axis=1)


def winner_is_sure(score, second, row_max, has_same_sums, z_factor, noise_factor):
    """Whether no token below `second` can have a larger exact score than the winner's: bool[B].

    Both sides in the scale of `second`, where the winner has a max + b score; the terms bound all roundings
    of both scores, as noise lies within (-4, 23).

    Args:
      score, second: f32[B], see `winner_of_lanes`. row_max: f32[B], the largest logit.
      has_same_sums: bool[B], rows whose scores by the factors are the exact ones, to the bit.
      z_factor, noise_factor: f32[B].
    """
    middle = z_factor * row_max
    size = jnp.abs(second) + 2 * jnp.abs(middle) + noise_factor * (64 + 2 * jnp.abs(score))
    is_clear = has_same_sums | (second == -jnp.inf)
    return is_clear | (second + _SCORE_ERROR * size < middle + noise_factor * score)


def _better(one: NoiseLanes, other: NoiseLanes) -> NoiseLanes:
    """Each lane's best of two, of equal scores the one of `one`, whose ids are the smaller."""
    is_better = other.score > one.score
    take = lambda new, old: jnp.where(is_better, new, old)
    second = jnp.maximum(jnp.maximum(one.second, other.second), jnp.minimum(one.score, other.score))
    return NoiseLanes(
        take(other.score, one.score),
        take(other.value, one.value),
        take(other.noise, one.noise),
        take(other.id, one.id),
        second,
    )


def _insert(kept, new):
    """Tokens in order with one more put in; an equal value goes behind, as its id is larger."""
    goes_before = [new[0] > value for value in kept[0]]

    def put(old, added):
        moved = [jnp.where(goes_before[0], added, old[0])]
        for index in range(1, len(old)):
            arriving = jnp.where(goes_before[index - 1], old[index - 1], added)
            moved.append(jnp.where(goes_before[index], arriving, old[index]))
        return tuple(moved)

    return tuple(put(old, added) for old, added in zip(kept, new))


def _tree_sum(terms):
    """By neighbours, so that roundings grow with the logarithm of their number."""
    while len(terms) > 1:
        pairs = [one + other for one, other in zip(terms[::2], terms[1::2])]
        terms = pairs + terms[2 * len(pairs) :]
    return terms[0]


def _weight(difference, temperature):
    return jnp.exp(difference if temperature is None else difference / temperature[:, None])


def first_in_order(values, ids):
    """The first (value, id) of each row: f32[B], i32[B] of f32[B, n], i32[B, n]."""
    best = jnp.max(values, axis=1, keepdims=True)
    return best[:, 0], jnp.min(jnp.where(values == best, ids, _LAST_ID), axis=1)


def _columns(arrays):
    return jnp.stack(arrays, axis=1)


def _apart_on_cpu(tree):
    """The same, materialised on a CPU, where XLA would inline chains of selects and repeat them."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    barrier = lambda *leaves: jax.lax.optimization_barrier(leaves)
    leaves = jax.lax.platform_dependent(*leaves, cpu=barrier, default=lambda *leaves: leaves)
    return jax.tree.unflatten(structure, leaves)
