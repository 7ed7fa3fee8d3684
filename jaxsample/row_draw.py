"""The token of each row by the kernels of `row_kernel`, for the programs these serve.

Knows nothing about how a kernel works, or about logprobs and drafts.
"""

import jax
import jax.numpy as jnp

from jaxsample.candidates import tidy
from jaxsample.params import PAD, Features, Limits, SamplingParams
from jaxsample.row_kernel import GROUP, Blocks, draw_first, draw_whole, summarize_groups
from jaxsample.shaping import divide
from jaxsample.truncation import is_filtered

_MOST_HELD = 128  # candidates, whose groups' tokens a program holds twice over


def serves(features: Features, limits: Limits) -> bool:
    """Whether the kernels give the tokens of a program: no shaping, no full rows, no logprobs."""
    held = 1 << (features.num_candidates - 1).bit_length()
    fits = held <= min(-(-limits.vocab_size // GROUP), _MOST_HELD)
    return not (features.shapes or features.full_rows or features.num_logprobs >= 0) and fits


def draw_tokens(
    logits,
    params: SamplingParams,
    position,
    *,
    limits: Limits,
    features: Features,
    blocks: Blocks | None = None,
    interpret: bool = False,
):
    """(tokens i32[B], PAD where a row is not valid; valid bool[B]), as `sample` returns them.

    Args:
      logits, params, position, limits, features: as in `sample`.
      blocks: sizes of the kernels' programs. interpret: for machines without a GPU.
    """
    blocks = Blocks() if blocks is None else blocks
    vocab_size = limits.vocab_size
    row = (params.temperature, params.seed, position)
    common = dict(vocab_size=vocab_size, blocks=blocks, interpret=interpret)
    if not features.filters:
        whole = draw_whole(logits, row[0], jnp.ones(position.shape, jnp.bool_), *row[1:], **common)
        highest = jnp.max(whole.max, axis=1)
        valid = (highest > -jnp.inf) & (highest < jnp.inf)
        return jnp.where(valid, _winner(whole, params, tidy(highest)), PAD), valid
    groups = summarize_groups(logits, params.temperature, **common)
    filters = (params.top_k, params.top_p, params.min_p)
    sizes = dict(count=features.num_candidates, filter_order=features.filter_order)
    first = draw_first(logits, groups, *row, *filters, **sizes, **common)
    asked = ~is_filtered(params, vocab_size)
    whole = draw_whole(logits, row[0], asked, *row[1:], **common)
    tokens = jnp.where(asked, _winner(whole, params, first.max), first.tokens)
    return jnp.where(first.valid, tokens, PAD), first.valid


def _winner(whole, params: SamplingParams, highest):
    """The winner of all parts of each row: i32[B]; highest is f32[B]."""
    scores = tidy(divide(whole.value, params, highest)) + whole.noise
    best = jnp.max(scores, axis=1, keepdims=True)
    return jnp.min(jnp.where(scores == best, whole.id, jnp.iinfo(jnp.int32).max), axis=1)
