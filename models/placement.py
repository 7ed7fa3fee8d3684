"""A decoder and the state of its batch on a mesh: rows over the axis "data", weights over the axis "tensor".

The table of `models.axes` says which axes of a weight are split; compilers add the sums across devices. Knows
nothing of requests' values.
"""

import dataclasses
import math
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsample.params import TILE
from models.axes import MESH_AXES, cache_specs, place, weight_specs
from models.decoder import DecoderConfig, Weights

DATA, TENSOR = "data", "tensor"
AXES = {name: {"model": TENSOR, "data": DATA}[axis] for name, axis in MESH_AXES.items()}


def read_mesh(text: str) -> Mesh:
    """The mesh that words like "data=2,tensor=3" say, for a program that has not touched its devices yet.

    A CPU then acts as as many devices as the mesh needs, unless XLA_FLAGS says how many it is.

    Raises:
      ValueError: other words, or more devices than there are.
    """
    sizes = mesh_sizes(text)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", math.prod(sizes.values()))
    return make_mesh(sizes)


def mesh_sizes(text: str) -> dict[str, int]:
    """The sizes in words like "data=2,tensor=3"; an axis left out has size 1.

    Raises:
      ValueError: other words.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        found = re.fullmatch(r"(\w+)=([1-9]\d*)", part.strip())
        if not found or found[1] not in (DATA, TENSOR) or found[1] in sizes:
            raise ValueError(f"mesh is {text!r}, expected data=D,tensor=P with sizes from 1")
        sizes[found[1]] = int(found[2])
    return {DATA: 1, TENSOR: 1} | sizes


def make_mesh(sizes: dict[str, int]) -> Mesh:
    """A mesh of these sizes on the first devices.

    Raises:
      ValueError: more devices than there are.
    """
    needed, devices = math.prod(sizes.values()), jax.devices()
    if needed > len(devices):
        words = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"mesh {words} needs {needed} devices, there are {len(devices)}")
    return Mesh(np.array(devices[:needed]).reshape(tuple(sizes.values())), tuple(sizes))


def place_model(config: DecoderConfig, weights: Weights, mesh: Mesh) -> tuple[DecoderConfig, Weights]:
    """The model on a mesh, each key-value head on several devices where there are more devices than heads.

    Where the devices along "tensor" do not divide the vocabulary, embedding and head get rows of zeros, so
    that each device has whole tiles of 128 ids: logits are wider than the vocabulary then, and split evenly.

    Args:
      config, weights: the model.
      mesh: with the axes "data" and "tensor".

    Returns:
      The configuration, whose key-value heads are repeated where that is needed, and the placed weights.

    Raises:
      ValueError: heads that the devices along "tensor" do not divide.
    """
    for name in (DATA, TENSOR):
        if name not in mesh.shape:
            raise ValueError(f"the mesh has no axis {name!r}, only {', '.join(mesh.axis_names)}")
    num_shards, num_heads, num_kv_heads = mesh.shape[TENSOR], config.num_heads, config.num_kv_heads
    if num_heads % num_shards or (num_kv_heads % num_shards and num_shards % num_kv_heads):
        raise ValueError(
            f"{num_heads} query and {num_kv_heads} key-value heads on {num_shards} devices along {TENSOR!r}: "
            "the devices must divide the query heads, and one of devices and key-value heads the other"
        )
    if num_kv_heads < num_shards:
        config, weights = repeat_kv_heads(config, weights, num_shards // num_kv_heads)
    weights, num_ids = pad_vocabulary(weights, num_shards)
    wide = dataclasses.replace(config, vocab_size=num_ids)
    return config, place(weights, weight_specs(wide, mesh.shape, AXES), mesh)


def weight_shardings(config: DecoderConfig, mesh: Mesh | None) -> Any:
    """How weights lie on a mesh from the start: a tree with a NamedSharding at each leaf; None for no mesh.

    What the devices do not divide is whole on each of them, until `place_model` has padded or repeated it.
    """
    if mesh is None:
        return None
    is_spec = lambda value: isinstance(value, PartitionSpec)
    specs = weight_specs(config, mesh.shape, AXES)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def pad_vocabulary(weights: Weights, num_shards: int) -> tuple[Weights, int]:
    """Embedding and head with rows of zeros behind, where num_shards does not divide them; and their rows.

    The rows are whole tiles on each of the shards then, as `jaxsample.map_rows` would make the logits.
    """
    num_ids = weights["embedding"]["weight"].shape[0]
    missing = -num_ids % (TILE * num_shards) if num_ids % num_shards else 0
    wide = lambda matrix: jnp.pad(matrix, ((0, missing), (0, 0)))
    padded = {name: jax.tree.map(wide, weights[name]) for name in ("embedding", "head") if name in weights}
    return ({**weights, **padded} if missing else weights), num_ids + missing


def repeat_kv_heads(config: DecoderConfig, weights: Weights, times: int) -> tuple[DecoderConfig, Weights]:
    """The same model with every key-value head `times` times in a row, each serving fewer query heads.

    Args:
      config, weights: the model, with separate or joined projections.
      times: divides the query heads of a key-value head.
    """
    H, G, D = config.num_heads, config.num_kv_heads, config.head_size

    def repeat(part: jax.Array) -> jax.Array:
        heads = jnp.repeat(part.reshape(G, D, *part.shape[1:]), times, axis=0)
        return heads.reshape(G * times * D, *part.shape[1:])

    def repeat_joined(part: jax.Array) -> jax.Array:
        query = part[:, :-2].reshape(G * times, H // (G * times), *part.shape[2:])
        return jnp.concatenate([query, jnp.repeat(part[:, -2:], times, axis=0)], axis=1)

    def repeat_layer(layer: Weights) -> Weights:
        attention = dict(layer["attention"])
        names = {"query_key_value": repeat_joined} if config.joined_projections else {}
        for name, how in (names or {"key": repeat, "value": repeat}).items():
            attention[name] = jax.tree.map(how, attention[name])
        return {**layer, "attention": attention}

    layers = {index: repeat_layer(layer) for index, layer in weights["layers"].items()}
    return dataclasses.replace(config, num_kv_heads=G * times), {**weights, "layers": layers}


def row_sharding(mesh: Mesh) -> NamedSharding:
    """How arrays with rows first lie on the mesh."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def cache_sharding(config: DecoderConfig, num_rows: int, mesh: Mesh) -> Any:
    """How a contiguous float cache lies on the mesh: KVCache with a NamedSharding in each field."""
    specs = cache_specs(config, num_rows, mesh.shape, AXES)
    is_spec = lambda value: isinstance(value, PartitionSpec)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def head_sharding(config: DecoderConfig, mesh: Mesh) -> NamedSharding:
    """How keys or values in pages, [L, pages, page_size, H, D] of floats, lie on the mesh: by head."""
    by_head = {name: axis for name, axis in AXES.items() if name == "kv_heads"}
    return NamedSharding(mesh, cache_specs(config, 1, mesh.shape, by_head).keys)  # type: ignore[arg-type]


def whole_sharding(mesh: Mesh) -> NamedSharding:
    """How arrays lie that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())
