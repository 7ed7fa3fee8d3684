"""The sum of a residual and its RMS norm on a GPU, in one kernel instead of two to four.

In Pallas' Triton dialect, a stop-gap like `models.attention_kernel`; imported where it is used.
"""

import functools

import jax
import jax.numpy as jnp


def add_norm(
    x: jax.Array, delta: jax.Array, weight: jax.Array, eps: float, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """y = x + delta and y / sqrt(mean(y^2) + eps) * weight, the norm in float32.

    Args:
      x: float[B, N, W].
      delta: [B, N, W] in x's dtype, or f32[P, B, N, W] whose sum, rounded to that, it is.
      weight: float[W].
      eps: added to the mean.

    Returns:
      The sum and its norm, [B, N, W] in x's dtype.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    B, N, W = x.shape
    row = pl.BlockSpec((None, W), lambda t: (t, 0))
    shape = jax.ShapeDtypeStruct((B * N, W), x.dtype)
    deltas = delta.reshape(-1, B * N, W)
    parts = pl.BlockSpec((len(deltas), None, W), lambda t: (0, t, 0))
    size = 1 << (W - 1).bit_length()
    total, normed = pl.pallas_call(
        functools.partial(_kernel, eps=eps, size=size),
        grid=(B * N,),
        in_specs=[row, parts, pl.BlockSpec((W,), lambda t: (0,))],
        out_specs=[row, row],
        out_shape=[shape, shape],
        compiler_params=plt.CompilerParams(
            num_warps=min(16, max(1, size // (512 if len(deltas) == 1 else 256)))
        ),
        interpret=interpret,
        name="add_norm",
    )(x.reshape(B * N, W), deltas, weight)
    return total.reshape(x.shape), normed.reshape(x.shape)


def _kernel(x_ref, delta_ref, weight_ref, total_ref, normed_ref, *, eps, size):
    from jax.experimental.pallas import triton as plt

    (width,) = x_ref.shape
    at = jnp.arange(size, dtype=jnp.int32)
    known = at < width
    read = lambda ref, *index: plt.load(ref.at[*index, at], mask=known, other=0)
    weight, x = read(weight_ref), read(x_ref)
    total = x + sum(read(delta_ref, part) for part in range(delta_ref.shape[0])).astype(x.dtype)
    plt.store(total_ref.at[at], total, mask=known)
    wide = total.astype(jnp.float32)
    scale = jax.lax.rsqrt((wide * wide).sum(axis=0) / width + eps)
    normed = wide * scale * weight.astype(jnp.float32)
    plt.store(normed_ref.at[at], normed.astype(normed_ref.dtype), mask=known)
