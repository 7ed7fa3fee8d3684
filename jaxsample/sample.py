"""The one call a plain loop needs: logits in, one token a row out.

Composes shaping, summary, truncation, draw and logprobs; equal to one decode step's choice without a draft.
Knows nothing about requests, caches or finishing.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsample import rng
from jaxsample.candidates import summarize
from jaxsample.draw import draw_candidates, draw_rows, split_words
from jaxsample.history import History
from jaxsample.logprobs import Logprobs, limit_top, processed_logprobs, raw_logprobs
from jaxsample.params import PAD, Features, Limits, SamplingParams, StopRule
from jaxsample.shaping import Shaped, shape
from jaxsample.truncation import is_filtered, is_greedy, truncate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """One token a row.

    Fields:
      tokens: i32[B], PAD where valid is False.
      valid: bool[B]. False: NaN or +inf among the row's logits, or nothing left that can be drawn.
      logprobs: Logprobs, or None if the program computes none.
    """

    tokens: jax.Array
    valid: jax.Array
    logprobs: Logprobs | None


def sample(
    logits,
    params: SamplingParams,
    position,
    *,
    stop: StopRule | None = None,
    history: History | None = None,
    allowed=None,
    limits: Limits | None = None,
    features: Features | None = None,
    transform_args: tuple = (),
    noise=None,
) -> Sampled:
    """Draw one token for each row; a row's result depends on that row alone.

    A plain function: call it inside your own jit, with limits and features static.

    Args:
      logits: f32, bf16 or f16 [B, Vp]; columns at limits.vocab_size and beyond are padding.
      params: SamplingParams of B rows.
      position: i32[B], absolute index of the token being chosen; with the seed it keys the noise.
      stop: StopRule, for the bans of min_tokens; needs history. None: no bans.
      history: History, for penalties, bad words and min_tokens. None: none of them act.
      allowed: u32[B, W] grammar mask of this step, bit i % 32 of word i // 32. None: all allowed.
      limits: capacities. None: the vocabulary is as wide as the logits.
      features: stages of this program. None: all of them, full rows included, without logprobs.
      transform_args: one pytree with B rows for each of features.transforms.
      noise: f32[B, V], used in place of the Gumbel noise, to compare with other software; greedy rows
        ignore it.

    Returns:
      Sampled.

    Raises:
      ValueError: shapes or dtypes that do not fit, at trace time.
    """
    logits, position = jnp.asarray(logits), jnp.asarray(position)
    params, stop = jax.tree.map(jnp.asarray, (params, stop))
    limits = Limits(logits.shape[-1]) if limits is None else limits
    features = Features() if features is None else features
    _check(logits, params, position, stop, history, allowed, noise, limits)
    shaped = shape(
        logits,
        params,
        position,
        stop=stop,
        history=history,
        allowed=allowed,
        limits=limits,
        features=features,
        transform_args=transform_args,
    )
    return _choose(shaped, params, position, noise, limits, features)


def _choose(shaped: Shaped, params, position, noise, limits, features) -> Sampled:
    z = shaped.logits
    processed = features.num_logprobs >= 0 and features.logprobs_mode == "processed"
    logprobs = None
    if not (features.filters or processed):
        tokens = draw_rows(z, _row_noise(noise, z, params, position))
        tokens = jnp.where(shaped.valid, tokens, PAD)
    else:
        candidates = summarize(z, features.num_candidates)
        cut, num_kept = truncate(z, candidates, params, vocab_size=limits.vocab_size, features=features)
        # Where the program can cut full rows, one draw over the row serves all. Else rows that may be cut
        # draw among their candidates: the same token, since its noise depends on its id alone.
        row_noise = _row_noise(noise, z, params, position)
        tokens = draw_rows(z, row_noise, cut if features.full_rows else None)
        if not features.full_rows:
            among = draw_candidates(candidates, _noise_of(noise, candidates.ids, params, position), num_kept)
            tokens = jnp.where(is_filtered(params, limits.vocab_size), among, tokens)
        tokens = jnp.where(shaped.valid, tokens, PAD)
        if processed:
            logprobs = processed_logprobs(z, tokens, candidates, cut, features.num_logprobs)
    if features.num_logprobs >= 0:
        if logprobs is None:
            logprobs = raw_logprobs(shaped.raw, tokens, features.num_logprobs)
        logprobs = limit_top(logprobs, params.num_logprobs)
    return Sampled(tokens, shaped.valid, logprobs)


def _row_noise(given, z, params, position):
    """Noise of all ids, as the four words of `draw_rows`; 0 for greedy rows."""
    if given is not None:
        words = split_words(jnp.pad(given, ((0, 0), (0, z.shape[1] - given.shape[1]))))
    else:
        words = rng.gumbel_words(params.seed, position, rng.TARGET, z.shape[1] // 4)
    return tuple(jnp.where(is_greedy(params)[:, None], 0, word) for word in words)


def _noise_of(given, ids, params, position):
    """Noise of given ids i32[B, C]: f32[B, C]; 0 for greedy rows."""
    if given is not None:
        noise = jnp.take_along_axis(given, jnp.minimum(ids, given.shape[1] - 1), axis=1, mode="clip")
    else:
        noise = rng.gumbel(params.seed, position, rng.TARGET, ids)
    return jnp.where(is_greedy(params)[:, None], 0, noise)


def _check(logits, params, position, stop, history, allowed, noise, limits):
    if logits.ndim != 2 or logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"logits are {logits.dtype}{list(logits.shape)}, expected float32, bfloat16 or float16 [B, V]"
        )
    num_rows, width = logits.shape
    if width < limits.vocab_size:
        raise ValueError(
            f"logits have {width} columns, expected at least limits.vocab_size = {limits.vocab_size}"
        )
    if position.shape != (num_rows,) or position.dtype != jnp.int32:
        raise ValueError(f"position is {position.dtype}{list(position.shape)}, expected int32[{num_rows}]")
    if stop is not None and history is None:
        raise ValueError("stop needs history: min_tokens counts emitted tokens")
    words = (num_rows, limits.num_words)
    expected = [
        ("params.temperature", params.temperature, (num_rows,)),
        ("params.seed", params.seed, (num_rows, 2)),
        ("params.allowed", params.allowed, words),
    ]
    if allowed is not None:
        expected.append(("allowed", jnp.asarray(allowed), words))
    if history is not None:
        expected.append(("history.output_counts", history.output_counts, (num_rows, limits.vocab_size)))
    if noise is not None:
        expected.append(("noise", noise, (num_rows, limits.vocab_size)))
    for name, array, needed in expected:
        if array.shape != needed:
            raise ValueError(f"{name} has shape {list(array.shape)}, expected {list(needed)}")
    if allowed is not None and jnp.asarray(allowed).dtype != jnp.uint32:
        raise ValueError(f"allowed is {jnp.asarray(allowed).dtype}, expected uint32 (32 token ids a word)")
