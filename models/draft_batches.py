"""Rollouts as batches for a draft head, and the tokens that it is to propose.

Knows what of a rollout is learnt from; knows nothing of models.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from models.rollouts import Rollout

_PADDING = 0  # an id as good as any: no token looks to its right
_LEAST_OUTPUT = 2  # tokens: a law to learn that a chain can be judged by


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftBatch:
    """B rollouts of at most N tokens, prompt and output, padded on the right.

    Fields:
      tokens: i32[B, N].
      first: i32[B], index of the last prompt token, the root of the first step.
      length: i32[B], tokens kept; 0 in rows that only fill the batch.
      start: i32[B], the first position that the head sees: 0, or `first` where it has not seen the prompt.
    """

    tokens: jax.Array | np.ndarray
    first: jax.Array | np.ndarray
    length: jax.Array | np.ndarray
    start: jax.Array | np.ndarray


def learnable(rollouts: Sequence[Rollout], window: int) -> list[Rollout]:
    """The rollouts of which the window, so many tokens from the prompt on, holds something to learn."""
    return [x for x in rollouts if len(x.output) >= _LEAST_OUTPUT and len(x.prompt) + _LEAST_OUTPUT <= window]


def make_draft_batch(
    rollouts: Sequence[Rollout], width: int, batch_size: int, without_prompt: float = 0.0
) -> DraftBatch:
    """Rollouts in one static shape.

    Args:
      rollouts: at most B of them, of `learnable`; what lies behind the width is cut off.
      width: N.
      batch_size: B.
      without_prompt: share of the batch, its first rows, in which the head begins with the output: so it does
        where nothing hands it the prompt.

    Returns:
      DraftBatch of NumPy arrays; rows without a rollout have length 0.
    """
    tokens = np.full((batch_size, width), _PADDING, np.int32)
    first, length, start = np.zeros((3, batch_size), np.int32)
    for row, rollout in enumerate(rollouts):
        kept = rollout.tokens[:width]
        tokens[row, : len(kept)] = kept
        first[row], length[row] = len(rollout.prompt) - 1, len(kept)
    num_without = round(without_prompt * batch_size)
    start[:num_without] = first[:num_without]
    return DraftBatch(tokens, first, length, start)


def frequent_tokens(rollouts: Sequence[Rollout], vocab_size: int, number: int) -> tuple[np.ndarray, float]:
    """The tokens that outputs hold most often, and the share of all their tokens which these are.

    Args:
      rollouts: at least one.
      vocab_size: V.
      number: Vd, 1 ... V; of equally frequent tokens the smaller ids are taken.

    Returns:
      (i32[Vd], rising, share in [0, 1]).

    Raises:
      ValueError: a number out of range.
    """
    if not 1 <= number <= vocab_size:
        raise ValueError(f"the draft vocabulary is {number} tokens, allowed is 1 ... {vocab_size}")
    counts = np.bincount(np.concatenate([x.output for x in rollouts]), minlength=vocab_size)
    chosen = np.sort(np.argsort(-counts, kind="stable")[:number]).astype(np.int32)
    return chosen, float(counts[chosen].sum() / counts.sum())
