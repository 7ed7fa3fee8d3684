"""One entry for every supported checkpoint: a Hugging Face folder, a GGUF file, an Orbax checkpoint of ours.

Knows nothing about what the formats look like inside.
"""

import dataclasses
import pathlib
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from models.checkpoints import is_checkpoint, load_checkpoint
from models.decoder import DecoderConfig, Weights
from models.load_safetensors import load_folder
from models.text import Text, TokenIds


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A checkpoint in memory."""

    config: DecoderConfig
    weights: Weights
    text: Text | TokenIds | None  # None: the checkpoint has no tokenizer


def load(path: str | pathlib.Path, dtype: Any, mesh: Mesh | None = None) -> LoadedModel:
    """Loads a checkpoint.

    Args:
      path: a folder with config.json and model.safetensors or its shards (and tokenizer.json), a folder
        that `models.checkpoints.save_checkpoint` wrote, or a GGUF file.
      dtype: float dtype of the weights on the device.
      mesh: with the axes "data" and "tensor" of `models.placement`: each device gets its share of a tensor as
        it is read, no device holds one whole that can be split. None: the default device.

    Returns:
      LoadedModel.

    Raises:
      ValueError: no float dtype, no such path, an unknown format, an unsupported architecture, a damaged
        file, or tensors that are missing, unexpected or misshapen.
    """
    try:
        floats = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floats = False
    if not floats:
        raise ValueError(f"dtype is {dtype!r}, allowed is a float dtype")
    path = pathlib.Path(path)
    if path.is_dir() and is_checkpoint(path):
        return LoadedModel(*load_checkpoint(path, dtype, mesh))
    if path.is_dir():
        return LoadedModel(*load_folder(path, dtype, mesh))
    if not path.is_file():
        raise ValueError(f"{path}: no such file or folder")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"GGUF":
        from models.load_gguf import load_gguf  # its reader is needed for nothing else

        return LoadedModel(*load_gguf(path, dtype, mesh))
    if path.suffix == ".safetensors":
        raise ValueError(f"{path}: give the folder that holds config.json and model.safetensors")
    raise ValueError(f"{path}: neither a model folder nor a GGUF file (it begins with {magic!r})")
