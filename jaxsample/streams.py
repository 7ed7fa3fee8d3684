"""What requests have emitted, kept for whoever reads it: one copy a step for all slots.

A step's record is kept as it came, in a block of the last steps; who reads finds its own rows there. When the
block is full, all tokens in it are given to the samples that they belong to, at once, and it begins anew.
Knows nothing of scheduling or of the device. Readers may be in other threads than the one that steps.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxsample.prompt_scores import PromptScores
from jaxsample.record import columns_of
from jaxsample.requests import IDLE, RUNNING, finish_reason

_MOST_STEPS, _MOST_WORDS = 128, 1 << 21  # of a block


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


@dataclasses.dataclass
class _Block:
    """Records of steps.

    Fields:
      records: i32[T, B, R], row by slot; a slot that was not in a step has counts of 0 there.
      levels: i64[T], index of each step's features.
      level: that of all of them, None where they differ.
      filled: steps in it, in order.
    """

    records: np.ndarray
    levels: np.ndarray
    level: int | None = None
    filled: int = 0


class _Part(NamedTuple):
    """A sample's tokens in a block: those of a slot in steps start ... end; None: it sits there still."""

    block: _Block
    slot: int
    start: int
    end: int | None


class _Said(NamedTuple):
    """All tokens of a sample, in order: pieces from blocks that are gone, of `words_of`; parts."""

    pieces: tuple[np.ndarray, ...] = ()
    num_tokens: int = 0  # in the pieces
    parts: tuple[_Part, ...] = ()


_Mark = tuple[_Said, int]  # up to which step of its last part a sample was read, while it says nothing else


