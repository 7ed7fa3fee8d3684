"""Rotary position embedding: frequencies, Llama 3's scaling of them, and the rotation.

Knows nothing of attention or caches.
"""

import jax
import jax.numpy as jnp
import numpy as np


def inverse_frequencies(head_size: int, theta: float, factors: tuple[float, ...] | None = None) -> np.ndarray:
    """theta^(-2i/D) / factors[i] for i < D/2.

    Args:
      head_size: D, even.
      theta: base, > 0.
      factors: D/2 divisors; None divides nothing.

    Returns:
      f32[D/2], host array.

    Source: Su et al. 2021, "RoFormer", section 3.2.2.
    """
    frequencies = theta ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    if factors is not None:
        frequencies = frequencies / np.asarray(factors, np.float64)
    return frequencies.astype(np.float32)


def llama3_factors(
    head_size: int,
    theta: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> tuple[float, ...]:
    """Divisors of Llama 3's scaling, by wavelengths w that fit into the original context length O.

    r = O / w; smooth = clip((r - low) / (high - low), 0, 1); the scaled frequency is
    f * (smooth + (1 - smooth) / factor): short waves stay, long waves are slowed by `factor`.

    Args:
      head_size, theta: as for `inverse_frequencies`.
      factor: > 0; 1 is neutral.
      low_freq_factor, high_freq_factor: low < high.
      original_max_position_embeddings: O, tokens.

    Returns:
      D/2 divisors for `inverse_frequencies`.

    Source: Llama 3.1 model configuration (rope type "llama3").
    """
    frequencies = theta ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    fits = original_max_position_embeddings * frequencies / (2 * np.pi)
    smooth = np.clip((fits - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return tuple((1 / (smooth + (1 - smooth) / factor)).tolist())


def rotation(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of position times frequency.

    Args:
      positions: i32[B, N], absolute index of each token.
      frequencies: f32[D/2].

    Returns:
      cos, sin: f32[B, N, 1, D/2]; the unit axis broadcasts over heads.
    """
    angles = positions.astype(jnp.float32)[:, :, None, None] * jnp.asarray(frequencies)[None, None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (x[i], x[i + D/2]) by their angles, in float32.

    Args:
      x: float[B, N, H, D].
      cos, sin: f32[B, N, 1, D/2].

    Returns:
      [B, N, H, D] in x's dtype.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
