"""Who sits in which slot of a batch, on which pages: arrays on the host with an entry for every slot.

Knows nothing of queues or of when something happens. The arrays make what a step costs independent of Python
work per request; requests are touched one by one only when they come and when they go.
"""

import dataclasses
import functools
import operator

import numpy as np

from jaxsample.buckets import smallest
from jaxsample.guidance_rows import OFF
from jaxsample.pages import PagePool
from jaxsample.params import Limits
from jaxsample.prompt_scores import PromptScores
from jaxsample.requests import IDLE
from jaxsample.slots import ADMIT, CHANGE, RELEASE, blank_updates
from jaxsample.staging import pack_rows
from jaxsample.streams import Outputs, Sample

_MAX_CHILDREN = 1 << 16
_UNLIMITED = np.iinfo(np.int64).max
_PLENTY = 4  # free pages for each slot, with which pages are given ahead of need
_MASKED, _GUIDED = 1, 2


@dataclasses.dataclass
class Ticket:
    """Samples that are seated together, since they begin with the same tokens.

    Fields:
      samples: one a slot.
      words: i32[n, W], each sample's parameters, stop rule and guidance, packed.
      level: index of the features they need.
      tokens: i32[T], the prompt and what was emitted before.
      num_prompt: tokens of the prompt.
      arrival: the order in which requests came; the lower goes first.
      scores: of the prompt; None where none were asked for.
      slots: where the samples sit.
    """

    samples: list[Sample]
    words: np.ndarray
    level: int
    tokens: np.ndarray
    num_prompt: int
    arrival: int
    scores: PromptScores | None = None
    slots: list[int] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> int:
        """Order of arrival, and of the children of a request."""
        return self.arrival * _MAX_CHILDREN + self.samples[0].index

    def leave(self, sample: Sample) -> None:
        """Take one sample off."""
        row = self.samples.index(sample)
        self.samples.pop(row)
        self.words = np.delete(self.words, row, axis=0)


@dataclasses.dataclass
class Rows:
    """The slots that run, as a step takes them; never written again.

    Fields:
      record: i32[b, 3], slot, -1, -1 of each row. Where b is B, row i is slot i's; else the slots are rising
        and the first of the rows. -1 is padding.
      generations: i64[B], of all slots.
      level: index of features that serve all. masked: whether any has a grammar. guided: whether any is.
    """

    record: np.ndarray
    generations: np.ndarray
    level: int
    masked: bool
    guided: bool


