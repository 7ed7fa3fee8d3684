"""The batch on the device: what every slot is doing, admitted, finished and advanced all at once.

Knows nothing about logits or models. Every function is one batched update; none loops over requests and none
asks the host.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxsample.history import History, append, start
from jaxsample.kvcache import WriteMetrics, count_writes, init_write_metrics
from jaxsample.params import PAD, Limits, SamplingParams, StopRule, neutral_params, set_rows
from jaxsample.shaping import end_ids
from jaxsample.verify import Verdict, on_path

IDLE, RUNNING, STOP_EOS, STOP_TOKEN, STOP_SEQUENCE, LENGTH, CANCELLED, ERROR = range(8)
_REASONS = {
    STOP_EOS: "stop",
    STOP_TOKEN: "stop",
    STOP_SEQUENCE: "stop",
    LENGTH: "length",
    CANCELLED: "cancelled",
    ERROR: "error",
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Requests:
    """B slots.

    Fields:
      params: SamplingParams. stop: StopRule. history: History.
      length: i32[B], committed cache slots = prompt + emitted - 1 for a running request.
      root: i32[B], the last token, not yet in the cache; at first the last prompt token.
      status: i32[B], IDLE, RUNNING or why it ended.
      writes: WriteMetrics, what the request's steps staged and wrote.
    """

    params: SamplingParams
    stop: StopRule
    history: History
    length: jax.Array
    root: jax.Array
    status: jax.Array
    writes: WriteMetrics


def finish_reason(status: int) -> str | None:
    """Status as text: "stop", "length", "cancelled", "error"; None while idle or running."""
    return _REASONS.get(int(status))


def empty_requests(limits: Limits, num_slots: int) -> Requests:
    """B = num_slots idle slots."""
    # Buffers of their own for all fields, since steps donate them.
    params, stop = jax.tree.map(jnp.array, neutral_params(limits, num_slots))
    zeros = lambda: jnp.zeros((num_slots,), jnp.int32)
    history = start(limits, jnp.full((num_slots, 1), PAD, jnp.int32), zeros())
    return Requests(params, stop, history, zeros(), zeros(), zeros(), init_write_metrics(num_slots))


def admit(
    requests: Requests,
    slots,
    params: SamplingParams,
    stop: StopRule,
    prompts,
    prompt_lengths,
    num_emitted=None,
    *,
    limits: Limits,
) -> Requests:
    """Put n requests into slots, in one write; whatever a slot held before is gone.

    The caller commits the keys and values of every token but the last, which becomes the root. A request that
    was stopped on its way goes on with the tokens it would have had: noise depends on positions alone.

    Args:
      requests: Requests.
      slots: i32[n], distinct; below 0 or at B and above is padding and dropped.
      params, stop: n rows each, from `make_params`.
      prompts: i32[n, LP], PAD behind. prompt_lengths: i32[n], at least 1.
      num_emitted: i32[n], tokens in `prompts` behind the prompt that the request emitted before it was
        stopped. None: 0. Prompt and emitted together have 1 ... S tokens; other rows are refused with status
        ERROR.
      limits: capacities.
    """
    prompts, prompt_lengths = jnp.asarray(prompts), jnp.asarray(prompt_lengths)
    num_tokens = prompt_lengths if num_emitted is None else prompt_lengths + jnp.asarray(num_emitted)
    last = jnp.maximum(num_tokens - 1, 0)[:, None]
    fits = (prompt_lengths >= 1) & (num_tokens >= prompt_lengths) & (num_tokens <= limits.max_length)
    new = Requests(
        params=params,
        stop=stop,
        history=start(limits, prompts, prompt_lengths, num_emitted),
        length=last[:, 0],
        root=jnp.take_along_axis(prompts, last, axis=1, mode="clip")[:, 0],
        status=jnp.where(fits, RUNNING, ERROR),
        writes=init_write_metrics(prompt_lengths.shape[0]),
    )
    return set_rows(requests, slots, new)


def release(requests: Requests, slots) -> Requests:
    """Make slots idle (i32[n]; out of range is dropped). `admit` clears what they held."""
    return _set_status(requests, slots, IDLE)


def cancel(requests: Requests, slots) -> Requests:
    """End running requests with status CANCELLED (i32[n] slots; out of range is dropped)."""
    stopped = _set_status(requests, slots, CANCELLED).status
    return dataclasses.replace(
        requests, status=jnp.where(requests.status == RUNNING, stopped, requests.status)
    )


def finish(requests: Requests, verdict: Verdict, *, limits: Limits) -> tuple[Verdict, jax.Array]:
    """Find where each row ends, and drop what lies behind.

    Emitted positions are looked at in order; the first that ends the row wins and is itself emitted. At one
    position: EOS or a stop id, then a stop sequence, then length (max_tokens, or a full cache). EOS and stop
    ids end whenever they are emitted: while min_tokens bans them they are not, and where a finished grammar
    lifts the ban they must. Sequences end a row only from min_tokens on. A running row that emits nothing has
    had a bad row of logits: ERROR.

    Args:
      requests: Requests before the step.
      verdict: Verdict of the step.
      limits: capacities.

    Returns:
      (Verdict cut at the end, status i32[B]); rows that do not run keep their status and emit nothing.
    """
    stop, history = requests.stop, requests.history
    running = requests.status == RUNNING
    num_columns = verdict.tokens.shape[1]
    column = jnp.arange(num_columns, dtype=jnp.int32)[None, :]
    live = (column < verdict.count[:, None]) & running[:, None]
    num_out = history.num_emitted[:, None] + column + 1
    tokens = verdict.tokens[:, :, None]
    ends = end_ids(stop)
    num_eos = stop.eos_ids.shape[1]
    is_end = (tokens == ends[:, None, :]) & (ends[:, None, :] >= 0)
    is_eos = jnp.any(is_end[:, :, :num_eos], axis=2)
    is_stop = jnp.any(is_end[:, :, num_eos:], axis=2)
    is_sequence = _completes_sequence(stop, history, verdict) & (num_out >= stop.min_tokens[:, None])
    num_total = history.num_prompt[:, None] + num_out
    is_full = (num_out >= stop.max_tokens[:, None]) | (num_total >= limits.max_length + 1)

    reason = jnp.where(is_full, LENGTH, RUNNING)
    reason = jnp.where(is_sequence, STOP_SEQUENCE, reason)
    reason = jnp.where(is_stop, STOP_TOKEN, reason)
    reason = jnp.where(is_eos, STOP_EOS, reason)
    ended = live & (reason != RUNNING)
    first = jnp.argmax(ended, axis=1).astype(jnp.int32)
    any_end = jnp.any(ended, axis=1)
    count = jnp.where(running, jnp.where(any_end, first + 1, verdict.count), 0)
    status = jnp.where(any_end, jnp.take_along_axis(reason, first[:, None], axis=1)[:, 0], RUNNING)
    status = jnp.where(count > 0, status, ERROR)

    emitted = column < count[:, None]
    kept_nodes = jnp.where(emitted, verdict.path, 0)
    cut = Verdict(
        tokens=jnp.where(emitted, verdict.tokens, PAD),
        count=count,
        path=kept_nodes,
        accepted=on_path(kept_nodes, verdict.accepted.shape[1] + 1),
    )
    return cut, jnp.where(running, status, requests.status)


def advance(requests: Requests, verdict: Verdict, status, num_drafted: Any = 0) -> Requests:
    """Move every row on by what it emitted: history, length, root, status.

    Args:
      requests: Requests before the step.
      verdict: Verdict from `finish`.
      status: i32[B] from `finish`.
      num_drafted: i32[B], live proposals of the step, for the counters.
    """
    running = requests.status == RUNNING
    last = jnp.maximum(verdict.count - 1, 0)[:, None]
    last_token = jnp.take_along_axis(verdict.tokens, last, axis=1)[:, 0]
    return dataclasses.replace(
        requests,
        history=append(requests.history, verdict.tokens, verdict.count),
        length=requests.length + verdict.count,
        root=jnp.where(verdict.count > 0, last_token, requests.root),
        status=status,
        writes=count_writes(requests.writes, 1 + num_drafted, verdict.count, running),
    )


def _completes_sequence(stop: StopRule, history: History, verdict: Verdict):
    """bool[B, M]: a stop sequence ends with emitted token m, over emitted tokens only, across steps."""
    num_columns, max_length = verdict.tokens.shape[1], stop.stop_sequences.shape[2]
    if stop.stop_sequences.shape[1] == 0 or max_length == 0:
        return jnp.zeros(verdict.tokens.shape, jnp.bool_)
    recent = append(history, verdict.tokens, verdict.count)
    # Token m sits at num_prompt + num_emitted + m; compare backwards from there.
    end = (history.num_prompt + history.num_emitted)[:, None, None]
    end = end + jnp.arange(num_columns, dtype=jnp.int32)[None, :, None]
    index = end - jnp.arange(max_length, dtype=jnp.int32)[None, None, :]
    inside = index >= history.num_prompt[:, None, None]
    num_rows = verdict.tokens.shape[0]
    flat = jnp.maximum(index, 0).reshape(num_rows, -1)
    window = jnp.take_along_axis(recent.tokens, flat, axis=1, mode="clip").reshape(index.shape)
    window = jnp.where(inside, window, PAD)

    length = stop.stop_sequence_lengths
    back = jnp.arange(max_length, dtype=jnp.int32)[None, None, :]
    reversed_index = jnp.maximum(length[:, :, None] - 1 - back, 0)
    backwards = jnp.take_along_axis(stop.stop_sequences, reversed_index, axis=2)
    needed = back < length[:, :, None]
    same = window[:, :, None, :] == backwards[:, None, :, :]
    matches = jnp.all(same | ~needed[:, None, :, :], axis=3) & (length > 0)[:, None, :]
    return jnp.any(matches, axis=2)


def _set_status(requests: Requests, slots, status: int) -> Requests:
    slots = jnp.asarray(slots)
    slots = jnp.where(slots < 0, requests.status.shape[0], slots)
    return dataclasses.replace(requests, status=requests.status.at[slots].set(status, mode="drop"))
