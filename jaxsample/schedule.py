"""What an engine does next, decided on the host a whole step at a time: who comes, who waits, who gives way.

Knows nothing of the device, of models or of text. Requests are served in the order of their arrival; where
pages run out, the youngest gives up its own and goes on later with the same tokens.
"""

import dataclasses
import heapq
from typing import NamedTuple

import numpy as np

from jaxsample.buckets import Buckets, smallest
from jaxsample.counts import EngineStats
from jaxsample.params import Limits
from jaxsample.prompt_scores import PromptScores
from jaxsample.requests import CANCELLED, ERROR, RUNNING
from jaxsample.seats import Seats, Ticket
from jaxsample.streams import Outputs, Sample

_BAD_ROW = "the logits held NaN or infinity, or no token was left to draw"


class Chunk(NamedTuple):
    """Known tokens of some slots: record i32[p, 3 + N], and the bucket of lengths they end in.

    Where tokens are to be scored, `scored` says (row, whose, which), and the record has one token more.
    """

    record: np.ndarray
    length: int
    scored: tuple[tuple[int, PromptScores, slice], ...] = ()


@dataclasses.dataclass
class Plan:
    """What the device is to do next, in this order; None where there is nothing.

    Fields:
      updates: i32[n, R], an Update packed.
      prefill: Chunk for `slots.prefill`. prefill_values: for `slots.prefill_values`.
      copies: i32[B, 2], pages to copy.
      num_rows: k, the slots of the step, 0 for no step. record: i32[b, 3], for the device, as in `Rows`, with
        pages.
      generations: i64[B], who held each slot. num_left: how many had left one until then.
      length, level: the step's bucket of lengths and index of features, the last where masked or guided.
      masked: whether a slot has a grammar. guided: whether a value model guides one.
    """

    updates: np.ndarray | None
    prefill: Chunk | None
    prefill_values: Chunk | None
    copies: np.ndarray | None
    num_rows: int
    record: np.ndarray
    generations: np.ndarray
    num_left: int
    length: int
    level: int
    masked: bool
    guided: bool


