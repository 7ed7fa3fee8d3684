"""What an engine does next, decided on the host a whole step at a time: who comes, who waits, who gives way.

Knows nothing of the device, of models or of text. Requests are served in the order of their arrival; where
pages run out, the youngest gives up its own and goes on later with the same tokens.
"""

import dataclasses
import heapq
from typing import NamedTuple

import numpy as np

from jaxsample.buckets import Buckets, smallest
from jaxsample.counts import EngineStats, Totals
from jaxsample.params import Limits
from jaxsample.record import columns_of
from jaxsample.requests import CANCELLED, ERROR, RUNNING
from jaxsample.seats import Seats, Ticket
from jaxsample.streams import Sample

_BAD_ROW = "the logits held NaN or infinity, or no token was left to draw"


class Chunk(NamedTuple):
    """Known tokens of some slots: record i32[p, 3 + N], and the bucket of lengths they end in."""

    record: np.ndarray
    length: int


@dataclasses.dataclass
class Plan:
    """What the device is to do next, in this order; None where there is nothing.

    Fields:
      updates: i32[n, R], an Update packed.
      prefill: Chunk for `slots.prefill`. prefill_values: for `slots.prefill_values`.
      copies: i32[B, 2], pages to copy.
      slots: i32[k], the slots of the step, k = 0 for no step. record: i32[b, 3], for the device.
      generations: i64[k], who held them.
      length, level: the step's bucket of lengths and index of features, the last where masked or guided.
      masked: whether a slot has a grammar. guided: whether a value model guides one.
    """

    updates: np.ndarray | None
    prefill: Chunk | None
    prefill_values: Chunk | None
    copies: np.ndarray | None
    slots: np.ndarray
    record: np.ndarray
    generations: np.ndarray
    length: int
    level: int
    masked: bool
    guided: bool


