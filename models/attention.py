"""Attention of new tokens over committed cache slots plus the staged tokens, under a boolean mask.

Knows nothing of layers, weights or positions.
"""

import jax
import jax.numpy as jnp


def attend(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    staged_keys: jax.Array,
    staged_values: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """softmax(q k / sqrt(D)) v over what the mask shows, grouped-query heads, softmax in float32.

    The two parts share a maximum and a sum and are never joined to one array. A query that sees nothing gets
    zeros. What a query cannot see does not reach it, NaN included: hidden committed values are replaced by
    zeros before the product (0 * NaN is NaN).
    Staged visibility differs by query, so there a non-finite value is zeroed and its score made NaN,
    which only the queries that see it take in.

    Args:
      query: float[B, N, H, D], H a multiple of the cache's heads G.
      keys, values: float[B, S, G, D], committed slots.
      staged_keys, staged_values: float[B, N, G, D], the new tokens' own.
      mask: bool[B, N, S+N], true = query n sees that slot or staged node.

    Returns:
      [B, N, H * D] in query's dtype.
    """
    B, N, H, D = query.shape
    S, G = keys.shape[1], keys.shape[2]
    precision = precision_of(query.dtype)
    grouped = query.reshape(B, N, G, H // G, D)

    def score(k: jax.Array) -> jax.Array:
        k = k.astype(query.dtype)
        return jnp.einsum(
            "bngqd,bsgd->bgqns", grouped, k, precision=precision, preferred_element_type=jnp.float32
        )

    def mix(weights: jax.Array, v: jax.Array) -> jax.Array:
        v = v.astype(query.dtype)
        weights = weights.astype(query.dtype)
        return jnp.einsum(
            "bgqns,bsgd->bngqd", weights, v, precision=precision, preferred_element_type=jnp.float32
        )

    seen = mask[:, :, :S].any(axis=1)
    values = jnp.where(seen[:, :, None, None], values, jnp.zeros((), values.dtype))
    finite = jnp.isfinite(staged_values)
    staged_values = jnp.where(finite, staged_values, jnp.zeros((), staged_values.dtype))
    poison = jnp.where(finite.all(axis=-1), 0.0, jnp.nan).astype(jnp.float32)  # [B, N, G]
    staged_scores = score(staged_keys) + poison.transpose(0, 2, 1)[:, :, None, None, :]

    def shown(scores: jax.Array, seen: jax.Array) -> jax.Array:
        return jnp.where(seen[:, None, None, :, :], scores * D**-0.5, -jnp.inf)  # [B, G, H/G, N, S or N]

    committed, staged = shown(score(keys), mask[:, :, :S]), shown(staged_scores, mask[:, :, S:])
    most = lambda scores: scores.max(axis=-1, keepdims=True, initial=-jnp.inf)  # S may be 0
    top = jnp.maximum(most(committed), most(staged))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    committed, staged = jnp.exp(committed - top), jnp.exp(staged - top)
    total = committed.sum(axis=-1) + staged.sum(axis=-1)
    mixed = mix(committed, values) + mix(staged, staged_values)
    mixed = mixed / jnp.where(total == 0, 1.0, total).transpose(0, 3, 1, 2)[..., None]
    return mixed.astype(query.dtype).reshape(B, N, H * D)


def precision_of(dtype) -> jax.lax.Precision | None:
    """Full float32 products where float32 is asked for: a GPU's default would round the inputs to 10 bits."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
