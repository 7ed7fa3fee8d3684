"""Exchanging candidates gives the tokens of `sample`, and moves far less than logits."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxsample.candidates import first_tokens, merge, normaliser, summarize, tile_sums
from jaxsample.exchange import sample_by_exchange
from jaxsample.params import Features, Limits
from jaxsample.sample import sample
from tests import mixes
from tests.meshes import assert_same_bits, collectives, largest_gather, mesh_of
from tests.test_sharded_sample import LIMITS, PROGRAMS, alone, arguments, rows_of

pytestmark = pytest.mark.usefixtures("on_cpu")

SERVED = PROGRAMS["served"]
run = jax.jit(sample_by_exchange, static_argnames=("limits", "features", "mesh", "axis", "batch_axis"))


def expected(program, num_rows):
    return rows_of(alone(program), slice(num_rows))


@pytest.mark.parametrize(
    ("program", "num_rows", "kind", "sizes", "axis", "batch_axis"),
    [
        # The next test holds the same of the same mesh.
        pytest.param("served", 64, "auto", dict(x=8), "x", (), marks=pytest.mark.large),
        ("served", 8, "explicit", dict(data=2, tensor=3), "tensor", "data"),
        ("plain", 64, "explicit", dict(x=4), "x", ()),
        ("plain", 3, "auto", dict(a=2, b=2), ("b", "a"), ()),
        pytest.param("plain", 1, "auto", dict(x=1), "x", (), marks=pytest.mark.large),
    ],
)
def test_tokens_and_logprobs_are_those_of_one_device(program, num_rows, kind, sizes, axis, batch_axis):
    given = rows_of(arguments(program)[0], slice(num_rows))
    placed = dict(mesh=mesh_of(kind, **sizes), axis=axis, batch_axis=batch_axis)
    sampled = run(*given, limits=LIMITS, features=PROGRAMS[program], **placed)
    assert_same_bits(sampled, expected(program, num_rows))


@pytest.mark.parametrize("tier", ["filtered", pytest.param("plain", marks=pytest.mark.large)])
def test_processed_logprobs_are_those_of_one_device(tier):
    features = dataclasses.replace(SERVED, tier=tier, num_logprobs=4, logprobs_mode="processed")
    given = rows_of(arguments("served" if tier == "filtered" else "plain")[0], slice(16))
    whole = jax.jit(functools.partial(sample, limits=LIMITS, features=features))(*given)
    sampled = run(*given, limits=LIMITS, features=features, mesh=mesh_of(x=4), axis="x")
    assert np.isfinite(whole.logprobs.top).any()
    assert_same_bits(sampled, whole)


def test_inside_the_callers_shard_map_and_no_more_travels_than_candidates():
    mesh = mesh_of(x=8)
    given = arguments("served")[0]
    placed = jax.device_put(given[0], NamedSharding(mesh, PartitionSpec(None, "x")))
    local = functools.partial(sample_by_exchange, limits=LIMITS, features=SERVED, axis="x")
    specs = (PartitionSpec(None, "x"), PartitionSpec(), PartitionSpec())
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))
    compiled = mapped.lower(placed, *given[1:]).compile()
    sampled = compiled(placed, *given[1:])
    assert_same_bits(sampled, expected("served", 64))
    assert collectives(compiled) == {"all-to-all": 1, "all-gather": 1, "all-reduce": 2}
    assert largest_gather(compiled) <= (3 + 2 * SERVED.num_logprobs) * 64


@jax.jit
def merged(logits):
    highest, _ = normaliser(logits)
    shards = jnp.split(logits, 4, axis=1)
    values, ids = zip(*(first_tokens(shard, 40) for shard in shards))
    ids = [part + 384 * index for index, part in enumerate(ids)]
    tiles = [tile_sums(jnp.exp(shard - highest[:, None])) for shard in shards]
    return merge(*(jnp.concatenate(parts, axis=1) for parts in (values, ids, tiles)), highest, 40)


whole = jax.jit(summarize, static_argnums=1)


@pytest.mark.parametrize("kind", mixes.ROW_KINDS)
def test_summaries_of_shards_merge_into_that_of_the_row(kind):
    logits = mixes.rows(np.random.default_rng(2), 4, 1536, (kind,))
    logits = np.where(np.abs(logits) < np.finfo(np.float32).tiny, np.float32(0), logits)
    found, expected = merged(logits), whole(logits, 40)
    finite = np.asarray(expected.values) > -np.inf
    assert_same_bits((found.values, found.max, found.sum), (expected.values, expected.max, expected.sum))
    np.testing.assert_array_equal(np.where(finite, found.ids, 0), np.where(finite, expected.ids, 0))


def test_programs_that_need_whole_rows_are_refused():
    given = arguments("plain")[0]
    for features in (Features(), Features("filtered")):
        needs = f"tier '{features.tier}' and full_rows {features.full_rows}"
        with pytest.raises(ValueError, match=needs):
            sample_by_exchange(*given, limits=LIMITS, features=features, mesh=mesh_of(x=2), axis="x")
    options = dict(features=SERVED, mesh=mesh_of(data=3, x=2), axis="x", batch_axis="data")
    with pytest.raises(ValueError, match=r"64 rows on 3 devices along \('data',\)"):
        sample_by_exchange(*given, limits=LIMITS, **options)
    with pytest.raises(
        ValueError, match=re.escape("logits have 1024 columns, expected at least limits.vocab_size = 2000")
    ):
        sample_by_exchange(*given, limits=Limits(2000), features=SERVED, mesh=mesh_of(x=2), axis="x")


WRONG = [
    (dict(axis=None), "an axis is None, expected the name of one or a tuple of names"),
    (dict(axis="a", batch_axis="a"), "axis is 'a' and batch_axis 'a': an axis may occur only once"),
    (dict(mesh=None, batch_axis="b"), "batch_axis is 'b', but in a shard_map rows are split already"),
]


@pytest.mark.parametrize(("placed", "message"), WRONG)
def test_axes_that_do_not_fit_are_refused(placed, message):
    given = rows_of(arguments("plain")[0], slice(8))
    mesh = mesh_of(a=2, b=2)
    call = functools.partial(sample_by_exchange, limits=LIMITS, features=SERVED, mesh=mesh, axis="a")
    call = functools.partial(call, **placed)
    if "mesh" in placed:
        call = jax.shard_map(call, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    with pytest.raises(ValueError, match=re.escape(message)):
        call(*given)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda logits, params, at: (logits[:, :999], params, at), "logits have 999 columns, expected at"),
        (lambda logits, params, at: (logits[0], params, at), "logits are float32[1024], expected float32"),
        (lambda logits, params, at: (logits.view(np.int32), params, at), "logits are int32[8, 1024]"),
        (lambda *rows: rows_of(rows, slice(0)), "logits have no rows, expected at least one"),
        (lambda logits, params, at: (logits, params, at[:1]), "position is int32[1], expected int32[8]"),
        (
            lambda logits, params, at: (logits, rows_of(params, slice(1)), at),
            "params.temperature has shape [1]",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused_as_by_sample(edit, message):
    given = edit(*rows_of(arguments("plain")[0], slice(8)))
    options = dict(limits=LIMITS, features=SERVED, mesh=mesh_of(x=2), axis="x")
    for function in (sample, sample_by_exchange):
        with pytest.raises(ValueError, match=re.escape(message)):
            function(*given, **options)
