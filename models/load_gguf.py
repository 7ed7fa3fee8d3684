"""Checkpoints in one GGUF file, through the `gguf` package's reader and dequantiser.

Configuration, tokenizer and chat template come from the file's metadata.
"""

import mmap
import pathlib
from typing import Any

import gguf
import numpy as np
from jax.sharding import Mesh

from models.config_fields import check_factors, check_heads, count, positive
from models.decoder import DecoderConfig, Weights
from models.placement import weight_shardings
from models.text import Text
from models.tokenizer_gguf import special_tokens, tokenizer_from_gguf
from models.weights import GGUF, assemble

_BLOCK = 1 << 18  # values


def load_gguf(
    path: pathlib.Path, dtype: Any, mesh: Mesh | None = None
) -> tuple[DecoderConfig, Weights, Text | None]:
    """Loads a GGUF file; quantised tensors are expanded to `dtype`.

    Args:
      path: the file.
      dtype: float dtype of the weights.
      mesh: where they are to lie, see `models.placement`; None: on the default device.

    Raises:
      ValueError: a damaged or truncated file, an unsupported architecture, or tensors that are missing,
        unexpected or misshapen.
    """
    try:
        # The reader checks nothing: a short file surfaces as whichever NumPy or index error comes first.
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path}: damaged or truncated GGUF file ({error})") from None
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}
    config = decoder_config(metadata, shapes, _frequency_factors(tensors))

    def read(name: str) -> np.ndarray:
        values = _expanded(tensors[name], dtype)
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
        if metadata["general.architecture"] == "llama" and heads:
            values = pair_halves(values, heads)
        # The file is mapped: what was read of it would stay in memory beside the weights.
        reader.data._mmap.madvise(mmap.MADV_DONTNEED)
        return values

    ignored = ["rope_freqs.weight"]
    shardings = weight_shardings(config, mesh)
    weights = assemble(config, GGUF, shapes, read, source=str(path), ignored=ignored, shardings=shardings)
    return config, weights, text_from_gguf(metadata)


def decoder_config(
    metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]], factors: tuple[float, ...] | None
) -> DecoderConfig:
    """The architecture that the metadata describe; embeddings are tied where no output matrix is stored.

    Args:
      metadata: the file's keys and values.
      shapes: shape of each tensor by name.
      factors: divisors of the rotary frequencies, None where the file has none.

    Raises:
      ValueError: a missing key, a value that is no such number, one of several files, or an architecture or
        rotary scaling that the decoder does not have.
    """
    kind = metadata.get("general.architecture")
    if kind not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"GGUF architecture {kind!r} is not supported (llama, qwen2, qwen3 are)")

    def need(name: str) -> Any:
        if f"{kind}.{name}" not in metadata:
            raise ValueError(f"GGUF metadata: no {kind}.{name}")
        return metadata[f"{kind}.{name}"]

    def size(name: str, absent: int | None = None) -> int:
        value = need(name) if absent is None else metadata.get(f"{kind}.{name}", absent)
        return count(f"GGUF metadata: {kind}.{name}", value)

    def number(name: str, absent: float | None = None) -> float:
        value = need(name) if absent is None else metadata.get(f"{kind}.{name}", absent)
        return positive(f"GGUF metadata: {kind}.{name}", value)

    if metadata.get("split.count", 1) != 1:
        raise ValueError(f"GGUF metadata: split.count = {metadata['split.count']!r}, one of several files")
    scaling = metadata.get(f"{kind}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise ValueError(f"GGUF metadata: rope scaling {scaling!r} is not supported")
    if scaling is None:  # then a factor means linear scaling; the second key is an older one's
        for name in ("rope.scaling.factor", "rope.scale_linear"):
            factor = metadata.get(f"{kind}.{name}", 1)
            if factor not in (0, 1):
                raise ValueError(f"GGUF metadata: {kind}.{name} = {factor!r} is not supported")
    num_heads, width = size("attention.head_count"), size("embedding_length")
    num_kv_heads = size("attention.head_count_kv", num_heads)
    head_size = size("attention.key_length", max(1, width // num_heads))
    rotated = metadata.get(f"{kind}.rope.dimension_count", head_size)
    if rotated != head_size:
        raise ValueError(
            f"GGUF metadata: {kind}.rope.dimension_count = {rotated!r}, allowed is {head_size}, a whole head"
        )
    check_heads("GGUF metadata", num_heads, num_kv_heads, head_size)
    check_factors("rope_freqs.weight", factors, head_size)
    cap = f"{kind}.final_logit_softcapping"
    has = lambda ending: any(name.startswith("blk.") and name.endswith(ending) for name in shapes)
    embedding = shapes.get("token_embd.weight", (1,))
    return DecoderConfig(
        vocab_size=size("vocab_size", embedding[0]),
        width=width,
        num_layers=size("block_count"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        mlp_width=size("feed_forward_length"),
        norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_theta=number("rope.freq_base", 10000.0),
        rope_factors=factors,
        tied_embeddings="output.weight" not in shapes,
        qkv_bias=kind == "qwen2" or any(has(f".attn_{part}.bias") for part in "qkv"),
        qk_norm=kind == "qwen3",
        output_bias=has(".attn_output.bias"),
        logit_scale=number("logit_scale", 1.0),
        final_logit_softcapping=positive(f"GGUF metadata: {cap}", metadata[cap]) if cap in metadata else None,
        max_length=size("context_length"),
    )


def text_from_gguf(metadata: dict[str, Any]) -> Text | None:
    """The text side of a GGUF file's metadata; None where they hold no tokenizer.

    Args:
      metadata: the file's keys and values.

    Raises:
      ValueError: a kind of tokenizer that is not supported.
    """
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return Text(
        tokenizer_from_gguf(metadata),
        tuple(dict.fromkeys(end for end in ends if end is not None)),
        metadata.get("tokenizer.chat_template"),
        special_tokens(metadata),
    )


def pair_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes GGUF's row order of Llama query and key matrices.

    The file rotates neighbouring rows (2i, 2i+1) of a head; the decoder rotates rows (i, i + D/2).

    Args:
      values: [H * D, ...] rows as stored.
      num_heads: H.

    Returns:
      The same rows, even ones of each head first.
    """
    rows = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.swapaxes(rows, 1, 2).reshape(values.shape)


def _expanded(tensor: Any, dtype: Any) -> np.ndarray:
    """The tensor's values in `dtype`; of the float32 that the reader makes, `_BLOCK` exist at a time."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    values = np.empty((len(rows), shape[-1]), dtype)
    step = max(1, _BLOCK // shape[-1])
    for start in range(0, len(rows), step):
        values[start : start + step] = _dequantized(rows[start : start + step], tensor)
    return values.reshape(shape)


def _frequency_factors(tensors: dict[str, Any]) -> tuple[float, ...] | None:
    if "rope_freqs.weight" not in tensors:
        return None
    tensor = tensors["rope_freqs.weight"]
    return tuple(_dequantized(tensor.data, tensor).ravel().tolist())


def _dequantized(data: np.ndarray, tensor: Any) -> np.ndarray:
    try:
        return gguf.dequantize(data, tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(
            f"{tensor.name} is of type {tensor.tensor_type.name}, which cannot be read"
        ) from None