class Scheduler:
    """The queue and the seats.

    Attributes:
      seats: Seats. totals: Totals.
    """

    def __init__(
        self,
        limits: Limits,
        buckets: Buckets,
        num_pages: int,
        page_size: int,
        step_width: int,
        has_values: bool = False,
    ):
        """step_width: M, the most tokens a step emits; at most page_size. has_values: with a value model."""
        self._limits, self._buckets = limits, buckets
        self._columns = [
            [_as_slice(columns) for columns in columns_of(step_width, x.num_logprobs)]
            for x in buckets.features
        ]
        # A step is launched before the last one is known: two steps' writes must have room. A value model's
        # cache is a token ahead.
        self.seats = Seats(
            limits,
            buckets.rows[-1],
            buckets.lengths[-1] // page_size,
            page_size,
            num_pages,
            buckets.features[-1].num_logprobs,
            ahead=2 * step_width + has_values,
            has_values=has_values,
        )
        self.totals = Totals()
        self._queue: list[tuple[int, Ticket]] = []  # a heap by order of arrival
        self._committed: dict[int, int] = {}  # first slot of a ticket -> tokens committed, until all are
        self._valued: dict[int, int] = {}  # likewise in the value model's cache, of tickets that are guided

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def stats(self, num_waiting: int) -> EngineStats:
        """The counts, with those waiting whom the scheduler has not been given yet."""
        seats, totals = self.seats, self.totals
        return EngineStats(
            num_waiting=num_waiting,
            num_seated=seats.num_slots - seats.num_free,
            num_slots=seats.num_slots,
            num_free_pages=seats.pool.num_free,
            num_pages=seats.pool.holders.size,
            num_tokens=totals.tokens,
            num_windows=totals.windows,
            num_drafted=totals.drafted,
            num_accepted=totals.accepted,
            num_preempted=totals.preempted,
        )

    @property
    def has_work(self) -> bool:
        return bool(self._queue) or self.seats.num_changes > 0 or self.seats.num_free < self.seats.num_slots

    def pages_needed(self, num_prompt: int, num_samples: int, max_tokens: int) -> int:
        """Pages without which a request could not be served: all its samples' at the beginning, or those of
        one alone at its end."""
        most = min(num_prompt + max_tokens, self._limits.max_length + 1)
        shared, own = self.seats.split(num_prompt, num_samples)
        return max(shared + num_samples * own, self.seats.pages_of(most - 1))

    # --- what callers ask for -------------------------------------------------------------------------------

    def add(self, ticket: Ticket) -> None:
        """Queue samples, by order of arrival."""
        heapq.heappush(self._queue, (ticket.key, ticket))

    def cancel(self, sample: Sample) -> None:
        """End a sample now, waiting or seated; what its step in flight emits is dropped."""
        slot = sample.slot
        if sample.done:
            return
        if slot is not None and not self.seats.running[slot]:
            # Its siblings wait for the same prompt, which may be on this slot's pages: they begin anew.
            self._preempt(slot)
            slot = None
        if slot is not None:
            self.seats.vacate(slot, CANCELLED)
            return
        for _, ticket in self._queue:
            if sample in ticket.samples:
                ticket.leave(sample)
        self._queue = [(ticket.key, ticket) for _, ticket in self._queue if ticket.samples]
        heapq.heapify(self._queue)
        sample.leave_seat(CANCELLED)

    def change(self, sample: Sample, words: np.ndarray, level: int) -> None:
        """Give a sample other parameters: i32[W], packed."""
        slot = sample.slot
        if slot is not None and self.seats.guides(words) and not self.seats.guided[slot]:
            # The value model's cache lacks its tokens: it begins anew.
            self._preempt(slot)
            slot = None
        if slot is not None:
            self.seats.change(slot, words, level)
            return
        for _, ticket in self._queue:
            if sample in ticket.samples:
                ticket.words[ticket.samples.index(sample)] = words
                ticket.level = max(ticket.level, level) if len(ticket.samples) > 1 else level

    def fail(self, sample: Sample, error: str) -> None:
        """End a seated sample with status ERROR."""
        slot = sample.slot
        if slot is not None:
            self.seats.vacate(slot, ERROR, error)

    def fail_all(self, error: str) -> None:
        """End all samples, seated and waiting, with status ERROR."""
        for slot in range(self.seats.num_slots):
            if self.seats.sample[slot] is not None:
                self.seats.vacate(slot, ERROR, error)
        for _, ticket in self._queue:
            for sample in ticket.samples:
                sample.leave_seat(ERROR, error)
        self._queue.clear()
        self._committed.clear()
        self._valued.clear()

    # --- before a step --------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """What the next launch does; as far as the scheduler is concerned it is done."""
        seats, buckets = self.seats, self._buckets
        grown = self._make_room()
        added = seats.grow(grown) if len(grown) else None
        self._admit()
        prefill, values = self._prefill(self._committed, 1), self._prefill(self._valued, 0)
        copies = self._begin()
        rows = seats.rows()
        record = np.full((buckets.rows[smallest(buckets.rows, len(rows.slots))], 3), -1, np.int32)
        record[: len(rows.slots), 0] = rows.slots
        if added is not None:
            at = np.searchsorted(rows.slots, grown)
            record[at, 1], record[at, 2] = added
        return Plan(
            updates=seats.take_changes(buckets.updates),
            prefill=prefill,
            prefill_values=values,
            copies=copies,
            slots=rows.slots,
            record=record,
            generations=rows.generations,
            length=self._length_for(rows.num_pages),
            level=len(buckets.features) - 1 if rows.masked or rows.guided else rows.level,
            masked=rows.masked,
            guided=rows.guided,
        )

    def _make_room(self) -> np.ndarray:
        """The slots that must grow; where pages run out the youngest gives up its own."""
        short = self.seats.short()
        while len(short) > self.seats.pool.num_free:
            self._preempt(self.seats.youngest())
            short = short[self.seats.running[short]]
        return short

    def _admit(self) -> None:
        """Seat tickets in their order, while there are slots and pages for the next."""
        seats = self.seats
        while self._queue:
            _, ticket = self._queue[0]
            num_samples = len(ticket.samples)
            shared, own = seats.split(len(ticket.tokens), num_samples)
            # While others sit, a few pages stay free, or the newcomer would soon be the one to give way.
            margin = 1 + seats.pool.holders.size // 100 if seats.num_free < seats.num_slots else 0
            if num_samples > seats.num_free or shared + num_samples * own + margin > seats.pool.num_free:
                return
            heapq.heappop(self._queue)
            taken = seats.seat(ticket)
            self._committed[taken[0]] = 0
            if seats.guided[taken].any():
                self._valued[taken[0]] = 0

    def _prefill(self, committed: dict[int, int], num_left: int) -> Chunk | None:
        """The next chunk of the prompts that are not committed, oldest first.

        Args:
          committed: first slot of a ticket -> tokens that are; brought up to date.
          num_left: last tokens that stay: 1 for the model, whose step takes it; 0 for the value model.
        """
        seats, shapes = self.seats, self._buckets.prefill
        left = {s: len(seats.ticket_at(s).tokens) - num_left - done for s, done in committed.items()}
        unfinished = [slot for slot, count in left.items() if count > 0]
        if not unfinished:
            return None
        widths = [width for _, width in shapes]
        num_prompts, width = shapes[min(smallest(widths, left[unfinished[0]]), len(shapes) - 1)]
        record = np.zeros((num_prompts, 3 + width), np.int32)
        record[:, 0] = seats.num_slots
        furthest = 0
        for row, slot in zip(record, unfinished, strict=False):
            start, count = committed[slot], min(left[slot], width)
            row[:3] = slot, start, count
            row[3 : 3 + count] = seats.ticket_at(slot).tokens[start : start + count]
            committed[slot] = start + count
            furthest = max(furthest, start + count)
        return Chunk(record, self._length_for(-(-furthest // seats.page_size)))

    def _begin(self) -> np.ndarray | None:
        """Let those run whose prompt is committed; the pages to copy, i32[B, 2]."""
        seats = self.seats
        size = lambda slot: len(seats.ticket_at(slot).tokens)
        done = [s for s, count in self._committed.items() if count == size(s) - 1]
        done = [s for s in done if self._valued.get(s, size(s)) == size(s)]
        pairs = []
        for slot in done:
            del self._committed[slot]
            self._valued.pop(slot, None)
            pairs += seats.begin(seats.ticket_at(slot))
        if not pairs:
            return None
        copies = np.full((seats.num_slots, 2), seats.pool.holders.size, np.int32)
        copies[: len(pairs)] = pairs
        return copies

    def _preempt(self, slot: int) -> None:
        """Take a sample off its slot and queue it with all it has said; before it runs, its siblings too."""
        seats = self.seats
        ticket = seats.ticket_at(slot)
        if seats.running[slot]:
            row = ticket.samples.index(seats.sample_at(slot))
            sample = seats.vacate(slot)
            prompt = ticket.tokens[: ticket.num_prompt]
            tokens = np.concatenate([prompt, sample.tokens().token_ids])
            words, level = ticket.words[row : row + 1].copy(), int(seats.level[slot])
            self.add(Ticket([sample], words, level, tokens, ticket.num_prompt, ticket.arrival))
            self.totals.preempted += 1
            return
        slots = ticket.slots
        for taken in slots:
            self._committed.pop(taken, None)
            self._valued.pop(taken, None)
            seats.vacate(taken)
        self.add(ticket)
        self.totals.preempted += len(slots)

    def _length_for(self, num_pages: int) -> int:
        lengths = self._buckets.lengths
        return lengths[smallest(lengths, num_pages * self.seats.page_size)]

    # --- after a step ---------------------------------------------------------------------------------------

    def deliver(self, plan: Plan, record: np.ndarray) -> None:
        """Take in a step's record, i32[b, R]; rows whose slot has changed hands since are passed over."""
        seats, totals, slots = self.seats, self.totals, plan.slots
        record = record[: len(slots)]
        current = seats.generation[slots] == plan.generations
        if not current.all():
            slots, record = slots[current], record[current]
        status, count = record[:, 0], record[:, 1]
        seats.outputs.append(slots, count, record, self._columns[plan.level])
        seats.total[slots] += count
        tokens, drafted, accepted = record[:, 1:4].sum(axis=0).tolist()
        totals.tokens += tokens
        totals.windows += int(np.count_nonzero(count))
        totals.drafted += drafted
        totals.accepted += accepted
        for row in np.flatnonzero(status != RUNNING).tolist():
            reason = int(status[row])
            seats.vacate(int(slots[row]), reason, _BAD_ROW if reason == ERROR else None)

    def with_grammar(self, plan: Plan) -> list[tuple[int, Sample]]:
        """(row, sample) of those rows of a plan that have a grammar and still hold their slot."""
        seats, slots = self.seats, plan.slots
        rows = np.flatnonzero(seats.masked[slots] & (seats.generation[slots] == plan.generations))
        return [(int(row), seats.sample_at(slots[row])) for row in rows]


def _as_slice(columns: np.ndarray) -> np.ndarray | slice:
    """Columns as a slice where they lie side by side, which is not copied."""
    first = int(columns[0])
    together = (columns == first + np.arange(len(columns))).all()
    return slice(first, first + len(columns)) if together else columns
