"""Linear maps of few tokens on a GPU, their sums in parts that the kernel behind them adds up.

A decode step streams every weight once for a handful of tokens. Where a matrix has few rows of outputs, its
inputs are split as well until all multiprocessors stream alike; what a product library adds up in a kernel of
its own, `models.norm_kernel` adds where it reads it. In Pallas' Triton dialect, a stop-gap like
`models.attention_kernel`; imported where it is used.
"""

import functools

import jax
import jax.numpy as jnp

from models.attention import precision_of

_MOST_TOKENS = 128
_OUTPUTS, _INPUTS = 128, 64  # of a block of the weight
_MULTIPROCESSORS = 132  # of an H200


def splits(x: jax.Array, weight: jax.Array) -> bool:
    """Whether `project_parts` is made for it: few tokens, a matrix that divides into blocks."""
    num_tokens, (num_outputs, num_inputs) = x.shape[0] * x.shape[1], weight.shape
    return num_tokens <= _MOST_TOKENS and num_outputs % _OUTPUTS == 0 and num_inputs % _INPUTS == 0


def project_parts(x: jax.Array, weight: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Parts whose sum is x weight^T, float32.

    Args:
      x: float[B, N, I].
      weight: float[O, I], x's dtype.

    Returns:
      f32[P, B, N, O].
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    B, N, num_inputs = x.shape
    num_outputs, num_tokens = weight.shape[0], B * N
    is_small = num_tokens <= _MOST_TOKENS // 2
    num_tiles, num_blocks = num_outputs // _OUTPUTS, num_inputs // _INPUTS
    num_parts = max(1, round(_MULTIPROCESSORS * (2 if is_small else 1) / num_tiles))
    blocks = -(-num_blocks // num_parts)
    num_parts = -(-num_blocks // blocks)
    parts = pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, num_blocks=num_blocks),
        grid=(num_tiles, num_parts),
        in_specs=[
            pl.BlockSpec((num_tokens, num_inputs), lambda o, p: (0, 0)),
            pl.BlockSpec((_OUTPUTS, num_inputs), lambda o, p: (o, 0)),
        ],
        out_specs=pl.BlockSpec((None, num_tokens, _OUTPUTS), lambda o, p: (p, 0, o)),
        out_shape=jax.ShapeDtypeStruct((num_parts, num_tokens, num_outputs), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4 if is_small else 8, num_stages=4),
        interpret=interpret,
        name="project_parts",
    )(x.reshape(num_tokens, num_inputs), weight)
    return parts.reshape(num_parts, B, N, num_outputs)


def _kernel(x_ref, weight_ref, part_ref, *, blocks, num_blocks):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    num_tokens, dtype = x_ref.shape[0], x_ref.dtype
    size = max(16, 1 << (num_tokens - 1).bit_length())
    token = jnp.arange(size, dtype=jnp.int32)[:, None]
    output = jnp.arange(_OUTPUTS, dtype=jnp.int32)
    product = functools.partial(jnp.dot, precision=precision_of(dtype), preferred_element_type=jnp.float32)

    def add_block(index, total):
        at = index * _INPUTS + jnp.arange(_INPUTS, dtype=jnp.int32)[None, :]
        # Both go to the product as they were loaded: a gate computed here would keep the weight from being
        # on its way in advance (53 us instead of 34 and 2 of its own).
        x = plt.load(x_ref.at[token, at], mask=token < num_tokens, other=0)
        weight = plt.load(weight_ref.at[output[:, None], at])
        return total + product(x, weight.T)

    begin = pl.program_id(1) * blocks
    end = jnp.minimum(begin + blocks, num_blocks)
    total = jax.lax.fori_loop(begin, end, add_block, jnp.zeros((size, _OUTPUTS), jnp.float32))
    plt.store(part_ref.at[token, output[None, :]], total, mask=token < num_tokens)
