"""Faults that happened in public projects, as small inputs with the right result; ids are those of the reports.

Only what one call of `sample` or of admission shows: finishing, verification and caches have files of their own,
and so have the kinds that need more than one input (filters, penalties, logprobs, rows, admission).
"""

import math

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxsample.admission import make_params
from tests import batches
from tests.batches import EIGHT, PROCESSED, RAW, sample_eight


def draws(logits, request, num_draws, dtype=np.float32, **rest):
    """Tokens of one row under the seeds 0 ... num_draws - 1."""
    tokens = []
    rest = {name: [value] * 3 for name, value in rest.items()}
    for seed in range(0, num_draws, 3):
        requests = [{**request, "seed": seed + i} for i in range(3)]
        tokens += sample_eight([np.asarray(logits, dtype)] * 3, requests, **rest).tokens.tolist()
    return tokens[:num_draws]


def probabilities(logits, request):
    """Of the ids 0 ... 5 of one row, as processed logprobs tell them."""
    result = sample_eight([logits], [dict(request, logprobs=6, seed=0)])
    probs = np.zeros(8)
    there = result.logprobs.top[0] > -np.inf
    probs[result.logprobs.top_ids[0][there]] = np.exp(result.logprobs.top[0][there])
    return probs


# B01
@pytest.mark.parametrize("top_k", [0, -1, 8, 9, 2**30])
def test_top_k_off_removes_nothing(top_k):
    probs = probabilities([2, 1.9, 0], dict(top_k=top_k))
    np.testing.assert_allclose(probs[:3], [0.4902, 0.4435, 0.0663], atol=1e-4)
    assert set(draws([2, 1.9, 0], dict(top_k=top_k), 90)) == {0, 1, 2}


# B03
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_top_k_of_one_is_greedy_with_ties_to_the_lowest_id(dtype):
    assert set(draws([21.375, 21.375, 0], dict(top_k=1), 99, dtype)) == {0}
    assert set(draws([0, 21.375, 21.375], dict(top_k=1), 30, dtype)) == {1}
    assert set(draws([21.375, 21.375, 0], dict(temperature=0.0), 30, dtype)) == {0}


# B04
def test_the_token_that_makes_the_sum_equal_to_top_p_is_the_last():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    assert np.flatnonzero(probabilities(logits, dict(top_p=0.75))).tolist() == [0, 1]
    assert np.flatnonzero(probabilities(logits, dict(top_p=1.0))).tolist() == [0, 1, 2, 3]


# B07
def test_temperature_comes_before_the_filters_and_min_p_is_about_probabilities():
    scaled = probabilities([2, 1, 0], dict(temperature=2.0, top_p=0.6))
    assert np.flatnonzero(scaled).tolist() == [0, 1]
    np.testing.assert_allclose(scaled[0], 0.5065 / 0.8136, atol=1e-3)
    assert np.flatnonzero(probabilities([-1, -1.5, -4], dict(min_p=0.5))).tolist() == [0, 1]
    assert set(draws([-1, -1.5, -4], dict(min_p=0.5), 90)) == {0, 1}


# B09
@pytest.mark.parametrize("temperature", [1e-5, 2.0**-126])
def test_a_tiny_temperature_gives_the_largest_logit(temperature):
    result = sample_eight(
        [np.array(row, np.float16) for row in ([2.875, 2.955, 11.0625, -2.447], [2, 4, 3])],
        [dict(temperature=temperature, seed=1)] * 2,
    )
    assert result.tokens.tolist() == [2, 1]
    assert result.valid.all()


# B11
@pytest.mark.parametrize("bad", [[np.nan] * 8, [0, np.nan, *[0] * 6], [0, 0, np.inf, *[0] * 5]])
def test_a_row_of_nan_or_infinity_gives_no_token_and_touches_no_neighbour(bad):
    good = np.linspace(-1, 1, 8)
    requests = [dict(seed=seed, logprobs=4) for seed in range(3)]
    spoiled = sample_eight([good, bad, good], requests)
    clean = sample_eight([good, good, good], requests)
    assert spoiled.valid.tolist() == [True, False, True]
    assert spoiled.tokens[1] == -1
    for row in (0, 2):
        take = lambda leaf, row=row: leaf[row].tobytes()
        assert jax.tree.map(take, spoiled) == jax.tree.map(take, clean)


