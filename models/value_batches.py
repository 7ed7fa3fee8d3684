"""Rollouts as batches of static shapes, in an order that depends on a seed and the step alone.

Knows which part of a rollout is trained on and what is known of its end; knows nothing of models.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from models.rollouts import Rollout

BOOTSTRAP, INFINITE, MASK = TREATMENTS = ("bootstrap", "infinite", "mask")
_SMALLEST_WIDTH = 64  # tokens
_PADDING = 0  # an id as good as any: no token looks to its right


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """B rollouts of at most N tokens, prompt and output, padded on the right.

    Fields:
      tokens: i32[B, N].
      first: i32[B], index of the last prompt token, the first whose value is trained.
      length: i32[B], tokens kept; 0 in rows that only fill the batch.
      end: f32[B], gamma^l of the last token kept, l the tokens after it: 1 where that is the rollout's last,
        0 where l counts as infinite; any number where `known` is false.
      known: bool[B], whether l is known; if not, the model's own value stands at the end.
    """

    tokens: jax.Array | np.ndarray
    first: jax.Array | np.ndarray
    length: jax.Array | np.ndarray
    end: jax.Array | np.ndarray
    known: jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Labels:
    """How rollouts are labelled.

    Fields:
      gamma: the discount, in (0, 1).
      window: tokens of prompt and output that are kept, the first ones.
      cap: outputs of more tokens count as infinitely long; None: none do.
      truncated: what becomes of a rollout that a limit cut off and that is not over the cap as it is:
        "bootstrap": the model's own value stands at its last token, which is itself not trained on;
        "infinite": it counts as infinitely long;
        "mask": it is not trained on. What is left then is biased towards short replies.
        The published trainer is silent on this; "bootstrap" is how time limits are treated where values are
        learnt (Pardo et al. 2018, arXiv 1712.00378), and alone has the true values as its solution.
    """

    gamma: float
    window: int
    cap: int | None = None
    truncated: str = BOOTSTRAP

    def __post_init__(self):
        if not 0 < self.gamma < 1:
            raise ValueError(f"gamma is {self.gamma}, allowed is (0, 1)")
        if self.window < 1:
            raise ValueError(f"window is {self.window}, allowed are integers from 1")
        if self.cap is not None and self.cap < 1:
            raise ValueError(f"cap is {self.cap}, allowed are integers from 1")
        if self.truncated not in TREATMENTS:
            raise ValueError(f"truncated is {self.truncated!r}, allowed are {', '.join(TREATMENTS)}")


def gamma_of(lengths: Sequence[int]) -> float:
    """The discount for which 99 of 100 replies are no longer than a value of .99 says: .01^(1 / l_99).

    Args:
      lengths: tokens of each output, EOS counted.
    """
    return float(0.01 ** (1 / max(np.percentile(lengths, 99), 2.0)))


def end_of(rollout: Rollout, labels: Labels) -> float | None:
    """gamma^l of the last token kept, in float64; None where it is unknown."""
    num_out = len(rollout.output)
    # A reply that was cut off is longer than what there is of it.
    if labels.cap is not None and num_out + (not rollout.finished) > labels.cap:
        return 0.0
    if rollout.finished:
        return labels.gamma ** max(len(rollout.prompt) + num_out - labels.window, 0)
    return 0.0 if labels.truncated == INFINITE else None


def mean_value(rollouts: Sequence[Rollout], labels: Labels) -> float:
    """About what v = 1 - gamma^l is on average, within [.01, .99]; an unknown end is taken for EOS."""
    means = []
    for rollout in rollouts:
        end, num_tokens = end_of(rollout, labels), len(rollout.output)
        total = (1 - labels.gamma**num_tokens) / (1 - labels.gamma)  # 1 + gamma + ... up to num_tokens terms
        means.append(total / num_tokens * (1.0 if end is None else end))
    return float(np.clip(1 - np.mean(means), 0.01, 0.99))


def trainable(rollouts: Sequence[Rollout], labels: Labels) -> list[Rollout]:
    """The rollouts that have tokens to train on: the prompt within the window, the end not masked."""
    masked = lambda rollout: labels.truncated == MASK and end_of(rollout, labels) is None
    return [x for x in rollouts if len(x.prompt) <= labels.window and not masked(x)]


def widths_for(lengths: Sequence[int], window: int) -> tuple[int, ...]:
    """The static widths of batches, rising: powers of two from 64 that hold all lengths, none above window.

    Args:
      lengths: tokens of each rollout, prompt and output.
      window: most tokens kept.
    """
    longest = min(max(lengths), window)
    widths = [_SMALLEST_WIDTH]
    while widths[-1] < longest:
        widths.append(2 * widths[-1])
    return tuple(sorted({min(width, window) for width in widths}))


def batches_from(
    step: int, lengths: Sequence[int], widths: Sequence[int], batch_size: int, seed: int
) -> Iterator[tuple[int, np.ndarray]]:
    """What each step trains on, from a step on, without end; every epoch has ceil(R / B) steps.

    The order is a function of the seed and the step, so that training goes on as if it had not stopped.

    Args:
      step: the first one to give out, from 0.
      lengths: tokens of each of R rollouts; longer ones than the last width are cut there.
      widths: rising.
      batch_size: B.
      seed: of the order, from 0.

    Yields:
      (N, indices i64[<= B]): one of the widths, and which rollouts. Only an epoch's last batch of the largest
      width may have fewer than B.
    """
    epoch, place = divmod(step, -(-len(lengths) // batch_size))
    while True:
        yield from epoch_of(epoch, lengths, widths, batch_size, seed)[place:]
        epoch, place = epoch + 1, 0


def epoch_of(
    epoch: int, lengths: Sequence[int], widths: Sequence[int], batch_size: int, seed: int
) -> list[tuple[int, np.ndarray]]:
    """The batches of one epoch: each rollout once. Arguments as for `batches_from`."""
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    bucket = np.searchsorted(widths, np.minimum(np.asarray(lengths), widths[-1])[order])
    batches, left = [], np.zeros(0, np.int64)
    for number, width in enumerate(widths):
        # What fills no batch of one width goes to the next.
        held = np.concatenate([left, order[bucket == number]])
        num_taken = len(held) if width == widths[-1] else len(held) // batch_size * batch_size
        batches += [(width, held[at : at + batch_size]) for at in range(0, num_taken, batch_size)]
        left = held[num_taken:]
    return [batches[index] for index in rng.permutation(len(batches))]


def make_batch(rollouts: Sequence[Rollout], labels: Labels, width: int, batch_size: int) -> Batch:
    """Rollouts in one static shape.

    Args:
      rollouts: at most B of them, of `trainable`.
      labels: how they are labelled.
      width: N, holds what the window leaves of each.
      batch_size: B.

    Returns:
      Batch of NumPy arrays; rows without a rollout have length 0.
    """
    tokens = np.full((batch_size, width), _PADDING, np.int32)
    first, length = np.zeros((2, batch_size), np.int32)
    end, known = np.ones(batch_size, np.float32), np.ones(batch_size, bool)
    for row, rollout in enumerate(rollouts):
        kept = rollout.tokens[: labels.window]
        tokens[row, : len(kept)] = kept
        first[row], length[row] = len(rollout.prompt) - 1, len(kept)
        nearness = end_of(rollout, labels)
        known[row] = nearness is not None
        end[row] = 0.0 if nearness is None else nearness
    return Batch(tokens, first, length, end, known)
