"""Writes safetensors files, and reads tensors one at a time, by plain reads: nothing is mapped into memory.

A tensor is converted to the wanted dtype block by block, so that the host holds one tensor in that dtype and
one block in the file's. Knows nothing of models.

Source: the safetensors format description: 8 bytes of header length, a JSON header, then the tensors' bytes.
"""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
}
_BLOCK = 1 << 20  # bytes of the file a read, where they are converted
_LONGEST_HEADER = 100 << 20  # bytes, as the format says


class SafetensorsFile:
    """One file: the shapes of its tensors, known from the header, and their values on request."""

    def __init__(self, path: pathlib.Path):
        """Reads and checks the header; ValueError where the file is damaged or shorter than it says."""
        self.path = path
        self._entries, self._start = _read_header(path)
        self.shapes = {name: tuple(entry["shape"]) for name, entry in self._entries.items()}

    def read(self, name: str, dtype: Any) -> np.ndarray:
        """One tensor.

        Args:
          name: a key of `shapes`.
          dtype: to convert to: one of floats for a tensor of floats, of integers for one of integers.

        Returns:
          A new array.

        Raises:
          ValueError: the tensor is not of floats, or not of integers, as `dtype` is; or the file ended early.
        """
        entry = self._entries[name]
        stored = _DTYPES.get(entry["dtype"])
        floats = jnp.issubdtype(dtype, jnp.floating)
        if stored is None or jnp.issubdtype(stored, jnp.floating) != floats:
            known = [key for key, kind in _DTYPES.items() if jnp.issubdtype(kind, jnp.floating) == floats]
            raise ValueError(
                f"{self.path}: {name} has dtype {entry['dtype']}, expected one of {', '.join(known)}"
            )
        result = np.empty(math.prod(self.shapes[name]), dtype)
        per_block = _BLOCK // stored.itemsize
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._start + entry["data_offsets"][0])
            if result.dtype == stored:
                _fill(file, result.view(np.uint8), self.path)
                return result.reshape(self.shapes[name])
            block = np.empty(min(per_block, result.size), stored)
            for begin in range(0, result.size, per_block):
                part = block[: min(per_block, result.size - begin)]
                _fill(file, part.view(np.uint8), self.path)
                result[begin : begin + part.size] = part
        return result.reshape(self.shapes[name])


def write_tensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a safetensors file; the same tensors give the same bytes.

    Args:
      path: the file.
      tensors: by name, of the float dtypes that can be read; dtypes are kept.
    """
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    words = json.dumps(header).encode("utf-8")
    words += b" " * (-len(words) % 8)  # tensors begin at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())


def _read_header(path: pathlib.Path) -> tuple[dict[str, Any], int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise _damaged(path, "the header is incomplete")
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            ends = [_checked_end(entry) for entry in entries.values()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _damaged(path, f"the header is wrong: {error}") from None
    start, needed = 8 + length, max(ends, default=0)
    if size < start + needed:
        raise _damaged(path, f"{size} bytes, its header says {start + needed}")
    return entries, start


def _checked_end(entry: dict[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    stored = _DTYPES.get(entry["dtype"])
    num_bytes = end - begin
    whole = all(isinstance(number, int) and number >= 0 for number in (begin, end, *entry["shape"]))
    if not whole or num_bytes < 0:
        raise ValueError(f"offsets {begin} to {end}, shape {entry['shape']}")
    if stored is not None and num_bytes != math.prod(entry["shape"]) * stored.itemsize:
        raise ValueError(f"{num_bytes} bytes for {entry['dtype']}{entry['shape']}")
    return end


def _fill(file, destination: np.ndarray, path: pathlib.Path) -> None:
    view = memoryview(destination)
    while len(view):
        count = file.readinto(view)
        if not count:
            raise _damaged(path, "it ends within a tensor")
        view = view[count:]


def _damaged(path: pathlib.Path, why: str) -> ValueError:
    return ValueError(f"{path}: damaged or truncated ({why})")
