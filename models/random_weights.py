"""Random weights of any configuration, made on the device one tensor at a time, in the dtype asked for.

For tests and benchmarks: the host holds no copy, and nothing is ever in a wider dtype as a whole.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from models.decoder import DecoderConfig, Weights, weight_shapes


def random_weights(
    config: DecoderConfig, seed: int, dtype: Any = jnp.float32, shardings: Any = None
) -> Weights:
    """Random weights: normal with variance 1 / inputs, norms one, biases zero.

    Args:
      config: the architecture.
      seed: any integer that fits in 32 bits.
      dtype: float dtype of the weights.
      shardings: a Sharding for each tensor, or None: the default device. Values do not depend on it.

    Returns:
      The decoder's weights.
    """
    return fill_randomly(weight_shapes(config), seed, dtype, shardings)


def fill_randomly(shapes: Weights, seed: int, dtype: Any, shardings: Any = None) -> Weights:
    """The same for any tree of shapes whose leaves are called as the decoder's."""
    # The "rbg" generator is many times faster than JAX's default one on billions of numbers.
    keys = jax.random.key(seed, impl="rbg")
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    places = jax.tree.leaves(shardings)
    made = []
    for number, (path, leaf) in enumerate(leaves):
        names = [entry.key for entry in path]
        if names[-1] == "bias":
            made.append(jnp.zeros(leaf.shape, dtype))
        elif names[-2].endswith("norm"):
            made.append(jnp.ones(leaf.shape, dtype))
        else:
            made.append(_normal(jax.random.fold_in(keys, number), leaf.shape, jnp.dtype(dtype)))
        if shardings is not None:
            # Waited for, so that the default device never holds more than one tensor whole.
            made[-1] = jax.block_until_ready(jax.device_put(made[-1], places[number]))
    return treedef.unflatten(made)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, dtype):
    return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[-1] ** -0.5, dtype)
