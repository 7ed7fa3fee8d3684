"""The one call a plain loop needs: logits in, one token a row out.

Composes shaping, target, draw and logprobs; equal to one decode step's choice without a draft. On a mesh each
device draws for its own rows. On a GPU kernels draw in the programs that they serve. Knows nothing about
requests, caches or finishing.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxsample.history import History
from jaxsample.logprobs import Logprobs
from jaxsample.params import Features, Limits, SamplingParams, StopRule
from jaxsample.row_draw import draw_tokens, is_chosen
from jaxsample.shaping import shape
from jaxsample.sharding import Axis, axis_names, map_rows
from jaxsample.target import draw_target, logprobs_of, make_target


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """One token a row.

    Fields:
      tokens: i32[B], PAD where valid is False.
      valid: bool[B]. False: NaN or +inf among the row's logits, or nothing left that can be drawn.
      logprobs: Logprobs, or None if the program computes none.
    """

    tokens: jax.Array
    valid: jax.Array
    logprobs: Logprobs | None


def sample(
    logits,
    params: SamplingParams,
    position,
    *,
    stop: StopRule | None = None,
    history: History | None = None,
    allowed=None,
    limits: Limits | None = None,
    features: Features | None = None,
    transform_args: tuple = (),
    noise=None,
    mesh: Any = None,
    axis: Axis | None = None,
    batch_axis: Axis = (),
) -> Sampled:
    """Draw one token for each row; a row's result depends on that row alone.

    A plain function: call it inside your own jit, with limits, features, mesh and axes static.

    Args:
      logits: f32, bf16 or f16 [B, Vp]; columns at limits.vocab_size and beyond are padding.
      params: SamplingParams of B rows.
      position: i32[B], absolute index of the token being chosen; with the seed it keys the noise.
      stop: StopRule, for the bans of min_tokens; needs history. None: no bans.
      history: History, for penalties, bad words and min_tokens. None: none of them act.
      allowed: u32[B, W] grammar mask of this step, bit i % 32 of word i // 32. None: all allowed.
      limits: capacities. None: the vocabulary is as wide as the logits.
      features: stages of this program. None: all of them, full rows included, without logprobs.
      transform_args: one pytree with B rows for each of features.transforms.
      noise: f32[B, V], used in place of the Gumbel noise, to compare with other software; greedy rows
        ignore it.
      mesh, axis, batch_axis: logits are split over the vocabulary along `axis` of the mesh, rows beforehand
        along batch_axis, see `sharding.map_rows`. With an axis and no mesh the call stands in a shard_map of
        the caller's: logits are its device's [B, Vp / P], everything else has all B rows.

    Returns:
      Sampled, the same bits on a mesh as on one device.

    Raises:
      ValueError: shapes or dtypes that do not fit, at trace time.
    """
    logits, position = jnp.asarray(logits), jnp.asarray(position)
    params, stop = jax.tree.map(jnp.asarray, (params, stop))
    width = logits.shape[-1]
    if axis is not None and mesh is None:
        width *= jax.lax.axis_size(axis_names(axis))
    limits = Limits(width) if limits is None else limits
    features = Features() if features is None else features
    check_given(logits, width, params, position, stop, history, allowed, noise, limits)

    on_mesh = mesh is not None
    plainly = noise is None and allowed is None and not transform_args and (on_mesh or axis is None)
    by_kernels = plainly and is_chosen(features, limits, on_mesh)

    def rows(logits, params, position, stop, history, allowed, transform_args, noise):
        if by_kernels:
            return draw_rows(logits, params, position, limits=limits, features=features), ()
        shaped = shape(
            logits,
            params,
            position,
            stop=stop,
            history=history,
            allowed=allowed,
            limits=limits,
            features=features,
            transform_args=transform_args,
        )
        target = make_target(shaped, params, position, vocab_size=limits.vocab_size, features=features)
        tokens = draw_target(target, noise)
        return Sampled(tokens, shaped.valid, logprobs_of(target, tokens)), ()

    mapped = map_rows(rows, mesh, axis, batch_axis)
    return mapped(logits, params, position, stop, history, allowed, transform_args, noise)[0]


def draw_rows(logits, params, position, *, limits: Limits, features: Features) -> Sampled:
    """By kernels where the program runs on a GPU, else by XLA, for features that `row_draw` serves."""

    def by_xla(logits, params, position):
        shaped = shape(logits, params, position, limits=limits, features=features)
        target = make_target(shaped, params, position, vocab_size=limits.vocab_size, features=features)
        return draw_target(target), shaped.valid

    by_kernels = functools.partial(draw_tokens, limits=limits, features=features)
    tokens, valid = jax.lax.platform_dependent(logits, params, position, cuda=by_kernels, default=by_xla)
    return Sampled(tokens, valid, None)


def check_given(logits, width, params, position, stop, history, allowed, noise, limits: Limits) -> None:
    """Refuse logits of another kind or width than `sample` takes, and rows that do not fit them."""
    if logits.ndim != 2 or logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"logits are {logits.dtype}{list(logits.shape)}, expected float32, bfloat16 or float16 [B, V]"
        )
    num_rows = logits.shape[0]
    if num_rows == 0:
        raise ValueError("logits have no rows, expected at least one")
    if width < limits.vocab_size:
        raise ValueError(
            f"logits have {width} columns, expected at least limits.vocab_size = {limits.vocab_size}"
        )
    check_rows(num_rows, params, position, stop, history, allowed, noise, limits)


def check_rows(num_rows: int, params, position, stop, history, allowed, noise, limits: Limits) -> None:
    """Refuse what belongs to rows where it has not num_rows of them, or another width than limits say."""
    if position.shape != (num_rows,) or position.dtype != jnp.int32:
        raise ValueError(f"position is {position.dtype}{list(position.shape)}, expected int32[{num_rows}]")
    if stop is not None and history is None:
        raise ValueError("stop needs history: min_tokens counts emitted tokens")
    words = (num_rows, limits.num_words)
    expected = [
        ("params.temperature", params.temperature, (num_rows,)),
        ("params.seed", params.seed, (num_rows, 2)),
        ("params.allowed", params.allowed, words),
    ]
    if allowed is not None:
        expected.append(("allowed", jnp.asarray(allowed), words))
    if history is not None:
        expected.append(("history.output_counts", history.output_counts, (num_rows, limits.vocab_size)))
    if noise is not None:
        expected.append(("noise", noise, (num_rows, limits.vocab_size)))
    for name, array, needed in expected:
        if array.shape != needed:
            raise ValueError(f"{name} has shape {list(array.shape)}, expected {list(needed)}")
    if allowed is not None and jnp.asarray(allowed).dtype != jnp.uint32:
        raise ValueError(f"allowed is {jnp.asarray(allowed).dtype}, expected uint32 (32 token ids a word)")
