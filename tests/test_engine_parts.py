"""The engine's parts alone: pages, packed rows, streams, masks of drafts."""

import dataclasses
import threading

import jax
import numpy as np
import pytest

import jaxsample as js
from jaxsample.buckets import Buckets, smallest
from jaxsample.grammar import fill_masks
from jaxsample.intake import Intake
from jaxsample.pages import PagePool
from jaxsample.schedule import Scheduler
from jaxsample.seats import Ticket
from jaxsample.slots import ADMIT
from jaxsample.staging import pack_rows, unpack_rows
from jaxsample.streams import Outputs

# --- pages -----------------------------------------------------------------------------------------------------------


def test_a_page_is_free_again_when_its_last_holder_gives_it_back():
    pool = PagePool(5)
    first, second = pool.take(3), pool.take(2)
    assert sorted([*first, *second]) == [0, 1, 2, 3, 4] and pool.num_free == 0
    pool.share(first[:2])
    pool.give(first)
    assert pool.num_free == 1 and pool.take(1) == first[2:]
    pool.give(first[:2])
    assert pool.num_free == 2 and sorted(pool.take(2)) == sorted(first[:2])


def test_pages_that_are_not_there_cannot_be_taken_or_given():
    pool = PagePool(3)
    taken = pool.take(2)
    with pytest.raises(ValueError, match=r"count is 2, allowed is 0 \.\.\. 1"):
        pool.take(2)
    pool.give(taken[:1])
    with pytest.raises(ValueError, match="free already"):
        pool.give(taken)
    assert pool.num_free == 2 and pool.holders.tolist().count(1) == 1, "nothing was given back"


def test_any_order_of_taking_sharing_and_giving_keeps_count():
    generator = np.random.default_rng(0)
    pool, held = PagePool(40), []
    for _ in range(2000):
        action = generator.integers(3)
        if action == 0 and pool.num_free:
            held.append(pool.take(int(generator.integers(1, pool.num_free + 1))))
        elif action == 1 and held:
            held.append(held[generator.integers(len(held))].copy())
            pool.share(held[-1])
        elif held:
            pool.give(held.pop(int(generator.integers(len(held)))))
        holders = np.bincount(np.concatenate(held), minlength=40) if held else np.zeros(40, int)
        assert pool.holders.tolist() == holders.tolist()
        assert pool.num_free == (holders == 0).sum()


# --- staging ---------------------------------------------------------------------------------------------------------


def test_packed_rows_come_back_bit_for_bit():
    limits = js.Limits(70, max_length=9)
    asked = [
        {"temperature": 0.3, "ignore_eos": True, "eos_token_ids": [5], "logit_bias": {3: -np.inf}},
        {"seed": -1},
    ]
    rows = js.stack_rows([js.make_params(limits, **words) for words in asked])
    rows[0].temperature[1] = np.float32(np.nan)
    record = pack_rows(rows)
    back = jax.jit(lambda record: unpack_rows(record, js.neutral_params(limits, 1)))(record)
    for left, right in zip(jax.tree.leaves(rows), jax.tree.leaves(back), strict=True):
        assert left.dtype == right.dtype and left.tobytes() == np.asarray(right).tobytes()
    with pytest.raises(ValueError, match="expected rows of"):
        unpack_rows(record[:, 1:], rows)
    with pytest.raises(ValueError, match="a field is int64"):
        pack_rows((np.zeros((1, 2), np.int64),))


# --- buckets ---------------------------------------------------------------------------------------------------------


def test_the_smallest_bucket_that_holds_a_size_is_chosen():
    assert [smallest((1, 4, 16), size) for size in (0, 1, 2, 4, 5, 16)] == [0, 0, 1, 1, 2, 2]


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_top", [-1, 0, 2])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_outputs_hold_what_records_say(num_top, num_tokens):
    generator = np.random.default_rng(num_tokens)
    features = js.Features(num_logprobs=num_top)
    width = 4 + num_tokens * (1 if num_top < 0 else 3 + 2 * num_top)
    outputs = Outputs(4, num_tokens, [num_top])
    samples = [js.Sample(0, num_top) for _ in range(4)]
    for slot, sample in enumerate(samples):
        sample.take_seat(outputs, slot)
    expected = [[] for _ in range(4)]
    for step in range(500):  # more than a block has
        whole = step % 2
        slots = np.arange(4) if whole else np.sort(generator.choice(4, 3, replace=False)).astype(np.int32)
        record = generator.integers(-(2**31), 2**31, (4, width)).astype(np.int32)
        record[:, 1] = generator.integers(0, num_tokens + 1, 4)
        told = js.unpack(record, features)
        dropped = slots[:1] if step % 5 == 0 else None
        written = outputs.write(record, 0, None if whole else slots, dropped)
        assert written[slots[1:], :width].tolist() == record[1 : len(slots)].tolist()
        for row, slot in enumerate(slots):
            for m in range(0 if dropped is not None and slot == dropped[0] else told.count[row]):
                entry = [told.tokens[row, m].tobytes()]
                if num_top >= 0:
                    entry += [told.logprobs[row, m].tobytes(), told.ranks[row, m].tobytes()]
                    entry += [told.top_ids[row, m].tobytes(), told.top_logprobs[row, m].tobytes()]
                expected[slot].append(entry)
    for sample, entries in zip(samples, expected, strict=True):
        for _ in range(2):
            tokens = sample.tokens()
            assert len(tokens) == len(entries) > 100
            parts = [getattr(tokens, field.name) for field in dataclasses.fields(tokens)]
            got = [[part[at].tobytes() for part in parts if part is not None] for at in range(len(tokens))]
            assert got == entries
            sample.leave_seat(js.LENGTH)


