"""What a newcomer may do wrong, and callers' loops of every kind."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsample as js
from jaxsample.admission import MAX_CHILDREN

LIMITS = js.Limits(40, max_length=8)


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"]
)
@pytest.mark.parametrize(
    "value", [np.float16("inf"), np.float16("-inf"), np.float16("nan"), 10**400, -(10**400)]
)
def test_numbers_out_of_range_are_refused_in_every_type(name, value):
    with pytest.raises(ValueError, match=name):
        js.make_params(LIMITS, **{name: value})


def test_a_half_precision_zero_is_no_repetition_penalty():
    with pytest.raises(ValueError, match="repetition_penalty"):
        js.make_params(LIMITS, repetition_penalty=np.float16(0))


def test_half_precision_numbers_are_taken_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params, _ = js.make_params(
            LIMITS, temperature=np.float16(0.5), frequency_penalty=np.float16(-0.25), seed=0
        )
    assert params.temperature[0] == 0.5
    assert params.frequency_penalty[0] == -0.25


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {1: 10**400}),
        ("token_temperature_scale", {1: 10**400}),
        ("eos_token_ids", np.array(3)),
        ("stop_token_ids", 3),
        ("stop_sequences", [np.array(3)]),
        ("bad_words_ids", [3]),
        ("n", MAX_CHILDREN + 1),
        ("n", 2**70),
    ],
)
def test_lists_and_counts_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        js.make_params(LIMITS, **{name: value})


def test_many_children_differ_and_the_first_is_the_request_itself():
    many, _ = js.make_params(LIMITS, seed=5, n=300, temperature=0.5)
    alone, _ = js.make_params(LIMITS, seed=5, temperature=0.5)
    assert len(np.unique(many.seed, axis=0)) == 300
    np.testing.assert_array_equal(many.seed[0], alone.seed[0])
    assert (many.temperature == 0.5).all()


@pytest.mark.parametrize("tier", ["plain", "filtered"])
def test_a_mask_is_refused_by_a_program_without_masks(tier):
    params, _ = js.make_params(LIMITS, seed=1)
    with pytest.raises(ValueError, match="allowed"):
        js.sample(
            jnp.zeros((1, 40)),
            params,
            jnp.zeros(1, jnp.int32),
            allowed=np.ones((1, 2), np.uint32),
            limits=LIMITS,
            features=js.Features(tier),
        )


def test_arguments_of_transforms_that_are_not_there_are_refused():
    params, _ = js.make_params(LIMITS, seed=1)
    with pytest.raises(ValueError, match="transform_args"):
        js.sample(
            jnp.zeros((1, 40)),
            params,
            jnp.zeros(1, jnp.int32),
            limits=LIMITS,
            features=js.Features("plain"),
            transform_args=(jnp.zeros(1),),
        )


def test_capacities_may_be_numpy_integers_but_no_fractions():
    limits = js.Limits(np.int64(40), max_length=np.int32(8))
    assert limits == LIMITS
    assert hash(limits) == hash(LIMITS)
    for wrong in ({"num_candidates": 1.5}, {"num_logprobs": 0.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            js.Features(**wrong)


def test_scores_check_their_shapes():
    with pytest.raises(ValueError, match="ids"):
        js.score(jnp.zeros((3, 5)), jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="num_top"):
        js.score(jnp.zeros((1, 5)), jnp.zeros(1, jnp.int32), -1)


def test_a_bad_row_reports_no_top_tokens():
    params, _ = js.stack_rows([js.make_params(LIMITS, seed=1, logprobs=3)] * 2)
    logits = np.zeros((2, 40), np.float32)
    logits[1, 7] = np.nan
    features = js.Features("filtered", full_rows=False, num_logprobs=3)
    sample = jax.jit(functools.partial(js.sample, limits=LIMITS, features=features))
    result = sample(logits, params, jnp.zeros(2, jnp.int32))
    assert np.asarray(result.logprobs.top_ids).tolist() == [[0, 1, 2], [js.PAD] * 3]
    assert np.isneginf(np.asarray(result.logprobs.top)[1]).all()


def test_a_batch_of_no_rows_is_refused():
    params, _ = jax.tree.map(lambda x: x[:0], js.neutral_params(LIMITS, 1))
    with pytest.raises(ValueError, match="no rows"):
        js.sample(jnp.zeros((0, 40)), params, jnp.zeros(0, jnp.int32), limits=LIMITS)


def test_a_cache_smaller_than_its_requests_is_refused():
    forward = lambda weights, tokens, positions, cache, mask: (tokens, None)
    step = js.make_decode_step(forward, forward, limits=LIMITS, features=js.Features())
    cache = js.init_cache(1, 1, 7, 1, 1, jnp.float32)
    with pytest.raises(ValueError, match="7 slots"):
        step((), js.empty_requests(LIMITS, 1), cache)


def test_a_callers_shard_map_gives_the_tokens_of_one_device():
    mesh = jax.make_mesh(
        (2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2]
    )
    params, _ = js.stack_rows(
        [js.make_params(LIMITS, seed=i, top_k=30, top_p=0.8, logprobs=2) for i in range(4)]
    )
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((4, 40)) * 3, jnp.float32)
    position = jnp.arange(4, dtype=jnp.int32)
    features = js.Features("filtered", full_rows=False, num_logprobs=2)
    sample = functools.partial(js.sample, limits=LIMITS, features=features)
    rows = jax.sharding.PartitionSpec("x")
    sharded = jax.shard_map(sample, mesh=mesh, in_specs=(rows, rows, rows), out_specs=rows)
    params = jax.tree.map(jnp.asarray, params)
    for ours, theirs in zip(
        jax.tree.leaves(jax.jit(sharded)(logits, params, position)),
        jax.tree.leaves(jax.jit(sample)(logits, params, position)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