# B21
@pytest.mark.parametrize("bias", [{12: 5.0, 3: 1.0}, {-1: 5.0}, {8: 5.0}])
def test_a_bias_outside_the_vocabulary_is_refused(bias):
    with pytest.raises(ValueError, match="logit_bias"):
        make_params(EIGHT, logit_bias=bias)


# B21, had it reached the device
@pytest.mark.parametrize("token", [12, 8, 127, 128, 2**31 - 1])
def test_a_bias_past_the_vocabulary_reaches_no_token(token):
    def spoil(params):
        params.bias_ids[:, 1], params.bias_values[:, 1] = token, 50.0

    rows, requests = (
        [np.zeros(8)] * 3,
        [dict(seed=seed, logprobs=6, logit_bias={3: 1.0}) for seed in range(3)],
    )
    plain, biased = sample_eight(rows, requests), sample_eight(rows, requests, edit=spoil)
    assert jax.tree.map(lambda x: x.tobytes(), plain) == jax.tree.map(lambda x: x.tobytes(), biased)


# B23
def test_a_finished_grammar_ends_the_request_before_min_tokens():
    request = dict(temperature=0.0, eos_token_ids=[2], min_tokens=64)
    result = sample_eight([[0] * 6], [request], outputs=[[1] * 10], grammars=[[2]])
    assert (result.tokens.tolist(), result.valid.tolist()) == ([2], [True])


# B25
def test_a_row_without_a_grammar_is_free():
    logits = np.linspace(-1, 1, 8)
    requests = [dict(seed=1, logprobs=4), dict(seed=2)]
    bound = sample_eight([logits, logits], requests, grammars=[None, [4]])
    alone = sample_eight([logits], requests[:1])
    assert bound.tokens[1] == 4
    take = lambda leaf: leaf[0].tobytes()
    assert jax.tree.map(take, bound) == jax.tree.map(take, alone)


# B27: the padding columns of `sample_eight` hold 99
def test_padding_columns_have_no_mass():
    logits = np.linspace(0, 1, 8)
    tokens = draws(logits, dict(top_p=0.9), 90)
    assert set(tokens) <= set(range(8))
    assert len(set(tokens)) > 4
    probs = probabilities(logits[:6], dict(top_p=0.99))
    np.testing.assert_allclose(probs[:6], np.exp(logits[:6]) / np.exp(logits[:6]).sum(), rtol=1e-5)


# B29
def test_every_row_that_may_emit_obeys_its_own_mask():
    # Three rows of one request: a draft, a placeholder, and the row that is sampled next.
    logits = [np.eye(8)[7] * 9] * 3
    result = sample_eight(
        logits, [dict(temperature=0.0)] * 3, outputs=[[], [7], [7]], grammars=[None, None, [4]]
    )
    assert result.tokens.tolist() == [7, 7, 4]
    sampled = sample_eight(logits, [dict(seed=5)] * 3, grammars=[[4], [4], [4]])
    assert sampled.tokens.tolist() == [4, 4, 4]


def stream(seed_rows, num_tokens, num_rows=3, row=0):
    """Tokens of one request at positions 0, 1, ... in a row of a batch of equal logits over 333 tokens."""
    tokens = []
    for position in range(num_tokens):
        requests = [dict(seed=seed) for seed in seed_rows]
        result = batches.sample_rows(
            np.zeros((num_rows, batches.WIDTH), np.float32),
            requests,
            batches.LIMITS,
            PROCESSED,
            position=np.full(num_rows, position),
        )
        tokens.append(int(result.tokens[row]))
    return tokens


# B31
def test_a_seed_of_zero_is_a_seed():
    first, second = stream([0, 1, 2], 8), stream([0, 5, 0], 8)
    assert first == second == stream([9, 9, 0], 8, row=2)
    assert len(set(first)) > 4
    assert stream([1, 0, 0], 8) != first


# B33
def test_children_of_a_seeded_request_differ_and_repeat():
    params, _ = make_params(batches.LIMITS, seed=42, n=2)
    seeds = [low | high << 32 for low, high in params.seed.tolist()]
    first = [stream([*seeds, 0], 8, row=row) for row in (0, 1)]
    assert first[0] != first[1]
    assert first[0] == stream([42, 0, 0], 8)
    again, _ = make_params(batches.LIMITS, seed=42, n=2)
    assert again.seed.tolist() == params.seed.tolist()


