"""Linear maps of few tokens on a GPU: whole, or their sums in parts that the kernel behind them adds up.

A decode step streams every weight once for a handful of tokens. Where a matrix has few rows of outputs, its
inputs are split as well until all multiprocessors stream alike; what a product library adds up in a kernel of
its own, `models.norm_kernel` adds where it reads it. For the fewest tokens narrow blocks of outputs need no
parts. In Pallas' Triton dialect, a stop-gap like `models.attention_kernel`; imported where it is used.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.attention import precision_of

_MOST_TOKENS = 128
_MULTIPROCESSORS = 132  # of an H200


class _Plan(NamedTuple):
    """Outputs and inputs of a block of the weight; warps of a program; loads under way."""

    outputs: int
    inputs: int
    warps: int
    stages: int


_PARTS, _PARTS_OF_MANY, _WHOLE = _Plan(128, 64, 4, 4), _Plan(128, 64, 8, 4), _Plan(16, 256, 2, 4)
_FEW_TOKENS = 16  # a block of the matrix units: narrow blocks of outputs do not pay for more


def splits(x: jax.Array, weight: jax.Array) -> bool:
    """Whether `project_parts` is made for it: few tokens, and not a product that is faster whole."""
    num_outputs, num_inputs = weight.shape
    num_tokens = x.shape[0] * x.shape[1]
    is_worth_it = num_inputs > num_outputs or num_tokens > _FEW_TOKENS
    return is_worth_it and num_tokens <= _MOST_TOKENS and _divides(weight, _PARTS)


def fits_whole(x: jax.Array, weight: jax.Array) -> bool:
    """Whether `project_whole` is made for it: the fewest tokens."""
    return x.shape[0] * x.shape[1] <= _FEW_TOKENS and _divides(weight, _WHOLE)


def project_parts(x: jax.Array, weight: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Parts whose sum is x weight^T, float32.

    Args:
      x: float[B, N, I].
      weight: float[O, I], x's dtype.

    Returns:
      f32[P, B, N, O].
    """
    is_small = x.shape[0] * x.shape[1] <= _MOST_TOKENS // 2
    num_programs = _MULTIPROCESSORS * (2 if is_small else 1)
    num_parts = max(1, round(num_programs / (weight.shape[0] // _PARTS.outputs)))
    plan = _PARTS if is_small else _PARTS_OF_MANY
    return _project(x, weight, plan, num_parts, jnp.float32, "project_parts", interpret)


def project_whole(x: jax.Array, weight: jax.Array, *, interpret: bool = False) -> jax.Array:
    """x weight^T, [B, N, O] in x's dtype. Args as for `project_parts`."""
    return _project(x, weight, _WHOLE, 1, x.dtype, "project_whole", interpret)[0]


def _divides(weight: jax.Array, plan: _Plan) -> bool:
    return weight.shape[0] % plan.outputs == 0 and weight.shape[1] % plan.inputs == 0


def _project(x, weight, plan: _Plan, num_parts: int, dtype: Any, name: str, interpret: bool) -> jax.Array:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    B, N, num_inputs = x.shape
    num_outputs, num_tokens = weight.shape[0], B * N
    num_blocks = num_inputs // plan.inputs
    blocks = -(-num_blocks // num_parts)
    num_parts = -(-num_blocks // blocks)
    parts = pl.pallas_call(
        functools.partial(_kernel, plan=plan, blocks=blocks, num_blocks=num_blocks),
        grid=(num_outputs // plan.outputs, num_parts),
        in_specs=[
            pl.BlockSpec((num_tokens, num_inputs), lambda o, p: (0, 0)),
            pl.BlockSpec((plan.outputs, num_inputs), lambda o, p: (o, 0)),
        ],
        out_specs=pl.BlockSpec((None, num_tokens, plan.outputs), lambda o, p: (p, 0, o)),
        out_shape=jax.ShapeDtypeStruct((num_parts, num_tokens, num_outputs), dtype),
        compiler_params=plt.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
        interpret=interpret,
        name=name,
    )(x.reshape(num_tokens, num_inputs), weight)
    return parts.reshape(num_parts, B, N, num_outputs)


def _kernel(x_ref, weight_ref, part_ref, *, plan, blocks, num_blocks):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    num_tokens, dtype = x_ref.shape[0], x_ref.dtype
    size = max(16, 1 << (num_tokens - 1).bit_length())
    token = jnp.arange(size, dtype=jnp.int32)[:, None]
    output = jnp.arange(plan.outputs, dtype=jnp.int32)
    product = functools.partial(jnp.dot, precision=precision_of(dtype), preferred_element_type=jnp.float32)

    def add_block(index, total):
        at = index * plan.inputs + jnp.arange(plan.inputs, dtype=jnp.int32)[None, :]
        # Both go to the product as they were loaded: a gate computed here would keep the weight from being
        # on its way in advance (53 us instead of 34 and 2 of its own).
        x = plt.load(x_ref.at[token, at], mask=token < num_tokens, other=0)
        weight = plt.load(weight_ref.at[output[:, None], at])
        return total + product(x, weight.T)

    begin = pl.program_id(1) * blocks
    end = jnp.minimum(begin + blocks, num_blocks)
    total = jax.lax.fori_loop(begin, end, add_block, jnp.zeros((size, plan.outputs), jnp.float32))
    total = total.astype(part_ref.dtype)
    plt.store(part_ref.at[token, output[None, :]], total, mask=token < num_tokens)
