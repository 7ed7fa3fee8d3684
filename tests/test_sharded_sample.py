"""`sample` on a mesh: the tokens and logprobs of one device to the bit, whatever the mesh."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxsample.params import Features, Limits, neutral_params
from jaxsample.sample import Sampled, sample
from tests import batches
from tests.meshes import assert_same_bits, collectives, largest_gather, mesh_of

pytestmark = pytest.mark.usefixtures("on_cpu")

LIMITS, WIDTH = batches.small_limits(1000), 1024
PROGRAMS = {
    "full": Features(num_candidates=32, num_logprobs=6, logprobs_mode="processed"),
    "served": Features("filtered", full_rows=False, num_candidates=32, num_logprobs=6),
    "plain": Features("plain", full_rows=False),
}
run = jax.jit(sample, static_argnames=("limits", "features", "mesh", "axis", "batch_axis"))


@functools.cache
def arguments(program):
    """(logits, params, position), and the rest by name, of 64 rows that a program serves; some have no token."""
    generator = np.random.default_rng(7)
    batch = batches.random_batch(generator, 64, LIMITS, WIDTH, chance=0.4)
    batch["logits"][5, 3], batch["logits"][6, 999], batch["logits"][7] = np.nan, np.inf, -np.inf
    if program != "full":
        for row, request in enumerate(batch["requests"]):
            request.clear()
            request.update(
                seed=row, temperature=float(generator.choice([0.0, 0.5, 1.0, 2.0])), logprobs=row % 7
            )
            if program == "served" and row % 2:
                request["top_k"], request["top_p"] = int(generator.integers(1, 32)), float(generator.random())
    params, stop = batches.params_of(LIMITS, batch["requests"])
    rest = {}
    if program == "full":
        history = batches.history_of(LIMITS, batch["prompts"], batch["outputs"], LIMITS.max_length)
        rest = dict(stop=stop, history=history, allowed=batches.bit_mask(LIMITS, batch["grammars"]))
    return (batch["logits"], params, batch["position"].astype(np.int32)), rest


@functools.cache
def alone(program):
    given, rest = arguments(program)
    with jax.default_device(jax.devices("cpu")[0]):  # the meshes are of CPU devices on every machine
        sampled = run(*given, limits=LIMITS, features=PROGRAMS[program], **rest)
    return jax.tree.map(np.asarray, sampled)


def rows_of(tree, rows):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], tree)


MESHES = [  # covers the numbers of shards, both kinds of mesh, 2-D meshes, and rows that do not divide
    ("plain", 8, "auto", dict(x=1), "x", ()),
    pytest.param("plain", 64, "explicit", dict(x=2), "x", (), marks=pytest.mark.large),
    pytest.param("served", 8, "auto", dict(x=3), "x", (), marks=pytest.mark.large),
    ("plain", 3, "explicit", dict(x=4), ("x",), ()),
    ("plain", 1, "auto", dict(x=8), "x", ()),
    ("plain", 64, "explicit", dict(data=2, tensor=4), "tensor", "data"),
    pytest.param("served", 64, "explicit", dict(data=2, tensor=4), "tensor", "data", marks=pytest.mark.large),
    pytest.param(
        "plain", 64, "auto", dict(data=4, tensor=2), ("tensor", "data"), (), marks=pytest.mark.large
    ),
    pytest.param(
        "full", 64, "explicit", dict(data=2, tensor=3), ("tensor",), ("data",), marks=pytest.mark.large
    ),
]


@pytest.mark.parametrize(("program", "num_rows", "kind", "sizes", "axis", "batch_axis"), MESHES)
def test_results_are_those_of_one_device_to_the_bit(program, num_rows, kind, sizes, axis, batch_axis):
    given, rest = rows_of(arguments(program), slice(num_rows))
    placed = dict(mesh=mesh_of(kind, **sizes), axis=axis, batch_axis=batch_axis)
    sampled = run(*given, limits=LIMITS, features=PROGRAMS[program], **placed, **rest)
    assert_same_bits(sampled, rows_of(alone(program), slice(num_rows)))


def test_one_all_to_all_of_logits_and_one_all_gather_of_results():
    mesh = mesh_of(x=8)
    given, rest = arguments("full")
    given = (jax.device_put(given[0], NamedSharding(mesh, PartitionSpec(None, "x"))), *given[1:])
    options = dict(limits=LIMITS, features=PROGRAMS["full"], mesh=mesh, axis="x")
    compiled = run.lower(*given, **options, **rest).compile()
    assert collectives(compiled) == {"all-to-all": 1, "all-gather": 1}
    assert largest_gather(compiled) < 64 * WIDTH // 8
    assert_same_bits(compiled(*given, **rest), alone("full"))


def loop_arguments():
    (logits, params, position), _ = arguments("plain")
    return logits[8:16, :1000], rows_of(params, slice(8, 16)), position[8:16]


def sampled_in_a_loop(logits, params, position, num_steps, **placed):
    """Eight steps in a `while_loop`: each token changes the logits of the next."""

    def step(state):
        index, tokens, out = state
        moved = jnp.roll(logits, 1, axis=1) + tokens[:, None].astype(jnp.float32) / 1000
        sampled = sample(moved, params, position + index, limits=LIMITS, features=PROGRAMS["plain"], **placed)
        return index + 1, sampled.tokens, out.at[index].set(sampled.tokens)

    start = jnp.zeros_like(position)
    out = jnp.zeros((8, 8), jnp.int32) + start[None]
    return jax.lax.while_loop(lambda state: state[0] < num_steps, step, (jnp.int32(0), start, out))[2]


@pytest.mark.parametrize("kind", [pytest.param("auto", marks=pytest.mark.large), "explicit"])
def test_inside_a_while_loop_of_the_callers(kind):
    looped = jax.jit(sampled_in_a_loop, static_argnames=("mesh", "axis"))
    expected = looped(*loop_arguments(), 8)
    assert (np.asarray(expected) >= 0).all()
    assert_same_bits(looped(*loop_arguments(), 8, mesh=mesh_of(kind, x=4), axis="x"), expected)


@pytest.mark.parametrize(
    ("program", "kind"),
    [pytest.param("full", "auto", marks=pytest.mark.large), ("plain", "explicit")],
)
def test_inside_a_shard_map_of_the_callers(program, kind):
    mesh = mesh_of(kind, data=2, tensor=4)
    given, rest = arguments(program)
    rows = PartitionSpec("data")

    def local(logits, params, position, rest):
        options = dict(limits=LIMITS, features=PROGRAMS[program], axis="tensor")
        return sample(logits, params, position, **options, **rest)

    specs = (PartitionSpec("data", "tensor"), rows, rows, rows)
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows))
    place = lambda spec: lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec))
    placed = [jax.tree.map(place(spec), tree) for spec, tree in zip(specs, (*given, rest))]
    assert_same_bits(mapped(*placed), alone(program))


def test_parameters_meet_their_own_rows_on_every_shard():
    # B59: 2 shards of 4 slots with 3 and 2 live rows; temperature -1 in the idle ones would turn logits around.
    limits = Limits(3)
    params, _ = neutral_params(limits, 8)
    live = np.array([0, 1, 2, 4, 5])
    params.temperature[:] = -1
    params.temperature[live] = 0.5
    params.seed[:, 0] = np.arange(8)
    logits = np.tile(np.array([2, 1, 0, 99], np.float32), (8, 1))
    options = dict(limits=limits, features=PROGRAMS["plain"], mesh=mesh_of(x=2), axis="x")
    tokens = np.stack([run(logits, params, np.full(8, at, np.int32), **options).tokens for at in range(200)])
    shares = np.stack([(tokens[:, live] == token).mean(axis=0) for token in range(3)])
    expected = np.exp([4, 2, 0]) / np.exp([4, 2, 0]).sum()
    assert np.abs(shares - expected[:, None]).max() < 5 * np.sqrt(0.25 / 200)


def test_equal_logits_on_two_data_shards_draw_by_their_own_seeds():
    limits = Limits(16)
    params, _ = neutral_params(limits, 64)
    params.seed[:, 0] = np.arange(64)
    options = dict(limits=limits, features=PROGRAMS["plain"], mesh=mesh_of(data=2, tensor=2), axis="tensor")
    tokens = np.stack([
        run(np.zeros((64, 16), np.float32), params, np.full(64, at, np.int32), batch_axis="data", **options).tokens
        for at in range(16)
    ])  # fmt: skip
    agree = (tokens[:, :32] == tokens[:, 32:]).mean()
    assert abs(agree - 1 / 16) < 5 * np.sqrt(1 / 16 / 512)


def test_transforms_and_given_noise_travel_with_their_rows():
    limits = Limits(200)
    generator = np.random.default_rng(3)
    logits = generator.normal(size=(6, 200)).astype(np.float32)
    noise = generator.gumbel(size=(6, 200)).astype(np.float32)
    features = Features(
        full_rows=False, num_candidates=8, transforms=(lambda z, shift, position: z * shift[:, None],)
    )
    given = dict(noise=noise, transform_args=(np.arange(6, dtype=np.float32),))
    params, _ = neutral_params(limits, 6)
    position = np.zeros(6, np.int32)
    expected = run(logits, params, position, limits=limits, features=features, **given)
    mesh = mesh_of(x=4)
    assert_same_bits(
        run(logits, params, position, limits=limits, features=features, mesh=mesh, axis="x", **given),
        expected,
    )
    np.testing.assert_array_equal(expected.tokens, (logits * np.arange(6)[:, None] + noise).argmax(axis=1))


def test_what_does_not_fit_is_refused():
    (logits, params, position), _ = arguments("plain")
    options = dict(limits=LIMITS, features=PROGRAMS["plain"])
    with pytest.raises(ValueError, match=r"64 rows on 3 devices along \('data',\)"):
        sample(logits, params, position, mesh=mesh_of(data=3, x=2), axis="x", batch_axis="data", **options)
    with pytest.raises(ValueError, match=re.escape("the mesh has no axis 'tensor', only data=3, x=2")):
        sample(logits, params, position, mesh=mesh_of(data=3, x=2), axis="tensor", **options)
    with pytest.raises(ValueError, match="axis is None"):
        sample(logits, params, position, mesh=mesh_of(x=2), **options)


@pytest.mark.large
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_large_vocabulary_gives_the_results_of_one_device(kind):
    limits = dataclasses.replace(LIMITS, vocab_size=151936)
    batch = batches.random_batch(np.random.default_rng(1), 8, limits, 151936, chance=0.3)
    params, stop = batches.params_of(limits, batch["requests"])
    history = batches.history_of(limits, batch["prompts"], batch["outputs"], limits.max_length)
    given = (batch["logits"], params, batch["position"].astype(np.int32))
    rest = dict(stop=stop, history=history, limits=limits, features=PROGRAMS["full"])
    expected = run(*given, **rest)
    assert isinstance(expected, Sampled)
    for num_shards in (3, 8):
        assert_same_bits(run(*given, mesh=mesh_of(kind, x=num_shards), axis="x", **rest), expected)
