"""From named tensors of a checkpoint to the decoder's tree of weights, with every mismatch named.

Knows the two spellings of tensor names (Hugging Face and GGUF) but no file format.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.decoder import DecoderConfig, Weights, weight_shapes

# Module path in the decoder -> name in the file; "layers" holds the prefix of layer {}.
HUGGING_FACE = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers": "model.layers.{}",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
GGUF = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "layers": "blk.{}",
    "attention_norm": "attn_norm",
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.output": "attn_output",
    "attention.query_norm": "attn_q_norm",
    "attention.key_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}
_MOST_NAMED = 8  # names in one error message


def assemble(
    config: DecoderConfig,
    spelling: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    *,
    source: str,
    ignored: Iterable[str] = (),
    shardings: Any = None,
) -> Weights:
    """Reads every tensor the decoder needs, after checking that the file holds exactly those.

    One tensor at a time goes to the device, the largest first: when the host still holds a copy of one, the
    device holds only what is at least as large, and the last and smallest copies decide the peak.

    Args:
      config: the architecture.
      spelling: HUGGING_FACE or GGUF.
      shapes: shape of each tensor in the file by name.
      read: tensor by name in the dtype wanted; called once for each, when all names and shapes are right.
      source: the file, for messages.
      ignored: names in the file that the decoder has no use for.
      shardings: a Sharding for each weight, so that a device gets its share alone; None: the default device.

    Returns:
      The decoder's weights.

    Raises:
      ValueError: missing, unexpected or misshapen tensors, each by name.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(weight_shapes(config))
    wanted = {tensor_name(path, spelling): leaf.shape for path, leaf in leaves}
    missing = [name for name in wanted if name not in shapes]
    extra = [name for name in shapes if name not in wanted and name not in set(ignored)]
    wrong = [
        f"{name} (is {tuple(shapes[name])}, the configuration says {shape})"
        for name, shape in wanted.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    faults = [
        f"{what}: {_listing(names)}"
        for what, names in (
            ("missing tensors", missing),
            ("unexpected tensors", extra),
            ("wrong shapes", wrong),
        )
        if names
    ]
    if faults:
        raise ValueError(f"{source}: " + "; ".join(faults))
    places = dict(zip(wanted, jax.tree.leaves(shardings), strict=True)) if shardings is not None else {}
    placed = {}
    for name in sorted(wanted, key=lambda name: -math.prod(wanted[name])):
        # Waited for, since a transfer under way keeps its host copy alive.
        array = jax.device_put(read(name), places[name]) if places else jnp.array(read(name))
        placed[name] = jax.block_until_ready(array)
    return treedef.unflatten([placed[name] for name in wanted])


def tensor_name(path: tuple[Any, ...], spelling: Mapping[str, str]) -> str:
    """The name in a file of the weight at a path in the tree, in that spelling."""
    keys = [entry.key for entry in path]
    prefix = ""
    if keys[0] == "layers":
        prefix = spelling["layers"].format(keys[1]) + "."
        keys = keys[2:]
    return f"{prefix}{spelling['.'.join(keys[:-1])]}.{keys[-1]}"


def _listing(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