class Outputs:
    """What B slots have emitted in the last steps."""

    def __init__(self, num_slots: int, num_tokens: int, num_tops: Sequence[int]):
        """Keep what records look like.

        Args:
          num_slots: B.
          num_tokens: M, the most tokens of a row in a step.
          num_tops: n of each level's records, top logprobs beside a token's own; -1 for no logprobs.
        """
        self.num_top = max(num_tops)
        self.width = _width(self.num_top)
        self._num_tokens = num_tokens
        self._moves = [
            [_moves(columns, num_top, self.num_top) for columns in columns_of(num_tokens, num_top)]
            for num_top in num_tops
        ]
        row = 4 + num_tokens * self.width
        num_steps = min(max(_MOST_WORDS // (num_slots * row), 1), _MOST_STEPS)
        self._block = _Block(np.zeros((num_steps, num_slots, row), np.int32), np.zeros(num_steps, np.int64))
        # The block, and the totals of those before it, which change together.
        self._before = self._block, np.zeros(4, np.int64)
        self._owners: dict[Sample, None] = {}  # of what is in the block, in no particular order

    def write(
        self, record: np.ndarray, level: int, slots: np.ndarray | None, dropped: np.ndarray | None
    ) -> np.ndarray:
        """Add a step.

        Args:
          record: i32[b, R], as `record.pack` makes it. level: index of its features.
          slots: i32[k], distinct, of the first k rows; None: row i is slot i's.
          dropped: i64[d], slots whose rows belong to nobody any more; None for none.

        Returns:
          i32[B, R], the record row by slot; status IDLE and counts of 0 where there is nothing.
        """
        if self._block.filled == len(self._block.records):
            self._fold()
        block = self._block
        step = block.records[block.filled]
        if slots is None:
            step[:, : record.shape[1]] = record
        else:
            step[:, :4] = 0
            step[slots, : record.shape[1]] = record[: len(slots)]
        if dropped is not None:
            step[dropped, :4] = 0
        block.levels[block.filled] = level
        if block.filled == 0 or block.level != level:
            block.level = None if block.filled else level
        block.filled += 1
        return step

    def totals(self) -> tuple[int, int, int, int]:
        """Since the beginning: tokens, row steps that emitted, proposals drafted, proposals accepted."""
        while True:
            before = self._before
            block, totals = before
            totals = totals + _count(block)
            if self._before is before:
                tokens, windows, drafted, accepted = totals.tolist()
                return tokens, windows, drafted, accepted

    def seat(self, sample: "Sample", slot: int) -> _Part:
        """Where a sample's tokens lie that begins now."""
        self._owners[sample] = None
        return _Part(self._block, slot, self._block.filled, None)

    def words_of(self, part: _Part, start: int, filled: int) -> np.ndarray:
        """A copy of all that is known of a part's tokens, in order: i32[T, words of a token].

        A token's words are its id, and with logprobs its logprob, rank, `num_top` top ids and their logprobs.

        Args: start: first step. filled: how many steps its block has.
        """
        block, slot, _, end = part
        stop = filled if end is None else end
        records, level = block.records[start:stop, slot], block.level
        count = records[:, 1]
        levels = None if level is not None else block.levels[start:stop]
        if self._num_tokens == 1 and np.count_nonzero(count) < len(count):
            told = count.nonzero()[0]
            records, count, levels = records[told], count[told], None if levels is None else levels[told]
        if self._num_tokens == 1 and level is not None and len(self._moves[level][0]) == 1:
            ((target, source),) = self._moves[level][0]
            if target.stop == self.width:
                return records[:, source].copy()
        words = np.zeros((len(records), self._num_tokens, self.width), np.int32)
        for chosen in [level] if level is not None else set(block.levels[start:stop].tolist()):
            rows = slice(None) if levels is None else levels == chosen
            for place, moves in enumerate(self._moves[chosen]):
                for target, source in moves:
                    words[rows, place, target] = records[rows, source]
        return words[np.arange(self._num_tokens) < count[:, None]]

    def _fold(self) -> None:
        """Give the tokens in the block to their samples and begin it anew.

        Who reads the old block while it is written again sees that the sample has moved on, and reads anew.
        """
        block = self._block
        self._block = _Block(block.records, block.levels)
        self._before = self._block, self._before[1] + _count(block)
        for sample in sorted(self._owners, key=Sample.last_slot):  # neighbours lie in the same cache lines
            if not sample.settle(self._block):
                del self._owners[sample]


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
        self._outputs: Outputs | None = None  # of its seats
        self._said = _Said()  # replaced whole, by who steps
        self._num_read = 0
        self._mark: _Mark | None = None

    @property
    def slot(self) -> int | None:
        """Where it sits."""
        parts = self._said.parts
        return parts[-1].slot if parts and parts[-1].end is None else None

    @property
    def done(self) -> bool:
        return self.status not in (IDLE, RUNNING)

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", "cancelled", "error"; None while it goes on."""
        return finish_reason(self.status)

    def tokens(self, start: int = 0) -> Tokens:
        """All tokens so far, from number `start` on, at least 0."""
        return self._read_from(start, None)[0]

    def read(self) -> Tokens:
        """The tokens since the last call of `read`."""
        tokens, self._mark = self._read_from(self._num_read, self._mark)
        self._num_read += len(tokens)
        return tokens

    def take_seat(self, outputs: Outputs, slot: int) -> None:
        """For the engine: go on in a slot."""
        pieces, num_tokens, parts = self._said
        self._outputs = outputs
        self._said = _Said(pieces, num_tokens, (*parts, outputs.seat(self, slot)))
        self.status = RUNNING

    def leave_seat(self, status: int, error: str | None = None) -> None:
        """For the engine: the slot is needed otherwise, or the sample has ended."""
        pieces, num_tokens, parts = self._said
        if parts and parts[-1].end is None:
            block, slot, start, _ = parts[-1]
            parts = (*parts[:-1], _Part(block, slot, start, block.filled))
            self._said = _Said(pieces, num_tokens, parts)
        self.error = error
        self.status = status

    def last_slot(self) -> int:
        """For `Outputs`: where it sits or sat, having been in the block."""
        return self._said.parts[-1].slot

    def settle(self, block: _Block) -> bool:
        """For `Outputs`: take its tokens out of the block; whether it sits and goes on in this one."""
        outputs, (pieces, num_tokens, parts) = self._outputs, self._said
        assert outputs is not None
        sits = ()
        for part in parts:
            piece = outputs.words_of(part, part.start, part.block.filled)
            pieces, num_tokens = (*pieces, piece), num_tokens + len(piece)
            if part.end is None:
                sits = (_Part(block, part.slot, 0, None),)
        self._said = _Said(pieces, num_tokens, sits)
        return bool(sits)

    def _read_from(self, start: int, mark: _Mark | None) -> tuple[Tokens, _Mark | None]:
        """The tokens from number `start` on, and a mark of where they end; `mark`: where they begin."""
        while True:
            said, outputs = self._said, self._outputs
            if outputs is None:
                width = _width(self.num_logprobs)
                words = np.zeros((0, width), np.int32)
                return _tokens(words, self.num_logprobs, self.num_logprobs), None
            filled = said.parts[-1].block.filled if said.parts else 0
            if mark is not None and mark[0] is said:
                words = outputs.words_of(said.parts[-1], mark[1], filled)
            else:
                words = _joined(outputs, said, start, filled)
            if self._said is said:  # else a seat was left, or the block was begun anew, while it was read
                sits = said.parts and said.parts[-1].end is None
                tokens = _tokens(words, outputs.num_top, self.num_logprobs)
                return tokens, (said, filled) if sits else None


def _joined(outputs: Outputs, said: _Said, start: int, filled: int) -> np.ndarray:
    """A copy of the tokens from number `start` on: i32[T, words of a token]."""
    first, pieces = 0, []
    for piece in said.pieces if start < said.num_tokens else ():
        if first + len(piece) > start:
            pieces.append(piece[max(start - first, 0) :])
        first += len(piece)
    new = [outputs.words_of(part, part.start, filled) for part in said.parts]
    pieces += new or [np.zeros((0, outputs.width), np.int32)]
    # Only new words can be left to pass over where no old ones are asked for.
    return np.concatenate(pieces)[max(start - said.num_tokens, 0) :]


def _count(block: _Block) -> np.ndarray:
    """Of its steps: tokens, row steps that emitted, proposals drafted, proposals accepted: i64[4]."""
    counts = block.records[: block.filled, :, 1:4]
    tokens, drafted, accepted = counts.sum(axis=(0, 1), dtype=np.int64)
    return np.asarray([tokens, np.count_nonzero(counts[:, :, 0]), drafted, accepted])


def _width(num_top: int) -> int:
    """Words of a token."""
    return 1 if num_top < 0 else 3 + 2 * num_top


def _moves(columns: np.ndarray, num_top: int, most: int) -> list[tuple[slice, slice]]:
    """Where a token's columns of a record go among its words: (words, columns), as few as there can be.

    Args: columns: of `columns_of`. num_top: n, as many as the record has; most: as many as there is room for.
    """
    targets = np.arange(len(columns))
    targets[3 + max(num_top, 0) :] += most - num_top
    breaks = np.flatnonzero((np.diff(columns) != 1) | (np.diff(targets) != 1)) + 1
    return [
        (slice(target[0], target[-1] + 1), slice(column[0], column[-1] + 1))
        for target, column in zip(np.split(targets, breaks), np.split(columns, breaks), strict=True)
    ]


def _tokens(words: np.ndarray, num_top: int, num_logprobs: int) -> Tokens:
    """Tokens with num_logprobs of the words' num_top top columns; -1 without logprobs."""
    if num_logprobs < 0:
        return Tokens(words[:, 0])
    top_ids, top = words[:, 3 : 3 + num_logprobs], words[:, 3 + num_top :][:, :num_logprobs]
    return Tokens(words[:, 0], words[:, 1].view(np.float32), words[:, 2], top_ids, top.view(np.float32))


class Stream:
    """What `Engine.submit` returns: the n samples of one request.

    Iterating steps the engine until the request is done and yields (sample, its new tokens) as they come.

    Attributes:
      request: as submitted, the seed settled; `Engine.change` replaces it.
      samples: n Samples.
      scores: PromptScores, None where the request has no `prompt_logprobs`.
    """

    def __init__(
        self,
        request: Any,
        samples: tuple[Sample, ...],
        step: Callable[[], bool],
        scores: PromptScores | None = None,
    ):
        self.request = request
        self.samples = samples
        self.scores = scores
        self._step = step

    @property
    def done(self) -> bool:
        return all(sample.done for sample in self.samples)

    @property
    def prompt_logprobs(self) -> Tokens | None:
        """The prompt's tokens but the first, with the logprobs, ranks and top n the model itself gives them.

        As many as are known yet: all T - 1 of them from before the first token is out, in whole chunks until
        then. None where the request has no `prompt_logprobs`.
        """
        if self.scores is None:
            return None
        token_ids, words = self.scores.words()
        num_top = self.scores.num_logprobs
        return _tokens(np.concatenate([token_ids[:, None], words], axis=1), num_top, num_top)

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
