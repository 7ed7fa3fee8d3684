"""A model whose logits are a fixed table of the last two tokens, bit-equal however it is batched.

For exact end-to-end tests. The table is a hash, never stored. The previous token is read from the cache or
the staged nodes through the attention mask, so a token committed to the wrong slot, a stale row or a wrong
mask changes the logits, and with them the text.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxsample import rng
from jaxsample.kvcache import Cache, KVCache, Staged, as_stored, gather_layer, init_cache, read_staged

# Logits are (20 random bits - 2^19) * 2^-16: exact float32 numbers from -8 up to 8.
_NUM_BITS, _SCALE = 20, 2.0**-16


def lookup_functions(vocab_size: int, *, padded_size: int | None = None) -> tuple[Callable, Callable]:
    """The model as the two pure functions that jaxsample.decode takes.

    Its weights are a seed, u32[2]; its cache comes from `init_lookup_cache`; hidden is i32[B, N, 3].

    Args:
      vocab_size: V, at most 2^24.
      padded_size: width of the logits, >= V; columns from V on are NaN, which no one may look at. None: V.

    Returns:
      forward(weights, tokens i32[B, N], positions i32[B, N], cache, mask bool[B, N, S+N]) -> (hidden, Staged)
      and unembed(weights, hidden) -> logits f32[B, N, padded_size].
    """
    width = vocab_size if padded_size is None else padded_size

    def unembed(weights: jax.Array, hidden: jax.Array) -> jax.Array:
        logits = table(weights, hidden[..., 0], hidden[..., 1], hidden[..., 2], vocab_size)
        return jnp.pad(logits, ((0, 0), (0, 0), (0, width - vocab_size)), constant_values=jnp.nan)

    return lookup_forward, unembed


def init_lookup_cache(num_rows: int, num_slots: int) -> KVCache:
    """An empty cache for B rows of S slots: one layer, one head, one float32 a slot."""
    return init_cache(1, num_rows, num_slots, 1, 1, jnp.float32)


def lookup_forward(
    weights: jax.Array, tokens: jax.Array, positions: jax.Array, cache: Cache, mask: jax.Array
) -> tuple[jax.Array, Staged]:
    """Finds each token's predecessor among what its mask shows.

    A slot holds token + 1 as its key and position + 1 as its value, so 0 is an empty one. The predecessor is
    the last visible staged node before the token's own, else the last visible slot. `fault` is 0 where all is
    well: as many visible slots as the position says, and a predecessor at the position before.

    Args:
      weights: u32[2], unused here.
      tokens, positions: i32[B, N].
      cache: of one layer and one head of one number, contiguous f32[1, B, S, 1, 1] or any other kind.
      mask: bool[B, N, S+N]; the last visible entry of a node is itself.

    Returns:
      hidden i32[B, N, 3]: previous token (-1 at the beginning), token, fault; and Staged with the tokens.
    """
    del weights
    N = tokens.shape[1]
    keys = tokens.astype(jnp.float32) + 1
    values = positions.astype(jnp.float32) + 1
    staged = as_stored(Staged(keys[None, :, :, None, None], values[None, :, :, None, None]), cache)
    committed_keys, committed_values = gather_layer(cache, 0)
    new_keys, new_values = read_staged(staged)

    def all_of(committed: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.concatenate([committed[:, :, 0, 0], new[0, :, :, 0, 0]], axis=1)[:, None, :]

    all_keys, all_values = all_of(committed_keys, new_keys), all_of(committed_values, new_values)
    num_slots = mask.shape[2] - N

    index = jax.lax.broadcasted_iota(jnp.int32, mask.shape, 2)
    own = num_slots + jax.lax.broadcasted_iota(jnp.int32, mask.shape, 1)
    last = jnp.where(mask & (index != own), index, -1).max(axis=2, keepdims=True)
    chosen = index == last
    # Sums with one non-zero term are exact in any order; a select, not a product, keeps hidden NaN out.
    # One-byte caches give integers below 2^15 to within a half, since a head of one number is its scale's.
    key = jnp.round(jnp.where(chosen, all_keys, 0.0).sum(axis=2)).astype(jnp.int32)
    value = jnp.round(jnp.where(chosen, all_values, 0.0).sum(axis=2)).astype(jnp.int32)
    num_visible = mask.sum(axis=2, dtype=jnp.int32)
    fault = (num_visible - 1 - positions) * 65536 + (value - positions)
    hidden = jnp.stack([key - 1, tokens, fault], axis=-1)
    return hidden, staged


def table(
    weights: jax.Array, previous: jax.Array, token: jax.Array, fault: jax.Array, vocab_size: int
) -> jax.Array:
    """The logits after two tokens: Philox of (id // 4, token, previous, fault) under the seed, word id % 4.

    Args:
      weights: u32[2], seed.
      previous, token, fault: i32[...], fault 0 for the true table.
      vocab_size: V.

    Returns:
      f32[..., V], multiples of 2^-16 in [-8, 8).
    """
    num_calls = -(-vocab_size // 4)
    call = jnp.arange(num_calls, dtype=jnp.uint32).reshape((1,) * token.ndim + (-1,))
    counter = [x.astype(jnp.uint32)[..., None] for x in (token, previous, fault)]
    words = rng.philox4x32((call, *counter), (weights[0], weights[1]))
    bits = jnp.stack(words, axis=-1).reshape(*token.shape, num_calls * 4)[..., :vocab_size]
    centred = (bits >> (32 - _NUM_BITS)).astype(jnp.int32) - (1 << (_NUM_BITS - 1))
    return centred.astype(jnp.float32) * _SCALE
