"""The kernels that draw rows against `sample` by XLA: interpreted on a CPU, as they are on a GPU."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxsample as js
from jaxsample import decode
from jaxsample.row_draw import draw_tokens, is_chosen, serves
from jaxsample.sample import Sampled
from tests import mixes, test_sharded_decode

V, WIDTH, COUNT = 4475, 4480, 40  # 70 groups, the last of 59 tokens; 64 groups are chosen
LIMITS = js.Limits(V)
INTERPRETED = jax.default_backend() != "gpu"


def rows(dtype):
    """Rows of every kind, bad ones, ones whose first tokens share a group, ties across a cut, signed zeros."""
    generator = np.random.default_rng(0)
    logits = np.concatenate([mixes.rows(generator, 2, WIDTH, (kind,)) for kind in mixes.ROW_KINDS])
    more = generator.normal(0, 2, (16, WIDTH)).astype(np.float32)
    more[0, 128:192] += 30
    more[1] = np.round(more[1])
    more[2, ::67] = 9.5
    more[3], more[3, 77] = -np.inf, 0
    more[4, 5], more[5, V - 1], more[6] = np.nan, np.inf, -np.inf
    more[7, 256:512], more[8, 256:512] = np.nan, np.inf
    more[10, ::64], more[11, ::64], more[12, 64:192] = np.inf, np.nan, 40
    more[12, [70, 130]] = np.inf
    more[13], more[13, 77] = -np.inf, -3e38
    more[14] = -5 - np.abs(more[14])
    more[15] = -np.inf
    more[15, 640:1280], more[15, [700, 1270]] = 5, np.inf
    more[9] = np.where(more[9] > 2, -0.0, np.where(more[9] > 1, 0.0, more[9] - 9))
    logits = np.concatenate([logits, more])
    logits[:, V:] = np.nan  # never looked at
    with np.errstate(over="ignore"):
        return logits.astype(dtype)


def given(num_rows, filters):
    generator = np.random.default_rng(1)
    requests = []
    for row in range(num_rows):
        request = dict(
            seed=row * 7919 + (row % 3 << 40), temperature=float(generator.choice([0.0, 0.7, 1.0, 1.3]))
        )
        if filters and row % 4:
            request |= dict(
                top_k=int(generator.integers(1, COUNT)), top_p=float(generator.choice([1, 0.9, 0.5]))
            )
            request |= dict(min_p=float(generator.choice([0, 0.05])))
        requests.append(request)
    requests[1] |= dict(top_p=0)
    requests[2] |= dict(min_p=1)
    requests[3] |= dict(
        temperature=1e-38
    )  # of a row, as the last but one, that a quotient takes out of range
    requests[-2] |= dict(temperature=1.3e-38)
    requests[-3] |= dict(temperature=1.0)
    params, _ = js.stack_rows([js.make_params(LIMITS, **request) for request in requests])
    return params, 5 * np.arange(num_rows, dtype=np.int32)


@pytest.mark.parametrize(
    ("tier", "order", "dtype"),
    [
        ("filtered", "vllm", np.float32),
        ("plain", "vllm", np.float32),
        pytest.param("filtered", "hf", ml_dtypes.bfloat16, marks=pytest.mark.large),
        pytest.param("filtered", "joint", np.float16, marks=pytest.mark.large),
    ],
)
def test_tokens_and_validity_are_those_of_sample(tier, order, dtype):
    logits = rows(dtype)
    params, position = given(len(logits), tier == "filtered")
    features = js.Features(tier, full_rows=False, num_candidates=COUNT, filter_order=order)
    options = dict(limits=LIMITS, features=features)
    assert serves(features, LIMITS)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(functools.partial(js.sample, **options))(logits, params, position)
    draw = jax.jit(functools.partial(draw_tokens, **options, interpret=INTERPRETED))
    tokens, valid = draw(jnp.asarray(logits), params, position)
    np.testing.assert_array_equal(valid, expected.valid)
    assert 8 < np.sum(~np.asarray(valid)) < len(logits) // 2
    np.testing.assert_array_equal(tokens, expected.tokens)


@pytest.mark.slow
def test_unfiltered_tokens_follow_their_law_where_scores_are_close():
    """All tokens equal: each draw is decided by noise alone, and often only by its exact form."""
    num_rows = 64
    logits = jnp.zeros((num_rows, V), jnp.float32)
    params, _ = js.stack_rows([js.make_params(LIMITS, seed=row) for row in range(num_rows)])
    options = dict(limits=LIMITS, features=js.Features("plain", full_rows=False))
    expected = jax.jit(functools.partial(js.sample, **options))
    draw = jax.jit(functools.partial(draw_tokens, **options, interpret=INTERPRETED))
    for first in range(0, 6400, 1600):
        position = first + np.arange(num_rows, dtype=np.int32)
        np.testing.assert_array_equal(
            draw(logits, params, position)[0], expected(logits, params, position).tokens
        )


def test_programs_and_machines_that_kernels_do_not_serve():
    filtered = js.Features("filtered", full_rows=False, num_candidates=64)
    assert serves(filtered, js.Limits(64 * 64)) and not serves(filtered, js.Limits(63 * 64))
    assert serves(js.Features("plain", full_rows=False), js.Limits(10))
    for features in (
        js.Features(),
        js.Features("filtered"),
        js.Features("filtered", full_rows=False, num_logprobs=2),
        js.Features("filtered", full_rows=False, num_candidates=129),
    ):
        assert not serves(features, js.Limits(151936))
    if INTERPRETED:
        assert not is_chosen(filtered, js.Limits(151936), False)


def test_tokens_can_be_drawn_inside_what_is_differentiated():
    params, position = given(4, True)
    features = js.Features("filtered", full_rows=False, num_candidates=COUNT)
    draw = functools.partial(draw_tokens, limits=LIMITS, features=features, interpret=True)
    loss = lambda x: jnp.sum(jnp.take_along_axis(x, draw(x, params, position)[0][:, None], axis=1))
    gradient = jax.eval_shape(jax.grad(loss), jax.ShapeDtypeStruct((4, WIDTH), jnp.float32))
    assert gradient.shape == (4, WIDTH)


def test_a_step_emits_the_kernels_tokens(monkeypatch):
    """Where kernels are chosen, a step with and without a chain gives them its rows."""
    given = []

    def draw(logits, params, position, *, limits, features):
        given.append(logits.shape)
        return Sampled(jnp.full(position.shape, 5, jnp.int32), jnp.ones(position.shape, jnp.bool_), None)

    monkeypatch.setattr(decode, "is_chosen", lambda features, limits, on_mesh: not on_mesh)
    monkeypatch.setattr(decode, "draw_rows", draw)
    options = dict(limits=test_sharded_decode.LIMITS, features=test_sharded_decode.SERVED)
    functions = test_sharded_decode.lookup_forward, test_sharded_decode.unembed
    requests, cache = test_sharded_decode.admitted(test_sharded_decode.PLAIN_REQUESTS)
    record = js.make_decode_step(*functions, **options)(test_sharded_decode.WEIGHTS, requests, cache)[2]
    told = js.unpack(record, test_sharded_decode.SERVED)
    assert len(given) == 1 and set(told.tokens[told.count > 0, 0].tolist()) == {5}


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["filtered", "plain"])
def test_sample_takes_the_kernels_on_a_gpu(tier):
    limits = js.Limits(151936, max_length=16)
    features = js.Features(tier, full_rows=False)
    # What is asked of the device itself: were it not told, rows would be drawn by XLA and nobody would know.
    if jax.device_count() > 1 or float(jax.devices()[0].compute_capability) < 8:
        pytest.skip("several GPUs, or one before compute capability 8.0")
    assert is_chosen(features, limits, False)
    call = jax.jit(functools.partial(js.sample, limits=limits, features=features))
    params, _ = js.stack_rows(
        [js.make_params(limits, seed=row, temperature=0.5 * (row % 4)) for row in range(8)]
    )
    given = jnp.zeros((8, 151936)), params, jnp.arange(8, dtype=jnp.int32)
    assert "draw_whole" in call.lower(*given).compile().as_text()