class Scheduler:
    """The queue and the seats.

    Attributes:
      seats: Seats. outputs: Outputs. num_preempted: times a sample had to give up its slot.
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
        self._limits, self._buckets, self._width = limits, buckets, step_width
        self._has_values = has_values
        num_slots, num_tops = buckets.rows[-1], [features.num_logprobs for features in buckets.features]
        self.outputs = Outputs(num_slots, step_width, num_tops)
        self.seats = Seats(
            limits,
            num_slots,
            buckets.lengths[-1] // page_size,
            page_size,
            num_pages,
            buckets.rows,
            self.outputs,
            step_width,
            has_values,
        )
        self.num_preempted = 0
        self._blanks = {width: np.zeros((p, 3 + width), np.int32) for p, width in buckets.prefill}
        for blank in self._blanks.values():
            blank[:, 0] = num_slots
        self._queue: list[tuple[int, Ticket]] = []  # a heap by order of arrival
        self._committed: dict[int, int] = {}  # first slot of a ticket -> tokens committed, until all are
        self._valued: dict[int, int] = {}  # likewise in the value model's cache, of tickets that are guided

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def stats(self, num_waiting: int) -> EngineStats:
        """The counts, with those waiting whom the scheduler has not been given yet."""
        seats = self.seats
        num_tokens, num_windows, num_drafted, num_accepted = self.outputs.totals()
        return EngineStats(
            num_waiting=num_waiting,
            num_seated=seats.num_slots - seats.num_free,
            num_slots=seats.num_slots,
            num_free_pages=seats.pool.num_free,
            num_pages=seats.pool.num_pages,
            num_tokens=num_tokens,
            num_windows=num_windows,
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            num_preempted=self.num_preempted,
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
        grown, added = (), None
        if seats.slack < 0:
            grown = self._make_room()
            added = seats.grow(grown)
        if self._queue and seats.num_free:
            self._admit()
        prefill = values = copies = None
        if self._committed:
            prefill, values = self._prefill(self._committed, 1), self._prefill(self._valued, 0)
            copies = self._begin()
        rows = seats.rows()
        record = rows.record
        if added is not None and len(grown):
            record = record.copy()
            at = (
                grown
                if len(record) == seats.num_slots
                else np.searchsorted(record[: seats.num_running, 0], grown)
            )
            record[at, 1], record[at, 2] = added
        return Plan(
            updates=seats.take_changes(buckets.updates),
            prefill=prefill,
            prefill_values=values,
            copies=copies,
            num_rows=seats.num_running,
            record=record,
            generations=rows.generations,
            num_left=seats.num_left,
            length=self._length_for(seats.num_pages),
            level=len(buckets.features) - 1 if rows.masked or rows.guided else rows.level,
            masked=rows.masked,
            guided=rows.guided,
        )

    def _make_room(self) -> np.ndarray:
        """The slots that must grow; where pages run out the youngest gives up its own."""
        short = self.seats.short()
        while len(short) > self.seats.pool.num_free:
            self._preempt(self.seats.youngest())
            running = self.seats.running
            short = np.asarray([slot for slot in short.tolist() if running[slot]], np.int64)
        return short

    def _admit(self) -> None:
        """Seat tickets in their order, while there are slots and pages for the next."""
        seats, pool = self.seats, self.seats.pool
        while self._queue:
            _, ticket = self._queue[0]
            num_samples = len(ticket.samples)
            if num_samples > seats.num_free:
                return
            shared, own = seats.split(len(ticket.tokens), num_samples)
            # While others sit, a few pages stay free, or the newcomer would soon be the one to give way.
            margin = 1 + pool.num_pages // 100 if seats.num_free < seats.num_slots else 0
            if shared + num_samples * own + margin > pool.num_free:
                return
            heapq.heappop(self._queue)
            taken = seats.seat(ticket, shared, own)
            self._committed[taken[0]] = 0
            if self._has_values and any(seats.guided[slot] for slot in taken):
                self._valued[taken[0]] = 0

    def _prefill(self, committed: dict[int, int], num_left: int) -> Chunk | None:
        """The next chunk of the prompts that are not committed, oldest first.

        Args:
          committed: first slot of a ticket -> tokens that are; brought up to date.
          num_left: last tokens that stay: 1 for the model, whose step takes it; 0 for the value model.
        """
        seats, shapes = self.seats, self._buckets.prefill
        unfinished = []
        for slot, start in committed.items():
            left = len(seats.ticket_at(slot).tokens) - num_left - start
            if left > 0:
                unfinished.append((slot, start, left))
        if not unfinished:
            return None
        widths = [width for _, width in shapes]
        width = widths[min(smallest(widths, unfinished[0][2]), len(shapes) - 1)]
        record = self._blanks[width].copy()  # what is launched may still be read when the next is made
        furthest, scored = 0, []
        for index, (slot, start, left) in enumerate(unfinished[: len(record)]):
            ticket, row, count = seats.ticket_at(slot), record[index], min(left, width)
            end = start + count
            row[:3] = slot, start, count
            row[3 : 3 + count] = ticket.tokens[start:end]
            if num_left and ticket.scores is not None:
                which = ticket.scores.claim(start, end)
                if which is not None:
                    scored.append((index, ticket.scores, which))
            committed[slot] = end
            furthest = max(furthest, end)
        if scored:
            record = np.pad(record, ((0, 0), (0, 1)))
            for index, _, _ in scored:
                slot, start, count = record[index, :3].tolist()
                record[index, 3 + count] = seats.ticket_at(slot).tokens[start + count]
        return Chunk(record, self._length_for(-(-furthest // seats.page_size)), tuple(scored))

    def _begin(self) -> np.ndarray | None:
        """Let those run whose prompt is committed; the pages to copy, i32[B, 2]."""
        seats, done = self.seats, []
        for slot, count in self._committed.items():
            size = len(seats.ticket_at(slot).tokens)
            if count == size - 1 and self._valued.get(slot, size) == size:
                done.append(slot)
        pairs = []
        for slot in done:
            del self._committed[slot]
            self._valued.pop(slot, None)
            pairs += seats.begin(seats.ticket_at(slot))
        if not pairs:
            return None
        copies = np.full((seats.num_slots, 2), seats.pool.num_pages, np.int32)
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
            words, level = ticket.words[row : row + 1].copy(), seats.level[slot]
            self.add(Ticket([sample], words, level, tokens, ticket.num_prompt, ticket.arrival, ticket.scores))
            self.num_preempted += 1
            return
        slots = ticket.slots
        for taken in slots:
            self._committed.pop(taken, None)
            self._valued.pop(taken, None)
            seats.vacate(taken)
        self.add(ticket)
        self.num_preempted += len(slots)

    def _length_for(self, num_pages: int) -> int:
        lengths = self._buckets.lengths
        return lengths[smallest(lengths, num_pages * self.seats.page_size)]

    # --- after a step ---------------------------------------------------------------------------------------

    def deliver(self, plan: Plan, record: np.ndarray) -> None:
        """Take in a step's record, i32[b, R]; rows whose slot has changed hands since are passed over."""
        seats = self.seats
        dropped = None
        if seats.num_left != plan.num_left:
            dropped = (seats.generation != plan.generations).nonzero()[0]
        slots = None if len(plan.record) == seats.num_slots else plan.record[: plan.num_rows, 0]
        told = self.outputs.write(record, plan.level, slots, dropped)
        status = told[:, 0]
        seats.total += told[:, 1]
        seats.slack -= self._width
        for slot in (status > RUNNING).nonzero()[0].tolist():
            reason = int(status[slot])
            seats.vacate(slot, reason, _BAD_ROW if reason == ERROR else None)

    def deliver_scores(self, plan: Plan, words: np.ndarray) -> None:
        """Take in what was scored of prompts, i32[p, N, R]; whoever has left meanwhile keeps it too."""
        assert plan.prefill is not None
        for row, scores, which in plan.prefill.scored:
            scores.put(words[row, which])

    def with_grammar(self, plan: Plan) -> list[tuple[int, Sample]]:
        """(row, sample) of those rows of a plan that have a grammar and still hold their slot."""
        seats = self.seats
        return [
            (row, seats.sample_at(slot))
            for row, slot in enumerate(plan.record[:, 0].tolist())
            if slot >= 0 and seats.masked[slot] and seats.generation[slot] == plan.generations[slot]
        ]
