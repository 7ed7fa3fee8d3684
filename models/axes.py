"""How a model's arrays are split over a mesh of devices: one table of logical axes, one of mesh axes.

Weights are split as in Megatron: heads and MLP columns over the "model" axis, so that each layer needs two
sums across devices; the vocabulary likewise; rows of the cache over "data". Knows nothing of values.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsample.kvcache import KVCache
from models.decoder import DecoderConfig, Weights, weight_shapes

# Logical axes of each weight, by its path in a layer or in the decoder.
WEIGHT_AXES: dict[str, tuple[str, ...]] = {
    "embedding.weight": ("vocabulary", "width"),
    "head.weight": ("vocabulary", "width"),
    "norm.weight": ("width",),
    "attention_norm.weight": ("width",),
    "attention.query.weight": ("heads", "width"),
    "attention.query.bias": ("heads",),
    "attention.key.weight": ("kv_heads", "width"),
    "attention.key.bias": ("kv_heads",),
    "attention.value.weight": ("kv_heads", "width"),
    "attention.value.bias": ("kv_heads",),
    "attention.query_key_value.weight": ("kv_heads", "group", "head_size", "width"),
    "attention.query_key_value.bias": ("kv_heads", "group", "head_size"),
    "attention.output.weight": ("width", "heads"),
    "attention.output.bias": ("width",),
    "attention.query_norm.weight": ("head_size",),
    "attention.key_norm.weight": ("head_size",),
    "mlp_norm.weight": ("width",),
    "mlp.gate.weight": ("mlp", "width"),
    "mlp.up.weight": ("mlp", "width"),
    "mlp.gate_up.weight": ("mlp", "pair", "width"),
    "mlp.down.weight": ("width", "mlp"),
}
CACHE_AXES = ("layers", "rows", "slots", "kv_heads", "head_size")

# Mesh axis of each logical axis; a logical axis that is not here, or whose mesh axis a mesh lacks, is whole.
MESH_AXES: dict[str, str] = {
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "vocabulary": "model",
    "rows": "data",
}


def weight_specs(
    config: DecoderConfig, mesh_sizes: Mapping[str, int], mesh_axes: Mapping[str, str] = MESH_AXES
) -> Weights:
    """The PartitionSpec of every weight.

    An axis is split only where its count (heads, not rows of the matrix) is a multiple of the devices along
    its mesh axis; otherwise every device holds it whole.

    Args:
      config: the architecture.
      mesh_sizes: devices by mesh axis, `mesh.shape`.
      mesh_axes: mesh axis by logical axis.

    Returns:
      The tree of the weights with a PartitionSpec at each leaf.
    """
    counts = _counts(config)

    def spec(path: tuple[Any, ...], _) -> PartitionSpec:
        return _spec(WEIGHT_AXES[weight_name(path)], counts, mesh_sizes, mesh_axes)

    return jax.tree_util.tree_map_with_path(spec, weight_shapes(config))


def cache_specs(
    config: DecoderConfig,
    num_rows: int,
    mesh_sizes: Mapping[str, int],
    mesh_axes: Mapping[str, str] = MESH_AXES,
) -> KVCache:
    """The PartitionSpec of a contiguous cache's keys and values, split as the key and value heads are.

    Args:
      config, mesh_sizes, mesh_axes: as for `weight_specs`.
      num_rows: B.

    Returns:
      KVCache with a PartitionSpec in each field.
    """
    spec = _spec(CACHE_AXES, {**_counts(config), "rows": num_rows}, mesh_sizes, mesh_axes)
    return KVCache(spec, spec)  # type: ignore[arg-type]


def place(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Puts a tree of arrays on a mesh, each split as its PartitionSpec says."""
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)
    return jax.device_put(tree, shardings)


def weight_name(path: tuple[Any, ...]) -> str:
    """A weight's name in WEIGHT_AXES from its path in the tree: the layer's index is left out."""
    keys = [str(entry.key) for entry in path]
    return ".".join(keys[2:] if keys[0] == "layers" else keys)


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def _counts(config: DecoderConfig) -> dict[str, int]:
    return {
        "vocabulary": config.vocab_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "mlp": config.mlp_width,
        "width": config.width,
        "head_size": config.head_size,
        "layers": config.num_layers,
    }


def _spec(axes, counts, mesh_sizes, mesh_axes) -> PartitionSpec:
    def split(axis: str) -> str | None:
        mesh_axis = mesh_axes.get(axis)
        if mesh_axis not in mesh_sizes or counts[axis] % mesh_sizes[mesh_axis]:
            return None
        return mesh_axis

    return PartitionSpec(*(split(axis) for axis in axes))
