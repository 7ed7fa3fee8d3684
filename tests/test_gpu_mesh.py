"""On a mesh of GPUs: the bits of one GPU, by all-to-all and by exchange, in `sample` and in an engine."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxsample as js
from jaxsample.sample import sample
from tests import test_engine_mesh
from tests.meshes import KINDS, assert_same_bits
from tests.test_sharded_sample import LIMITS, PROGRAMS, arguments, rows_of

NAMES = ("limits", "features", "mesh", "axis", "batch_axis")
run, exchanged = (jax.jit(function, static_argnames=NAMES) for function in (sample, js.sample_by_exchange))
PROCESSED = dataclasses.replace(PROGRAMS["served"], num_logprobs=4, logprobs_mode="processed")


def gpus(kind="auto"):
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("one GPU")
    return Mesh(np.array(devices[:2]).reshape(1, 2), ("data", "tensor"), axis_types=(KINDS[kind],) * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("features", [*PROGRAMS.values(), PROCESSED], ids=[*PROGRAMS, "processed"])
def test_two_gpus_give_the_bits_of_one(features, kind):
    program = "served" if features == PROCESSED else next(x for x in PROGRAMS if PROGRAMS[x] == features)
    given, rest = arguments(program)
    for num_rows in (64, 3):
        taken = rows_of((given, rest), slice(num_rows))
        options = dict(limits=LIMITS, features=features)
        expected = run(*taken[0], **taken[1], **options)
        placed = dict(mesh=gpus(kind), axis="tensor", batch_axis="data")
        assert_same_bits(run(*taken[0], **taken[1], **options, **placed), expected)
        if program != "full":
            assert_same_bits(exchanged(*taken[0], **options, **placed), expected)


@pytest.mark.gpu
def test_an_engine_on_two_gpus_draws_by_exchange_what_one_draws():
    requests = test_engine_mesh.random_requests(40)
    expected = test_engine_mesh.served(test_engine_mesh.engine_on(None), requests)
    for given in ({}, dict(draw=js.sample_by_exchange)):
        engine = test_engine_mesh.engine_on(gpus("explicit"), **given)
        assert test_engine_mesh.served(engine, requests) == expected


@pytest.mark.gpu
def test_a_wide_vocabulary_on_two_gpus():
    generator = np.random.default_rng(0)
    width = 151936
    logits = jnp.asarray(generator.normal(0, 2, (8, width)).astype(np.float32))
    limits = js.Limits(width)
    rows = [js.make_params(limits, seed=row, top_k=20 * (row % 2), temperature=0.7) for row in range(8)]
    params, _ = js.stack_rows(rows)
    position = jnp.arange(8, dtype=jnp.int32)
    options = dict(limits=limits, features=js.Features("filtered", full_rows=False, num_logprobs=5))
    expected = run(logits, params, position, **options)
    for function in (run, exchanged):
        found = function(logits, params, position, **options, mesh=gpus(), axis="tensor")
        assert_same_bits(found, expected)
