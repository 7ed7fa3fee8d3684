"""Rows of parameters: what an accepted request becomes, batches of rows, and the features they need."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from jaxsample import rng
from jaxsample.admission import make_params
from jaxsample.params import PAD, Features, Limits, neutral_params, required_features, set_rows, stack_rows

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


def rows_equal(first, second):
    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), first, second))


def bits_of(words, num_bits):
    return np.unpackbits(np.asarray(words).view(np.uint8), bitorder="little")[:num_bits].astype(bool)


def test_a_request_that_asks_for_nothing_is_the_neutral_row():
    assert rows_equal(make_params(LIMITS, seed=0), neutral_params(LIMITS, 1))


def test_the_fields_hold_what_was_asked():
    params, stop = make_params(
        LIMITS,
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=-0.4,
        logit_bias={3: 1.5, 9: -INF},
        allowed_token_ids=[1, 3, 31, 32, 49],
        banned_token_ids=[31],
        bad_words_ids=[[1, 2], [4]],
        seed=(5 << 32) + 6,
        logprobs=2,
        min_tokens=2,
        max_tokens=9,
        eos_token_ids=[2],
        stop_token_ids=[7, 8],
        stop_sequences=[[1, 2, 3]],
        ignore_eos=True,
        token_temperature_scale={11: 1.3},
    )
    for name, value in dict(
        temperature=0.5,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=-0.4,
    ).items():
        field = getattr(params, name)
        assert field.dtype == np.float32
        assert field.tolist() == [np.float32(value)], name
    assert params.top_k.tolist() == [7]
    assert params.seed.dtype == np.uint32
    assert params.seed.tolist() == [[6, 5]]
    assert params.num_logprobs.tolist() == [2]
    assert params.bias_ids.tolist() == [[3, 9, PAD, PAD]]
    assert params.bias_values[0, :2].tolist() == [1.5, -INF]
    assert np.flatnonzero(bits_of(params.allowed[0], 50)).tolist() == [1, 3, 32, 49]
    assert params.bad_words.tolist() == [[[1, 2, PAD, PAD], [4, PAD, PAD, PAD], [PAD] * 4]]
    assert params.bad_word_lengths.tolist() == [[2, 1, 0]]
    assert params.scale_ids.tolist() == [[11, PAD]]
    assert params.scale_values[0, 0] == np.float32(1.3)
    assert stop.eos_ids.tolist() == [[2, PAD]]
    assert stop.stop_ids.tolist() == [[7, 8, PAD]]
    assert stop.stop_sequences.tolist() == [[[1, 2, 3, PAD, PAD], [PAD] * 5]]
    assert stop.stop_sequence_lengths.tolist() == [[3, 0]]
    assert stop.ignore_eos.tolist() == [True]
    assert stop.min_tokens.tolist() == [2]
    assert stop.max_tokens.tolist() == [9]


# Fault report B31: falsy zeros taken for "absent".
def test_zero_is_a_value_and_only_none_is_absent():
    params, _ = make_params(LIMITS, temperature=0, top_p=0, logprobs=0, seed=0, min_tokens=0)
    assert params.temperature[0] == 0
    assert params.top_p[0] == 0
    assert params.num_logprobs[0] == 0
    assert params.seed.tolist() == [[0, 0]]
    again, _ = make_params(LIMITS, seed=0)
    assert again.seed.tolist() == [[0, 0]]
    absent, _ = make_params(LIMITS)
    assert absent.num_logprobs[0] == -1
    assert absent.temperature[0] == 1
    assert absent.top_p[0] == 1


def test_seeds_count_modulo_two_to_the_64():
    row = lambda seed: make_params(LIMITS, seed=seed)[0].seed.tolist()
    assert row(2**64 + 42) == row(42) == [[42, 0]]
    assert row(-1) == [[2**32 - 1, 2**32 - 1]]
    assert row(2**32) == [[0, 1]]


def test_requests_without_a_seed_get_seeds_of_their_own():
    seeds = {tuple(make_params(LIMITS)[0].seed[0].tolist()) for _ in range(50)}
    assert len(seeds) == 50


# Fault report B33.
def test_children_differ_in_their_seeds_alone_and_child_zero_is_the_request_itself():
    arguments = dict(seed=42, temperature=0.3, top_k=5, logprobs=1, stop_token_ids=[4])
    alone = make_params(LIMITS, **arguments)
    children = make_params(LIMITS, n=4, **arguments)
    assert rows_equal(jax.tree.map(lambda leaf: leaf[:1], children), alone)
    seeds = [low | high << 32 for low, high in children[0].seed.tolist()]
    assert len(set(seeds)) == 4
    assert seeds == [rng.child_seed(42, child) for child in range(4)]
    for child in range(1, 4):
        row = jax.tree.map(lambda leaf, child=child: leaf[child : child + 1].copy(), children)
        row[0].seed[:] = alone[0].seed
        assert rows_equal(row, alone)
    assert rows_equal(make_params(LIMITS, n=4, **arguments), children)


def test_children_of_a_request_without_a_seed_differ():
    params, _ = make_params(LIMITS, n=8)
    assert len({tuple(row) for row in params.seed.tolist()}) == 8


def test_neutral_masks_allow_every_id_and_bits_past_the_vocabulary_are_set():
    params, _ = neutral_params(LIMITS, 2)
    assert params.allowed.shape == (2, 2)
    assert (params.allowed == 0xFFFFFFFF).all()
    restricted, _ = make_params(LIMITS, allowed_token_ids=[49])
    assert restricted.allowed[0].tolist() == [0, (1 << 17) | (0xFFFFFFFF << 18) & 0xFFFFFFFF]


def test_stacking_keeps_rows_in_order():
    requests = [make_params(LIMITS, seed=seed, temperature=seed / 10, n=1 + seed % 2) for seed in range(4)]
    stacked = stack_rows(requests)
    assert stacked[0].temperature.tolist() == [np.float32(t) for t in (0, 0.1, 0.1, 0.2, 0.3, 0.3)]
    assert rows_equal(jax.tree.map(lambda leaf: leaf[3:4], stacked), requests[2])
    with pytest.raises(ValueError):
        stack_rows([])


@pytest.mark.parametrize("function", [set_rows, jax.jit(set_rows)])
def test_set_rows_writes_the_rows_named_and_drops_those_outside(function):
    batch = neutral_params(LIMITS, 5)
    values = stack_rows(
        [make_params(LIMITS, seed=seed, temperature=0.25 * seed, ignore_eos=True) for seed in (1, 2, 3, 4)]
    )
    result = function(batch, np.array([3, 5, 0, -1], np.int32), values)
    result = jax.tree.map(np.asarray, result)
    take = lambda tree, row: jax.tree.map(lambda leaf: np.asarray(leaf)[row], tree)
    assert rows_equal(take(result, 3), take(values, 0))
    assert rows_equal(take(result, 0), take(values, 2))
    for row in (1, 2, 4):
        assert rows_equal(take(result, row), take(batch, row))


def test_parameters_are_pytrees_and_static_facts_are_hashable():
    tree = make_params(LIMITS, seed=1, n=2)
    leaves, definition = jax.tree.flatten(tree)
    assert all(leaf.shape[0] == 2 for leaf in leaves)
    assert rows_equal(jax.tree.unflatten(definition, leaves), tree)
    assert hash(LIMITS) == hash(
        Limits(**{name: getattr(LIMITS, name) for name in LIMITS.__dataclass_fields__})
    )
    assert hash(Features()) == hash(Features())
    assert Features() == Features(tier="full", full_rows=True, num_candidates=128)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(tier="all"),
        dict(filter_order="VLLM"),
        dict(logprobs_mode="log"),
        dict(num_candidates=0),
        dict(num_logprobs=-2),
    ],
)
def test_unknown_features_are_refused_by_name(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Features(**arguments)


@pytest.mark.parametrize(
    "arguments", [dict(vocab_size=0), dict(vocab_size=5.0), dict(vocab_size=5, num_eos=-1)]
)
def test_impossible_limits_are_refused_by_name(arguments):
    with pytest.raises(ValueError, match=list(arguments)[-1]):
        Limits(**arguments)


BIG = Limits(vocab_size=1000)


def features_of(*requests, **arguments):
    params, stop = stack_rows([make_params(BIG, seed=0, **request) for request in requests])
    return required_features(params, stop, limits=BIG, **arguments)


def test_the_tier_is_the_smallest_that_serves_the_rows():
    assert features_of({}, dict(temperature=0), dict(temperature=0.5, top_k=1000)).tier == "plain"
    assert features_of({}, dict(temperature=0, top_k=5, top_p=0.5)).tier == "plain"
    for request in (dict(top_k=5), dict(top_p=0.9), dict(min_p=0.1), dict(logprobs=0)):
        assert features_of({}, request).tier == "filtered", request
    for request in (
        dict(repetition_penalty=1.1),
        dict(frequency_penalty=0.1),
        dict(presence_penalty=-0.1),
        dict(logit_bias={3: 1.0}),
        dict(allowed_token_ids=[1, 2]),
        dict(banned_token_ids=[999]),
        dict(bad_words_ids=[[1, 2]]),
        dict(min_tokens=1, eos_token_ids=[2]),
        dict(token_temperature_scale={3: 2.0}),
    ):
        assert features_of({}, request).tier == "full", request
    assert features_of({}, grammar=True).tier == "full"
    assert features_of({}, transforms=(lambda logits, argument, position: logits,)).tier == "full"


def test_logprobs_exist_in_the_program_only_where_a_row_asks():
    assert features_of({}).num_logprobs == -1
    assert features_of({}, dict(logprobs=0)).num_logprobs >= 0
    assert features_of({}, dict(logprobs=5)).num_logprobs >= 5


@pytest.mark.parametrize("filter_order", ["vllm", "hf", "joint"])
def test_the_counting_path_is_left_out_only_where_candidates_always_suffice(filter_order):
    full_rows = lambda *requests: (
        features_of(*requests, filter_order=filter_order, num_candidates=64).full_rows
    )
    assert not full_rows(
        {}, dict(temperature=0, top_p=0.1), dict(top_k=64), dict(top_k=1), dict(top_k=10, min_p=0.2)
    )
    for request in (dict(top_p=0.5), dict(min_p=0.1), dict(top_k=65), dict(top_k=999, top_p=0.9)):
        assert full_rows({}, request), request


def test_few_candidates_are_taken_where_they_serve_all_rows():
    served = (dict(temperature=0), dict(top_k=64, top_p=0.9), dict(top_k=1))
    assert (features_of(*served).num_candidates, features_of(*served).full_rows) == (64, False)
    for request in (dict(top_p=0.9), dict(top_k=65)):
        assert features_of(*served, request).num_candidates == 128
    assert not features_of(dict(top_k=65)).full_rows
    params, stop = stack_rows([make_params(BIG, **request) for request in served])
    guided = dataclasses.replace(BIG, num_guided=100)
    assert required_features(params, stop, limits=guided).num_candidates == 128


def test_the_joint_preset_keeps_the_counting_path_for_top_p_beside_a_small_top_k():
    # There top-p is measured on all that min-p left, which can be more than the candidates.
    for request in (dict(top_k=5, top_p=0.9), dict(top_k=5, top_p=0.9, min_p=1e-6)):
        assert features_of(request, filter_order="joint", num_candidates=64).full_rows
        assert not features_of(request, filter_order="vllm", num_candidates=64).full_rows
        assert not features_of(request, filter_order="hf", num_candidates=64).full_rows
