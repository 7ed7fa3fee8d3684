"""Checkpoints of this package's own: weights through Orbax, the configuration and the text side as JSON.

A folder holds decoder.json, weights/ (an Orbax checkpoint) and, where the model has a text side,
tokenizer.json and text.json. Weights come back with the bits they were saved with.
"""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp

from models.config_fields import config_of_fields
from models.decoder import DecoderConfig, Weights, weight_shapes
from models.placement import weight_shardings
from models.text import Text

CONFIG, WEIGHTS, TOKENIZER, TEXT = "decoder.json", "weights", "tokenizer.json", "text.json"
_LARGE_SHARE = 0.05  # of all weights, from which an array is restored alone
_CHUNK_BYTES = 2**20  # of an array on a disk, at most
_FORMAT = 1  # raised when a folder can no longer be read by older code


def save_checkpoint(
    folder: pathlib.Path, config: DecoderConfig, weights: Weights, text: Text | None = None
) -> None:
    """Writes a checkpoint.

    Args:
      folder: does not exist yet, or is empty.
      config, weights: the model; the weights' dtype is kept.
      text: the text side, if any.

    Raises:
      ValueError: the folder holds something, or the weights are not of that configuration or of one dtype.
    """
    folder = pathlib.Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: exists already")
    dtypes = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(weights)})
    if len(dtypes) != 1:
        raise ValueError(f"the weights have dtypes {', '.join(dtypes)}, expected one")
    shapes = lambda tree: jax.tree.map(lambda leaf: tuple(leaf.shape), tree)
    if shapes(weights) != shapes(weight_shapes(config)):
        raise ValueError("the weights do not have the names and shapes that the configuration says")
    folder.mkdir(parents=True, exist_ok=True)
    if text is not None:
        text.tokenizer.save(str(folder / TOKENIZER))
        fields = {
            "eos_token_ids": text.eos_token_ids,
            "chat_template": text.chat_template,
            "special_tokens": text.special_tokens,
        }
        write_json(folder / TEXT, fields)
    save(folder / WEIGHTS, weights)
    # Last: a folder without it is not taken for a checkpoint.
    write_json(folder / CONFIG, {"format": _FORMAT, "dtype": dtypes[0], "config": dataclasses.asdict(config)})


def is_checkpoint(folder: pathlib.Path) -> bool:
    """Whether a folder was written by `save_checkpoint`."""
    return (folder / CONFIG).is_file()


def load_checkpoint(
    folder: pathlib.Path, dtype: Any = None, mesh: Mesh | None = None
) -> tuple[DecoderConfig, Weights, Text | None]:
    """Reads a checkpoint, each tensor straight to where it is to lie.

    Args:
      folder: as `save_checkpoint` wrote it.
      dtype: float dtype of the weights; None: the one they were saved in.
      mesh: where they are to lie, see `models.placement`; None: on the default device.

    Raises:
      ValueError: a missing or damaged file, another format, or weights that are not of the configuration.
    """
    folder = pathlib.Path(folder).absolute()
    fields = _read_json(folder / CONFIG)
    if fields.get("format") != _FORMAT:
        raise ValueError(f"{folder / CONFIG}: format {fields.get('format')!r}, expected {_FORMAT}")
    config = config_of_fields(str(folder / CONFIG), fields.get("config"))
    if not (folder / WEIGHTS).is_dir():
        raise ValueError(f"{folder}: no {WEIGHTS} folder")
    try:
        dtype = jnp.dtype(fields["dtype"] if dtype is None else dtype)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / CONFIG}: no dtype of the weights ({error})") from None
    shardings = weight_shardings(config, mesh)
    weights = restore(folder / WEIGHTS, weight_shapes(config), dtype, shardings)
    return config, weights, _text(folder)


def save(folder: pathlib.Path, tree: Any) -> None:
    """Saves a tree of arrays with Orbax, in chunks that `restore` converts one by one."""
    context = ocp.Context()
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    with context:
        ocp.save(folder, tree)


def restore(folder: pathlib.Path, shapes: Any, dtype: Any, shardings: Any = None) -> Any:
    """A tree of arrays that Orbax saved; ValueError where it cannot be restored.

    Args:
      folder: where it was saved.
      shapes: the tree with a ShapeDtypeStruct at each leaf.
      dtype: of every leaf.
      shardings: the tree with a Sharding at each leaf; None: all on the default device.
    """
    if shardings is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: device, shapes)
    wanted = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=place), shapes, shardings
    )
    leaves, treedef = jax.tree.flatten(wanted)
    sizes = [leaf.size * max(jnp.dtype(dtype).itemsize, 4) for leaf in leaves]
    # Large arrays come one by one, while there is room for what is read of them beside the weights; of the
    # others as much as the largest is read at a time.
    large = [index for index, size in enumerate(sizes) if size > sum(sizes) * _LARGE_SHARE]
    groups = [{index} for index in sorted(large, key=lambda index: -sizes[index])]
    groups.append(set(range(len(leaves))) - set(large))
    restored: list[Any] = [None] * len(leaves)
    try:
        for group in filter(None, groups):
            context = ocp.Context()
            most = max(sizes[index] for index in group)
            context.memory.read_concurrent_bytes = most + 1  # the limit itself is too much
            asked = [leaf if index in group else ... for index, leaf in enumerate(leaves)]
            with context:
                found = treedef.flatten_up_to(ocp.load(folder, treedef.unflatten(asked)))
            for index in group:
                restored[index] = found[index]
    except Exception as error:  # Orbax and its storage layer raise many kinds
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{folder}: cannot be restored ({reason})") from error
    return treedef.unflatten(restored)


def _text(folder: pathlib.Path) -> Text | None:
    if not (folder / TEXT).is_file():
        return None
    import tokenizers

    fields = _read_json(folder / TEXT)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # the package raises bare Exception
        raise ValueError(f"{folder / TOKENIZER}: not a tokenizer ({error})") from None
    try:
        return Text(
            tokenizer, tuple(fields["eos_token_ids"]), fields["chat_template"], fields["special_tokens"]
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / TEXT}: damaged ({error})") from None


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: not a JSON object")
    return fields


def write_json(path: pathlib.Path, fields: dict[str, Any]) -> None:
    """Writes a JSON object to a file."""
    path.write_text(json.dumps(fields, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
