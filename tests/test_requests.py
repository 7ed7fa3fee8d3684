"""Admission, finishing and advancing of the whole batch, against plain Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsample as js

V = 12
LIMITS = js.Limits(V, max_length=20)
_admit, _finish = (jax.jit(run, static_argnames="limits") for run in (js.admit, js.finish))
_advance, _empty = jax.jit(js.advance), jax.jit(js.empty_requests, static_argnums=(0, 1))


def _batch(*rows, prompts=None):
    """Requests admitted to slots 0, 1, ... with the given make_params keywords."""
    prompts = prompts or [[1, 2, 3]] * len(rows)
    width = max(map(len, prompts))
    padded = np.full((len(rows), width), js.PAD, np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    params, stop = js.stack_rows([js.make_params(LIMITS, **{"seed": 0, **row}) for row in rows])
    slots = np.arange(len(rows), dtype=np.int32)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    empty = _empty(LIMITS, len(rows))
    return _admit(empty, slots, params, stop, padded, lengths, limits=LIMITS)


def _verdict(*rows):
    width = max(map(len, rows))
    tokens = np.full((len(rows), width), js.PAD, np.int32)
    for row, out in enumerate(rows):
        tokens[row, : len(out)] = out
    count = np.asarray([len(out) for out in rows], np.int32)
    path = np.tile(np.arange(width, dtype=np.int32)[None], (len(rows), 1))
    accepted = np.arange(1, width)[None] < count[:, None]
    return jax.tree.map(jnp.asarray, js.Verdict(tokens, count, path, accepted))


def _step(requests, *rows):
    verdict, status = _finish(requests, _verdict(*rows), limits=LIMITS)
    return _advance(requests, verdict, status), verdict


def _output(requests, row):
    start = int(requests.history.num_prompt[row])
    return np.asarray(requests.history.tokens)[
        row, start : start + int(requests.history.num_emitted[row])
    ].tolist()


def test_admission_sets_root_length_and_history():
    requests = _batch({}, {}, prompts=[[4, 5, 6], [7]])
    np.testing.assert_array_equal(np.asarray(requests.root), [6, 7])
    np.testing.assert_array_equal(np.asarray(requests.length), [2, 0])
    np.testing.assert_array_equal(np.asarray(requests.status), [js.RUNNING] * 2)
    np.testing.assert_array_equal(np.asarray(requests.history.tokens)[0, :4], [4, 5, 6, js.PAD])


def test_eos_in_the_middle_of_a_block_drops_what_follows():
    # B47: [5, EOS, 7, 8] commits [5, EOS] in tokens, cache rows and counts alike.
    requests = _batch({"eos_token_ids": [2]})
    requests, verdict = _step(requests, [5, 2, 7, 8])
    assert _output(requests, 0) == [5, 2]
    assert int(verdict.count[0]) == 2
    np.testing.assert_array_equal(np.asarray(verdict.tokens), [[5, 2, js.PAD, js.PAD]])
    np.testing.assert_array_equal(np.asarray(verdict.accepted), [[True, False, False]])
    assert int(requests.status[0]) == js.STOP_EOS
    assert int(requests.length[0]) == 2 + 2
    assert js.finish_reason(int(requests.status[0])) == "stop"


def test_ignore_eos_lifts_eos_only():
    # B51
    requests = _batch({"eos_token_ids": [2], "stop_token_ids": [5], "ignore_eos": True})
    requests, _ = _step(requests, [7, 2, 7, 5, 7])
    assert _output(requests, 0) == [7, 2, 7, 5]
    assert int(requests.status[0]) == js.STOP_TOKEN


def test_a_reused_slot_starts_clean():
    # B61: A ignores EOS, B in the same slot stops at it at once; counts and masks of A are gone.
    requests = _batch({"eos_token_ids": [2], "ignore_eos": True, "frequency_penalty": 1.0})
    requests, _ = _step(requests, [2, 4])
    params, stop = js.make_params(LIMITS, eos_token_ids=[2], seed=3)
    slot = np.zeros(1, np.int32)
    requests = js.release(requests, slot)
    assert int(requests.status[0]) == js.IDLE
    prompt, length = np.array([[9, 9]], np.int32), np.array([2], np.int32)
    again = _admit(requests, slot, params, stop, prompt, length, limits=LIMITS)
    empty = _empty(LIMITS, 1)
    fresh = _admit(empty, slot, params, stop, prompt, length, limits=LIMITS)
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(fresh), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    again, _ = _step(again, [2])
    assert int(again.status[0]) == js.STOP_EOS


def test_max_tokens_is_counted_by_token():
    requests = _batch({"max_tokens": 3})
    requests, _ = _step(requests, [4, 5])
    assert int(requests.status[0]) == js.RUNNING
    requests, _ = _step(requests, [6, 7])
    assert _output(requests, 0) == [4, 5, 6]
    assert int(requests.status[0]) == js.LENGTH


def test_a_full_cache_is_length():
    # S slots hold S + 1 tokens: a prompt of 3 leaves room for S - 2.
    requests = _batch({})
    for _ in range(LIMITS.max_length - 3):
        requests, _ = _step(requests, [4])
    assert int(requests.status[0]) == js.RUNNING
    requests, verdict = _step(requests, [4, 5])
    assert int(verdict.count[0]) == 1
    assert int(requests.status[0]) == js.LENGTH
    assert int(requests.length[0]) == LIMITS.max_length
    assert int(requests.history.num_prompt[0] + requests.history.num_emitted[0]) == LIMITS.max_length + 1


def test_at_one_position_eos_goes_before_stop_ids_sequences_and_length():
    ends = {
        "eos_token_ids": [2],
        "stop_token_ids": [5],
        "stop_sequences": [[4, 2], [5], [6]],
        "max_tokens": 2,
    }
    requests = _batch(ends, ends, ends, ends)
    requests, _ = _step(requests, [4, 2], [4, 5], [4, 6], [4, 7])
    np.testing.assert_array_equal(
        np.asarray(requests.status), [js.STOP_EOS, js.STOP_TOKEN, js.STOP_SEQUENCE, js.LENGTH]
    )


def test_the_first_position_that_ends_wins():
    requests = _batch({"eos_token_ids": [2], "stop_sequences": [[6, 7]]})
    requests, _ = _step(requests, [6, 7, 2])
    assert _output(requests, 0) == [6, 7]
    assert int(requests.status[0]) == js.STOP_SEQUENCE


def test_stop_sequences_match_across_steps_but_not_into_the_prompt():
    rule = {"stop_sequences": [[3, 4], [7, 8, 9]]}
    requests = _batch(rule)  # the prompt ends in 3
    requests, _ = _step(requests, [4, 7])
    assert int(requests.status[0]) == js.RUNNING
    requests, _ = _step(requests, [8])
    assert int(requests.status[0]) == js.RUNNING
    requests, _ = _step(requests, [9, 10])
    assert _output(requests, 0) == [4, 7, 8, 9]
    assert int(requests.status[0]) == js.STOP_SEQUENCE


def test_stop_sequences_do_not_end_before_min_tokens():
    requests = _batch({"stop_sequences": [[4]], "min_tokens": 3})
    requests, _ = _step(requests, [4, 4])
    assert int(requests.status[0]) == js.RUNNING
    requests, _ = _step(requests, [4])
    assert int(requests.status[0]) == js.STOP_SEQUENCE


def test_a_running_row_without_a_token_is_an_error_and_touches_no_neighbour():
    requests = _batch({}, {})
    after, verdict = _step(requests, [], [5])
    np.testing.assert_array_equal(np.asarray(after.status), [js.ERROR, js.RUNNING])
    np.testing.assert_array_equal(np.asarray(verdict.count), [0, 1])
    assert _output(after, 1) == [5]
    assert js.finish_reason(js.ERROR) == "error"


def test_rows_that_do_not_run_change_nothing():
    requests = _batch({}, {}, {})
    requests = js.cancel(js.release(requests, np.array([0], np.int32)), np.array([1, 0, -1, 7], np.int32))
    np.testing.assert_array_equal(np.asarray(requests.status), [js.IDLE, js.CANCELLED, js.RUNNING])
    after, verdict = _step(requests, [4], [5], [6])
    np.testing.assert_array_equal(np.asarray(verdict.count), [0, 0, 1])
    for before, now in zip(jax.tree.leaves(requests), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(np.asarray(before)[:2], np.asarray(now)[:2])


def test_padding_slots_are_dropped_and_bad_prompt_lengths_end_in_error():
    params, stop = js.stack_rows([js.make_params(LIMITS, seed=0)] * 4)
    prompts = np.zeros((4, LIMITS.max_length + 1), np.int32)
    lengths = np.array([1, 0, LIMITS.max_length + 1, 1], np.int32)
    slots = np.array([-1, 0, 1, 9], np.int32)
    requests = _admit(_empty(LIMITS, 3), slots, params, stop, prompts, lengths, limits=LIMITS)
    np.testing.assert_array_equal(np.asarray(requests.status), [js.ERROR, js.ERROR, js.IDLE])


def test_random_runs_equal_a_python_loop_over_requests():
    rng = np.random.default_rng(5)
    rules = [
        {
            "eos_token_ids": [0],
            "stop_token_ids": [1] if row % 3 == 0 else [],
            "stop_sequences": [[2], [4, 4, 5]] if row % 2 else [[6, 7]],
            "ignore_eos": row % 5 == 0,
            "min_tokens": int(row % 4) if row % 2 else 0,
            "max_tokens": int(rng.integers(4, 12)),
        }
        for row in range(60)
    ]
    requests = _batch(*rules)
    step = jax.jit(
        lambda r, v: (lambda cut, status: js.advance(r, cut, status))(*js.finish(r, v, limits=LIMITS))
    )
    outputs, statuses = [[] for _ in rules], [js.RUNNING] * len(rules)
    for _ in range(8):
        blocks = [rng.integers(0, V, rng.integers(1, 5)).tolist() for _ in rules]
        blocks = [block + [js.PAD] * (4 - len(block)) for block in blocks]
        verdict = _verdict(*[[t for t in block if t >= 0] for block in blocks])
        width = 4 - verdict.tokens.shape[1]
        verdict = dataclasses.replace(
            verdict,
            tokens=jnp.pad(verdict.tokens, ((0, 0), (0, width)), constant_values=js.PAD),
            path=jnp.pad(verdict.path, ((0, 0), (0, width))),
            accepted=jnp.pad(verdict.accepted, ((0, 0), (0, width))),
        )
        requests = step(requests, verdict)
        for row, (rule, block) in enumerate(zip(rules, blocks, strict=True)):
            for token in block:
                if token < 0 or statuses[row] != js.RUNNING:
                    break
                outputs[row].append(token)
                statuses[row] = _status_of(outputs[row], rule)
    np.testing.assert_array_equal(np.asarray(requests.status), statuses)
    assert [_output(requests, row) for row in range(len(rules))] == outputs
    counts = np.asarray(requests.history.output_counts)
    for row, out in enumerate(outputs):
        np.testing.assert_array_equal(counts[row], np.bincount(out, minlength=V))
    assert set(statuses) >= {js.STOP_EOS, js.STOP_TOKEN, js.STOP_SEQUENCE, js.LENGTH}


def _status_of(out, rule):
    if out[-1] in rule["eos_token_ids"] and not rule["ignore_eos"]:
        return js.STOP_EOS
    if out[-1] in rule["stop_token_ids"]:
        return js.STOP_TOKEN
    if len(out) >= rule["min_tokens"] and any(out[-len(s) :] == s for s in rule["stop_sequences"]):
        return js.STOP_SEQUENCE
    return js.LENGTH if len(out) >= rule["max_tokens"] else js.RUNNING


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (js.IDLE, None),
        (js.RUNNING, None),
        (js.STOP_SEQUENCE, "stop"),
        (js.LENGTH, "length"),
        (js.CANCELLED, "cancelled"),
    ],
)
def test_statuses_have_texts(status, text):
    assert js.finish_reason(status) == text