def test_a_sample_goes_on_in_another_slot_and_is_read_once():
    outputs = Outputs(3, 1, [-1])
    sample, other = js.Sample(0, -1), js.Sample(0, -1)
    assert sample.status == js.IDLE and sample.read().token_ids.size == 0
    say = lambda slot, token: outputs.write(
        np.asarray([[1, 1, 0, 0, token]], np.int32), 0, np.asarray([slot], np.int32), None
    )
    sample.take_seat(outputs, 1)
    say(1, 7)
    assert sample.read().token_ids.tolist() == [7]
    say(1, 8)
    sample.leave_seat(js.IDLE)
    other.take_seat(outputs, 1)
    say(1, 99)
    assert other.read().token_ids.tolist() == [99]
    assert sample.tokens().token_ids.tolist() == [7, 8]
    sample.take_seat(outputs, 2)
    say(2, 9)
    assert sample.read().token_ids.tolist() == [8, 9] and sample.status == js.RUNNING
    sample.leave_seat(js.ERROR, "because")
    assert sample.done and sample.error == "because" and sample.finish_reason == "error"
    assert sample.read().token_ids.size == 0 and sample.tokens().token_ids.tolist() == [7, 8, 9]
    for token in range(700):  # the block is begun anew
        say(1, token)
    assert sample.tokens(1).token_ids.tolist() == [8, 9] and outputs.totals() == (704, 704, 0, 0)
    assert other.tokens(250).token_ids.tolist() == list(range(249, 700))
    assert other.read().token_ids.tolist() == list(range(700)) and other.read().token_ids.size == 0


def test_levels_with_logprobs_of_their_own_mix_in_a_stream():
    tops = [-1, 1, 3]
    outputs = Outputs(2, 1, tops)
    all_of, one_of = js.Sample(0, -1), js.Sample(0, 1)
    all_of.take_seat(outputs, 0)
    one_of.take_seat(outputs, 1)
    generator, expected = np.random.default_rng(0), []
    for step in range(600):
        level = int(generator.integers(1, 3)) if step % 50 else 0
        record = generator.integers(0, 100, (2, 5 if not level else 4 + 3 + 2 * tops[level])).astype(np.int32)
        record[:, 1] = level > 0, level > 0
        told = js.unpack(record, js.Features(num_logprobs=tops[level]))
        if level:
            top = told.top_ids[1, 0, :1].tolist(), told.top_logprobs[1, 0, :1].tolist()
            expected.append((told.tokens[1, 0], told.logprobs[1, 0], told.ranks[1, 0], *top))
        outputs.write(record, level, None, None)
    tokens = one_of.tokens()
    fields = [getattr(tokens, field.name) for field in dataclasses.fields(tokens)]
    assert list(zip(*fields[:3], *(field.tolist() for field in fields[3:]), strict=True)) == expected
    assert len(all_of.tokens()) == len(expected) and all_of.tokens().logprobs is None


