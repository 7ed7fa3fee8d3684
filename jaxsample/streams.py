"""What requests have emitted, kept for whoever reads it: one write a step for all slots.

Knows nothing of scheduling or of the device. Readers may be in other threads than the one that steps.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxsample.requests import IDLE, RUNNING, finish_reason


@dataclasses.dataclass(frozen=True)
class Tokens:
    """T emitted tokens, in order, as NumPy arrays.

    Fields:
      token_ids: i32[T].
      logprobs: f32[T], ranks: i32[T], top_ids: i32[T, n], top_logprobs: f32[T, n], as in `StepOutput`, n as
        the request asked; None where it asked for none.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    ranks: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, part: slice) -> "Tokens":
        rest = (self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        return Tokens(self.token_ids[part], *(None if value is None else value[part] for value in rest))


class Outputs:
    """What B slots have emitted, side by side; columns are added as the longest output grows.

    All that is known of a token (its id, and with logprobs its logprob, rank, top ids and top logprobs) lies
    side by side as in a step's record, so that a step is one write for each token it can emit.

    Attributes:
      count: i64[B], tokens of each slot.
    """

    def __init__(self, num_slots: int, num_top: int):
        """num_top: n, top logprobs kept beside a token's own; -1 keeps no logprobs."""
        self.count = np.zeros(num_slots, np.int64)
        self._num_top = num_top
        self._words = np.zeros((num_slots, 64, 1 if num_top < 0 else 3 + 2 * num_top), np.int32)

    def append(
        self, slots: np.ndarray, count: np.ndarray, record: np.ndarray, columns: Sequence[Any]
    ) -> None:
        """Add the first count[i] tokens of row i of a step's record to slot slots[i].

        Args:
          slots: i32[k], distinct. count: i32[k], 0 ... M.
          record: i32[k, R]. columns: of `columns_of`, M arrays or slices; a step may have no logprobs.
        """
        start = self.count[slots]
        self._reserve(int(start.max(initial=0)) + len(columns))
        # What is written past the count is written over later.
        for m, chosen in enumerate(columns):
            words = record[:, chosen]
            self._words[slots, start + m, : words.shape[1]] = words
        self.count[slots] = start + count

    def read(self, slot: int, start: int = 0) -> np.ndarray:
        """A copy of a slot's tokens from `start` on, for `tokens_of`: i32[T, words of a token]."""
        count = int(self.count[slot])
        return self._words[slot, start:count].copy()

    def restart(self, slot: int, words: np.ndarray) -> None:
        """Begin a slot anew with tokens emitted before: what `read` gave."""
        self._reserve(len(words))
        self._words[slot, : len(words)] = words
        self.count[slot] = len(words)

    def tokens_of(self, words: np.ndarray, num_logprobs: int) -> Tokens:
        """Tokens with num_logprobs top columns; -1 without logprobs."""
        if num_logprobs < 0:
            return Tokens(words[:, 0])
        top_ids, top = words[:, 3 : 3 + num_logprobs], words[:, 3 + self._num_top :][:, :num_logprobs]
        return Tokens(words[:, 0], words[:, 1].view(np.float32), words[:, 2], top_ids, top.view(np.float32))

    def _reserve(self, width: int) -> None:
        have = self._words.shape[1]
        if width > have:
            self._words = np.pad(self._words, ((0, 0), (0, max(width, 2 * have) - have), (0, 0)))


class Sample:
    """One continuation of a request, growing as the engine steps.

    Attributes:
      index: which of the request's n children.
      status: IDLE while it waits, RUNNING, then why it ended, as in `requests`.
      error: what went wrong, where status is ERROR; else None.
    """

    def __init__(
        self,
        index: int,
        num_logprobs: int,
        matcher: Any = None,
        ends: frozenset[int] = frozenset(),
        owner: Any = None,
    ):
        self.index = index
        self.owner = owner  # the engine
        self.num_logprobs = num_logprobs
        self.matcher, self.ends = matcher, ends  # for the engine: a grammar, and the ids that end the request
        self.num_matched = 0  # tokens that the matcher has accepted
        self.status = IDLE
        self.error: str | None = None
        self._seat: tuple[Outputs, int] | None = None
        self._outputs: Outputs | None = None  # of its last seat
        self._words = np.zeros((0, 1), np.int32)  # what it had emitted when it left that seat
        self._num_read = 0

    @property
    def slot(self) -> int | None:
        """Where it sits."""
        seat = self._seat
        return None if seat is None else seat[1]

    @property
    def done(self) -> bool:
        return self.status not in (IDLE, RUNNING)

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", "cancelled", "error"; None while it goes on."""
        return finish_reason(self.status)

    def tokens(self) -> Tokens:
        """All tokens so far."""
        return self._from(0)

    def read(self) -> Tokens:
        """The tokens since the last call of `read`."""
        new = self._from(self._num_read)
        self._num_read += len(new)
        return new

    def take_seat(self, outputs: Outputs, slot: int) -> None:
        """For the engine: go on in a slot."""
        outputs.restart(slot, self._words)
        self._outputs, self._seat = outputs, (outputs, slot)
        self.status = RUNNING

    def leave_seat(self, status: int, error: str | None = None) -> None:
        """For the engine: the slot is needed otherwise, or the sample has ended."""
        if self._seat is not None:
            outputs, slot = self._seat
            self._words = outputs.read(slot)
            self._seat = None
        self.error = error
        self.status = status

    def _from(self, start: int) -> Tokens:
        while True:
            seat = self._seat
            words = self._words[start:] if seat is None else seat[0].read(seat[1], start)
            if self._seat is seat:  # else the slot was left, maybe taken again, while it was read
                break
        if self._outputs is None:
            outputs = Outputs(1, self.num_logprobs)
            return outputs.tokens_of(outputs.read(0), self.num_logprobs)
        return self._outputs.tokens_of(words, self.num_logprobs)


class Stream:
    """What `Engine.submit` returns: the n samples of one request.

    Iterating steps the engine until the request is done and yields (sample, its new tokens) as they come.

    Attributes:
      request: as submitted, the seed settled; `Engine.change` replaces it.
      samples: n Samples.
    """

    def __init__(self, request: Any, samples: tuple[Sample, ...], step: Callable[[], bool]):
        self.request = request
        self.samples = samples
        self._step = step

    @property
    def done(self) -> bool:
        return all(sample.done for sample in self.samples)

    def __iter__(self) -> Iterator[tuple[Sample, Tokens]]:
        while True:
            done = self.done  # read before the tokens: what comes after it is seen next time
            for sample in self.samples:
                tokens = sample.read()
                if len(tokens):
                    yield sample, tokens
            if done:
                return
            self._step()
