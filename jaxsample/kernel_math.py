"""What the kernels of rows share, and what kernels compute their own way for want of an operation.

In Pallas' Triton dialect, a stop-gap; Pallas is imported where it is used.
"""

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample import rng

TINY = np.finfo(np.float32).tiny
LOG2_E = np.float32(1 / np.log(2))
LAST_ID = np.iinfo(np.int32).max


def multiply_wide(x, constant: int):
    """High and low word of x * constant, u32: one instruction, where `rng` takes a dozen to work anywhere."""
    with jax.enable_x64(True):
        product = jax.lax.convert_element_type(x, jnp.uint64)
        product = product * jax.lax.full_like(product, constant)
        high = jax.lax.shift_right_logical(product, jax.lax.full_like(product, 32))
        return tuple(jax.lax.convert_element_type(word, jnp.uint32) for word in (high, product))


def log2(x):
    """log2 of positive f32 as the hardware approximates it: within 2^-22, absolutely or relatively."""
    from jax.experimental.pallas import triton as plt

    (result,) = plt.elementwise_inline_asm(
        "lg2.approx.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result


def words_of(call, position, low, high):
    """Four random words of each generator call, as `rng.philox4x32` makes them of a row's seed."""
    word = lambda x: jax.lax.convert_element_type(x, jnp.uint32)
    zero = jnp.zeros_like(call).astype(jnp.uint32)
    counter = (word(call), zero + word(position), zero + np.uint32(rng.TARGET), zero)
    return rng.philox4x32(counter, (word(low), word(high)), multiply_wide)


def word_of(words, index):
    """Of four arrays of words the one that index i32 (0 ... 3) names, everywhere."""
    first = jnp.where(index == 0, words[0], words[1])
    return jnp.where(index < 2, first, jnp.where(index == 2, words[2], words[3]))


def kept_scale(temperature):
    """What logits are divided by; 1 for greedy rows, and never so large that its inverse is subnormal."""
    return jnp.where(temperature < TINY, 1, jnp.minimum(temperature, np.float32(2.0**125)))


@functools.cache
def runs_here() -> bool:
    """Whether this machine's GPU and jax run kernels in the dialect: it takes compute capability 8.0."""
    if jax.default_backend() != "gpu" or importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return False
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    return capability.replace(".", "").isdigit() and float(capability) >= 8


def pallas() -> tuple[Any, Any]:
    """Pallas and its Triton dialect, half a second to import."""
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    return pallas, triton


def row_of(pl: Any, size: int, axis: int):
    """The row of the program along `axis` of the grid."""
    return pl.BlockSpec((None, size), lambda *at: (at[axis], 0))


def whole_of(pl: Any, size: int):
    """One number of each row, of which a program takes its own."""
    return pl.BlockSpec((size,), lambda *_: (0,))
