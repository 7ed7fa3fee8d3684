"""From the model's logits to the logits that are drawn from: every stage, and their order in one place.

    float32 -> mask padding columns (raw logprobs are taken here) -> logit bias -> penalties -> transforms
      -> bans (min_tokens, bad words) and bit masks -> per-token scales -> divide by temperature

Knows nothing about randomness or filters. Removed tokens are -inf. Rows never see each other.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample.candidates import tidy
from jaxsample.history import History, bit_columns
from jaxsample.params import PAD, TILE, Features, Limits, SamplingParams, StopRule
from jaxsample.penalties import bad_word_bans, penalize
from jaxsample.truncation import is_greedy

_MAX_COMPARED = 32
_HUGE = np.finfo(np.float32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shaped:
    """Logits before and after shaping, V' = V rounded up to a multiple of 128.

    Fields:
      logits: f32[B, V'], shaped; rows at temperature 1 (and greedy ones) keep their scale, others hold
        (z - max) / temperature.
      raw: [B, V'] in the model's dtype, its own logits, untouched (see `candidates.tidy`); -inf behind V.
      valid: bool[B]. False: NaN or +inf among the row's real columns, or nothing left that can be drawn.
    """

    logits: jax.Array
    raw: jax.Array
    valid: jax.Array


def shape(
    logits,
    params: SamplingParams,
    position,
    *,
    stop: StopRule | None = None,
    history: History | None = None,
    allowed=None,
    limits: Limits,
    features: Features,
    transform_args: tuple = (),
) -> Shaped:
    """Apply every stage before the filters.

    Args:
      logits: f32, bf16 or f16 [B, Vp], Vp >= V; columns at V and beyond are never looked at.
      params: SamplingParams.
      position: i32[B], absolute index of the token being chosen; handed to transforms.
      stop: StopRule, for the bans of min_tokens; needs history. None: no bans.
      history: History, for penalties and bad words. None: an empty one.
      allowed: u32[B, W], this step's grammar mask (bit i % 32 of word i // 32), joined with the request's own
        mask. None: all allowed. If the masks allow only tokens that end the request, min_tokens is lifted.
      limits: capacities.
      features: which stages exist; stages of higher tiers are left out whatever the rows say.
      transform_args: one pytree with B rows for each of features.transforms.

    Returns:
      Shaped.

    Raises:
      ValueError: shapes that do not fit, at trace time.
    """
    vocab_size = limits.vocab_size
    if logits.shape[1] < vocab_size:
        raise ValueError(
            f"logits have {logits.shape[1]} columns, expected at least limits.vocab_size = {vocab_size}"
        )
    if allowed is not None and not features.shapes:
        raise ValueError(
            f"allowed is given, but tier {features.tier!r} has no masks, expected tier 'full' "
            "(required_features with grammar=True)"
        )
    if len(transform_args) != len(features.transforms):
        raise ValueError(
            f"transform_args has {len(transform_args)} entries, expected {len(features.transforms)}: "
            "one for each of features.transforms"
        )
    raw, bad = _at_the_door(logits, vocab_size)
    z = tidy(raw)
    if features.shapes:
        z = _before_masks(z, params, history)
        for transform, argument in zip(features.transforms, transform_args, strict=True):
            z = _checked(transform(z, argument, position), z, transform)
        z = _from_masks_on(z, params, allowed_words(params, stop, history, allowed, vocab_size))
    valid = ~bad & jnp.any(z > -jnp.inf, axis=1)
    return Shaped(tidy(divide(z, params, jnp.max(z, axis=1))), raw, valid)


def _at_the_door(logits, vocab_size: int):
    """The real columns, padded with -inf to whole tiles; and which rows hold NaN or +inf."""
    width = -(-vocab_size // TILE) * TILE
    raw = logits[:, :vocab_size]
    bad = jnp.any(jnp.isnan(raw) | (raw == jnp.inf), axis=1)
    if width > vocab_size:
        raw = jnp.pad(raw, ((0, 0), (0, width - vocab_size)), constant_values=-np.inf)
    return raw, bad


def shape_columns(z, params: SamplingParams, history: History | None, words, first):
    """The stages of tier "full" but transforms and temperature, on some columns of the rows.

    Args:
      z: f32[B, n], tidy logits of the tokens from `first` on, -inf behind the vocabulary.
      params: SamplingParams.
      history: History whose columns reach to first + n at least, or None.
      words: u32[B, W], `allowed_words`, with bits for first + n tokens at least.
      first: i32[] or int, a multiple of 32.
    """
    return _from_masks_on(_before_masks(z, params, history, first), params, words, first)


def _before_masks(z, params: SamplingParams, history: History | None, first=0):
    z = _add_bias(z, params, first)
    return z if history is None else penalize(z, params, history, first)


def _from_masks_on(z, params: SamplingParams, words, first=0):
    z = jnp.where(bit_columns(words, first, z.shape[1]), z, -jnp.inf)
    return jnp.minimum(_scale(z, params, first), _HUGE)


def _add_bias(z, params: SamplingParams, first=0):
    """z + bias at the biased ids.

    Up to 32 entries by a compare each, in the pass that reads z; more by a scatter, which makes a copy of z.
    """
    num_entries = params.bias_ids.shape[1]
    if num_entries <= _MAX_COMPARED:
        token = first + jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
        # Ids are distinct, so at most one term is not 0. Each sum is used once: a chain of selects between z
        # and z + bias, which uses each twice, took jaxlib 0.12 exponential time to compile for V <= 128.
        added = jnp.zeros_like(z)
        for entry in range(num_entries):
            is_token = token == params.bias_ids[:, entry, None]
            added = added + jnp.where(is_token, params.bias_values[:, entry, None], 0)
        return z + added
    rows = jnp.arange(z.shape[0], dtype=jnp.int32)[:, None]
    # What lies outside goes beyond the end, where it is dropped: -1 would wrap.
    ids = jnp.where(params.bias_ids < first, z.shape[1], params.bias_ids - first)
    return z.at[rows, ids].add(params.bias_values, mode="drop")


def allowed_words(params: SamplingParams, stop, history, allowed, vocab_size: int):
    """The request's and the grammar's bit masks, less what bad words and min_tokens ban: u32[B, W].

    Args: as for `shape`.
    """
    words = params.allowed if allowed is None else params.allowed & allowed
    bans = []
    if history is not None:
        bans.append(bad_word_bans(params, history))
        if stop is not None:
            bans.append(_min_token_bans(stop, history, words, vocab_size))
    if bans:
        words = _without(words, jnp.concatenate(bans, axis=1))
    return words


def _without(words, ids):
    """u32[B, W] with the bits of ids i32[B, n] cleared. On the mask, as a scatter into z would copy z."""
    bits = jnp.where(is_first(ids), jnp.uint32(1) << (ids & 31).astype(jnp.uint32), 0)
    # Distinct ids have distinct bits, so their sum is their union.
    rows = jnp.arange(words.shape[0], dtype=jnp.int32)[:, None]
    index = jnp.where(ids < 0, words.shape[1], ids >> 5)
    banned = jnp.zeros_like(words).at[rows, index].add(bits, mode="drop")
    return words & ~banned


def is_first(ids):
    """bool[B, n]: entries of i32[B, n] that do not repeat an earlier one of their row."""
    order = jnp.arange(ids.shape[1], dtype=jnp.int32)
    earlier = (ids[:, :, None] == ids[:, None, :]) & (order[None, None, :] < order[None, :, None])
    return ~jnp.any(earlier, axis=2)


def _min_token_bans(stop: StopRule, history: History, words, vocab_size: int):
    """EOS and stop ids of rows that emitted too little; PAD where masks allow no others: i32[B, NE + NS]."""
    ends = end_ids(stop)
    early = history.num_emitted < stop.min_tokens
    word = jnp.take_along_axis(words, jnp.maximum(ends, 0) >> 5, axis=1, mode="clip")
    can_end = (ends >= 0) & ((word >> (ends & 31).astype(jnp.uint32)) & 1 != 0)
    can_end &= is_first(ends)
    inside = np.full(words.shape[1], 0xFFFFFFFF, np.uint32)
    if vocab_size % 32:
        inside[-1] = (1 << vocab_size % 32) - 1
    num_allowed = jnp.sum(jax.lax.population_count(words & inside[None, :]), axis=1, dtype=jnp.uint32)
    finished = num_allowed.astype(jnp.int32) == jnp.sum(can_end, axis=1, dtype=jnp.int32)
    return jnp.where((early & ~finished)[:, None], ends, PAD)


def end_ids(stop: StopRule):
    """The ids that end each row, EOS first (PAD where ignore_eos lifts them): i32[B, NE + NS]."""
    eos = jnp.where(stop.ignore_eos[:, None], PAD, stop.eos_ids)
    return jnp.concatenate([eos, stop.stop_ids], axis=1)


def _scale(z, params: SamplingParams, first=0):
    """LenVM's multipliers; greedy rows have no temperature, hence no scale of it either.

    A compare for each of the few entries, not a scatter, which would copy z.
    """
    ids = jnp.where(is_greedy(params)[:, None], PAD, params.scale_ids)
    token = first + jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
    factor = jnp.ones_like(z)
    for entry in range(ids.shape[1]):
        factor = jnp.where(token == ids[:, entry, None], params.scale_values[:, entry, None], factor)
    return z * factor


def keeps_scale(params: SamplingParams):
    """bool[B]: rows whose logits are not divided: temperature 1, or greedy."""
    return is_greedy(params) | (params.temperature == 1)


def divide(z, params: SamplingParams, highest):
    """(z - max) / T, so that a tiny T cannot overflow; rows at T = 1 and greedy rows stay as they are.

    Args:
      z: f32[B, n], some or all columns of a row.
      params: SamplingParams.
      highest: f32[B], the largest value of the whole row.
    """
    one = keeps_scale(params)
    temperature = jnp.where(one, 1, params.temperature)[:, None]
    highest = jnp.where(highest > -jnp.inf, highest, 0)[:, None]
    return jnp.where(one[:, None], z, (z - highest) / temperature)


def _checked(result, z, transform):
    if result.shape != z.shape or result.dtype != z.dtype:
        raise ValueError(
            f"transform {getattr(transform, '__name__', transform)} returned "
            f"{result.dtype}{list(result.shape)}, expected {z.dtype}{list(z.shape)}"
        )
    return result
