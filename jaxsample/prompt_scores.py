"""Log-probabilities of a request's own prompt, computed chunk by chunk as it is prefilled.

The device's part scores the tokens that follow those of a chunk; the host's keeps what was asked for. Knows
nothing of slots or of the order in which chunks come, but that each request's come in theirs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample.head import Head
from jaxsample.head_score import score_head
from jaxsample.logprobs import score
from jaxsample.sharding import Axis, axis_names, axis_size


def make_scorer(
    unembed: Callable[..., Any] | Head,
    vocab_size: int,
    num_top: int,
    mesh: Any = None,
    axis: Axis | None = None,
    batch_axis: Axis = (),
) -> Callable[..., Any]:
    """(weights, hidden [p, N, W], ids i32[p, N]) -> i32[p, N, 2 + 2n]: what `score` says of each token.

    A token's words are the bits of its logprob, its rank, the n first ids, and the bits of their logprobs.

    Args:
      unembed: the model's, or a Head: then `score_head` is asked.
      vocab_size: V; logits may be wider.
      num_top: n.
      mesh, axis, batch_axis: where logits lie, as in `make_decode_step`.
    """

    def scored(weights, hidden, ids):
        num_rows = ids.size
        spread = (*axis_names(batch_axis), *axis_names(axis or ()))
        if mesh is None or num_rows % axis_size(mesh, spread):
            spread = ()  # every device scores all rows
        if isinstance(unembed, Head):
            hidden = hidden.reshape(num_rows, -1)
            options: Any = {"vocab_size": vocab_size, "head": unembed, "mesh": mesh, "axis": axis}
            options["batch_axis"] = batch_axis if spread else ()
            told = score_head(hidden, weights, ids.reshape(-1), num_top, **options)
        else:
            logits = unembed(weights, hidden).reshape(num_rows, -1)
            if mesh is not None:  # whole rows, as they have one order of summation
                rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(spread))
                logits = jax.lax.with_sharding_constraint(logits, rows)
            told = score(logits[:, :vocab_size], ids.reshape(-1), num_top)
        as_bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)
        parts = as_bits(told.token)[:, None], told.rank[:, None], told.top_ids, as_bits(told.top)
        return jnp.concatenate(parts, axis=1).reshape(*ids.shape, -1)

    return scored


class PromptScores:
    """What is known of a prompt's tokens but the first.

    Attributes:
      num_planned: of these, how many are scored or about to be.
    """

    def __init__(self, prompt: np.ndarray, num_logprobs: int, num_top: int):
        """Begin with nothing.

        Args:
          prompt: i32[T]. num_logprobs: top logprobs that were asked for. num_top: n, as many as come.
        """
        self.num_planned = 0
        self.num_logprobs = num_logprobs
        self._prompt = prompt
        self._num_top = num_top
        self._pieces: list[np.ndarray] = []  # i32[k, 2 + 2 num_logprobs]

    def claim(self, start: int, end: int) -> slice | None:
        """Which of the tokens that follow tokens start ... end of the prompt are still to be scored.

        They count as planned from then on. The slice is of a chunk that begins at `start`; None for none.
        """
        first, last = max(start, self.num_planned), min(end, len(self._prompt) - 1)
        if first >= last:
            return None
        self.num_planned = last
        return slice(first - start, last - start)

    def put(self, words: np.ndarray) -> None:
        """Take in the next tokens' words, i32[k, 2 + 2n], as `make_scorer` orders them."""
        top, n = 2 + self._num_top, self.num_logprobs
        self._pieces.append(np.concatenate([words[:, : 2 + n], words[:, top : top + n]], axis=1))

    def words(self) -> tuple[np.ndarray, np.ndarray]:
        """(token ids i32[k], words i32[k, 2 + 2 num_logprobs]) of the tokens after the first known by now."""
        empty = np.zeros((0, 2 + 2 * self.num_logprobs), np.int32)
        words = np.concatenate([empty, *self._pieces])
        return self._prompt[1 : 1 + len(words)], words
