"""The decode step: forward, sample, verify, finish, commit, advance, as one jitted function.

The one file that knows all of the library. A model is two pure functions:

    forward(weights, tokens i32[B, N], positions i32[B, N], cache, mask bool[B, N, S + N]) -> (hidden, Staged)
    unembed(weights, hidden [B, N, W]) -> logits [B, N, Vp], Vp >= V

State is donated, no value is looked at by the host, and what the host is told comes back as one small array.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample.draft import ROOT, Draft, chain
from jaxsample.kvcache import KVCache, attention_mask, commit
from jaxsample.logprobs import Logprobs
from jaxsample.params import Features, Limits
from jaxsample.requests import Requests, advance, finish
from jaxsample.sample import sample
from jaxsample.verify import Verdict, verify_match


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """All the host is told of a step, as NumPy arrays; M tokens a row, n top logprobs.

    Fields:
      tokens: i32[B, M], the first count[b] are emitted, PAD behind. count: i32[B]. status: i32[B].
      logprobs: f32[B, M], ranks: i32[B, M], top_ids: i32[B, M, n], top_logprobs: f32[B, M, n]; of width 0
        along M where the program computes no logprobs.
    """

    tokens: np.ndarray
    count: np.ndarray
    status: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def make_decode_step(
    forward: Callable[..., Any], unembed: Callable[..., Any], *, limits: Limits, features: Features
):
    """Build the jitted step: one token for every running slot.

    Args:
      forward, unembed: the model's two functions, see the module's text.
      limits: capacities.
      features: stages of this program; it serves rows that need these or fewer.

    Returns:
      step(weights, requests, cache, allowed=None, transform_args=()) -> (requests, cache, record i32[B, R]).
      requests and cache are donated. `allowed` is the grammar mask u32[B, W]. Slots that do not run are
      left as they are. Read the record with `unpack`, best after the next step is launched.
    """
    tree = ROOT

    def step(weights, requests: Requests, cache: KVCache, allowed=None, transform_args=()):
        tokens = requests.root[:, None]
        positions = requests.length[:, None] + jnp.asarray(tree.depth)[None, :]
        mask = attention_mask(requests.length, tree, cache.num_slots)
        with jax.named_scope("forward"):
            hidden, staged = forward(weights, tokens, positions, cache, mask)
        with jax.named_scope("unembed"):
            logits = unembed(weights, hidden)
        with jax.named_scope("sample"):
            sampled = sample(
                logits[:, 0],
                requests.params,
                requests.length + 1,
                stop=requests.stop,
                history=requests.history,
                allowed=allowed,
                limits=limits,
                features=features,
                transform_args=transform_args,
            )
        with jax.named_scope("update"):
            draft = Draft(tokens, jnp.zeros_like(requests.length))
            verdict = verify_match(sampled.tokens[:, None], sampled.valid[:, None], draft, tree)
            verdict, status = finish(requests, verdict, limits=limits)
            cache = commit(cache, staged, requests.length, verdict.path, verdict.count)
            requests = advance(requests, verdict, status)
            record = _pack(verdict, status, sampled.logprobs)
        return requests, cache, record

    return jax.jit(step, donate_argnums=(1, 2))


def make_prefill(forward: Callable[..., Any], limits: Limits):
    """Build the jitted prefill: commit chunks of known tokens, one compilation a chunk width.

    Args:
      forward: the model's function.
      limits: capacities; a slot at max_length and beyond is dropped.

    Returns:
      prefill(weights, cache, tokens i32[B, N], lengths i32[B], counts i32[B]) -> cache. The cache is donated.
      tokens[b, :counts[b]] are committed at slots lengths[b] and on; a row of count 0 idles. Commit all
      prompt tokens but the last: that one is the root of the first step.
    """

    def prefill(weights, cache: KVCache, tokens, lengths, counts):
        num_rows, num_tokens = tokens.shape
        if num_tokens > limits.max_length:
            raise ValueError(
                f"tokens are {num_tokens} wide, allowed is at most max_length = {limits.max_length}"
            )
        tree = chain(num_tokens - 1)
        order = jnp.arange(num_tokens, dtype=jnp.int32)[None, :]
        mask = attention_mask(lengths, tree, cache.num_slots)
        _, staged = forward(weights, tokens, lengths[:, None] + order, cache, mask)
        return commit(cache, staged, lengths, jnp.broadcast_to(order, (num_rows, num_tokens)), counts)

    return jax.jit(prefill, donate_argnums=(1,))


def unpack(record, features: Features) -> StepOutput:
    """Read a step's record on the host.

    Args:
      record: i32[B, R], as NumPy or JAX array (reading a JAX array waits for the step).
      features: those the step was built with.
    """
    record = np.asarray(record)
    num_rows, width = record.shape
    num_top = features.num_logprobs
    has_logprobs = num_top >= 0
    num_columns = (width - 2) // (3 + 2 * num_top if has_logprobs else 1)
    fields = np.split(record, np.cumsum([1, 1, num_columns]), axis=1)
    status, count, tokens, rest = fields[0][:, 0], fields[1][:, 0], fields[2], fields[3]
    as_float = lambda bits: np.ascontiguousarray(bits).view(np.float32)
    columns = num_columns if has_logprobs else 0
    top = max(num_top, 0)
    logprobs, ranks, top_ids, top_logprobs = np.split(
        rest, np.cumsum([columns, columns, columns * top]), axis=1
    )
    return StepOutput(
        tokens=tokens,
        count=count,
        status=status,
        logprobs=as_float(logprobs),
        ranks=ranks,
        top_ids=top_ids.reshape(num_rows, columns, top),
        top_logprobs=as_float(top_logprobs).reshape(num_rows, columns, top),
    )


def _pack(verdict: Verdict, status, logprobs: Logprobs | None):
    """One i32[B, R]: status, count, M tokens; then logprobs, ranks, top ids, top logprobs if there are any."""
    columns = [status[:, None], verdict.count[:, None], verdict.tokens]
    if logprobs is not None:
        as_bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)
        columns += [
            as_bits(logprobs.token)[:, None],
            logprobs.rank[:, None],
            logprobs.top_ids,
            as_bits(logprobs.top),
        ]
    return jnp.concatenate(columns, axis=1)
