"""The engine on a mesh of devices: what every request gets without one, and state that stays where it lies."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxsample as js
from jaxsample.buckets import Buckets
from jaxsample.engine import Engine, Request
from models.lookup import lookup_forward
from tests.meshes import collectives, largest_gather, mesh_of
from tests.test_engine import PAGE, Alternating, S, idle, new_cache

V, PADDED, SLOTS = 101, 384, 6  # three devices divide the padded columns
LIMITS = js.Limits(V, max_length=S)
FEATURES = js.Features("filtered", full_rows=False, num_candidates=32)
BUCKETS = Buckets(rows=(SLOTS,), lengths=(S,), prefill=((2, 16),), features=(FEATURES,), updates=(SLOTS,))
# The logits after each token; padding is NaN, which no one may look at.
TABLE = np.full((V, PADDED), np.nan, np.float32)
TABLE[:, :V] = np.random.default_rng(0).normal(0, 3, (V, V))


def unembed(weights, hidden):
    return jnp.take(weights, hidden[:, :, 1], axis=0, mode="clip")


def engine_on(mesh, /, **given):
    weights = TABLE
    if mesh is not None:
        weights = jax.device_put(TABLE, NamedSharding(mesh, PartitionSpec(None, "tensor")))
        given = dict(mesh=mesh, axis="tensor", batch_axis="data") | given
    given = dict(limits=LIMITS, buckets=BUCKETS, num_pages=14, page_size=PAGE) | given
    return Engine(lookup_forward, unembed, weights, new_cache, **given)


def random_requests(num_requests):
    generator = np.random.default_rng(num_requests)
    requests = []
    for seed in range(num_requests):
        params = {"seed": seed, "max_tokens": int(generator.integers(1, 20)), "n": 1 + (seed % 5 == 0)}
        params["temperature"] = float(generator.choice([0.0, 0.7, 1.3]))
        if seed % 2:
            params |= {"top_k": int(generator.integers(1, 32)), "top_p": 0.9}
        if seed % 3 == 0:
            params |= {"eos_token_ids": [int(x) for x in generator.integers(0, V, 4)]}
        prompt = generator.integers(0, V, int(generator.integers(1, 30)))
        requests.append(Request([int(x) for x in prompt], params))
    return requests


def served(engine, requests):
    """[(tokens, status)] of every sample."""
    streams = [engine.submit(request) for request in requests]
    engine.run()
    assert idle(engine)
    return [(x.tokens().token_ids.tolist(), x.status) for stream in streams for x in stream.samples]


def test_requests_get_what_they_get_without_a_mesh_and_nothing_is_compiled_later(caplog):
    engine = engine_on(mesh_of("explicit", data=2, tensor=3))
    requests = random_requests(60)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        found = served(engine, requests)
    assert not [record for record in caplog.records if "ompil" in record.getMessage()]
    assert engine.stats.num_preempted > 0
    assert found == served(engine_on(None), requests)
    assert {status for _, status in found} == {js.STOP_EOS, js.LENGTH}

    for leaf in jax.tree.leaves(engine._state):
        assert leaf.sharding.is_fully_replicated and len(leaf.sharding.device_set) == 6
    step = engine._programs["step", SLOTS, S, 0]
    # Two of the all-gathers give what was staged to both halves of the data, one gives the verdict to all.
    assert collectives(step) == {"all-to-all": 1, "all-gather": 3}
    assert largest_gather(step) < SLOTS * V // 6


@pytest.mark.large
def test_an_engine_draws_by_exchange_where_features_allow_it():
    served_by = (FEATURES, js.Features(num_candidates=32))
    given = dict(buckets=dataclasses.replace(BUCKETS, features=served_by))
    engine = engine_on(mesh_of("explicit", data=2, tensor=3), draw=js.sample_by_exchange, **given)
    requests = random_requests(30)
    for request in requests[::7]:
        request.params["repetition_penalty"] = 1.3
    assert served(engine, requests) == served(engine_on(None, **given), requests)
    counted = [collectives(engine._programs["step", SLOTS, S, level]) for level in (0, 1)]
    assert [count["all-to-all"] for count in counted] == [1, 1]
    assert counted[0]["all-reduce"] and "all-reduce" not in counted[1]
    assert largest_gather(engine._programs["step", SLOTS, S, 0]) < SLOTS * V // 6


@pytest.mark.large
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_grammars_and_drafts_on_a_mesh(num_drafts):
    given = dict(grammars=True)
    if num_drafts:
        given["proposer"] = js.ngram_proposer(js.chain(num_drafts), max_ngram=2)
    given["buckets"] = dataclasses.replace(BUCKETS, features=(js.Features(num_candidates=32),))
    asked = {"max_tokens": 20, "temperature": 0.3}
    ruled = [Request([3, 4, 3, 4], {"seed": seed, **asked}, Alternating) for seed in range(8)]
    requests = [*random_requests(8), *ruled]
    engine = engine_on(mesh_of("auto", data=2, tensor=3), **given)
    found = served(engine, requests)
    assert found == served(engine_on(None, **given), requests)
    assert found[-1][0][0] % 2 == 0
    complete = engine._programs["complete", SLOTS, S]
    assert collectives(complete) == {"all-to-all": 1, "all-gather": 1}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(buckets=dataclasses.replace(BUCKETS, rows=(3, 6))), "3 rows on 2 devices along 'data'"),
        (dict(axis="model"), "the mesh has no axis 'model', only data=2, tensor=3"),
        (dict(axis=None), "axis is None, expected one of the mesh's axes data=2, tensor=3"),
        (dict(mesh=None), "axis is 'tensor', but there is no mesh"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_its_numbers(given, words):
    with pytest.raises(ValueError, match=words):
        engine_on(mesh_of(data=2, tensor=3), **given)
