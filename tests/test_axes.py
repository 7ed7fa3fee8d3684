"""The axis table covers every weight, and a model split over eight devices gives the logits of one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxsample
from models.axes import CACHE_AXES, MESH_AXES, WEIGHT_AXES, cache_specs, place, weight_name, weight_specs
from models.decoder import decoder_functions, weight_shapes
from models.joining import join_projections
from models.presets import PRESETS
from models.random_weights import random_weights
from tests.test_models import SMALL, tolerance

WIDE = dataclasses.replace(
    SMALL,
    num_layers=1,
    vocab_size=64,
    num_heads=16,
    num_kv_heads=8,
    mlp_width=48,
    qkv_bias=True,
    output_bias=True,
)
VARIANTS = {
    "separate": WIDE,
    "query and key norms, tied": dataclasses.replace(
        WIDE, qk_norm=True, qkv_bias=False, tied_embeddings=True
    ),
    "joined": dataclasses.replace(WIDE, joined_projections=True),
}


def leaves_by_name(tree):
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda value: isinstance(value, PartitionSpec)
    )
    return [(weight_name(path), leaf) for path, leaf in leaves]


@pytest.mark.parametrize("joined", [False, True])
def test_every_weight_of_the_families_has_its_axes_and_no_entry_is_unused(joined):
    used = set()
    for config in [*PRESETS.values(), *VARIANTS.values()]:
        config = dataclasses.replace(config, num_layers=1, joined_projections=joined)
        shapes, specs = (
            leaves_by_name(weight_shapes(config)),
            leaves_by_name(weight_specs(config, {"model": 2})),
        )
        assert [name for name, _ in shapes] == [name for name, _ in specs]
        for (name, shape), (_, spec) in zip(shapes, specs):
            assert len(WEIGHT_AXES[name]) == len(shape.shape) == len(spec), name
            used.add(name)
    parts = {"query", "key", "value", "gate", "up"}
    left_out = {name for name in WEIGHT_AXES if set(name.split(".")) & {*parts, "query_key_value", "gate_up"}}
    assert set(WEIGHT_AXES) - used <= left_out


def test_all_large_weights_are_split_where_the_counts_allow_it():
    config = dataclasses.replace(PRESETS["llama-3.1-8b"], num_layers=1)
    for name, spec in leaves_by_name(weight_specs(config, {"data": 1, "model": 8})):
        assert ("model" in spec) == (not name.endswith("norm.weight")), name
    assert cache_specs(config, 4, {"data": 2, "model": 8}).keys == PartitionSpec(
        None, "data", None, "model", None
    )
    assert len(CACHE_AXES) == 5


def test_an_axis_that_does_not_divide_is_whole_on_every_device():
    # 28 query and 4 key-value heads on 8 devices; the MLP and the vocabulary do divide.
    config = dataclasses.replace(PRESETS["qwen2.5-7b"], num_layers=1)
    specs = dict(leaves_by_name(weight_specs(config, {"model": 8})))
    assert specs["attention.query.weight"] == specs["attention.key.weight"] == PartitionSpec(None, None)
    assert specs["mlp.down.weight"] == PartitionSpec(None, "model")
    assert specs["embedding.weight"] == PartitionSpec("model", None)
    assert weight_specs(SMALL, {})["embedding"]["weight"] == PartitionSpec(None, None)
    assert set(MESH_AXES.values()) == {"model", "data"}


@pytest.mark.parametrize(
    ("variant", "shape"),
    [
        ("separate", (1, 8)),
        pytest.param("query and key norms, tied", (2, 4), marks=pytest.mark.large),
        ("joined", (2, 4)),
    ],
)
def test_logits_of_eight_devices_equal_those_of_one(variant, shape):
    config = VARIANTS[variant]
    weights = random_weights(config, 3)
    rng = np.random.default_rng(0)
    num_rows, num_slots = 4, 16
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (num_rows, 3)), jnp.int32)
    lengths = jnp.array([0, 5, 16, 2], jnp.int32)
    cache = jaxsample.init_cache(
        config.num_layers, num_rows, num_slots, config.num_kv_heads, config.head_size, jnp.float32
    )
    cache = dataclasses.replace(
        cache,
        keys=jnp.asarray(rng.standard_normal(cache.keys.shape), jnp.float32),
        values=jnp.asarray(rng.standard_normal(cache.values.shape), jnp.float32),
    )
    forward, unembed = decoder_functions(config)
    tree = jaxsample.chain(2)

    @jax.jit
    def logits(weights, cache):
        positions = lengths[:, None] + jnp.arange(3, dtype=jnp.int32)[None]
        mask = jaxsample.attention_mask(lengths, tree, num_slots)
        hidden, staged = forward(weights, tokens, positions, cache, mask)
        return unembed(weights, hidden), staged

    alone, staged_alone = logits(weights, cache)
    mesh = Mesh(np.array(jax.devices("cpu")).reshape(shape), ("data", "model"))
    placed = place(weights, weight_specs(config, mesh.shape), mesh)
    down = placed["layers"][0]["mlp"]["down"]["weight"]
    assert len(down.sharding.device_set) == 8
    assert down.addressable_shards[0].data.shape == (config.width, config.mlp_width // shape[1])
    given = placed, place(cache, cache_specs(config, num_rows, mesh.shape), mesh)
    program = logits.lower(*given).compile()
    # No weight is gathered where the counts divide, however its axes are folded into a matrix.
    assert "all-gather" not in (program.as_text() or "")
    split, staged = program(*given)
    assert np.abs(np.asarray(split) - alone).max() <= tolerance(config, alone)
    for one, other in zip(jax.tree.leaves(staged), jax.tree.leaves(staged_alone)):
        assert np.abs(np.asarray(one) - other).max() <= tolerance(config, other)


@pytest.mark.parametrize(
    "variant", [pytest.param("separate", marks=pytest.mark.large), "query and key norms, tied"]
)
def test_joined_projections_give_the_same_logits_to_rounding(variant):
    config = VARIANTS[variant]
    weights = random_weights(config, 4)
    tokens = np.arange(6, dtype=np.int32)[None]
    cache = jaxsample.init_cache(config.num_layers, 1, 1, config.num_kv_heads, config.head_size, jnp.float32)

    def logits(config, weights):
        forward, unembed = decoder_functions(config)
        mask = jaxsample.attention_mask(jnp.zeros(1, jnp.int32), jaxsample.chain(5), 1)
        return unembed(weights, forward(weights, tokens, jnp.asarray(tokens), cache, mask)[0])

    wanted = np.asarray(logits(config, weights))
    joined = join_projections(config, weights)
    assert jax.tree.map(lambda x: x.shape, joined[1]) == jax.tree.map(
        lambda x: x.shape, weight_shapes(joined[0])
    )
    assert np.abs(np.asarray(logits(*joined)) - wanted).max() <= tolerance(config, wanted)
