"""Penalties on what was said before: repetition, frequency, presence, and bad words.

Knows nothing about randomness. Every function reads a `History` and leaves neutral rows bit-unchanged.
"""

import jax
import jax.numpy as jnp

from jaxsample.history import History, bit_columns, last_output
from jaxsample.params import PAD, SamplingParams


def penalize(logits, params: SamplingParams, history: History, first=0):
    """Repetition, then frequency and presence penalties.

    Repetition, over prompt and output: z / r if z > 0 else z * r. Then, over the output alone:
    z - frequency * count - presence * (count > 0).

    Args:
      logits: f32[B, V'], V' >= V; columns past V are left alone. Or the columns from `first` on.
      params: SamplingParams; neutral 1, 0, 0.
      history: History.
      first: i32[] or int, a multiple of 32; other than 0 only where the history is as wide as the columns.

    Returns:
      f32[B, V'].

    Source: Keskar et al. 2019, "CTRL", section 4.1, for repetition; the OpenAI API for the other two.
    """
    width = logits.shape[1]
    counts = history.output_counts
    if counts.shape[1] < width:
        counts = jnp.pad(counts, ((0, 0), (0, width - counts.shape[1])))
    elif counts.shape[1] > width:
        counts = jax.lax.dynamic_slice_in_dim(counts, first, width, axis=1)
    counts = counts.astype(jnp.int32)
    token = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    for step in range(history.pending.shape[1]):
        counts += (token == history.pending[:, step, None]).astype(jnp.int32)
    said = counts > 0
    seen = said | bit_columns(history.prompt_seen, first, width)
    repetition = params.repetition_penalty[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    # The select stands between product and difference so that no compiler contracts them: the bits would
    # then depend on what else is fused.
    by_count = jnp.where(said, params.frequency_penalty[:, None] * counts.astype(jnp.float32), 0)
    return logits - by_count - jnp.where(said, params.presence_penalty[:, None], 0)


def bad_word_bans(params: SamplingParams, history: History):
    """The token that would complete each bad word now: i32[B, NW], PAD where none would.

    A word's last token is banned when its other tokens are exactly the last ones emitted. A word of one token
    is always banned. The prompt does not count.

    Args:
      params: SamplingParams with bad_words and bad_word_lengths.
      history: History.
    """
    words, lengths = params.bad_words, params.bad_word_lengths
    max_length = words.shape[2]
    if max_length == 0:
        return jnp.full(lengths.shape, PAD, jnp.int32)
    recent = last_output(history, max_length)  # right-aligned
    index = jnp.arange(max_length, dtype=jnp.int32)[None, None, :]
    # Token j of a word of length L is compared with the token L - 1 - j from the end.
    from_end = jnp.maximum(lengths[:, :, None] - 1 - index, 0)
    said = jnp.take_along_axis(recent[:, None, :], jnp.minimum(max_length - from_end, max_length - 1), axis=2)
    prefix = index < lengths[:, :, None] - 1
    completes = jnp.all(~prefix | (said == words), axis=2) & (lengths > 0)
    last = jnp.take_along_axis(words, jnp.maximum(lengths[:, :, None] - 1, 0), axis=2)[:, :, 0]
    return jnp.where(completes, last, PAD)
