"""Attention of one new token a row as products and sums, which read the cache in the order it is stored in.

A matrix product wants each head's slots beside one another, [B, G, S, D]; the cache is [B, S, G, D], so that
compilers copy it first. Sums over the stored order need no copy. Knows nothing of layers or weights.
"""

import jax
import jax.numpy as jnp

from models.attention import attend


def attend_by_reduction(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    staged_keys: jax.Array,
    staged_values: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """`attend` for N = 1, all of it in float32; more new tokens take `attend` itself.

    Args, Returns: as for `models.attention.attend`.
    """
    B, N, H, D = query.shape
    if N != 1:
        return attend(query, keys, values, staged_keys, staged_values, mask)
    G = keys.shape[2]
    grouped = query.astype(jnp.float32).reshape(B, 1, G, H // G, D) * D**-0.5
    seen = mask[:, 0, :-1, None, None]  # [B, S, 1, 1]
    own_seen = mask[:, 0, -1:, None]  # [B, 1, 1]

    def score(k: jax.Array) -> jax.Array:  # [B, *, G, D] -> [B, *, G, H/G]
        return (grouped * k.astype(jnp.float32)[:, :, :, None, :]).sum(axis=-1)

    scores = jnp.where(seen, score(keys), -jnp.inf)
    own = jnp.where(own_seen, score(staged_keys)[:, 0], -jnp.inf)
    top = jnp.maximum(scores.max(axis=1), own)  # [B, G, H/G]
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights, own = jnp.exp(scores - top[:, None]), jnp.exp(own - top)
    total = weights.sum(axis=1) + own
    total = jnp.where(total == 0, 1.0, total)[..., None]

    # What is hidden may be NaN, and 0 * NaN is NaN: it is replaced before the product.
    shown = jnp.where(seen, values.astype(jnp.float32), 0.0)[:, :, :, None, :]
    own_value = jnp.where(own_seen[..., None], staged_values[:, 0].astype(jnp.float32)[:, :, None, :], 0.0)
    mixed = (weights[..., None] * shown).sum(axis=1) + own[..., None] * own_value
    return (mixed / total).astype(query.dtype).reshape(B, N, H * D)
