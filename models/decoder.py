"""A decoder of the Llama, Qwen2 and Qwen3 families in Flax NNX, with the cache as an argument.

Pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU MLP. Variants are
fields of the configuration: query/key/value biases (Qwen2), query/key norms (Qwen3), scaled
rotary frequencies (Llama 3), tied embeddings, scaled and soft-capped logits. Knows nothing of files, text
or sampling.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsample.head import Head, scale_logits
from jaxsample.kvcache import Cache, Staged, gather_layer, read_staged, stage
from models.attention import attend
from models.heads import Heads, Norms, read_heads
from models.kernels import Kernels
from models.projection import project_by_dot
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
    output_bias: bool = False  # of the attention's output projection
    qk_norm: bool = False
    logit_scale: float = 1.0  # multiplies the logits
    final_logit_softcapping: float | None = None  # c: logits become c tanh(logits / c), after the scale
    max_length: int = 2048  # positions the model was made for
    joined_projections: bool = False  # weights hold query, key, value as one matrix, gate and up as another


def decoder_functions(
    config: DecoderConfig,
    *,
    project: Callable = project_by_dot,
    attend: Callable = attend,
    kernels: Kernels | None = None,
) -> tuple[Callable, Callable]:
    """The model as the two pure functions that jaxsample.decode takes.

    Args:
      config: the architecture.
      project: the linear map of every projection and of the logits, one of models.projection.
      attend: the attention where no kernel computes it, as `models.attention.attend`.
      kernels: those of this device, from `models.kernels.kernels_of`; None computes all with XLA.

    Returns:
      forward(weights, tokens i32[B, N], positions i32[B, N], cache, mask bool[B, N, S+N])
        -> (hidden float[B, N, W] after the final norm, Staged); ids outside [0, V) read id 0, so that
        padding stays finite.
      unembed(weights, hidden float[B, N, W]) -> logits f32[B, N, V]; wider where embedding and head are.
    """
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config, project, attend, kernels)))

    def forward(
        weights: Weights, tokens: jax.Array, positions: jax.Array, cache: Cache, mask: jax.Array
    ) -> tuple[jax.Array, Staged]:
        return nnx.merge(graph, weights)(tokens, positions, cache, mask)

    def unembed(weights: Weights, hidden: jax.Array) -> jax.Array:
        return nnx.merge(graph, weights).unembed(hidden)

    return forward, unembed


def decoder_head(config: DecoderConfig, **portions: Any) -> Head:
    """The decoder's head, for functions that work without logits, as `jaxsample.sample_head`.

    Args:
      config: the architecture.
      portions: other fields of Head.
    """
    return Head(
        weight_of=_embedding_rows if config.tied_embeddings else _head_rows,
        logit_scale=config.logit_scale,
        softcap=config.final_logit_softcapping,
        **portions,
    )


def _embedding_rows(weights: Weights) -> jax.Array:
    return weights["embedding"]["weight"]


def _head_rows(weights: Weights) -> jax.Array:
    return weights["head"]["weight"]


def weight_shapes(config: DecoderConfig) -> Weights:
    """The tree of weights with a ShapeDtypeStruct (float32) at each leaf."""
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Decoder(config, project_by_dot, attend))))


class Decoder(nnx.Module):
    """Embedding, L layers, final norm, and the output projection unless it is tied."""

    def __init__(
        self, config: DecoderConfig, project: Callable, attend: Callable, kernels: Kernels | None = None
    ):
        self.config, self.kernels = config, kernels
        self.embedding = Linear((config.vocab_size,), config.width, project=project)
        self.layers = nnx.List([Layer(config, project, attend, kernels) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.width, config.norm_eps)
        if not config.tied_embeddings:
            self.head = Linear((config.vocab_size,), config.width, project=project)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, cache: Cache, mask: jax.Array
    ) -> tuple[jax.Array, Staged]:
        config = self.config
        frequencies = inverse_frequencies(config.head_size, config.rope_theta, config.rope_factors)
        cos, sin = rotation(positions, frequencies)
        known = (tokens >= 0) & (tokens < config.vocab_size)
        x, delta = self.embedding.weight[...][jnp.where(known, tokens, 0)], None
        staged = []
        for index, layer in enumerate(self.layers):
            x, delta, new = apply_layer(layer, x, delta, cos, sin, cache, jnp.int32(index), mask)
            staged.append(new)
        return self.norm.after(x, delta, self.kernels)[1], jax.tree.map(
            lambda *layers: jnp.stack(layers), *staged
        )

    def unembed(self, hidden: jax.Array) -> jax.Array:
        config = self.config
        output = self.embedding if config.tied_embeddings else self.head
        weight = output.weight[...]
        logits = output.project(hidden.astype(weight.dtype), weight, jnp.float32)
        return scale_logits(logits, config.logit_scale, config.final_logit_softcapping)


@jax.jit
def apply_layer(layer: "Layer", x, delta, cos, sin, cache, index, mask):
    """A layer of `Decoder`; index is its place in the cache."""
    # A jit of its own makes all layers share one trace; XLA inlines the call.
    return layer(x, delta, cos, sin, cache, index, mask)


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), the last sum left to the norm that comes next.

    Takes and returns x and what is still to be added to it, as `RMSNorm.after` takes it.
    """

    def __init__(self, config: DecoderConfig, project: Callable, attend: Callable, kernels: Kernels | None):
        self.kernels = kernels
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, project, attend, kernels)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config, project, kernels)

    def __call__(self, x, delta, cos, sin, cache, index, mask):
        x, normed = self.attention_norm.after(x, delta, self.kernels)
        mixed, staged = self.attention(normed, cos, sin, cache, index, mask)
        x, normed = self.mlp_norm.after(x, mixed, self.kernels)
        return x, self.mlp(normed), staged


