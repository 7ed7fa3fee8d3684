"""The value model: a decoder's trunk with a head of two layers that tells how much is still to come.

    z = w2 . silu(W1 h + b1) + b2,    v = sigmoid(z) = 1 - gamma^l,    l = ln(1 - v) / ln gamma

h is the hidden state after the final norm at a token's own position, l the number of tokens after that one.
The trunk's weights may be in any float dtype; the head's are float32 and so is z. Knows nothing of files or
guidance.

Source: Zhang et al., "Length Value Model", arXiv 2604.27039.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.decoder import DecoderConfig, Linear, Weights, decoder_functions, weight_shapes
from models.random_weights import fill_randomly, random_weights


def value_functions(config: DecoderConfig, **parts: Any) -> tuple[Callable, Callable]:
    """The value model as two pure functions.

    Args:
      config: the trunk's architecture; whether its embeddings are tied does not matter, no LM head is used.
      parts: project, attend and kernels, as for `decoder_functions`.

    Returns:
      forward(weights, tokens, positions, cache, mask) -> (hidden, Staged), as the decoder's.
      value(weights, hidden float[B, N, W]) -> z f32[B, N].
    """
    forward, _ = decoder_functions(trunk_config(config), **parts)
    graph, _ = nnx.split(nnx.eval_shape(lambda: ValueHead(config.width)))

    def trunk(weights: Weights, tokens, positions, cache, mask):
        return forward(weights["trunk"], tokens, positions, cache, mask)

    def value(weights: Weights, hidden: jax.Array) -> jax.Array:
        return nnx.merge(graph, weights["head"])(hidden)

    return trunk, value


class ValueHead(nnx.Module):
    """w2 . silu(W1 h + b1) + b2 in float32: f32[B, N] of [B, N, W]."""

    def __init__(self, width: int):
        self.fc = Linear((width,), width, bias=True)
        self.summary = Linear((1,), width, bias=True)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return self.summary(jax.nn.silu(self.fc(hidden.astype(jnp.float32))))[..., 0]


def trunk_config(config: DecoderConfig) -> DecoderConfig:
    """The trunk's own configuration: tied, so that there is no matrix for logits."""
    return dataclasses.replace(config, tied_embeddings=True)


def head_shapes(width: int) -> Weights:
    """The head's tree of weights with a ShapeDtypeStruct (float32) at each leaf."""
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: ValueHead(width))))


def value_weight_shapes(config: DecoderConfig) -> Weights:
    """The tree of weights, {"trunk", "head"}, with a ShapeDtypeStruct at each leaf."""
    return {"trunk": weight_shapes(trunk_config(config)), "head": head_shapes(config.width)}


def random_value_weights(config: DecoderConfig, seed: int, dtype=jnp.float32) -> Weights:
    """Random weights as `random_weights` makes them; dtype is the trunk's."""
    head = fill_randomly(head_shapes(config.width), seed + 1, jnp.float32)
    return {"trunk": random_weights(trunk_config(config), seed, dtype), "head": head}
