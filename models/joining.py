"""Joins the projections that read the same input, for fewer and larger matrix products in a decode step.

Query, key and value become one tensor, gate and up another. Knows nothing of files.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from models.decoder import DecoderConfig, Weights
from models.kernels import kernels_of


def join_for_kernels(
    config: DecoderConfig, weights: Weights, mesh: Any = None
) -> tuple[DecoderConfig, Weights]:
    """Joined projections where the kernels are used, which read them so; else what is given.

    Args, Returns: as for `join_projections`; mesh: where the weights lie, None for one device.
    """
    return (config, weights) if kernels_of(mesh) is None else join_projections(config, weights)


def join_projections(config: DecoderConfig, weights: Weights) -> tuple[DecoderConfig, Weights]:
    """The same model with joined projections, made layer by layer on the device.

    The parts that were joined are deleted as soon as their copy exists, so that no more than one layer is
    ever held twice: `weights` must not be used afterwards.

    Args:
      config: of separate projections; one that is already joined comes back as it is.
      weights: as `decoder_functions(config)` takes them.

    Returns:
      The configuration with `joined_projections`, and its weights.
    """
    if config.joined_projections:
        return config, weights
    G, D = config.num_kv_heads, config.head_size

    def heads(part: jax.Array) -> jax.Array:
        return part.reshape(G, -1, D, *part.shape[1:])

    def join_layer(layer: Weights) -> Weights:
        attention, mlp = dict(layer["attention"]), dict(layer["mlp"])
        parts = [attention.pop(name) for name in ("query", "key", "value")]
        # [G, H/G + 2, D, W]: each key-value head with its queries.
        attention["query_key_value"] = {
            kind: _consume(lambda *arrays: jnp.concatenate([heads(a) for a in arrays], axis=1), kind, parts)
            for kind in parts[0]
        }
        parts = [mlp.pop(name) for name in ("gate", "up")]
        mlp["gate_up"] = {"weight": _consume(lambda *arrays: jnp.stack(arrays, axis=1), "weight", parts)}
        return {**layer, "attention": attention, "mlp": mlp}

    layers = {index: join_layer(layer) for index, layer in weights["layers"].items()}
    return dataclasses.replace(config, joined_projections=True), {**weights, "layers": layers}


def _consume(join, kind: str, parts: list[Weights]) -> jax.Array:
    arrays = [part[kind] for part in parts]
    joined = jax.block_until_ready(join(*arrays))
    for array in arrays:
        array.delete()
    return joined
