"""A distribution over tokens as it is drawn from: shaped logits, their cut and its mass.

Knows nothing about verification. No array of probabilities is kept: log-probabilities are formed where they
are used, inside the pass that uses them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample import rng
from jaxsample.truncation import Cut

# Differences p - q of rounding's size are none: a residual made of them alone has no mass.
_FEW_ULP = np.float32(4 * 2.0**-23)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Law:
    """Distributions over V' tokens; leading axes are the same in every field.

    Fields:
      logits: f32[..., V'], shaped; -inf for what cannot be drawn.
      max: f32[...], the largest of them.
      cut: Cut [...], which tokens are kept and their mass.
    """

    logits: jax.Array
    max: jax.Array
    cut: Cut


def log_probs(law: Law):
    """Log-probabilities of all tokens, -inf where removed: f32[..., V']."""
    ids = jax.lax.broadcasted_iota(jnp.int32, law.logits.shape, law.logits.ndim - 1)
    return _log_prob(law, law.logits, ids)


def log_prob_of(law: Law, ids):
    """Log-probability of one token a distribution, i32[...] ids: f32[...]; -inf for an id outside."""
    inside = (ids >= 0) & (ids < law.logits.shape[-1])
    at = jnp.where(inside, ids, 0)[..., None]
    values = jnp.take_along_axis(law.logits, at, axis=-1, mode="clip")
    return jnp.where(inside, _log_prob(law, values, at)[..., 0], -jnp.inf)


def take_rows(tree, index):
    """One row of each batch entry: leaves [B, n, ...] at i32[B] index, [B, ...]."""

    def take(leaf):
        at = index.reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.take_along_axis(leaf, at, axis=1, mode="clip")[:, 0]

    return jax.tree.map(take, tree)


def log_residual(log_p, log_q, log_scale=0.0):
    """log max(s p - q, 0), elementwise, with s = exp(log_scale); differences within 4 ulp of s p are none.

    Args:
      log_p, log_q: f32[B, n], -inf for zero.
      log_scale: f32 that broadcasts, at most 0.
    """
    log_p = log_p + log_scale
    part = -jnp.expm1(jnp.minimum(log_q - log_p, 0))  # (s p - q) / (s p); NaN only where p = 0
    return jnp.where(
        (log_p > -jnp.inf) & (part > _FEW_ULP), log_p + rng.log(jnp.maximum(part, _FEW_ULP)), -jnp.inf
    )


def residual(log_p, log_q, log_scale=0.0):
    """max(s p - q, 0), elementwise: f32[B, n]; the same terms count as none as in `log_residual`."""
    log_p = log_p + log_scale
    part = -jnp.expm1(jnp.minimum(log_q - log_p, 0))
    return jnp.where((log_p > -jnp.inf) & (part > _FEW_ULP), jnp.exp(log_p) * part, 0)


def _log_prob(law: Law, values, ids):
    cut_value, cut_id = law.cut.value[..., None], law.cut.id[..., None]
    inside = (values > cut_value) | ((values == cut_value) & (ids <= cut_id))
    inside &= values > -jnp.inf
    return jnp.where(inside, values - law.max[..., None] - law.cut.log_mass[..., None], -jnp.inf)
