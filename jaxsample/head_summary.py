"""From hidden states to a summary of each row, with no array of logits.

A chunk's logits [B, n] are shaped and given to lanes (`lanes`), which keep what a row's result may need: the
first tokens of the order, sums of exponentials, the best noisy score. A row whose lanes had to drop what it
may need says so. Knows nothing about what becomes of a summary: `head_sample` draws from it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsample import rng
from jaxsample.candidates import Candidates, sum_tiles, tidy
from jaxsample.head import Head, check_head, filled, over_chunks, without_gradient
from jaxsample.head_kernel import Noise, head_lanes, takes
from jaxsample.history import History
from jaxsample.lanes import (
    Firsts,
    Lanes,
    NoiseLanes,
    add_columns,
    add_noisy,
    any_of_lanes,
    empty_lanes,
    empty_noise_lanes,
    first_in_order,
    first_of_lanes,
    highest,
    lane_sum,
    noise_factors,
    num_sure,
    sort_tokens,
    winner_is_sure,
    winner_of_lanes,
)
from jaxsample.params import TILE, Features, Limits, SamplingParams, StopRule
from jaxsample.sample import check_rows
from jaxsample.shaping import allowed_words, divide, keeps_scale, shape_columns
from jaxsample.truncation import is_greedy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadSummary:
    """What was kept of B rows.

    Fields:
      candidates: Candidates of the shaped rows; the first num_sure[b] of row b are those of the whole row.
      raw: Candidates of the model's own logits, with num_raw_sure likewise; None where the program needs
        none.
      winner: i32[B], the first token of z + noise over whole rows, if winner_sure. None where rows are never
        drawn whole.
      num_sure, num_raw_sure: i32[B]. winner_sure: bool[B].
      valid: bool[B], as in `sample`.
    """

    candidates: Candidates
    raw: Candidates | None
    winner: jax.Array | None
    num_sure: jax.Array
    num_raw_sure: jax.Array | None
    winner_sure: jax.Array
    valid: jax.Array


def summarize_head(
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
    axes: tuple[str, ...] = (),
    sums: bool = True,
) -> HeadSummary:
    """Candidates, log-sum-exps and the noise winner of each row, from hidden states.

    Args:
      hidden: float [B, W]. weight: float [Vp, W], Vp >= V; rows at V and beyond are never looked at.
      params, position, stop, history, allowed, limits, features: as in `sample`; no transforms.
      head: Head; weight_of is not looked at.
      axes: mesh axes that the head's rows are split over, in a shard_map of the caller's, Vp / P rows a
        device, a multiple of 4. Results are the same on all of them.
      sums: False leaves candidates.sum NaN where the program's filters and logprobs need none.

    Returns:
      HeadSummary. With equal logits its certain tokens have the bits that `summarize` gives of `shape`'s
      logits; sums are within 2^-17 + 2^-23 n of the row's, relatively, for n chunks.

    Raises:
      ValueError: shapes or dtypes that do not fit, transforms; differentiation.
    """
    head = Head() if head is None else head
    hidden, weight, position = jnp.asarray(hidden), jnp.asarray(weight), jnp.asarray(position)
    params, stop = jax.tree.map(jnp.asarray, (params, stop))
    num_shards = jax.lax.axis_size(axes) if axes else 1
    check_head(hidden, weight, limits.vocab_size, num_shards)
    _check_rows(hidden, params, position, stop, history, allowed, limits, features)
    hidden, weight = without_gradient(hidden), without_gradient(weight)
    plan = _Plan.of(features, head, weight.shape[0], sums)
    first = jax.lax.axis_index(axes) * weight.shape[0] if axes else 0
    words = None
    if features.shapes:
        width = weight.shape[0] * num_shards
        moved = first % 32 if weight.shape[0] % 32 else 0
        as_wide = lambda words: _from_bit(_widened(words, -(-width // 32) + 1), moved)
        words = as_wide(allowed_words(params, stop, history, allowed, limits.vocab_size))
        if history is not None:
            counts, seen = _widened(history.output_counts, width), as_wide(history.prompt_seen)
            history = dataclasses.replace(history, output_counts=counts, prompt_seen=seen)
    temperature = jnp.where(keeps_scale(params), 1, params.temperature)
    greedy = is_greedy(params)
    factors = noise_factors(temperature)

    def add(state: _State, logits, at):
        """One chunk more: f32[B, n] logits of the tokens from first + at on."""
        start, num_columns = first + at, logits.shape[1]
        token = start + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        raw = jnp.where(token < limits.vocab_size, logits, -jnp.inf)
        z = raw = filled(raw, plan.num_lanes)
        bad = jnp.isnan(raw) | (raw == jnp.inf)
        z = raw = tidy(raw)
        if words is not None:
            z = shape_columns(raw[:, :num_columns], params, history, words, start)
            z = filled(tidy(z), plan.num_lanes)
        times = [temperature] * plan.shaped_sum + [None] * plan.raw_sum
        noise = state.noise
        if noise is not None:
            calls = z.shape[1] // 4
            noise_words = rng.gumbel_words(params.seed, position, rng.TARGET, calls, first_call=start // 4)
            noise_words = tuple(jnp.where(greedy[:, None], 0, word) for word in noise_words)
            noise = add_noisy(noise, z, noise_words, start, *factors)
        return _State(
            add_columns(state.shaped, z, start, times),
            None if state.raw is None else add_columns(state.raw, raw, start, [None]),
            noise,
            state.bad | any_of_lanes(bad, plan.num_lanes),
        )

    if words is None and takes(weight, head, plan.depth, axes):
        noise = Noise(params.seed, position, greedy, *factors) if plan.noise else None
        times = (temperature,) * plan.shaped_sum + (None,) * plan.raw_sum
        interpret = jax.default_backend() != "gpu"
        kept = head_lanes(
            hidden, weight, limits.vocab_size, head, plan.depth, times, noise, interpret=interpret
        )
        state, has_same_sums = _State(kept[0], None, *kept[1:]), greedy
    else:
        state = over_chunks(add, plan.empty(hidden.shape[0]), hidden, weight, head)
        has_same_sums = temperature == 1
    return _finish(state, plan, params, temperature, factors, has_same_sums, limits, features, axes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    shaped: Lanes
    raw: Lanes | None
    noise: NoiseLanes | None
    bad: jax.Array  # bool[B, L]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a program's lanes keep."""

    num_lanes: int
    depth: int
    count: int  # C
    shaped_sum: bool
    raw_sum: bool  # in the shaped lanes, where those hold the model's own logits
    raw_count: int  # first tokens of the model's own logits that are told
    raw_lanes: bool  # lanes of their own for these
    noise: bool

    @classmethod
    def of(cls, features: Features, head: Head, num_columns: int, sums: bool) -> "_Plan":
        num_lanes = min(head.num_lanes, -(-num_columns // TILE) * TILE)
        tells = features.num_logprobs >= 0
        raw = tells and features.logprobs_mode == "raw"
        candidates = features.filters or tells
        return cls(
            num_lanes=num_lanes,
            depth=head.depth if candidates else 1,
            count=features.num_candidates if candidates else 1,
            shaped_sum=sums or (tells and not raw) or (features.filters and features.full_rows),
            raw_sum=raw and not features.shapes,
            raw_count=features.num_candidates if raw else 0,
            raw_lanes=raw and features.shapes,
            noise=head.unfiltered,
        )

    def empty(self, num_rows: int) -> _State:
        num_sums = self.shaped_sum + self.raw_sum
        return _State(
            empty_lanes(num_rows, self.num_lanes, self.depth, num_sums),
            empty_lanes(num_rows, self.num_lanes, self.depth, 1) if self.raw_lanes else None,
            empty_noise_lanes(num_rows, self.num_lanes // 4) if self.noise else None,
            jnp.zeros((num_rows, self.num_lanes), jnp.bool_),
        )


def _finish(state: _State, plan: _Plan, params, temperature, factors, has_same_sums, limits, features, axes):
    """Lanes to summaries, those of several shards joined."""
    largest = highest(state.shaped)
    raw_largest = largest if state.raw is None else highest(state.raw)
    bad = jnp.any(state.bad, axis=1).astype(jnp.float32)
    join = Join(axes)
    largest, raw_largest, bad = join.largest(jnp.stack([largest, raw_largest, bad]))
    valid = (bad == 0) & (largest > -jnp.inf)
    largest = jnp.where(largest > -jnp.inf, largest, 0)
    raw_largest = jnp.where(raw_largest > -jnp.inf, raw_largest, 0)
    divided = lambda z: tidy(divide(z, params, largest))

    count = min(plan.count, -(-limits.vocab_size // TILE) * TILE)
    strict = ~keeps_scale(params)
    found = join.firsts(*first_of_lanes(state.shaped, count, divided, strict), strict)
    total = jnp.full_like(largest, jnp.nan)
    if plan.shaped_sum:
        total = join.sum(lane_sum(state.shaped, 0, largest, temperature))
    candidates = Candidates(found.values, found.ids, jnp.where(strict, 0, largest), total)

    raw = num_raw_sure = winner = None
    winner_sure = jnp.zeros_like(valid)
    if plan.raw_count:
        lanes = state.shaped if state.raw is None else state.raw
        first = join.firsts(*first_of_lanes(lanes, min(plan.raw_count, count)), jnp.zeros_like(valid))
        raw_total = join.sum(lane_sum(lanes, len(lanes.sums) - 1, raw_largest))
        raw, num_raw_sure = Candidates(first.values, first.ids, raw_largest, raw_total), first.num_sure
    if state.noise is not None:
        score, winner, second = join.winner(*winner_of_lanes(state.noise, divided))
        winner_sure = winner_is_sure(score, second, largest, has_same_sums, *factors)
    return HeadSummary(candidates, raw, winner, found.num_sure, num_raw_sure, winner_sure, valid)


@dataclasses.dataclass(frozen=True)
class Join:
    """What the shards of a vocabulary found, as one; without axes what there is."""

    axes: tuple[str, ...]

    def largest(self, x):
        return jax.lax.pmax(x, self.axes) if self.axes else x

    def count(self, x):
        return jax.lax.psum(x, self.axes) if self.axes else x

    def gather(self, tree):
        """[B, ...] of each shard, shards in order along axis 1."""
        return jax.tree.map(lambda x: jax.lax.all_gather(x, self.axes, axis=1), tree)

    def sum(self, x):
        if not self.axes:
            return x
        return sum_tiles(self.gather(x))

    def firsts(self, firsts: Firsts, bound, strict) -> Firsts:
        if not self.axes:
            return firsts
        count = firsts.values.shape[1]
        values, ids, bound = self.gather((firsts.values, firsts.ids, bound))
        flat = lambda x: x.reshape(x.shape[0], -1)
        values, ids = sort_tokens(flat(values), flat(ids), count)
        bound = first_in_order(*bound)
        return Firsts(values, ids, num_sure(values, ids, bound, strict))

    def winner(self, score, token, second):
        if not self.axes:
            return score, token, second
        score, token, second = self.gather((score, token, second))
        return *first_in_order(score, token), jnp.max(second, axis=1)


def _widened(x, width: int):
    return jnp.pad(x, ((0, 0), (0, width - x.shape[1]))) if x.shape[1] < width else x


def _from_bit(words, bit):
    """u32[B, W] whose bit 0 of each word was bit `bit` (i32[], below 32) of it, the next ones behind."""
    if isinstance(bit, int) and bit == 0:
        return words
    bit = jnp.asarray(bit).astype(jnp.uint32)
    following = jnp.pad(words[:, 1:], ((0, 0), (0, 1)))
    return (words >> bit) | jnp.where(bit == 0, 0, following << ((32 - bit) & 31))


def _check_rows(hidden, params, position, stop, history, allowed, limits: Limits, features: Features):
    num_rows = hidden.shape[0]
    if features.transforms:
        raise ValueError(
            f"features.transforms has {len(features.transforms)} entries, allowed is none with a head: they "
            "take whole rows of logits"
        )
    if allowed is not None and not features.shapes:
        raise ValueError(f"allowed is given, but tier {features.tier!r} has no masks, expected tier 'full'")
    check_rows(num_rows, params, position, stop, history, allowed, None, limits)
