"""Admission: what is refused and how it is said."""

import math

import jax
import numpy as np
import pytest

from jaxsample.admission import make_params
from jaxsample.params import Limits, neutral_params

LIMITS = Limits(
    vocab_size=50,
    max_length=64,
    num_logit_bias=4,
    num_bad_words=3,
    bad_word_length=4,
    num_eos=2,
    num_stop_ids=3,
    num_stop_sequences=2,
    stop_sequence_length=5,
    num_scales=2,
    num_logprobs=8,
)
NAN, INF = math.nan, math.inf


# Fault report B69: NaN passes a one-sided comparison.
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"]
)
@pytest.mark.parametrize(
    "value",
    [NAN, INF, -INF, np.float32(NAN), np.float32(INF), np.float64(NAN), np.float64(-INF), 1e39, -1e39],
)
def test_numbers_that_are_not_finite_are_refused_by_name(name, value):
    with pytest.raises(ValueError) as refusal:
        make_params(LIMITS, **{name: value})
    assert name in str(refusal.value)
    assert str(float(value)) in str(refusal.value) or repr(value) in str(refusal.value)
    assert "allowed" in str(refusal.value)


REFUSED = [
    ("temperature", -1.0),
    ("temperature", -1e-6),
    ("temperature", "1"),
    ("temperature", None),
    ("temperature", True),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 3.0),
    ("top_k", NAN),
    ("top_k", None),
    ("top_k", True),
    ("top_k", "5"),
    ("top_p", -0.01),
    ("top_p", 1.0001),
    ("top_p", "0.5"),
    ("top_p", None),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("min_p", [0.5]),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("seed", 1.5),
    ("seed", "7"),
    ("seed", True),
    ("n", 0),
    ("n", -1),
    ("n", 1.5),
    ("n", None),
    ("logprobs", -1),
    ("logprobs", 9),
    ("logprobs", 51),
    ("logprobs", 1.0),
    ("logprobs", True),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 9),
    ("prompt_logprobs", 2.5),
    ("min_tokens", -1),
    ("min_tokens", 2**31),
    ("min_tokens", 1.5),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2.5),
    ("prompt_length", 65),
    ("prompt_length", -1),
    ("ignore_eos", None),
    ("ignore_eos", 1),
    ("logit_bias", {3: NAN}),
    ("logit_bias", {3: INF}),
    ("logit_bias", {3: "1"}),
    ("logit_bias", {3: 1e39}),
    ("logit_bias", [1, 2]),
    ("logit_bias", dict.fromkeys(range(5), 1.0)),
    ("token_temperature_scale", {3: NAN}),
    ("token_temperature_scale", {3: 0.0}),
    ("token_temperature_scale", {3: -1.0}),
    ("token_temperature_scale", {3: INF}),
    ("token_temperature_scale", {1: 2.0, 2: 2.0, 3: 2.0}),
    ("allowed_token_ids", []),
    ("allowed_token_ids", 3),
    ("allowed_token_ids", "3"),
    ("banned_token_ids", range(50)),
    ("banned_token_ids", None),
    ("bad_words_ids", [[]]),
    ("bad_words_ids", [[1, 2, 3, 4, 5]]),
    ("bad_words_ids", [[1]] * 4),
    ("bad_words_ids", [3]),
    ("eos_token_ids", [1, 2, 3]),
    ("eos_token_ids", 2),
    ("stop_token_ids", [1, 2, 3, 4]),
    ("stop_sequences", [[]]),
    ("stop_sequences", [[1, 2, 3, 4, 5, 6]]),
    ("stop_sequences", [[1]] * 3),
    ("stop_sequences", ["ab"]),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[f"{name}={value!r}" for name, value in REFUSED])
def test_values_outside_the_allowed_range_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        make_params(LIMITS, **{name: value})


