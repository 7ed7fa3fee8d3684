"""Admission of guidance: what is refused and how it says so, what is neutral, what rows become. Compiles nothing."""

import dataclasses
import math

import numpy as np
import pytest

import jaxsample as js
from jaxsample import guidance_rows as rows

LIMITS = js.Limits(vocab_size=100, max_length=8, num_guided=8)


def params(**words):
    return js.make_params(LIMITS, **dict(top_k=5, seed=1) | words)[0]


def make(params_=None, **words):
    return js.make_guidance(LIMITS, params() if params_ is None else params_, **words)


def same(one, other):
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name))
        for field in dataclasses.fields(one)
    )


NUMBERS = ("scale", "gamma", "value_min", "entropy_threshold", "target_value", "target_length")
REFUSED = [
    *(
        (name, {name: value})
        for name in NUMBERS
        for value in (math.nan, math.inf, -math.inf, "1", True, [1.0])
    ),
    *(("gamma", dict(gamma=value)) for value in (0, 1, -0.5, 1.5, np.float32(1))),
    *(("value_min", dict(value_min=value)) for value in (-0.1, 1.1)),
    ("entropy_threshold", dict(entropy_threshold=-1e-9)),
    *(("target_value", dict(target_value=value)) for value in (-0.1, 1.5)),
    ("target_length", dict(target_length=-1)),
    ("scale", dict(scale=1e39)),
    ("mode", dict(mode="centred_exp")),
    ("mode", dict(mode=2)),
    ("constraint", dict(target_length=5, constraint="gt")),
    ("length_mode", dict(target_length=5, length_mode="budget")),
    ("target_value", dict(target_value=0.5, target_length=5)),
    ("mode", dict(target_value=0.5, mode="mul")),
    ("scale", dict(target_length=5, scale=2)),
    ("constraint", dict(constraint="eq")),
    ("length_mode", dict(target_value=0.5, length_mode="total")),
    ("length_mode", dict(mode="exp", scale=2, length_mode="remaining")),
]


@pytest.mark.parametrize(("name", "words"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name_value_and_range(name, words):
    with pytest.raises(ValueError, match=rf"^{name} is .*allowed"):
        make(**words)


def test_invalid_values_are_refused_in_neutral_requests_too():
    with pytest.raises(ValueError, match="gamma is 2"):
        make(mode="mul", scale=1, gamma=2)


@pytest.mark.parametrize("top_k", [0, -1, 9, 100])
def test_a_guided_request_needs_a_top_k_of_at_most_the_candidates_there_are(top_k):
    with pytest.raises(ValueError, match=r"top_k is .* allowed .* in \[1, 8\]"):
        make(params(top_k=top_k), mode="centered_exp", scale=-5)
    make(params(top_k=top_k), mode="centered_exp", scale=0)  # not guided, so not limited
    assert not js.needs_guidance(make(params(top_k=top_k)))


NEUTRAL = [
    {},
    dict(gamma=0.9998, value_min=0.5, entropy_threshold=1.0),
    *(
        dict(mode=mode, scale=scale)
        for mode in ("centered_exp", "value_bias")
        for scale in (0, -0.0, 1e-12, -1e-12)
    ),
    *(
        dict(mode=mode, scale=scale)
        for mode in ("mul", "linear", "exp", "length_mul")
        for scale in (1, 1 + 1e-13)
    ),
    dict(mode="mul", scale=0),
    dict(mode="mul", scale=-3),
    dict(scale=1),
]


@pytest.mark.parametrize("words", NEUTRAL)
def test_neutral_settings_make_neutral_rows(words):
    made = make(**words)
    assert same(made, js.neutral_guidance(1)) and not js.needs_guidance(made)


GUIDED = [
    (dict(scale=0.5), rows.MUL),
    (dict(mode="centered_exp", scale=1), rows.CENTERED_EXP),
    (dict(mode="centered_exp", scale=2e-12), rows.CENTERED_EXP),
    (dict(mode="value_bias", scale=1000), rows.VALUE_BIAS),
    (dict(mode="linear", scale=0), rows.LINEAR),
    (dict(mode="exp", scale=-1), rows.EXP),
    (dict(mode="length_mul", scale=0), rows.LENGTH_MUL),
    (dict(mode="scores"), rows.SCORES),
    (dict(target_value=0.0), rows.EQ),
    (dict(target_length=0, constraint="ge"), rows.GE),
    (dict(target_length=10, constraint="le"), rows.LE),
    (dict(target_value=1, constraint="eq_soft"), rows.EQ_SOFT),
]


@pytest.mark.parametrize(("words", "mode"), GUIDED)
def test_all_other_settings_are_guided(words, mode):
    made = make(**words)
    assert js.needs_guidance(made) and made.mode.tolist() == [mode]


def test_greedy_requests_are_not_guided():
    for temperature in (0, 1e-40):
        greedy = params(temperature=temperature, top_k=0)
        assert not js.needs_guidance(make(greedy, target_length=100, constraint="eq"))


def test_rows_hold_what_was_said():
    made = make(
        target_length=300, length_mode="remaining", constraint="ge", gamma=0.9998, entropy_threshold=0.25
    )
    assert made.target_length[0] == 300 and not made.is_total[0] and made.entropy_threshold[0] == 0.25
    assert abs(made.log_gamma[0] / math.log(0.9998) - 1) <= 2**-24  # gamma itself would be 30,000 ulp off
    assert make(target_length=300).is_total[0]
    made = make(mode="exp", scale=-1000, value_min=0.5)
    assert made.scale[0] == -1000 and made.value_min[0] == 0.5 and made.entropy_threshold[0] == -1


def test_a_target_value_is_held_as_the_length_it_stands_for():
    for gamma in (0.5, 0.997, 0.9998):
        for value in (0.0, 1e-9, 0.3, 0.999999):
            made = make(target_value=value, gamma=gamma)
            length = float(made.target_length[0])
            assert abs(-math.expm1(length * math.log(gamma)) - value) <= 2**-23 * max(value, (1 - value) * 20)
    assert make(target_value=1.0).target_length[0] == np.finfo(np.float32).max


def test_children_share_their_requests_guidance():
    made = make(params(n=3), mode="mul", scale=0.5)
    assert len(made.mode) == 3 and same(made, js.stack_rows([make(mode="mul", scale=0.5)] * 3))
    assert same(js.neutral_guidance(3), make(params(n=3)))
