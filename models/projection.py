"""Linear maps of new tokens: x [B, N, inputs] times weight [outputs..., inputs], summed in float32.

Two ways to the same numbers up to rounding: which is faster depends on the number of tokens and the device.
Knows nothing of layers.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from models.attention import precision_of


def project_by_dot(x: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    """x weight^T as one matrix product.

    Args:
      x: float[B, N, I].
      weight: float[O..., I], x's dtype.
      dtype: of the result.

    Returns:
      [B, N, O...].
    """
    num_rows, num_tokens, num_inputs = x.shape
    # Two axes on either side: what every matrix-product library takes as it is.
    y = jnp.einsum(
        "ti,oi->to",
        x.reshape(num_rows * num_tokens, num_inputs),
        weight.reshape(math.prod(weight.shape[:-1]), num_inputs),
        precision=precision_of(x.dtype),
        preferred_element_type=dtype,
    )
    return y.reshape(num_rows, num_tokens, *weight.shape[:-1])


def project_by_reduction(x: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    """x weight^T as products summed along the weight's rows, for B * N = 1; more tokens take the dot.

    One token needs no matrix unit: a compiler can stream the weight through one fused reduction, with what
    comes before and after it. Products and sums are float32, as in the dot.

    Args, Returns: as for `project_by_dot`.
    """
    num_rows, num_tokens, num_inputs = x.shape
    if num_rows * num_tokens != 1:
        return project_by_dot(x, weight, dtype)
    row = x.astype(jnp.float32).reshape((1,) * (weight.ndim - 1) + (num_inputs,))
    return (weight.astype(jnp.float32) * row).sum(axis=-1).astype(dtype)[None, None]