def test_a_reader_beside_the_writer_gets_every_token_once():
    outputs, sample = Outputs(2, 1, [-1]), js.Sample(0, -1)
    sample.take_seat(outputs, 1)

    def write():
        for token in range(6_000):
            outputs.write(np.asarray([[1, 1, 0, 0, token]], np.int32), 0, np.asarray([1]), None)
            if token % 1000 == 999:  # gives way, and comes back at once
                sample.leave_seat(js.IDLE)
                sample.take_seat(outputs, 1)
        sample.leave_seat(js.LENGTH)

    writer = threading.Thread(target=write)
    writer.start()
    got = []
    while not sample.done:
        got += sample.read().token_ids.tolist()
        assert sample.tokens(len(got) // 2).token_ids[:1].tolist() in ([], [len(got) // 2])
    writer.join()
    assert got + sample.read().token_ids.tolist() == list(range(6_000))


# --- scheduler -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_pages", [14, 200])
@pytest.mark.parametrize("width", [1, 3])
def test_pages_are_there_before_they_are_written_and_are_nobody_elses(num_pages, width):
    limits, page_size, num_slots = js.Limits(70, max_length=40), 4, 6
    plain = js.Features(tier="plain", full_rows=False)
    buckets = Buckets((2, num_slots), (40,), ((2, 16),), (plain,), (num_slots,))
    scheduler = Scheduler(limits, buckets, num_pages, page_size, width)
    intake = Intake(limits, buckets, False, num_pages, scheduler.pages_needed)
    generator, samples, asked = np.random.default_rng(width), [], []
    for arrival in range(60):
        params = {"max_tokens": int(generator.integers(1, 20)), "n": int(generator.integers(1, 3))}
        accepted = intake.accept(js.Request([1] * int(generator.integers(1, 15)), params))
        samples.append([js.Sample(index, -1) for index in range(params["n"])])
        asked.append(params["max_tokens"])
        words, prompt = accepted.words, accepted.prompt
        scheduler.add(Ticket([*samples[-1]], words, accepted.level, prompt, len(prompt), arrival))
    most = {sample: count for group, count in zip(samples, asked) for sample in group}
    table, length = np.full((num_slots, 10), -1), np.zeros(num_slots, int)  # as the device has them
    in_flight, num_grown, num_steps = None, 0, 0
    while scheduler.has_work or in_flight:
        num_steps += 1
        assert num_steps < 2000
        plan = scheduler.plan()
        for row in plan.updates if plan.updates is not None else ():
            if row[1]:
                table[row[0]] = row[4 + 41 : 4 + 41 + 10] if row[1] == ADMIT else -1
                length[row[0]] = row[2] + row[3]
        for slot, place, page in plan.record[plan.record[:, 1] >= 0]:
            assert table[slot, place] == -1
            table[slot, place] = page
            num_grown += 1
        record = np.zeros((len(plan.record), 4 + width), np.int32)
        for row, slot in enumerate(plan.record[:, 0].tolist()):
            if slot < 0:
                continue
            sample = scheduler.seats.sample_at(slot)
            written = np.arange(length[slot] - 1, min(length[slot] - 1 + width, 40)) // page_size
            assert (table[slot, written] >= 0).all()
            others = table[[other for other in plan.record[:, 0] if other not in (slot, -1)]]
            assert not np.isin(table[slot, written], others[others >= 0]).any()
            prompt = scheduler.seats.ticket_at(slot).num_prompt
            left = most[sample] - (length[slot] - prompt)
            count = min(int(generator.integers(1, width + 1)), left)
            record[row, :2] = js.LENGTH if count == left else js.RUNNING, count
            record[row, 4 : 4 + count] = length[slot] - prompt + np.arange(count)
            length[slot] += count
        if in_flight is not None:
            scheduler.deliver(*in_flight)
        in_flight = (plan, record) if plan.num_rows else None
    for sample, count in most.items():
        assert sample.status == js.LENGTH and sample.tokens().token_ids.tolist() == list(range(count))
    assert scheduler.seats.pool.num_free == num_pages and not scheduler.seats.pool.holders.any()
    assert (scheduler.num_preempted > 0) == (num_pages < 20) and num_grown > 0


# --- masks -----------------------------------------------------------------------------------------------------------


class Counting:
    """Each token must be the one before it plus 1 or plus 2, modulo 40; never 5."""

    def __init__(self, last):
        self.said = [last]

    def allowed(self):
        return {(self.said[-1] + step) % 40 for step in (1, 2)} - {5}

    def fill(self, mask):
        assert not mask.any()
        for token in self.allowed():
            mask[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token):
        fits = token in self.allowed()
        self.said += [token] * fits
        return fits

    def rollback(self, num_tokens):
        del self.said[-num_tokens:]


def _sets(masks):
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def test_every_node_of_a_draft_gets_the_mask_of_its_own_path():
    # 0 - 1, 2; 1 - 3, 4; 2 - 5; 3 - 6
    tree = js.Tree((-1, 0, 0, 1, 1, 2, 3))
    matcher, masks = Counting(1), np.zeros((7, 2), np.uint32)
    everything = set(range(64))
    fill_masks(matcher, tree, np.asarray([1, 2, 3, 4, 9, 4, 5]), frozenset([30]), masks)
    # Node 4 holds 9, which may not follow 2; node 6 holds 5, which may never come.
    assert _sets(masks) == [{2, 3}, {3, 4}, {4}, {6}, everything, {6}, everything]
    assert matcher.said == [1]
    fill_masks(matcher, tree, np.asarray([1, 2, 3, -1, 3, 4, 5]), frozenset([2]), masks)
    # 2 ends the request: nothing follows it; node 3 is no proposal.
    assert _sets(masks) == [{2, 3}, everything, {4}, everything, everything, {6}, everything]
    assert matcher.said == [1]


def test_a_matcher_that_refuses_what_it_allowed_is_told():
    class Fickle(Counting):
        def accept(self, token):
            return False

    with pytest.raises(ValueError, match="allows token 2 and does not accept it"):
        fill_masks(Fickle(1), js.chain(1), np.asarray([1, 2]), frozenset(), np.zeros((2, 2), np.uint32))
