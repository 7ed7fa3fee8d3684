"""Heads of queries, keys or values as a projection leaves them, before its bias, norms and rotation.

Kernels take them in this form, so that nothing is cut or copied between a matrix product and them.
"""

from typing import NamedTuple

import jax


class Heads(NamedTuple):
    """`count` heads of each of G key-value heads, from `first` on in an array that may hold others as well.

    Fields:
      array: float[B, N, G, rows, D].
      bias: float[G, rows, D], to be added; None for none.
      first, count: which of the rows.
    """

    array: jax.Array
    bias: jax.Array | None
    first: int
    count: int


class Norms(NamedTuple):
    """Weights of the RMS norms over each head: query and key float[D], eps."""

    query: jax.Array
    key: jax.Array
    eps: float


def read_heads(heads: Heads) -> jax.Array:
    """The heads with their bias, [B, N, G * count, D]."""
    rows = slice(heads.first, heads.first + heads.count)
    x = heads.array[:, :, :, rows]
    if heads.bias is not None:
        x = x + heads.bias[None, None, :, rows]
    return x.reshape(*x.shape[:2], -1, x.shape[-1])