# B35
def test_a_seeded_stream_does_not_depend_on_what_ran_before_or_beside_it():
    alone = stream([7, 1, 2], 6)
    for _ in range(10):
        stream([3, 4, 5], 1)
    assert stream([7, 8, 9], 6) == alone
    assert stream([*range(100, 107), 7], 6, num_rows=8, row=7) == alone


# B37
def test_processed_values_are_the_distribution_drawn_from():
    result = sample_eight([np.log([0.6, 0.3, 0.1])], [dict(top_k=2, top_p=0.8, logprobs=3, seed=0)])
    np.testing.assert_allclose(np.exp(result.logprobs.top[0, :3]), [2 / 3, 1 / 3, 0], atol=1e-6)
    assert result.logprobs.top_ids[0, :2].tolist() == [0, 1]


# B39
def test_ranks_are_one_two_three_and_a_sampled_third_is_three():
    result = sample_eight([[3, 2, 1]], [dict(logprobs=3, seed=0)], RAW)
    assert result.logprobs.top_ids[0, :3].tolist() == [0, 1, 2]
    third = sample_eight([[3, 2, 1]], [dict(logprobs=1, seed=0)], RAW, grammars=[[2]])
    assert (third.tokens[0], third.logprobs.rank[0]) == (2, 3)


# B41
def test_raw_values_are_the_models_whatever_the_parameters():
    request = dict(temperature=0.5, top_k=1, logprobs=1, seed=0)
    assert sample_eight([[2, 1, 0]], [request], RAW).logprobs.token[0] == pytest.approx(-0.4076, abs=1e-4)
    assert sample_eight([[2, 1, 0]], [request]).logprobs.token[0] == 0
    unfiltered = sample_eight([[2, 1, 0]], [dict(request, top_k=0)], grammars=[[0, 1, 2]])
    assert unfiltered.logprobs.top[0, 0] == pytest.approx(-0.1429, abs=1e-4)


# B59
def test_padding_rows_anywhere_leave_live_rows_their_own_parameters():
    # Two blocks of four slots with three and two live rows, and garbage in the parameters of the others.
    live = [0, 1, 2, 4, 5]
    requests = [dict(temperature=0.5, seed=row, logprobs=3) if row in live else {} for row in range(8)]
    logits = np.full((8, batches.WIDTH), -np.inf, np.float32)
    logits[:, :3] = 2, 1, 0
    for temperature in (1.0, -1.0, 0.0, np.nan):
        garbage = lambda params, temperature=temperature: params.temperature.__setitem__(
            [3, 6, 7], temperature
        )
        result = batches.sample_rows(logits, requests, batches.LIMITS, PROCESSED, edit=garbage)
        assert (result.logprobs.top_ids[live, :3] == [0, 1, 2]).all()
        np.testing.assert_allclose(
            np.exp(result.logprobs.top[live, :3]), [[0.8668, 0.1173, 0.0159]] * 5, atol=1e-4
        )


# B65
def test_a_forced_token_has_the_whole_mass_once_masks_have_acted():
    result = sample_eight([[0, -2.13, 1]], [dict(logprobs=1, seed=0)], grammars=[[1]])
    assert (result.tokens[0], result.logprobs.token[0]) == (1, 0)


# B67
@pytest.mark.parametrize("constant", [0, 10, -12, 1000])
def test_a_constant_added_to_a_row_changes_no_kept_set(constant):
    logits = np.array([3.0, 2, 1, 0]) + constant
    assert np.flatnonzero(probabilities(logits, dict(top_p=0.5))).tolist() == [0]
    assert np.flatnonzero(probabilities(logits, dict(top_p=0.7))).tolist() == [0, 1]
    assert np.flatnonzero(probabilities(logits, dict(min_p=0.1))).tolist() == [0, 1, 2]


# B69
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        make_params(EIGHT, **{name: value})


# B71
def test_top_p_of_zero_keeps_the_top_token_alone():
    assert set(draws([1, 1.5, 1.4], dict(top_p=0.0), 60)) == {1}
    assert set(draws([1, 1.5, 1.4], dict(top_p=0.0, temperature=0.0), 3)) == {1}
    assert set(draws([1.5, 1.5, 1.4], dict(top_p=0.0), 30)) == {0}
