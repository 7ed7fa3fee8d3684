"""Log-probabilities and ranks by log-sum-exp and gathers; no [B, V] array of probabilities.

Knows nothing about how a token was drawn. Raw values are the model's own; processed values belong to the
distribution drawn from: the kept tokens after temperature and filters, a point mass for a greedy row.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsample import rng
from jaxsample.candidates import Candidates, first_tokens, normaliser, tidy
from jaxsample.params import PAD, TILE
from jaxsample.truncation import Cut, is_kept


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """What is reported of one token a row.

    Fields:
      token: f32[B], the token's log-probability in nats; -inf where there is no token.
      rank: i32[B], 1 + the tokens before it in the order (value descending, id ascending); 0 for no token.
      top_ids: i32[B, n], the first n tokens of the order; PAD in columns the row did not ask for.
      top: f32[B, n], their log-probabilities; -inf for a token that cannot be drawn.
    """

    token: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top: jax.Array


def score(logits, ids, num_top: int = 0) -> Logprobs:
    """Raw log-probabilities of given tokens: prompt logprobs, scoring.

    Args:
      logits: f32, bf16 or f16 [B, V], one row a token; no padding columns.
      ids: i32[B], token ids; outside [0, V) gives the values of no token.
      num_top: n, at most V.

    Returns:
      Logprobs.
    """
    logits, ids = jnp.asarray(logits), jnp.asarray(ids)
    if logits.ndim != 2 or ids.shape != logits.shape[:1]:
        raise ValueError(f"logits {list(logits.shape)} and ids {list(ids.shape)}, expected [B, V] and [B]")
    vocab_size = logits.shape[1]
    if not 0 <= num_top <= vocab_size:
        raise ValueError(f"num_top is {num_top}, allowed are 0 ... {vocab_size}, the vocabulary")
    z = jnp.pad(logits, ((0, 0), (0, -vocab_size % TILE)), constant_values=-jnp.inf)
    ids = jnp.where((ids >= 0) & (ids < vocab_size), ids, PAD)
    return raw_logprobs(z, ids, num_top)


def raw_logprobs(raw, tokens, num_top: int) -> Logprobs:
    """Logprobs from the model's own logits.

    Args:
      raw: [B, V'] in any float dtype, -inf in padding columns; NaN and +inf count as -inf.
      tokens: i32[B], PAD for no token.
      num_top: n.
    """
    highest, total = normaliser(tidy(raw))
    top, top_ids = first_tokens(raw, num_top, tidy)
    norm = rng.log(total)
    return _logprobs(raw, tokens, highest, norm, top - highest[:, None] - norm[:, None], top_ids)


def processed_logprobs(logits, tokens, candidates: Candidates, cut: Cut, num_top: int) -> Logprobs:
    """Logprobs of the distribution drawn from; tokens past the cut have -inf.

    Args:
      logits: f32[B, V'], shaped.
      tokens: i32[B], PAD for no token.
      candidates: their summary, with at least num_top of them.
      cut: Cut.
      num_top: n.
    """
    top, ids = first_processed(candidates, cut, num_top)
    return _logprobs(logits, tokens, candidates.max, cut.log_mass, top, ids)


def first_processed(candidates: Candidates, cut: Cut, num_top: int):
    """The first tokens of the distribution drawn from: their logprobs f32[B, n] and ids i32[B, n]."""
    values, ids = candidates.values[:, :num_top], candidates.ids[:, :num_top]
    logprobs = values - candidates.max[:, None] - cut.log_mass[:, None]
    return jnp.where(is_kept(values, ids, cut), logprobs, -jnp.inf), ids


def limit_top(logprobs: Logprobs, num_asked) -> Logprobs:
    """Blank the top columns a row did not ask for (i32[B] num_asked; below 0 asks for none)."""
    column = jnp.arange(logprobs.top.shape[1], dtype=jnp.int32)[None, :]
    asked = column < num_asked[:, None]
    return dataclasses.replace(
        logprobs,
        top_ids=jnp.where(asked, logprobs.top_ids, PAD),
        top=jnp.where(asked, logprobs.top, -jnp.inf),
    )


def of_emitted(logprobs: Logprobs | None, tokens, row) -> Logprobs | None:
    """Logprobs of emitted tokens i32[B, M], PAD for none, from those of drawn ones: [B, M] in place of [R].

    Args:
      logprobs: Logprobs of R rows, or None.
      tokens: i32[B, M].
      row: i32[B, M], the row that drew each.
    """
    if logprobs is None:
        return None
    there = tokens >= 0
    told = jax.tree.map(lambda leaf: jnp.take(leaf, row, axis=0, mode="clip"), logprobs)
    return Logprobs(
        token=jnp.where(there, told.token, -jnp.inf),
        rank=jnp.where(there, told.rank, 0),
        top_ids=jnp.where(there[:, :, None], told.top_ids, PAD),
        top=jnp.where(there[:, :, None], told.top, -jnp.inf),
    )


def _logprobs(logits, tokens, highest, norm, top, top_ids):
    there = tokens >= 0
    at = jnp.maximum(tokens, 0)[:, None]
    # Tidied after the gather, so that no tidy copy of the row is made; shaped logits stay as they are.
    value = tidy(jnp.take_along_axis(logits, at, axis=1, mode="clip"))
    logits = tidy(logits)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    before = (logits > value) | ((logits == value) & (ids < at))
    rank = 1 + jnp.sum(before, axis=1, dtype=jnp.int32)
    return Logprobs(
        token=jnp.where(there, value[:, 0] - highest - norm, -jnp.inf),
        rank=jnp.where(there, rank, 0),
        top_ids=top_ids,
        top=top,
    )