class Attention(nnx.Module):
    """Projections and rotation around `attend`; returns its new keys and values as the cache stores them."""

    def __init__(self, config: DecoderConfig, project: Callable, attend: Callable, kernels: Kernels | None):
        H, G, D = config.num_heads, config.num_kv_heads, config.head_size
        self.num_queries, self.num_kv_heads, self.head_size = H // G, G, D
        self.attend, self.kernels = attend, kernels
        if config.joined_projections:
            # By key-value head, so that shards of the heads stay whole: its H/G queries, its key, its value.
            self.query_key_value = Linear(
                (G, H // G + 2, D), config.width, bias=config.qkv_bias, project=project
            )
        else:
            self.query = Linear((H * D,), config.width, bias=config.qkv_bias, project=project)
            self.key = Linear((G * D,), config.width, bias=config.qkv_bias, project=project)
            self.value = Linear((G * D,), config.width, bias=config.qkv_bias, project=project)
        self.joined = config.joined_projections
        self.output = Linear((config.width,), H * D, bias=config.output_bias, project=project)
        self.query_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None

    def projections(self, x: jax.Array) -> tuple[Heads, Heads, Heads]:
        """Queries, keys and values of x [B, N, W]."""
        R, G, D = self.num_queries, self.num_kv_heads, self.head_size
        if self.joined:
            array, bias = self.query_key_value.product(x, self.kernels), self.query_key_value.bias_value()
            return Heads(array, bias, 0, R), Heads(array, bias, R, 1), Heads(array, bias, R + 1, 1)

        def heads(linear: Linear, count: int) -> Heads:
            bias = linear.bias_value()
            array = linear.product(x, self.kernels).reshape(*x.shape[:2], G, count, D)
            return Heads(array, None if bias is None else bias.reshape(G, count, D), 0, count)

        return heads(self.query, R), heads(self.key, 1), heads(self.value, 1)

    def __call__(self, x, cos, sin, cache, index, mask):
        query, key, value = self.projections(x)
        if self.kernels is not None and self.kernels.takes(cache, query):
            norms = None
            if self.query_norm is not None and self.key_norm is not None:
                norms = Norms(self.query_norm.weight[...], self.key_norm.weight[...], self.query_norm.eps)
            mixed, staged = self.kernels.attend(query, key, value, norms, cos, sin, cache, index, mask)
            return self.output.delta(mixed, self.kernels), staged
        query, key, value = read_heads(query), read_heads(key), read_heads(value)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        # Staged rows are rounded as the cache stores them: attention sees what later steps will read.
        staged = stage(key, value, cache.keys.dtype)
        mixed = self.attend(query, *gather_layer(cache, index), *read_staged(staged), mask)
        return self.output(mixed), staged


class MLP(nnx.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, config: DecoderConfig, project: Callable, kernels: Kernels | None):
        F = config.mlp_width
        if config.joined_projections:
            # By unit, so that shards of the units are whole rows of the matrix: its gate, its up.
            self.gate_up = Linear((F, 2), config.width, project=project)
        else:
            self.gate = Linear((F,), config.width, project=project)
            self.up = Linear((F,), config.width, project=project)
        self.joined, self.kernels = config.joined_projections, kernels
        self.down = Linear((config.width,), F, project=project)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.joined:
            both = self.gate_up(x)  # [B, N, F, 2]
            gate, up = both[..., 0], both[..., 1]
        else:
            gate, up = self.gate(x), self.up(x)
        return self.down.delta(jax.nn.silu(gate) * up, self.kernels)


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

    def after(
        self, x: jax.Array, delta: jax.Array | None, kernels: Kernels | None
    ) -> tuple[jax.Array, jax.Array]:
        """x + delta and its norm; a delta of None is zero, one of `Linear.delta` may be in parts."""
        if delta is None:
            return x, self(x)
        if kernels is not None:
            return kernels.add_norm(x, delta, self.weight[...], self.eps)
        return x + delta, self(x + delta)


class Linear(nnx.Module):
    """x weight^T (+ bias); weight is [outputs..., inputs], as checkpoints store it."""

    def __init__(
        self,
        output_shape: tuple[int, ...],
        num_inputs: int,
        *,
        bias: bool = False,
        project: Callable = project_by_dot,
    ):
        # Never computed: modules are only ever made under eval_shape.
        self.weight = nnx.Param(jnp.zeros((*output_shape, num_inputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(output_shape, jnp.float32)) if bias else None
        self.project = project

    def product(self, x: jax.Array, kernels: Kernels | None = None) -> jax.Array:
        """Without the bias."""
        weight = self.weight[...]
        if kernels is not None:
            rows = weight.reshape(-1, weight.shape[-1])
            if kernels.fits_whole(x, rows):
                return kernels.project_whole(x, rows).reshape(*x.shape[:2], *weight.shape[:-1])
        return self.project(x, weight, x.dtype)

    def delta(self, x: jax.Array, kernels: Kernels | None) -> jax.Array:
        """The map of x for `RMSNorm.after`: [B, N, O], or parts of it, f32[P, B, N, O]."""
        if kernels is not None and self.bias is None and kernels.splits(x, self.weight[...]):
            return kernels.project_parts(x, self.weight[...])
        y = self.product(x, kernels)
        return y if self.bias is None else y + self.bias[...][None, None]

    def bias_value(self) -> jax.Array | None:
        return None if self.bias is None else self.bias[...]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.delta(x, None)
