"""Who sits in which slot of a batch, on which pages: arrays on the host with an entry for every slot.

Knows nothing of queues or of when something happens. The arrays make what a step costs independent of Python
work per request; requests are touched one by one only when they come and when they go.
"""

import dataclasses

import numpy as np

from jaxsample.guidance_rows import OFF
from jaxsample.pages import PagePool
from jaxsample.params import Limits
from jaxsample.requests import IDLE
from jaxsample.slots import ADMIT, CHANGE, RELEASE, blank_updates
from jaxsample.staging import pack_rows
from jaxsample.streams import Outputs, Sample

_MAX_CHILDREN = 1 << 16
_UNLIMITED = np.iinfo(np.int64).max


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
      slots: where the samples sit.
    """

    samples: list[Sample]
    words: np.ndarray
    level: int
    tokens: np.ndarray
    num_prompt: int
    arrival: int
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
    """The slots that run.

    Fields:
      slots: i32[k], rising. generations: i64[k], of each.
      level: index of features that serve all. masked: whether any has a grammar. guided: whether any is.
      num_pages: the most pages that any holds.
    """

    slots: np.ndarray
    generations: np.ndarray
    level: int
    masked: bool
    guided: bool
    num_pages: int


class Seats:
    """B slots and the pages of all of them.

    Attributes:
      sample, ticket: who sits in each slot, None for nobody.
      total: i64[B], tokens of each, prompt and emitted, as far as the host knows.
      level: i64[B], index of the features it needs. masked: bool[B], whether it has a grammar.
      guided: bool[B], whether a value model guides it.
      generation: i64[B], counts how often the slot was vacated.
      running: bool[B], whether steps include it: its prompt is committed.
      held: i64[B], pages in its line of table: i32[B, P], -1 behind.
      limit: i64[B], the most tokens it can have before it needs a page more; no limit where it does not run.
      pool: PagePool. outputs: Outputs.
    """

    def __init__(
        self,
        limits: Limits,
        num_slots: int,
        pages_per_row: int,
        page_size: int,
        num_pages: int,
        num_logprobs: int,
        ahead: int,
        has_values: bool,
    ):
        """ahead: slots that a row may write before the host sees it again. has_values: the value model's."""
        self.num_slots, self.page_size = num_slots, page_size
        self.sample: list[Sample | None] = [None] * num_slots
        self.ticket: list[Ticket | None] = [None] * num_slots
        self.total, self.level, self.generation, self.held = np.zeros((4, num_slots), np.int64)
        self.running, self.masked, self.guided = np.zeros((3, num_slots), np.bool_)
        self.limit = np.full(num_slots, _UNLIMITED, np.int64)
        self.table = np.full((num_slots, pages_per_row), -1, np.int32)
        self.pool = PagePool(num_pages)
        self.outputs = Outputs(num_slots, num_logprobs)
        self._limits, self._ahead = limits, ahead
        # A row of t tokens writes at slots t - 1 and on, as many as are reserved ahead: by pages held.
        room = np.arange(pages_per_row + 1) * page_size
        self._limit_with = np.where(room >= limits.max_length, _UNLIMITED, room - ahead + 1)
        self._free = list(range(num_slots))[::-1]
        self._rows: Rows | None = None
        self._changes: dict[
            int, tuple[int, Ticket | None, int]
        ] = {}  # slot -> kind, ticket, row of the ticket
        blank = blank_updates(limits, pages_per_row, 1, has_values)
        self._blank = pack_rows(blank)
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
        """The slots that run; found anew only when someone has come or gone."""
        if self._rows is None:
            slots = np.flatnonzero(self.running).astype(np.int32)
            self._rows = Rows(
                slots,
                self.generation[slots],
                level=int(self.level[slots].max(initial=0)),
                masked=bool(self.masked[slots].any()),
                guided=bool(self.guided[slots].any()),
                num_pages=int(self.held[slots].max(initial=0)),
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
        """The running slots that need one page more before the next step, rising; they never need two."""
        return np.flatnonzero(self.total > self.limit)

    def grow(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One page more for each of these slots, at least one: (place in the line, page), i64[n], i32[n]."""
        places, pages = self.held[slots], self.pool.take(len(slots))
        self.table[slots, places] = pages
        self.held[slots] = places + 1
        self.limit[slots] = self._limit_with[places + 1]
        if self._rows is not None:
            self._rows.num_pages = max(self._rows.num_pages, int(places.max()) + 1)
        return places, pages

    # --- coming and going -----------------------------------------------------------------------------------

    def seat(self, ticket: Ticket) -> list[int]:
        """Give a ticket's samples slots and pages, the caller having seen that there are enough."""
        shared, own = self.split(len(ticket.tokens), len(ticket.samples))
        common = self.pool.take(shared)
        for _ in ticket.samples[1:]:
            self.pool.share(common)
        ticket.slots = [self._free.pop() for _ in ticket.samples]
        num_pages = shared + own
        for row, (slot, sample) in enumerate(zip(ticket.slots, ticket.samples, strict=True)):
            self.sample[slot], self.ticket[slot] = sample, ticket
            self.total[slot], self.level[slot] = len(ticket.tokens), ticket.level
            self.held[slot] = num_pages
            self.table[slot, :shared] = common
            self.table[slot, shared:num_pages] = self.pool.take(own)
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
        for slot in ticket.slots:
            self.running[slot] = True
            self.limit[slot] = self._limit_with[self.held[slot]]
        self._rows = None
        place, begun = divmod(len(ticket.tokens) - 1, self.page_size)
        # The value model's cache holds the last token of the prompt too.
        if not begun and not self.guided[ticket.slots].any():
            return []
        leader, *others = self.table[ticket.slots, place].tolist()
        return [(leader, other) for other in others]

    def change(self, slot: int, words: np.ndarray, level: int) -> None:
        """Give a slot other parameters: i32[W], packed."""
        ticket = self.ticket_at(slot)
        row = ticket.samples.index(self.sample_at(slot))
        ticket.words[row] = words
        ticket.level = max(ticket.level, level)  # it may be seated anew before it runs
        self.level[slot], self.guided[slot] = level, self.guides(words)
        self._rows = None
        self._changes.setdefault(slot, (CHANGE, ticket, row))

    def vacate(self, slot: int, status: int = IDLE, error: str | None = None) -> Sample:
        """Free a slot and its pages; its sample leaves with this status."""
        sample = self.sample_at(slot)
        self.pool.give(self.table[slot, : self.held[slot]])
        self.held[slot] = 0
        self.limit[slot] = _UNLIMITED
        self.table[slot] = -1
        self.generation[slot] += 1
        self.running[slot] = self.masked[slot] = self.guided[slot] = False
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
        if not self._changes:
            return None
        only_releases = all(kind == RELEASE for kind, _, _ in self._changes.values())
        if only_releases and len(self._free) < self.num_slots:
            return None
        size = next(size for size in sizes if size >= len(self._changes))
        record = np.repeat(self._blank, size, axis=0)
        first_page = 4 + self._limits.max_length + 1
        for row, (slot, (kind, ticket, index)) in zip(record, self._changes.items(), strict=False):
            row[:2] = slot, kind
            if ticket is not None:
                row[-self._num_words :] = ticket.words[index]
            if ticket is not None and kind == ADMIT:
                row[2:4] = ticket.num_prompt, len(ticket.tokens) - ticket.num_prompt
                row[4 : 4 + len(ticket.tokens)] = ticket.tokens
                row[first_page : first_page + self.table.shape[1]] = self.table[slot]
        self._changes = {}
        return record
