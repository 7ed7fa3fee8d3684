"""Tunix's decode loop with this library's sampler in it: python scripts/tunix_decode.py

Needs google-tunix 0.1.7 beside jaxsample, in an environment of its own. The loop is Tunix's: its prefill, its
`lax.while_loop`, its donated state. What is replaced is the one method that turns logits into the next token,
so that every row may have settings of its own. The model is a random one of Tunix's Qwen2 kind.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

sys.path.insert(
    0, str(pathlib.Path(__file__).resolve().parent.parent)
)  # for a checkout that is not installed

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.generate import sampler as tunix_sampler
from tunix.models.qwen2 import model as qwen2

import jaxsample as js
from jaxsample import interop

VOCAB, CACHE_SLOTS = 96, 32
PROMPTS = ["5 17 33", "5 17 33", "8 8 90 41 7", "60"]
SETTINGS = {
    "temperature": jnp.array([0.0, 0.5, 1.3, 1.0]),  # a greedy row beside sampled ones
    "top_k": jnp.array([0, 12, 0, 6]),
    "top_p": jnp.array([1.0, 1.0, 1.0, 0.7]),
    "min_p": jnp.array([0.0, 0.0, 0.2, 0.0]),
}


class Sampler(tunix_sampler.Sampler):
    """Tunix's sampler with a function of ours in place of its draw.

    Args:
      draw: (logits f32[B, V], key) -> tokens i32[B], as of `interop.as_sample_fn`.
      rest: Tunix's own arguments.
    """

    def __init__(self, *rest: Any, draw: Callable[[jax.Array, jax.Array], jax.Array]):
        super().__init__(*rest)
        self._draw = draw

    def _sample(self, logits, eos, cache, sampler_state):
        step = sampler_state.decoding_step
        tokens = self._draw(logits[:, -1], jax.random.fold_in(sampler_state.seed, step))
        return dataclasses.replace(
            sampler_state,
            decoding_step=step + 1,
            token_buffer=sampler_state.token_buffer.at[:, step + 1].set(tokens),
            cache=cache,
            done=sampler_state.done | jnp.isin(tokens, eos),
        )


class Numbers:
    """A tokenizer whose texts are token ids in decimal; 0 is padding, 1 the end."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return 1

    def pad_id(self) -> int:
        return 0


class Toy(qwen2.Qwen2):
    num_embed = VOCAB  # Tunix asks its models for it where logits are to be returned


def toy_parts() -> tuple[nnx.Module, Numbers, tunix_sampler.CacheConfig]:
    """A random model of two layers, its tokenizer and its cache: the arguments of Tunix's sampler."""
    config = qwen2.ModelConfig(
        num_layers=2,
        vocab_size=VOCAB,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
    )
    model = Toy(config, rngs=nnx.Rngs(params=0))
    model.lm_head.w[...] *= 4.0  # logits as spread as those of a trained model
    return model, Numbers(), tunix_sampler.CacheConfig(CACHE_SLOTS, 2, 2, 8)


def drawing(tier: str = "filtered", **settings: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Our sampler as a function of logits and a key; settings are numbers, or arrays of a number a row."""
    features = js.Features(tier=tier, full_rows=tier != "plain")
    return interop.as_sample_fn(js.Limits(VOCAB, max_length=CACHE_SLOTS), features, **settings)


if __name__ == "__main__":
    ours = Sampler(*toy_parts(), draw=drawing(**SETTINGS))
    for prompt, text in zip(PROMPTS, ours(PROMPTS, max_generation_steps=12, seed=3).text, strict=True):
        print(f"{prompt} -> {text}")
