"""A decoder of the Llama, Qwen2 and Qwen3 families in Flax NNX, with the cache as an argument.

Pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU MLP. Variants are
fields of the configuration: query/key/value biases (Qwen2), query/key norms (Qwen3), scaled
rotary frequencies (Llama 3), tied embeddings. Knows nothing of files, text or sampling.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsample.kvcache import KVCache, Staged
from models.attention import attend, precision_of
from models.rope import inverse_frequencies, rotate, rotation

Weights = dict[str, Any]  # nested plain dict of arrays, the NNX state without its wrappers


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The facts of one architecture; static and hashable."""

    vocab_size: int  # V, rows of the embedding
    width: int  # W
    num_layers: int  # L
    num_heads: int  # H, query heads
    num_kv_heads: int  # G, divides H
    head_size: int  # D, even
    mlp_width: int
    norm_eps: float
    rope_theta: float
    rope_factors: tuple[float, ...] | None = None  # D/2 divisors of the frequencies
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    max_length: int = 2048  # positions the model was made for


def decoder_functions(config: DecoderConfig) -> tuple[Callable, Callable]:
    """The model as the two pure functions that jaxsample.decode takes.

    Args:
      config: the architecture.

    Returns:
      forward(weights, tokens i32[B, N], positions i32[B, N], cache KVCache, mask bool[B, N, S+N])
        -> (hidden float[B, N, W] after the final norm, Staged); ids outside [0, V) read id 0, so that
        padding stays finite.
      unembed(weights, hidden float[B, N, W]) -> logits f32[B, N, V].
    """
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

    def forward(
        weights: Weights, tokens: jax.Array, positions: jax.Array, cache: KVCache, mask: jax.Array
    ) -> tuple[jax.Array, Staged]:
        return nnx.merge(graph, weights)(tokens, positions, cache, mask)

    def unembed(weights: Weights, hidden: jax.Array) -> jax.Array:
        return nnx.merge(graph, weights).unembed(hidden)

    return forward, unembed


def weight_shapes(config: DecoderConfig) -> Weights:
    """The tree of weights with a ShapeDtypeStruct (float32) at each leaf."""
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))))


def random_weights(config: DecoderConfig, seed: int, dtype: Any = jnp.float32) -> Weights:
    """Random weights: normal with variance 1 / inputs, norms one, biases zero."""
    weights = nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(seed))))
    return jax.tree.map(lambda leaf: leaf.astype(dtype), weights)


class Decoder(nnx.Module):
    """Embedding, L layers, final norm, and the output projection unless it is tied."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Linear(config.width, config.vocab_size, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.width, config.norm_eps)
        if not config.tied_embeddings:
            self.head = Linear(config.width, config.vocab_size, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, cache: KVCache, mask: jax.Array
    ) -> tuple[jax.Array, Staged]:
        config = self.config
        frequencies = inverse_frequencies(config.head_size, config.rope_theta, config.rope_factors)
        cos, sin = rotation(positions, frequencies)
        known = (tokens >= 0) & (tokens < config.vocab_size)
        x = self.embedding.weight[...][jnp.where(known, tokens, 0)]
        keys, values = [], []
        for index, layer in enumerate(self.layers):
            x, key, value = _apply(layer, x, cos, sin, cache.keys[index], cache.values[index], mask)
            keys.append(key)
            values.append(value)
        return self.norm(x), Staged(keys=jnp.stack(keys), values=jnp.stack(values))

    def unembed(self, hidden: jax.Array) -> jax.Array:
        weight = (self.embedding if self.config.tied_embeddings else self.head).weight[...]
        return jnp.einsum(
            "bnw,vw->bnv",
            hidden.astype(weight.dtype),
            weight,
            precision=precision_of(weight.dtype),
            preferred_element_type=jnp.float32,
        )


@jax.jit
def _apply(layer: "Layer", x, cos, sin, cache_keys, cache_values, mask):
    # A jit of its own makes all layers share one trace; XLA inlines the call.
    return layer(x, cos, sin, cache_keys, cache_values, mask)


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x, cos, sin, cache_keys, cache_values, mask):
        mixed, key, value = self.attention(self.attention_norm(x), cos, sin, cache_keys, cache_values, mask)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), key, value


class Attention(nnx.Module):
    """Projections and rotation around `attend`; returns its new keys and values in the cache's dtype."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        H, G, D = config.num_heads, config.num_kv_heads, config.head_size
        self.head_size = D
        self.query = Linear(config.width, H * D, bias=config.qkv_bias, rngs=rngs)
        self.key = Linear(config.width, G * D, bias=config.qkv_bias, rngs=rngs)
        self.value = Linear(config.width, G * D, bias=config.qkv_bias, rngs=rngs)
        self.output = Linear(H * D, config.width, rngs=rngs)
        self.query_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None

    def __call__(self, x, cos, sin, cache_keys, cache_values, mask):
        B, N, _ = x.shape

        def heads(projected: jax.Array) -> jax.Array:
            return projected.reshape(B, N, -1, self.head_size)

        query, key, value = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        # Staged rows are rounded to the cache's dtype first: attention sees the bits that commit would store.
        query, key = rotate(query, cos, sin), rotate(key, cos, sin).astype(cache_keys.dtype)
        value = value.astype(cache_values.dtype)
        return self.output(attend(query, cache_keys, cache_values, key, value, mask)), key, value


class MLP(nnx.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.gate = Linear(config.width, config.mlp_width, rngs=rngs)
        self.up = Linear(config.width, config.mlp_width, rngs=rngs)
        self.down = Linear(config.mlp_width, config.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32."""

    def __init__(self, size: int, eps: float):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((size,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * scale * weight).astype(x.dtype)


class Linear(nnx.Module):
    """x weight^T (+ bias); weight is [outputs, inputs], as checkpoints store it."""

    def __init__(self, num_inputs: int, num_outputs: int, *, bias: bool = False, rngs: nnx.Rngs):
        shape = (num_outputs, num_inputs)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) * num_inputs**-0.5)
        self.bias = nnx.Param(jnp.zeros((num_outputs,), jnp.float32)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.einsum("bni,oi->bno", x, self.weight[...], precision=precision_of(x.dtype))
        return y if self.bias is None else y + self.bias[...][None, None, :]
