"""What each request has said: which prompt tokens, how often each output token, and all of them in order.

Knows nothing about logits. Counts use the narrowest unsigned dtype that holds the cache length.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample.draft import Tree
from jaxsample.params import PAD, Limits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """The tokens of B requests.

    Fields:
      prompt_seen: u32[B, W], bit i % 32 of word i // 32: token i occurs in the prompt.
      output_counts: u8, u16 or i32[B, V], how often each token was emitted.
      tokens: i32[B, S + 1], prompt then output, PAD behind.
      num_prompt: i32[B]. num_emitted: i32[B].
      pending: i32[B, D], proposals before this row on its own draft path (PAD behind), in tokens and
        num_emitted already, not yet in output_counts; D = 0 outside a step.
    """

    prompt_seen: jax.Array
    output_counts: jax.Array
    tokens: jax.Array
    num_prompt: jax.Array
    num_emitted: jax.Array
    pending: jax.Array


def count_dtype(limits: Limits):
    """The narrowest dtype that holds a count of S + 1 tokens."""
    for dtype in (np.uint8, np.uint16):
        if limits.max_length + 1 <= np.iinfo(dtype).max:
            return dtype
    return np.int32


def start(limits: Limits, prompts, prompt_lengths, num_emitted=None) -> History:
    """The history of requests that have emitted nothing, or that go on after what they emitted before.

    Args:
      limits: capacities.
      prompts: i32[B, LP], padded with anything; LP <= S + 1.
      prompt_lengths: i32[B], the valid part of each prompt. Ids outside [0, V) within it are kept in `tokens`
        but are no history for penalties.
      num_emitted: i32[B], tokens in `prompts` behind the prompt that the request itself emitted. None: 0.

    Raises:
      ValueError: prompts wider than S + 1, at trace time.
    """
    prompts, prompt_lengths = jnp.asarray(prompts, jnp.int32), jnp.asarray(prompt_lengths, jnp.int32)
    num_rows, width = prompts.shape
    capacity = limits.max_length + 1
    if width > capacity:
        raise ValueError(f"prompts are {width} wide, allowed is at most max_length + 1 = {capacity}")
    index = jnp.arange(width, dtype=jnp.int32)[None, :]
    in_prompt = index < prompt_lengths[:, None]
    tokens = jnp.where(in_prompt, prompts, PAD)
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    seen = jnp.zeros((num_rows, limits.num_words * 32), jnp.bool_)
    seen = seen.at[rows, _droppable(tokens, limits.vocab_size, seen.shape[1])].set(True, mode="drop")
    counts = jnp.zeros((num_rows, limits.vocab_size), count_dtype(limits))
    if num_emitted is None:
        num_emitted = jnp.zeros((num_rows,), jnp.int32)
    else:
        num_emitted = jnp.asarray(num_emitted, jnp.int32)
        in_output = ~in_prompt & (index < (prompt_lengths + num_emitted)[:, None])
        outputs = jnp.where(in_output, prompts, PAD)
        tokens = jnp.where(in_output, prompts, tokens)
        ids = _droppable(outputs, limits.vocab_size, limits.vocab_size)
        counts = counts.at[rows, ids].add(jnp.ones((), counts.dtype), mode="drop")
    return History(
        prompt_seen=pack_bits(seen),
        output_counts=counts,
        tokens=jnp.pad(tokens, ((0, 0), (0, capacity - width)), constant_values=PAD),
        num_prompt=prompt_lengths,
        num_emitted=num_emitted,
        pending=jnp.zeros((num_rows, 0), jnp.int32),
    )


def append(history: History, tokens, count) -> History:
    """Add the first count[b] of tokens[b] to row b.

    Args:
      history: History.
      tokens: i32[B, M]; entries at count and beyond are ignored.
      count: i32[B], 0 ... M.
    """
    tokens, count = jnp.asarray(tokens, jnp.int32), jnp.asarray(count, jnp.int32)
    num_rows, num_vocab = history.output_counts.shape
    step = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    live = step < count[:, None]
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    slot = (history.num_prompt + history.num_emitted)[:, None] + step
    slot = jnp.where(live, slot, history.tokens.shape[1])
    token = _droppable(jnp.where(live, tokens, PAD), num_vocab, num_vocab)
    return dataclasses.replace(
        history,
        output_counts=history.output_counts.at[rows, token].add(
            jnp.ones((), history.output_counts.dtype), mode="drop"
        ),
        tokens=history.tokens.at[rows, slot].set(tokens, mode="drop"),
        num_emitted=history.num_emitted + count,
    )


def at_nodes(history: History, draft_tokens, tree: Tree) -> History:
    """The history each node of a draft would have if its own path were emitted: B * N rows.

    Counts are not copied: the few proposals of a path stay in `pending`.

    Args:
      history: History of B rows.
      draft_tokens: i32[B, N], node 0 the root (already in the history).
      tree: static tree of the N nodes.
    """
    num_nodes = tree.num_nodes
    repeated = repeat_rows(history, num_nodes)
    path = jnp.asarray(tree.paths)  # i32[N, D], nodes from the root's child down to the node itself
    pending = jnp.where(path[None] >= 0, draft_tokens[:, jnp.maximum(path, 0)], PAD)
    pending = pending.reshape(repeated.tokens.shape[0], tree.max_depth)
    depth = jnp.tile(jnp.asarray(tree.depth), history.tokens.shape[0])
    step = jnp.arange(tree.max_depth, dtype=jnp.int32)[None, :]
    slot = (repeated.num_prompt + repeated.num_emitted)[:, None] + step
    slot = jnp.where(step < depth[:, None], slot, history.tokens.shape[1])
    rows = jnp.arange(slot.shape[0], dtype=jnp.int32)[:, None]
    return dataclasses.replace(
        repeated,
        tokens=repeated.tokens.at[rows, slot].set(pending, mode="drop"),
        num_emitted=repeated.num_emitted + depth,
        pending=pending,
    )


def repeat_rows(tree, times: int):
    """Every row of a pytree [B, ...] `times` times in a row: [B * times, ...]."""

    def repeat(leaf):
        leaf = jnp.asarray(leaf)
        wide = jnp.broadcast_to(leaf[:, None], (leaf.shape[0], times, *leaf.shape[1:]))
        return wide.reshape(leaf.shape[0] * times, *leaf.shape[1:])

    return jax.tree.map(repeat, tree)


def last_output(history: History, num_tokens: int):
    """The last num_tokens emitted tokens of each row, right-aligned, PAD where there are fewer: i32[B, n]."""
    offset = jnp.arange(-num_tokens, 0, dtype=jnp.int32)[None, :]
    index = (history.num_prompt + history.num_emitted)[:, None] + offset
    emitted = index >= history.num_prompt[:, None]
    tokens = jnp.take_along_axis(history.tokens, jnp.where(emitted, index, 0), axis=1, mode="clip")
    return jnp.where(emitted, tokens, PAD)


def pack_bits(bits):
    """bool[B, 32 * W] to u32[B, W], bit i % 32 of word i // 32."""
    words = bits.reshape(bits.shape[0], -1, 32).astype(jnp.uint32)
    return jnp.sum(words << jnp.arange(32, dtype=jnp.uint32)[None, None, :], axis=2, dtype=jnp.uint32)


def unpack_bits(words, num_bits: int):
    """u32[B, W] to bool[B, num_bits]; bits past the words are False."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & 1
    bits = bits.reshape(words.shape[0], -1) != 0
    missing = num_bits - bits.shape[1]
    return jnp.pad(bits, ((0, 0), (0, missing))) if missing > 0 else bits[:, :num_bits]


def bit_columns(words, first, num_bits: int):
    """Bits first ... first + num_bits - 1 of u32[B, W]: bool[B, num_bits]; `first` a multiple of 32."""
    count = -(-num_bits // 32)
    if count < words.shape[1]:
        words = jax.lax.dynamic_slice_in_dim(words, first // 32, count, axis=1)
    return unpack_bits(words, num_bits)


def _droppable(ids, num_vocab: int, beyond: int):
    """Ids with those outside [0, num_vocab) moved to `beyond`, where a scatter drops them (-1 would wrap)."""
    return jnp.where((ids < 0) | (ids >= num_vocab), beyond, ids)