# Fault report B21: an id at or past V was clamped, dropped or wrapped on the device.
@pytest.mark.parametrize("token", [-1, 50, 51, 63, 64, 2**31, -(2**31), 2**32 + 3, 3.0, "3", None, True])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("logit_bias", lambda token: {7: 1.0, token: 5.0}),
        ("token_temperature_scale", lambda token: {token: 2.0}),
        ("allowed_token_ids", lambda token: [3, token]),
        ("banned_token_ids", lambda token: [token]),
        ("stop_token_ids", lambda token: [token]),
        ("eos_token_ids", lambda token: [token]),
        ("bad_words_ids", lambda token: [[3, token]]),
        ("stop_sequences", lambda token: [[token, 3]]),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_name(name, make, token):
    with pytest.raises(ValueError, match=name) as refusal:
        make_params(LIMITS, **{name: make(token)})
    assert repr(token) in str(refusal.value)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(min_tokens=5, max_tokens=4),
        dict(allowed_token_ids=[3, 4], banned_token_ids=[3, 4]),
        dict(allowed_token_ids=[3], logit_bias={3: -INF}),
        dict(allowed_token_ids=[3], bad_words_ids=[[3]]),
        dict(allowed_token_ids=[2], eos_token_ids=[2], min_tokens=1),
        dict(allowed_token_ids=[2, 5], eos_token_ids=[2], stop_token_ids=[5], min_tokens=3),
    ],
)
def test_requests_that_contradict_themselves_are_refused(arguments):
    with pytest.raises(ValueError):
        make_params(LIMITS, **arguments)


def test_a_refused_request_leaves_its_arguments_as_they_were():
    bias, allowed, words = {3: 1.0, 60: 2.0}, [1, 2, 3], [[1, 2], [3]]
    with pytest.raises(ValueError, match="logit_bias"):
        make_params(LIMITS, logit_bias=bias, allowed_token_ids=allowed, bad_words_ids=words)
    assert (bias, allowed, words) == ({3: 1.0, 60: 2.0}, [1, 2, 3], [[1, 2], [3]])


ACCEPTED = [
    ("temperature", 0),
    ("temperature", 0.0),
    ("temperature", 1e-40),
    ("temperature", 100.0),
    ("temperature", np.float32(0.7)),
    ("top_k", -1),
    ("top_k", 0),
    ("top_k", 1),
    ("top_k", 50),
    ("top_k", 51),
    ("top_k", 2**40),
    ("top_k", np.int32(7)),
    ("top_p", 0),
    ("top_p", 0.0),
    ("top_p", 1),
    ("top_p", 1.0),
    ("min_p", 0),
    ("min_p", 1.0),
    ("repetition_penalty", 0.01),
    ("frequency_penalty", -2.0),
    ("presence_penalty", -2.0),
    ("presence_penalty", 5.0),
    ("seed", 0),
    ("seed", -1),
    ("seed", 2**100),
    ("seed", None),
    ("n", 3),
    ("logprobs", None),
    ("logprobs", 0),
    ("logprobs", 8),
    ("prompt_logprobs", 8),
    ("min_tokens", 0),
    ("max_tokens", 1),
    ("prompt_length", 64),
    ("logit_bias", {}),
    ("logit_bias", {0: -INF, 49: 1}),
    ("logit_bias", None),
    ("allowed_token_ids", (0, 49)),
    ("allowed_token_ids", np.array([3, 4])),
    ("banned_token_ids", [0, 49]),
    ("eos_token_ids", [0, 49]),
    ("stop_token_ids", []),
    ("stop_sequences", [[1, 2, 3, 4, 5]]),
    ("bad_words_ids", [[49]]),
]


@pytest.mark.parametrize(("name", "value"), ACCEPTED, ids=[f"{name}={value!r}" for name, value in ACCEPTED])
def test_values_at_the_ends_of_the_range_are_accepted(name, value):
    params, stop = make_params(LIMITS, **{name: value})
    neutral = neutral_params(LIMITS, 3 if name == "n" else 1)
    same_layout = lambda x, y: isinstance(x, np.ndarray) and x.dtype == y.dtype and x.shape == y.shape
    assert jax.tree.all(jax.tree.map(same_layout, (params, stop), neutral))


def test_a_bad_word_of_one_token_is_banned_where_no_history_is_given_too():
    params, _ = make_params(LIMITS, bad_words_ids=[[7], [3, 9]])
    bits = np.unpackbits(params.allowed[0].view(np.uint8), bitorder="little")[: LIMITS.vocab_size]
    assert np.flatnonzero(bits == 0).tolist() == [7]
    assert params.bad_word_lengths[0][:2].tolist() == [1, 2]
