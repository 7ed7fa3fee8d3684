"""One token a row: the first of the order of z + noise over the kept tokens.

Knows nothing about where a cut came from. With Gumbel noise the law of the token is the softmax of the kept
logits. The noise of a token depends on its id alone, so both functions draw the same token.

Source: Gumbel 1954; Maddison, Tarlow, Minka, "A* sampling", NeurIPS 2014, for the argmax form.
"""

import jax
import jax.numpy as jnp

from jaxsample.candidates import Candidates
from jaxsample.truncation import Cut, is_kept


def draw_rows(logits, noise, cut: Cut | None = None):
    """Draw from full rows: i32[B].

    Args:
      logits: f32[B, V'], shaped; V' a multiple of 4.
      noise: four f32[B, V'/4], the words of `rng.gumbel_words` (see `split_words`); 0 for greedy rows.
      cut: which tokens are kept; None keeps all that can be drawn.
    """
    return first_scored(logits, noise, cut)[1]


def first_scored(logits, noise, cut: Cut | None = None):
    """The first of the order of z + noise, as (z + noise f32[B], id i32[B]). Args as for `draw_rows`."""
    best = jnp.full(noise[0].shape, -jnp.inf)
    word = jnp.zeros(noise[0].shape, jnp.uint8)
    call = jax.lax.broadcasted_iota(jnp.int32, noise[0].shape, 1)
    for index, (z, noise_word) in enumerate(zip(split_words(logits), noise, strict=True)):
        scores = z + noise_word
        if cut is not None:
            scores = jnp.where(is_kept(z, 4 * call + index, cut), scores, -jnp.inf)
        word = jnp.where(scores > best, jnp.uint8(index), word)
        best = jnp.maximum(scores, best)
    # Materialised, a quarter of the row each: fused into the argmax, the generator would run as scalar code.
    best, word = jax.lax.optimization_barrier((best, word))
    winner = jnp.argmax(best, axis=1).astype(jnp.int32)[:, None]
    word = jnp.take_along_axis(word, winner, axis=1, mode="clip").astype(jnp.int32)
    score = jnp.take_along_axis(best, winner, axis=1, mode="clip")
    return score[:, 0], (4 * winner + word)[:, 0]


def split_words(rows):
    """[B, V'] as four [B, V'/4]: entry [b, c] of word w is [b, 4 * c + w]."""
    quads = rows.reshape(rows.shape[0], rows.shape[1] // 4, 4)
    return tuple(quads[:, :, word] for word in range(4))


def draw_candidates(candidates: Candidates, noise, num_kept):
    """Draw from the num_kept first candidates: i32[B].

    Args:
      candidates: summary of shaped logits.
      noise: f32[B, C], of the candidates' ids; 0 for greedy rows.
      num_kept: i32[B], at least 1.
    """
    index = jnp.arange(candidates.values.shape[1], dtype=jnp.int32)[None, :]
    scores = jnp.where(index < num_kept[:, None], candidates.values + noise, -jnp.inf)
    best = jnp.max(scores, axis=1, keepdims=True)
    return jnp.min(jnp.where(scores == best, candidates.ids, jnp.iinfo(jnp.int32).max), axis=1)
