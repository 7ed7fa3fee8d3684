"""Draft heads from disk and to disk: a folder with draft_head.json and draft_head.safetensors.

The file holds the head's own weights, named as its tree names them, and "ids", its draft vocabulary; what it
takes from its base model is not there. Knows nothing of what the numbers mean.
"""

import dataclasses
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from models.checkpoints import write_json
from models.config_fields import config_of_fields
from models.decoder import DecoderConfig, Weights
from models.draft_head import DraftHead, head_config, head_shapes
from models.load_safetensors import read_json
from models.safetensors_file import SafetensorsFile, write_tensors

DESCRIPTION, TENSORS, IDS = "draft_head.json", "draft_head.safetensors", "ids"
_FORMAT = 1  # raised when a folder can no longer be read by older code
_NOT_ITS_OWN = (
    "num_layers",
    "max_length",
    "joined_projections",
)  # of a configuration, may differ from the base's


def save_draft_head(folder: pathlib.Path, head: DraftHead, base_name: str, facts: dict[str, Any]) -> None:
    """Writes a draft head in bfloat16.

    Args:
      folder: does not exist yet, or is empty.
      head: what to write.
      base_name: the base model's, for whoever reads.
      facts: about its training, as JSON has it; kept beside, never looked at.

    Raises:
      ValueError: the folder holds something.
    """
    folder = pathlib.Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: exists already")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.asarray(leaf, ml_dtypes.bfloat16) for name, leaf in _named(head.weights).items()}
    if head.ids is not None:
        tensors[IDS] = np.asarray(head.ids, np.int32)
    write_tensors(folder / TENSORS, tensors)
    config = dataclasses.asdict(head.config)
    # Last: a folder without it is not taken for a draft head.
    write_json(
        folder / DESCRIPTION, {"format": _FORMAT, "base": base_name, "config": config, "training": facts}
    )


def load_draft_head(path: str | pathlib.Path, base: DecoderConfig) -> DraftHead:
    """Loads a draft head for a base model.

    Args:
      path: a folder that `save_draft_head` wrote.
      base: the configuration of the model that it is to draft for.

    Returns:
      DraftHead, its weights in float32.

    Raises:
      ValueError: no such folder, a damaged file, tensors that are missing, unexpected or misshapen, ids that
        are no draft vocabulary, or a head made for another model.
    """
    folder = pathlib.Path(path)
    if not (folder / DESCRIPTION).is_file():
        raise ValueError(f"{path}: no {DESCRIPTION}: not the folder of a draft head")
    fields = read_json(folder / DESCRIPTION)
    if fields.get("format") != _FORMAT:
        raise ValueError(f"{folder / DESCRIPTION}: format {fields.get('format')!r}, expected {_FORMAT}")
    config = config_of_fields(str(folder / DESCRIPTION), fields.get("config"))
    wanted = head_config(base, config.num_layers)
    for field in dataclasses.fields(DecoderConfig):
        made_for, given = getattr(config, field.name), getattr(wanted, field.name)
        if field.name not in _NOT_ITS_OWN and not _same(made_for, given):
            raise ValueError(
                f"{path}: a draft head for {fields.get('base')}, whose {field.name} is {made_for}; "
                f"the model's is {given}"
            )
    source = folder / TENSORS
    if not source.is_file():
        raise ValueError(f"{folder}: no {TENSORS}")
    file = SafetensorsFile(source)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(head_shapes(wanted))
    shapes = {_name(keys): leaf.shape for keys, leaf in leaves}
    found = {name: shape for name, shape in file.shapes.items() if name != IDS}
    if found != shapes:
        wrong = sorted(name for name in {*found, *shapes} if found.get(name) != shapes.get(name))
        told = ", ".join(
            f"{name} is {_told(found.get(name))}, expected {_told(shapes.get(name))}" for name in wrong
        )
        raise ValueError(f"{source}: {told}")
    weights = treedef.unflatten([jnp.asarray(file.read(name, np.float32)) for name in shapes])
    return DraftHead(wanted, weights, _ids(file, source, base.vocab_size))


def _same(one, other) -> bool:
    """Equal, numbers as far as a checkpoint's float32 tells them apart."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


def _ids(file: SafetensorsFile, source: pathlib.Path, vocab_size: int) -> np.ndarray | None:
    if IDS not in file.shapes:
        return None
    ids = file.read(IDS, np.int32)
    if ids.ndim != 1 or not ids.size or ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) <= 0).any():
        raise ValueError(
            f"{source}: {IDS} of shape {list(ids.shape)} are no rising token ids in 0 ... {vocab_size - 1}"
        )
    return ids


def _named(weights: Weights) -> dict[str, jax.Array]:
    return {_name(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(weights)[0]}


def _name(keys: tuple[Any, ...]) -> str:
    return ".".join(str(entry.key) for entry in keys)


def _told(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