class Seats:
    """B slots and the pages of all of them.

    Attributes:
      sample, ticket: who sits in each slot, None for nobody.
      total: i32[B], tokens of each, prompt and emitted, as far as the host knows.
      level: B indices of the features each needs. masked: B times whether it has a grammar.
      guided: B times whether a value model guides it.
      generation: i64[B], counts how often the slot was vacated.
      running: B times whether steps include it: its prompt is committed.
      pages: B lists, the pages each holds. held: i64[B], how many. table: i32[B, P], the same, -1 behind.
      limit: i64[B], the most tokens it can have before it needs a page more; no limit where it does not run.
      slack: tokens that each can emit before any of them is short of a page, or less.
      num_running: slots that run. num_left: how often a slot was vacated.
      num_pages: the most pages that any running slot holds, or more.
      pool: PagePool. outputs: Outputs.
    """

    def __init__(
        self,
        limits: Limits,
        num_slots: int,
        pages_per_row: int,
        page_size: int,
        num_pages: int,
        sizes: tuple[int, ...],
        outputs: Outputs,
        step_width: int,
        has_values: bool,
    ):
        """sizes: rows of a step, rising to B. step_width: M. has_values: the value model's."""
        self.num_slots, self.page_size = num_slots, page_size
        self.sample: list[Sample | None] = [None] * num_slots
        self.ticket: list[Ticket | None] = [None] * num_slots
        self.pages: list[list[int]] = [[] for _ in range(num_slots)]
        self.level = [0] * num_slots
        self.running, self.masked, self.guided = ([False] * num_slots for _ in range(3))
        self.total = np.zeros(num_slots, np.int32)
        self.generation, self.held = (np.zeros(num_slots, np.int64) for _ in range(2))
        self.limit = np.full(num_slots, _UNLIMITED, np.int64)
        self.table = np.full((num_slots, pages_per_row), -1, np.int32)
        self.pool = PagePool(num_pages)
        self.outputs = outputs
        self.num_running = self.num_left = self.num_pages = 0
        self._limits, self._sizes = limits, sizes
        # A step is launched before the last one is known: two steps' writes must have room. A value model's
        # cache is a token ahead.
        self._ahead = 2 * step_width + has_values
        # Tokens that all can emit, from one growing to the next, where each may grow by a page beforehand.
        self._reach = (page_size // step_width - 1) * step_width
        self.slack = self._reach
        # A row of t tokens writes at slots t - 1 and on, as many as are reserved ahead: by pages held.
        room = np.arange(pages_per_row + 1) * page_size
        self._limit_with = np.where(room >= limits.max_length, _UNLIMITED, room - self._ahead + 1).tolist()
        self._free = list(range(num_slots))[::-1]
        self._rows: Rows | None = None
        self._record = np.full((num_slots, 3), -1, np.int32)  # as in Rows, for b = B
        self._bits = [0] * num_slots  # of those that run: for level, grammar and guidance
        self._num_with: dict[int, int] = {}  # bits -> how many run with them
        # slot -> kind, ticket, row of the ticket
        self._changes: dict[int, tuple[int, Ticket | None, int]] = {}
        blank = blank_updates(limits, pages_per_row, 1, has_values)
        self._blank = pack_rows(blank)
        self._blanks: dict[int, np.ndarray] = {}  # by number of rows
        self._num_words = pack_rows((blank.params, blank.stop, blank.guidance)).shape[1]
        # The mode is the first word of guidance, which stands last.
        self._mode = -pack_rows(blank.guidance).shape[1] if has_values else None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_changes(self) -> int:
        """Slots whose change the device has not been told."""
        return len(self._changes)

    def rows(self) -> Rows:
        """The slots that run; made anew only when someone has come, gone or changed."""
        if self._rows is None:
            size = self._sizes[smallest(self._sizes, self.num_running)]
            record = self._record.copy()
            if size < self.num_slots:
                slots = record[record[:, 0] >= 0]
                record = np.full((size, 3), -1, np.int32)
                record[: len(slots)] = slots
            needs = functools.reduce(operator.or_, self._num_with, 0)
            self._rows = Rows(
                record,
                self.generation.copy(),
                level=max(needs.bit_length() - 3, 0),
                masked=bool(needs & _MASKED),
                guided=bool(needs & _GUIDED),
            )
        return self._rows

    def ticket_at(self, slot: int) -> Ticket:
        ticket = self.ticket[slot]
        assert ticket is not None, f"nobody sits in slot {slot}"
        return ticket

    def sample_at(self, slot: int) -> Sample:
        sample = self.sample[slot]
        assert sample is not None, f"nobody sits in slot {slot}"
        return sample

    def guides(self, words: np.ndarray) -> bool:
        """Whether a sample with these words, i32[W], is guided."""
        return self._mode is not None and int(words[self._mode]) != OFF

    def youngest(self) -> int:
        """The seated slot that arrived last."""
        seated = [slot for slot, sample in enumerate(self.sample) if sample is not None]
        return max(seated, key=lambda slot: (self.ticket_at(slot).arrival, self.sample_at(slot).index))

    # --- pages ----------------------------------------------------------------------------------------------

    def pages_of(self, length: int) -> int:
        """Pages that a row with this many committed slots needs for all it may write."""
        return -(-min(length + self._ahead, self._limits.max_length) // self.page_size)

    def split(self, num_tokens: int, num_samples: int) -> tuple[int, int]:
        """Pages that samples with the same first tokens share, and pages each needs of its own."""
        committed = num_tokens - 1
        shared = committed // self.page_size if num_samples > 1 else 0
        return shared, self.pages_of(committed) - shared

    def short(self) -> np.ndarray:
        """The running slots that need one page more before the next step, rising; they never need two.

        Where pages are plenty, also those that will before `slack` is used up again.
        """
        reach = self._reach if self.pool.num_free >= _PLENTY * self.num_slots else 0
        return (self.total > self.limit - reach).nonzero()[0]

    def grow(self, slots: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """One page more for each of these slots, all that are short: (place in the line, page), each [n]."""
        places, pages = self.held[slots], self.pool.take(len(slots))
        self.table[slots, places] = pages
        for slot, page in zip(slots.tolist(), pages, strict=True):
            self.pages[slot].append(page)
        self.held[slots] = places + 1
        self.limit[slots] = [self._limit_with[place + 1] for place in places.tolist()]
        self.slack = min(int((self.limit - self.total).min()), self._reach)
        self.num_pages = int(self.held[self._record[:, 0] >= 0].max(initial=0))
        return places, pages

    # --- coming and going -----------------------------------------------------------------------------------

    def seat(self, ticket: Ticket, shared: int, own: int) -> list[int]:
        """Give a ticket's samples slots and pages, of `split`; the caller has seen that there are enough."""
        num_samples, num_tokens, pool = len(ticket.samples), len(ticket.tokens), self.pool
        if pool.num_free - shared - num_samples * own >= _PLENTY * self.num_slots:
            own = self.pages_of(num_tokens - 1 + self._reach) - shared
        num_pages = shared + own
        common = pool.take(shared)
        ticket.slots = [self._free.pop() for _ in ticket.samples]
        for row, (slot, sample) in enumerate(zip(ticket.slots, ticket.samples, strict=True)):
            if row:
                pool.share(common)
            pages, line = common + pool.take(own), self.table[slot]
            line[:num_pages], line[num_pages:] = pages, -1
            self.pages[slot] = pages
            self.sample[slot], self.ticket[slot] = sample, ticket
            self.total[slot], self.level[slot] = num_tokens, ticket.level
            self.held[slot] = num_pages
            self.masked[slot] = sample.matcher is not None
            self.guided[slot] = self.guides(ticket.words[row])
            self._changes[slot] = (ADMIT, ticket, row)
            sample.take_seat(self.outputs, slot)
        return ticket.slots

    def begin(self, ticket: Ticket) -> list[tuple[int, int]]:
        """Let a ticket's slots run, its prompt being committed on the first one's pages.

        Returns:
          (page to read, page to write) of those pages that must be copied, since each writes on its own.
        """
        slots = ticket.slots
        num_pages = len(self.pages[slots[0]])  # all hold as many
        limit = self._limit_with[num_pages]
        for slot in slots:
            self.running[slot] = True
            self.limit[slot] = limit
            self._record[slot, 0] = slot
            self._set_bits(slot)
        self.slack = min(self.slack, limit - len(ticket.tokens))
        self.num_pages = max(self.num_pages, num_pages)
        self.num_running += len(slots)
        self._rows = None
        place, begun = divmod(len(ticket.tokens) - 1, self.page_size)
        # The value model's cache holds the last token of the prompt too.
        if len(slots) == 1 or not (begun or any(self.guided[slot] for slot in slots)):
            return []
        leader, *others = self.table[slots, place].tolist()
        return [(leader, other) for other in others]

    def change(self, slot: int, words: np.ndarray, level: int) -> None:
        """Give a slot other parameters: i32[W], packed."""
        ticket = self.ticket_at(slot)
        row = ticket.samples.index(self.sample_at(slot))
        ticket.words[row] = words
        ticket.level = max(ticket.level, level)  # it may be seated anew before it runs
        self.level[slot], self.guided[slot] = level, self.guides(words)
        if self.running[slot]:
            self._set_bits(slot)
            self._rows = None
        self._changes.setdefault(slot, (CHANGE, ticket, row))

    def vacate(self, slot: int, status: int = IDLE, error: str | None = None) -> Sample:
        """Free a slot and its pages; its sample leaves with this status."""
        sample = self.sample_at(slot)
        self.pool.give(self.pages[slot])
        self.pages[slot] = []
        self.held[slot] = 0
        self.limit[slot] = _UNLIMITED
        self.generation[slot] += 1
        self._record[slot, 0] = -1
        self.num_left += 1
        if self.running[slot]:
            self.num_running -= 1
            self.running[slot] = False
            self._set_bits(slot)
        self._rows = None
        self.sample[slot] = self.ticket[slot] = None
        self._free.append(slot)
        self._changes[slot] = (RELEASE, None, 0)
        sample.leave_seat(status, error)
        return sample

    def take_changes(self, sizes: tuple[int, ...]) -> np.ndarray | None:
        """An Update with all that has changed, packed, i32[n, R] with n one of the sizes; None for nothing.

        Releases alone wait while anybody sits: they change nothing that runs, and go along with a change.
        """
        changes = self._changes
        if not changes:
            return None
        if len(self._free) < self.num_slots and all(ticket is None for _, ticket, _ in changes.values()):
            return None
        size = sizes[smallest(sizes, len(changes))]
        if size not in self._blanks:
            self._blanks[size] = np.repeat(self._blank, size, axis=0)
        record = self._blanks[size].copy()  # what is launched may still be read when the next is made
        first_page = 4 + self._limits.max_length + 1
        for row, (slot, (kind, ticket, index)) in zip(record, changes.items(), strict=False):
            if ticket is None:
                row[:2] = slot, kind
                continue
            num_tokens, num_prompt = len(ticket.tokens), ticket.num_prompt
            row[-self._num_words :] = ticket.words[index]
            row[:2] = slot, kind
            if kind == ADMIT:
                row[2:4] = num_prompt, num_tokens - num_prompt
                row[4 : 4 + num_tokens] = ticket.tokens
                row[first_page : first_page + self.table.shape[1]] = self.table[slot]
        self._changes = {}
        return record

    def _set_bits(self, slot: int) -> None:
        """Count what a slot needs, now that it runs, has changed or runs no more."""
        old, new, num_with = self._bits[slot], 0, self._num_with
        if self.running[slot]:
            new = 4 << self.level[slot] | _GUIDED * self.guided[slot] | _MASKED * self.masked[slot]
            num_with[new] = num_with.get(new, 0) + 1
        if old:
            num_with[old] -= 1
            if not num_with[old]:
                del num_with[old]
        self._bits[slot] = new
