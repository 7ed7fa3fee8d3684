"""Value models as what they have beyond the model that they were trained from: last layers, norm and head.

A folder holds value_model.json and value_model.safetensors. The embedding and the layers before the trained
ones are the base model's own arrays, which are shared and not copied. Knows nothing of what the numbers mean.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from models.checkpoints import write_json
from models.decoder import DecoderConfig, Weights, weight_shapes
from models.joining import join_projections
from models.load_safetensors import read_json
from models.safetensors_file import SafetensorsFile, write_tensors
from models.value_head import head_shapes, trunk_config
from models.weights import HUGGING_FACE, tensor_name

DESCRIPTION, TENSORS = "value_model.json", "value_model.safetensors"
HEAD_PREFIX = "v_head."
_FORMAT = 1  # raised when a folder can no longer be read by older code
_NUM_ROWS = 16  # of the embedding that are looked at


def fingerprint(weights: Weights, num_layers: int) -> str:
    """SHA-256 of a few small tensors of a decoder, which tells it from others and from other roundings.

    They are read in bfloat16, so that the same model gives the same in float32 and in bfloat16.

    Args:
      weights: the decoder's.
      num_layers: whose norms are looked at, beside the first rows of the embedding and the final norm.
    """
    layers = [weights["layers"][index] for index in range(num_layers)]
    norms = [layer[name]["weight"] for layer in layers for name in ("attention_norm", "mlp_norm")]
    digest = hashlib.sha256()
    for array in (weights["embedding"]["weight"][:_NUM_ROWS], weights["norm"]["weight"], *norms):
        digest.update(np.asarray(array).astype(ml_dtypes.bfloat16).tobytes())
    return digest.hexdigest()


def is_delta(fields: Mapping[str, Any]) -> bool:
    """Whether a value_model.json is one of `save_delta`."""
    return "base" in fields


def save_delta(
    folder: pathlib.Path,
    config: DecoderConfig,
    weights: Weights,
    gamma: float,
    *,
    num_shared: int,
    base: str,
    base_weights: Weights,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Writes the part of a value model that its base model lacks.

    Args:
      folder: does not exist yet, or is empty.
      config: the trunk's architecture, of separate projections.
      weights: {"trunk", "head"}; layers from num_shared on and the norm are rounded to bfloat16, the head is
        float32.
      gamma: the discount it was trained with.
      num_shared: first layers that are the base model's, 0 ... L.
      base: the base model's name, for messages.
      base_weights: the base model's.
      facts: more to say of the model, as JSON has it.

    Raises:
      ValueError: the folder holds something, or num_shared is out of range.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: exists already")
    if not 0 <= num_shared <= config.num_layers:
        raise ValueError(f"num_shared is {num_shared}, allowed is 0 ... {config.num_layers}")
    trunk, head = _own(config, num_shared)
    as_numbers = lambda tree, names, dtype: {
        name: np.asarray(_at(tree, path)).astype(dtype) for name, path in names.items()
    }
    tensors = as_numbers(weights["trunk"], trunk, ml_dtypes.bfloat16)
    tensors |= as_numbers(weights["head"], head, np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / TENSORS, tensors)
    fields = {
        "format": _FORMAT,
        "gamma": gamma,
        "base": {"name": base, "fingerprint": fingerprint(base_weights, num_shared), **_shape(config)},
        "num_layers": config.num_layers,
        "num_shared": num_shared,
        "facts": dict(facts or {}),
    }
    write_json(folder / DESCRIPTION, fields)  # last: a folder without it is not taken for a value model


def load_delta(
    folder: pathlib.Path, config: DecoderConfig, base_weights: Weights
) -> tuple[DecoderConfig, Weights, float]:
    """A value model from what `save_delta` wrote and the model that it was trained from.

    Args:
      folder: as written.
      config, base_weights: the base model. Its embedding and first layers are part of the result as they are,
        so that nothing is held twice; where its projections are joined, those of the rest are joined too.

    Returns:
      (the trunk's configuration, {"trunk", "head"}, gamma); the trunk has the base's dtype.

    Raises:
      ValueError: a damaged folder, or another base model than the one it was trained from.
    """
    fields = read_json(folder / DESCRIPTION)
    source = folder / DESCRIPTION
    if fields.get("format") != _FORMAT:
        raise ValueError(f"{source}: format {fields.get('format')!r}, expected {_FORMAT}")
    try:
        told, num_layers, num_shared = fields["base"], fields["num_layers"], fields["num_shared"]
        name, mark, gamma = told["name"], told["fingerprint"], float(fields["gamma"])
        wanted = {key: told[key] for key in _shape(config)}
        sound = 0 < gamma < 1 and 0 <= num_shared <= num_layers
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{source}: damaged ({error!r})") from None
    if not sound:
        raise ValueError(
            f"{source}: gamma {gamma}, num_layers {num_layers} and num_shared {num_shared} make no sense"
        )
    there = _shape(config)
    others = [f"{key} is {there[key]}, not {wanted[key]}" for key in wanted if there[key] != wanted[key]]
    if config.num_layers < num_shared:
        others.append(f"it has {config.num_layers} layers, {num_shared} are shared")
    if not others and fingerprint(base_weights, num_shared) != mark:
        others = ["the shapes are the same, the weights are not"]
    if others:
        raise ValueError(f"{folder}: a value model for {name}, not for this model: {'; '.join(others)}")
    separate = dataclasses.replace(trunk_config(config), num_layers=num_layers, joined_projections=False)
    dtype = base_weights["norm"]["weight"].dtype
    trunk, head = _read(folder / TENSORS, separate, num_shared, dtype)
    if config.joined_projections:
        _, trunk = join_projections(separate, trunk)
    trunk["embedding"] = base_weights["embedding"]
    trunk["layers"] |= {index: base_weights["layers"][index] for index in range(num_shared)}
    config = dataclasses.replace(separate, joined_projections=config.joined_projections)
    return config, {"trunk": trunk, "head": head}, gamma


def _shape(config: DecoderConfig) -> dict[str, int]:
    """What a base model must have in common with the one trained from."""
    names = ("vocab_size", "width", "num_heads", "num_kv_heads", "head_size", "mlp_width")
    return {name: getattr(config, name) for name in names}


def _own(config: DecoderConfig, num_shared: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Name in the file -> path in the tree, of the trunk's own tensors and of the head's."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(weight_shapes(config))
    is_own = lambda path: path[0].key == "norm" or (path[0].key == "layers" and path[1].key >= num_shared)
    trunk = {tensor_name(path, HUGGING_FACE): path for path, _ in leaves if is_own(path)}
    leaves, _ = jax.tree_util.tree_flatten_with_path(head_shapes(config.width))
    return trunk, {HEAD_PREFIX + ".".join(entry.key for entry in path): path for path, _ in leaves}


def _at(tree: Any, path: Any) -> Any:
    for entry in path:
        tree = tree[entry.key]
    return tree


def _read(path: pathlib.Path, config: DecoderConfig, num_shared: int, dtype: Any) -> tuple[Weights, Weights]:
    """The trunk's own part, in dtype, and the head."""
    if not path.is_file():
        raise ValueError(f"{path.parent}: no {path.name}")
    file = SafetensorsFile(path)
    names, shapes = _own(config, num_shared), (weight_shapes(config), head_shapes(config.width))
    wanted = {name: _at(tree, at).shape for tree, part in zip(shapes, names) for name, at in part.items()}
    if file.shapes != wanted:
        odd = [name for name in {**wanted, **file.shapes} if wanted.get(name) != file.shapes.get(name)]
        raise ValueError(f"{path}: missing, unexpected or misshapen tensors: {', '.join(sorted(odd)[:8])}")
    trees: list[Weights] = []
    for part, kind in zip(names, (dtype, np.float32)):
        tree: Weights = {}
        for name, at in part.items():
            inner = tree
            for entry in at[:-1]:
                inner = inner.setdefault(entry.key, {})
            inner[at[-1].key] = jnp.asarray(file.read(name, kind))
        trees.append(tree)
    trees[0].setdefault("layers", {})
    return trees[0], trees[1]
