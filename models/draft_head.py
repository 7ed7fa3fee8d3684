"""A draft head in Flax NNX: hidden state and token in, an estimate of the next hidden state out.

    x = join [norm(embedding(token)); norm(hidden)],    layers of the base's shapes,    g = norm(x)

Embedding and LM head are the base model's own and never trained; the LM head may be cut down to the tokens
that the head proposes, its draft vocabulary. Knows nothing of files, training or verification.

Source: Li et al. 2024, "EAGLE" (arXiv 2401.15077); a draft vocabulary: Zhao et al. 2025 (arXiv 2502.14856).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsample import widen
from jaxsample.head import scale_logits
from jaxsample.kvcache import Cache, Staged
from models.attention import attend
from models.decoder import DecoderConfig, Layer, Linear, RMSNorm, Weights, apply_layer
from models.kernels import Kernels
from models.projection import project_by_dot
from models.rope import inverse_frequencies, rotation


@dataclasses.dataclass(frozen=True)
class DraftHead:
    """A draft head in memory, without what it takes from its base.

    Fields:
      config: the base's architecture with the head's own number of layers.
      weights: the head's own, `head_shapes(config)`.
      ids: i32[Vd], rising, the tokens that it proposes; None: all V.
    """

    config: DecoderConfig
    weights: Weights
    ids: np.ndarray | None


def head_config(base: DecoderConfig, num_layers: int = 1) -> DecoderConfig:
    """The head's configuration: the base's with fewer layers and separate projections."""
    return dataclasses.replace(base, num_layers=num_layers, joined_projections=False)


def draft_functions(
    config: DecoderConfig, *, attend: Callable = attend, kernels: Kernels | None = None
) -> tuple[Callable, Callable]:
    """The head as the two pure functions that `jaxsample.chained_head_proposer` takes.

    Args:
      config: of `head_config`.
      attend: as `models.attention.attend`.
      kernels: those of this device; attention is computed without: its mask may begin behind slot 0.

    Returns:
      forward(weights, tokens i32[B, N], hidden float[B, N, W], positions i32[B, N], cache, mask) ->
      (float[B, N, W], Staged), and unembed(weights, outputs) -> logits f32[B, N, V]. Weights are those of
      `join_base`. Ids outside [0, V) read id 0; logits are -inf outside the draft vocabulary.
    """
    if kernels is not None:
        kernels = kernels._replace(takes=lambda cache, query: False)
    graph, _ = nnx.split(nnx.eval_shape(lambda: _Head(config, attend, kernels)))

    def forward(weights: Weights, tokens, hidden, positions, cache: Cache, mask):
        known = (tokens >= 0) & (tokens < config.vocab_size)
        embedded = weights["embedding"][jnp.where(known, tokens, 0)]
        head = nnx.merge(graph, weights["head"])
        return head(embedded, hidden.astype(embedded.dtype), positions, cache, mask)

    def unembed(weights: Weights, outputs: jax.Array) -> jax.Array:
        logits = narrow_logits(config, weights["output"], outputs)
        return logits if weights["ids"] is None else widen(logits, weights["ids"], config.vocab_size)

    return forward, unembed


def join_base(head: DraftHead, base: Weights) -> Weights:
    """The weights that `draft_functions` takes: the head's in the base's dtype, and what it has of the base.

    Args:
      head: DraftHead.
      base: the base decoder's weights; its embedding is not copied.
    """
    embedding = base["embedding"]["weight"]
    output = base["head"]["weight"] if "head" in base else embedding
    ids = None if head.ids is None else jnp.asarray(head.ids, jnp.int32)
    return {
        "head": jax.tree.map(lambda leaf: jnp.asarray(leaf, embedding.dtype), head.weights),
        "embedding": embedding,
        "output": output if ids is None else jnp.take(output, ids, axis=0),
        "ids": ids,
    }


def narrow_logits(config: DecoderConfig, output: jax.Array, outputs: jax.Array) -> jax.Array:
    """Logits f32[..., Vd] of head outputs or hidden states [..., W] by rows of the LM head, [Vd, W]."""
    logits = project_by_dot(outputs.astype(output.dtype), output, jnp.float32)
    return scale_logits(logits, config.logit_scale, config.final_logit_softcapping)


def head_shapes(config: DecoderConfig) -> Weights:
    """The tree of the head's own weights with a ShapeDtypeStruct (float32) at each leaf."""
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: _Head(config, attend, None))))


class _Head(nnx.Module):
    def __init__(self, config: DecoderConfig, attend: Callable, kernels: Kernels | None):
        self.config, self.kernels = config, kernels
        self.token_norm = RMSNorm(config.width, config.norm_eps)
        self.hidden_norm = RMSNorm(config.width, config.norm_eps)
        self.join = Linear((config.width,), 2 * config.width)
        layers: list[Any] = [Layer(config, project_by_dot, attend, kernels) for _ in range(config.num_layers)]
        self.layers = nnx.List(layers)
        self.norm = RMSNorm(config.width, config.norm_eps)

    def __call__(self, embedded, hidden, positions, cache: Cache, mask) -> tuple[jax.Array, Staged]:
        config = self.config
        frequencies = inverse_frequencies(config.head_size, config.rope_theta, config.rope_factors)
        cos, sin = rotation(positions, frequencies)
        both = jnp.concatenate([self.token_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        x, delta, staged = self.join(both), None, []
        for index, layer in enumerate(self.layers):
            x, delta, new = apply_layer(layer, x, delta, cos, sin, cache, jnp.int32(index), mask)
            staged.append(new)
        outputs = self.norm.after(x, delta, self.kernels)[1]
        return outputs, jax.tree.map(lambda *layers: jnp.stack(layers), *staged)
