"""Penalties, bad words and bias: against other software and the reference; what counts as history."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxsample import history as history_module
from jaxsample.admission import make_params
from jaxsample.params import Features, Limits, neutral_params, stack_rows
from jaxsample.penalties import bad_word_bans, penalize
from jaxsample.shaping import shape
from tests import batches, mixes, reference

DATA = Path(__file__).parent / "data" / "penalties.npz"
run_shape = jax.jit(shape, static_argnames=("limits", "features"))


def shaped_rows(logits, requests, limits, prompts=None, outputs=None, grammar=None):
    """Shaped logits over the real vocabulary for requests given as keyword arguments."""
    num_rows = len(logits)
    params, stop = stack_rows([make_params(limits, **{"seed": 0, **request}) for request in requests])
    state = batches.history_of(limits, prompts or [[]] * num_rows, outputs or [[]] * num_rows)
    result = run_shape(
        np.asarray(logits),
        params,
        np.zeros(num_rows, np.int32),
        stop=stop,
        history=state,
        allowed=grammar,
        limits=limits,
        features=Features(),
    )
    return np.asarray(result.logits)[:, : limits.vocab_size]


def test_penalties_are_those_of_other_software():
    data = np.load(DATA)
    for group in data["groups"]:
        field = lambda name, group=group: data[f"{group}_{name}"]
        logits = field("logits")
        limits = Limits(vocab_size=logits.shape[1], max_length=128)
        prompts = [row[:n].tolist() for row, n in zip(field("prompt_tokens"), field("prompt_length"))]
        outputs = [row[:n].tolist() for row, n in zip(field("output_tokens"), field("output_length"))]
        params, _ = neutral_params(limits, len(logits))
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
            getattr(params, name)[:] = field(name)
        result = np.asarray(jax.jit(penalize)(logits, params, batches.history_of(limits, prompts, outputs)))
        expected = field("penalized")
        finite = np.isfinite(expected)
        assert (finite == np.isfinite(result)).all()
        assert (result[~finite] == expected[~finite]).all()
        # Theirs multiplies by a rounded 1 / r, ours divides.
        scale = 1 + np.abs(logits) + np.abs(expected)
        assert (np.abs(result[finite] - expected[finite]) <= 1e-6 * scale[finite]).all()
        for b in range(len(logits)):
            numbers = [
                float(field(name)[b])
                for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
            ]
            exact = reference.penalize(logits[b], prompts[b], outputs[b], *numbers)
            there = finite[b]
            assert (np.abs(result[b][there] - exact[there]) <= 2.0**-22 * scale[b][there]).all()


def test_bad_words_ban_what_other_software_bans():
    data = np.load(DATA)
    banned = data["bad_banned"]
    num_rows, num_vocab = banned.shape
    limits = Limits(vocab_size=num_vocab, max_length=32, num_bad_words=5, bad_word_length=4)
    words = [
        [
            data["bad_words"][b, i, : data["bad_word_length"][b, i]].tolist()
            for i in range(data["bad_num_words"][b])
        ]
        for b in range(num_rows)
    ]
    outputs = [data["bad_past_tokens"][b, : data["bad_past_length"][b]].tolist() for b in range(num_rows)]
    params, _ = stack_rows([make_params(limits, bad_words_ids=row, seed=0) for row in words])
    # The prompt does not count: here it ends with what would complete words.
    prompts = [word[:-1] for row in words for word in row[:1]] + [[]] * num_rows
    state = batches.history_of(limits, prompts[:num_rows], outputs)
    ids = np.asarray(jax.jit(bad_word_bans)(params, state))
    assert ids.dtype == np.int32
    assert [set(row[row >= 0].tolist()) for row in ids] == [
        set(np.flatnonzero(row).tolist()) for row in banned
    ]
    shaped = shaped_rows(
        np.zeros((num_rows, num_vocab), np.float32),
        [dict(bad_words_ids=row) for row in words],
        limits,
        None,
        outputs,
    )
    assert ((shaped == -np.inf) == banned).all()


def test_a_bad_word_is_banned_only_right_after_the_rest_of_it():
    limits = Limits(vocab_size=10, max_length=8)
    word = dict(bad_words_ids=[[1, 2, 3]])
    outputs = [[1, 2], [2, 1], [1, 2, 4], [2], [], [1, 1, 2], [4, 1, 2]]
    rows = shaped_rows(np.zeros((7, 10), np.float32), [word] * 7, limits, [[1]] * 7, outputs)
    assert (rows[:, 3] == -np.inf).tolist() == [True, False, False, False, False, True, True]
    assert np.isfinite(np.delete(rows, 3, axis=1)).all()


# Fault report B15: penalties that counted the prompt, or missed it.
def test_repetition_counts_prompt_and_output_and_the_others_the_output_alone():
    limits = Limits(vocab_size=10, max_length=8)
    logits = np.zeros((3, 10), np.float32)
    logits[:, 5], logits[:, 7] = 4, -4
    request = dict(presence_penalty=1, frequency_penalty=1, repetition_penalty=2)
    rows = shaped_rows(logits, [request] * 3, limits, [[5, 5, 7], [], [5]], [[], [5, 5, 7], [5, 7]])
    expected = np.zeros((3, 10))
    expected[0, [5, 7]] = 2, -8
    expected[1, [5, 7]] = 2 - 3, -8 - 2
    expected[2, [5, 7]] = 2 - 2, -8 - 2
    assert (rows == expected).all()


# Fault report B17: several tokens of one step, of which only the last reached the state.
def test_every_token_of_a_step_counts():
    limits = Limits(vocab_size=10, max_length=16)
    request = dict(frequency_penalty=0.5, min_tokens=3, eos_token_ids=[2])
    params, stop = make_params(limits, seed=0, **request)
    state = batches.history_of(limits, [[9]], [[]])
    shaped = lambda state: np.asarray(
        run_shape(
            np.zeros((1, 10), np.float32),
            params,
            np.zeros(1, np.int32),
            stop=stop,
            history=state,
            limits=limits,
            features=Features(),
        ).logits
    )[0, :10]
    assert shaped(state)[2] == -np.inf
    append = jax.jit(history_module.append)
    state = append(state, np.array([[4, 4, 5, 7]], np.int32), np.array([3], np.int32))
    assert shaped(state).tolist() == [0, 0, 0, 0, -1.0, -0.5, 0, 0, 0, 0]
    assert np.asarray(state.num_emitted).tolist() == [3]


@pytest.mark.parametrize("max_length", [8, 254, 255, 2048, 70_000])
def test_counts_do_not_depend_on_the_capacity_and_use_the_narrowest_dtype(max_length):
    # Fault report B20: a whole-history penalty must not depend on the buffer's capacity.
    limits = Limits(vocab_size=10, max_length=max_length)
    state = batches.history_of(limits, [[1, 2]], [[3, 4, 3]])
    expected = np.uint8 if max_length < 255 else np.uint16 if max_length < 65535 else np.int32
    assert state.output_counts.dtype == expected
    params, _ = make_params(limits, repetition_penalty=2.0, frequency_penalty=1.0, seed=0)
    result = np.asarray(penalize(np.full((1, 10), 4, np.float32), params, state))
    assert result.tolist() == [[4, 2, 2, 0, 1, 4, 4, 4, 4, 4]]


def test_a_full_history_counts_to_its_capacity():
    limits = Limits(vocab_size=5, max_length=254)
    state = batches.history_of(limits, [[]], [[3] * 255])
    assert np.asarray(state.output_counts).tolist() == [[0, 0, 0, 255, 0]]


def test_padding_and_placeholder_ids_are_no_history():
    limits = Limits(vocab_size=6, max_length=16)
    prompts = np.array([[1, -1, 7, 6, 2]], np.int32)
    state = history_module.start(limits, prompts, np.array([4], np.int32))  # the 2 lies past the valid part
    state = history_module.append(state, np.array([[-1, 3, 6, 5]], np.int32), np.array([3], np.int32))
    params, _ = make_params(limits, repetition_penalty=2.0, presence_penalty=1.0, seed=0)
    result = np.asarray(penalize(np.full((1, 6), 4, np.float32), params, state))
    assert result.tolist() == [[4, 2, 4, 1, 4, 4]]


def test_appending_in_pieces_equals_appending_at_once():
    limits = Limits(vocab_size=9, max_length=31)
    generator = np.random.default_rng(1)
    prompts = [mixes.tokens(generator, 9, 6) for _ in range(5)]
    outputs = [generator.integers(0, 9, 12).tolist() for _ in range(5)]
    whole = batches.history_of(limits, prompts, outputs)
    pieces = history_module.start(limits, *batches.ragged(prompts))
    for start in range(0, 12, 4):
        block = np.array(outputs, np.int32)[:, start : start + 4]
        for count in (1, 3):
            pieces = history_module.append(
                pieces,
                np.pad(block[:, :count], ((0, 0), (0, 4 - count)), constant_values=8),
                np.full(5, count, np.int32),
            )
            block = block[:, count:]
    assert jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), whole, pieces))
    unchanged = history_module.append(whole, np.full((5, 2), 3, np.int32), np.zeros(5, np.int32))
    assert jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), whole, unchanged))


def test_neutral_penalties_leave_logits_bit_unchanged_whatever_the_history():
    limits = Limits(vocab_size=40, max_length=64)
    generator = np.random.default_rng(2)
    logits = mixes.rows(generator, 11, 40)
    logits[np.abs(logits) < np.finfo(np.float32).tiny] = 0  # as they leave the door of shaping
    state = batches.history_of(
        limits, [mixes.tokens(generator, 40, 20) for _ in range(11)], [[1, 2, 3, 3]] * 11
    )
    params, _ = neutral_params(limits, 11)
    result = np.asarray(jax.jit(penalize)(logits, params, state))
    assert result.tobytes() == logits.tobytes()


def test_bias_is_added_before_penalties_and_minus_infinity_bans():
    limits = Limits(vocab_size=6, max_length=8)
    logits = np.array([[1, 1, -3, 1, 0, 0]], np.float32)
    request = dict(logit_bias={0: 2.0, 2: 5.0, 3: -np.inf}, repetition_penalty=2.0)
    # Id 2 is -3 + 5 = 2 when the penalty comes, hence divided.
    assert shaped_rows(logits, [request], limits, [[0, 2]]).tolist() == [[1.5, 1, 1, -np.inf, 0, 0]]
