"""Rows of many arrays as one array of integers: one copy to the device instead of one for every field.

Knows nothing of what the fields mean. Every field must have four bytes an element, or be bool.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def pack_rows(rows: Any) -> np.ndarray:
    """The rows of a pytree side by side.

    Args:
      rows: pytree of NumPy arrays with n rows each; float32, int32, uint32 or bool.

    Returns:
      i32[n, R], the bits of every leaf in the pytree's order.

    Raises:
      ValueError: a leaf of another dtype.
    """
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(rows)]
    return np.concatenate([_as_words(leaf).reshape(leaf.shape[0], -1) for leaf in leaves], axis=1)


def unpack_rows(record: jax.Array, like: Any) -> Any:
    """What `pack_rows` packed, on the device.

    Args:
      record: i32[n, R].
      like: the pytree that was packed, or any with its shapes behind the first axis and its dtypes.

    Raises:
      ValueError: a record of another width, at trace time.
    """
    leaves, structure = jax.tree.flatten(like)
    widths = [math.prod(leaf.shape[1:]) for leaf in leaves]
    if record.ndim != 2 or record.shape[1] != sum(widths):
        raise ValueError(f"record has shape {record.shape}, expected rows of {sum(widths)} words")
    ends = np.cumsum(widths)
    result = []
    for leaf, width, end in zip(leaves, widths, ends, strict=True):
        words = record[:, end - width : end].reshape(record.shape[0], *leaf.shape[1:])
        is_bool = leaf.dtype == np.bool_
        result.append(words != 0 if is_bool else jax.lax.bitcast_convert_type(words, jnp.dtype(leaf.dtype)))
    return jax.tree.unflatten(structure, result)


def _as_words(leaf: np.ndarray) -> np.ndarray:
    if leaf.dtype == np.bool_:
        return leaf.astype(np.int32)
    if leaf.dtype not in (np.float32, np.int32, np.uint32):
        raise ValueError(f"a field is {leaf.dtype}, allowed are float32, int32, uint32 and bool")
    return np.ascontiguousarray(leaf).view(np.int32)
