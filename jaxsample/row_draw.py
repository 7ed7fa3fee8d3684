"""The token of each row by kernels on a GPU, for the programs these serve.

XLA's twin is `target.draw_target`. Knows nothing about how a kernel works, or about logprobs and drafts.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxsample import kernel_math
from jaxsample.candidates import tidy
from jaxsample.first_kernel import GROUP, draw_first, summarize_groups
from jaxsample.params import PAD, Features, Limits, SamplingParams
from jaxsample.shaping import divide
from jaxsample.truncation import is_filtered
from jaxsample.whole_kernel import Whole, draw_whole

_MOST_HELD = 128  # candidates, so that the tokens of their groups fit into a program


def serves(features: Features, limits: Limits) -> bool:
    """Whether the kernels give the tokens of a program: no shaping, no full rows, no logprobs."""
    held = 1 << (features.num_candidates - 1).bit_length()
    fits = not features.filters or held <= min(-(-limits.vocab_size // GROUP), _MOST_HELD)
    full_rows = features.filters and features.full_rows
    return not (features.shapes or full_rows or features.num_logprobs >= 0) and fits


def is_chosen(features: Features, limits: Limits, on_mesh: bool) -> bool:
    """Whether programs are made with the kernels, where they run on a GPU.

    Without a mesh only where there is one device, since arrays may lie on several and a compiler splits no
    kernel, and outside a shard_map of the caller's, which would have to know what a kernel's results vary
    over.
    """
    alone = jax.device_count() == 1 and not jax.sharding.get_abstract_mesh().manual_axes
    return (on_mesh or alone) and kernel_math.runs_here() and serves(features, limits)


def draw_tokens(
    logits, params: SamplingParams, position, *, limits: Limits, features: Features, interpret: bool = False
):
    """(tokens i32[B], PAD where a row is not valid; valid bool[B]), as `sample` returns them.

    Args:
      logits, params, position, limits, features: as in `sample`.
      interpret: for machines without a GPU, slowly.
    """
    # Tokens have no gradient, and a kernel has no rule for one.
    logits, params = jax.lax.stop_gradient((logits, params))
    temperature, top_p, min_p = (
        x.astype(jnp.float32) for x in (params.temperature, params.top_p, params.min_p)
    )
    row = (temperature, params.seed, position)
    common: dict[str, Any] = dict(vocab_size=limits.vocab_size, interpret=interpret)
    if not features.filters:
        whole = draw_whole(logits, row[0], jnp.ones(position.shape, jnp.bool_), *row[1:], **common)
        highest = jnp.max(whole.max, axis=1)
        valid = (highest > -jnp.inf) & (highest < jnp.inf)
        return jnp.where(valid, _winner(whole, params, tidy(highest)), PAD), valid
    groups = summarize_groups(logits, temperature, **common)
    filters = (params.top_k, top_p, min_p)
    sizes: dict[str, Any] = dict(count=features.num_candidates, filter_order=features.filter_order)
    first = draw_first(logits, groups, *row, *filters, **sizes, **common)
    asked = ~is_filtered(params, limits.vocab_size)
    whole = draw_whole(logits, row[0], asked, *row[1:], **common)
    tokens = jnp.where(asked, _winner(whole, params, first.max), first.tokens)
    return jnp.where(first.valid, tokens, PAD), first.valid


def _winner(whole: Whole, params: SamplingParams, highest):
    """The winner of all parts of each row, i32[B]; highest: f32[B]."""
    scores = tidy(divide(whole.value, params, highest)) + whole.noise
    best = jnp.max(scores, axis=1, keepdims=True)
    return jnp.min(jnp.where(scores == best, whole.id, jnp.iinfo(jnp.int32).max), axis=1)
