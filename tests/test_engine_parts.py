"""The engine's parts alone: pages, packed rows, streams, masks of drafts."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxsample as js
from jaxsample.buckets import smallest
from jaxsample.grammar import fill_masks
from jaxsample.pages import PagePool
from jaxsample.record import columns_of
from jaxsample.staging import pack_rows, unpack_rows
from jaxsample.streams import Outputs

# --- pages -----------------------------------------------------------------------------------------------------------


def test_a_page_is_free_again_when_its_last_holder_gives_it_back():
    pool = PagePool(5)
    first, second = pool.take(3), pool.take(2)
    assert sorted([*first, *second]) == [0, 1, 2, 3, 4] and pool.num_free == 0
    pool.share(first[:2])
    pool.give(first)
    assert pool.num_free == 1 and pool.take(1) == first[2]
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
    outputs, columns = Outputs(4, num_top), columns_of(num_tokens, num_top)
    samples = [js.Sample(0, num_top) for _ in range(4)]
    for slot, sample in enumerate(samples):
        sample.take_seat(outputs, slot)
    expected = [[] for _ in range(4)]
    for _ in range(220):  # more tokens than the columns at the start
        slots = np.sort(generator.choice(4, 3, replace=False)).astype(np.int32)
        record = generator.integers(-(2**31), 2**31, (3, width)).astype(np.int32)
        record[:, 1] = generator.integers(0, num_tokens + 1, 3)
        told = js.unpack(record, features)
        outputs.append(slots, record[:, 1], record, columns)
        for row, slot in enumerate(slots):
            for m in range(told.count[row]):
                entry = [told.tokens[row, m].tobytes()]
                if num_top >= 0:
                    entry += [told.logprobs[row, m].tobytes(), told.ranks[row, m].tobytes()]
                    entry += [told.top_ids[row, m].tobytes(), told.top_logprobs[row, m].tobytes()]
                expected[slot].append(entry)
    for sample, entries in zip(samples, expected, strict=True):
        for _ in range(2):
            tokens = sample.tokens()
            assert len(tokens) == len(entries) > 64
            parts = [getattr(tokens, field.name) for field in dataclasses.fields(tokens)]
            got = [[part[at].tobytes() for part in parts if part is not None] for at in range(len(tokens))]
            assert got == entries
            sample.leave_seat(js.LENGTH)


def test_a_sample_goes_on_in_another_slot_and_is_read_once():
    outputs, columns = Outputs(3, -1), columns_of(1, -1)
    sample = js.Sample(0, -1)
    assert sample.status == js.IDLE and sample.read().token_ids.size == 0
    say = lambda slot, token: outputs.append(
        np.asarray([slot], np.int32), np.asarray([1]), np.asarray([[1, 1, 0, 0, token]], np.int32), columns
    )
    sample.take_seat(outputs, 1)
    say(1, 7)
    assert sample.read().token_ids.tolist() == [7]
    say(1, 8)
    sample.leave_seat(js.IDLE)
    outputs.restart(1, np.zeros((0, 1), np.int32))  # somebody else sits there now
    say(1, 99)
    assert sample.tokens().token_ids.tolist() == [7, 8]
    sample.take_seat(outputs, 2)
    say(2, 9)
    assert sample.read().token_ids.tolist() == [8, 9] and sample.status == js.RUNNING
    sample.leave_seat(js.ERROR, "because")
    assert sample.done and sample.error == "because" and sample.finish_reason == "error"
    assert sample.read().token_ids.size == 0 and sample.tokens().token_ids.tolist() == [7, 8, 9]


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
