"""Value models from disk and to disk: LenVM checkpoints in Hugging Face's layout, and folders of our own.

A LenVM checkpoint is a model folder whose value head lies in value_head.safetensors beside the weights, or
among them; its LM head, if it has one, is not read. A folder of our own holds value_model.json, trunk/ (a
decoder's checkpoint) and head/ (an Orbax checkpoint), or what `models.delta` writes. Knows nothing of what
the numbers mean.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.checkpoints import load_checkpoint, restore, save, save_checkpoint, write_json
from models.decoder import DecoderConfig, Weights
from models.delta import DESCRIPTION, HEAD_PREFIX, is_delta, load_delta
from models.load import LoadedModel
from models.load_safetensors import decoder_config, load_tensors, open_tensors, read_json, text_from_folder
from models.safetensors_file import SafetensorsFile
from models.text import Text
from models.value_head import head_shapes, trunk_config

TRUNK, HEAD = "trunk", "head"
HEAD_FILE = "value_head.safetensors"
_FORMAT = 1  # raised when a folder can no longer be read by older code


@dataclasses.dataclass(frozen=True)
class ValueModel:
    """A value model in memory.

    Fields:
      config: the trunk's architecture.
      weights: {"trunk", "head"}, for `value_functions`.
      text: the text side, None where there is none. It must be the guided model's: token ids are not
        translated.
      gamma: the discount the model was trained with, None where the files do not say.
    """

    config: DecoderConfig
    weights: Weights
    text: Text | None
    gamma: float | None


def load_value_model(path: str | pathlib.Path, dtype: Any, base: LoadedModel | None = None) -> ValueModel:
    """Loads a value model.

    Args:
      path: a folder that `save_value_model` wrote, or one with config.json and model.safetensors or its
        shards, in which the head's tensors v_head.fc.* and v_head.summary.* are among the others or in
        value_head.safetensors, or one of `models.delta.save_delta`.
      dtype: float dtype of the trunk's weights; the head's are float32.
      base: the model to be guided, in that dtype. A value model of `save_delta` is a part of it and is loaded
        beside it only; others do not look at it.

    Raises:
      ValueError: no such folder, an unsupported architecture, a damaged file, tensors that are missing,
        unexpected or misshapen, or a missing or wrong base.
    """
    folder = pathlib.Path(path)
    if not folder.is_dir():
        raise ValueError(f"{path}: no such folder")
    if (folder / DESCRIPTION).is_file():
        if is_delta(read_json(folder / DESCRIPTION)):
            return _load_beside(folder, dtype, base)
        return _load_own(folder.absolute(), dtype)
    fields = read_json(folder / "config.json")
    config = decoder_config(fields)
    source, holders = open_tensors(folder)
    if not config.tied_embeddings and "model.embed_tokens.weight" not in holders:
        raise ValueError(f"{source}: missing tensors: model.embed_tokens.weight")
    inside = {name: file for name, file in holders.items() if name.startswith(HEAD_PREFIX)}
    if (folder / HEAD_FILE).is_file():
        if inside:
            raise ValueError(f"{source}: {', '.join(sorted(inside))} are in {HEAD_FILE} too")
        source = folder / HEAD_FILE
        file = SafetensorsFile(source)
        head = _load_head(config.width, dict.fromkeys(file.shapes, file), source)
    elif inside:
        head = _load_head(config.width, inside, source)
    else:
        raise ValueError(f"{folder}: no {HEAD_FILE} and no tensors {HEAD_PREFIX}*: not a value model")
    trunk = load_tensors(folder, trunk_config(config), dtype, ignored=tuple(inside))
    return ValueModel(
        trunk_config(config), {"trunk": trunk, "head": head}, text_from_folder(folder, fields), None
    )


def save_value_model(folder: pathlib.Path, model: ValueModel) -> None:
    """Writes a value model; the trunk's dtype is kept.

    Args:
      folder: does not exist yet, or is empty.
      model: what to write.

    Raises:
      ValueError: the folder holds something, or the weights are not of the configuration.
    """
    folder = pathlib.Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: exists already")
    facts = lambda tree: jax.tree.map(lambda leaf: (tuple(leaf.shape), str(leaf.dtype)), tree)
    if facts(model.weights["head"]) != facts(head_shapes(model.config.width)):
        raise ValueError(
            "the head does not have the names, shapes and dtype (float32) of the configuration's"
        )
    save_checkpoint(folder / TRUNK, trunk_config(model.config), model.weights["trunk"], model.text)
    save(folder / HEAD, model.weights["head"])
    # Last: a folder without it is not taken for a value model.
    write_json(folder / DESCRIPTION, {"format": _FORMAT, "gamma": model.gamma})


def _load_beside(folder: pathlib.Path, dtype: Any, base: LoadedModel | None) -> ValueModel:
    if base is None:
        raise ValueError(
            f"{folder}: holds a part of a value model, which is loaded beside its base model only"
        )
    there = base.weights["norm"]["weight"].dtype
    if jnp.dtype(dtype) != there:
        raise ValueError(f"dtype is {jnp.dtype(dtype)}, allowed is that of the base model, {there}")
    text = base.text if isinstance(base.text, Text) else None
    config, weights, gamma = load_delta(folder, base.config, base.weights)
    return ValueModel(config, weights, text, gamma)


def _load_own(folder: pathlib.Path, dtype: Any) -> ValueModel:
    fields = read_json(folder / DESCRIPTION)
    if fields.get("format") != _FORMAT:
        raise ValueError(f"{folder / DESCRIPTION}: format {fields.get('format')!r}, expected {_FORMAT}")
    gamma = fields.get("gamma")
    if gamma is not None and (not isinstance(gamma, float) or not 0 < gamma < 1):
        raise ValueError(
            f"{folder / DESCRIPTION}: gamma is {gamma!r}, allowed are numbers in (0, 1) and null"
        )
    config, trunk, text = load_checkpoint(folder / TRUNK, dtype)
    head = restore(folder / HEAD, head_shapes(config.width), jnp.float32)
    return ValueModel(config, {"trunk": trunk, "head": head}, text, gamma)


def _load_head(width: int, holders: Mapping[str, SafetensorsFile], source: pathlib.Path) -> Weights:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(head_shapes(width))
    wanted = {HEAD_PREFIX + ".".join(entry.key for entry in path): leaf.shape for path, leaf in leaves}
    found = {name: file.shapes[name] for name, file in holders.items()}
    if found != wanted:
        expected = ", ".join(f"{name} {list(shape)}" for name, shape in wanted.items())
        there = ", ".join(f"{name} {list(shape)}" for name, shape in sorted(found.items()))
        raise ValueError(f"{source}: the value head is {there}; expected {expected}")
    return treedef.unflatten([jnp.asarray(holders[name].read(name, np.float32)) for name in wanted])
