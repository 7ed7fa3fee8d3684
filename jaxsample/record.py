"""The record of a step: all that the host is told, one row of integers a request.

Packed on the device, unpacked on the host; floats travel as their bits. Knows nothing of how a step decides.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample.logprobs import Logprobs
from jaxsample.params import Features
from jaxsample.verify import Verdict

_NUM_COUNTS = 4


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """All the host is told of a step, as NumPy arrays; M tokens a row, n top logprobs.

    Fields:
      tokens: i32[B, M], the first count[b] are emitted, PAD behind. count: i32[B]. status: i32[B].
      drafted: i32[B], proposals offered. accepted: i32[B], those emitted.
      logprobs: f32[B, M], ranks: i32[B, M], top_ids: i32[B, M, n], top_logprobs: f32[B, M, n]; of width 0
        along M where the program computes no logprobs.
    """

    tokens: np.ndarray
    count: np.ndarray
    status: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def pack(verdict: Verdict, status, drafted, logprobs: Logprobs | None):
    """i32[B, R]: status, count, drafted, accepted, M tokens; then logprobs, ranks, top ids, top logprobs."""
    num_rows = verdict.tokens.shape[0]
    accepted = jnp.sum(verdict.accepted, axis=1, dtype=jnp.int32)
    columns = [status[:, None], verdict.count[:, None], drafted[:, None], accepted[:, None], verdict.tokens]
    if logprobs is not None:
        as_bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)
        parts = (as_bits(logprobs.token), logprobs.rank, logprobs.top_ids, as_bits(logprobs.top))
        columns += [part.reshape(num_rows, -1) for part in parts]
    return jnp.concatenate(columns, axis=1)


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
    num_columns = (width - _NUM_COUNTS) // (3 + 2 * num_top if has_logprobs else 1)
    status, count, drafted, accepted = record[:, :_NUM_COUNTS].T
    tokens, rest = np.split(record[:, _NUM_COUNTS:], [num_columns], axis=1)
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
        drafted=drafted,
        accepted=accepted,
        logprobs=as_float(logprobs),
        ranks=ranks,
        top_ids=top_ids.reshape(num_rows, columns, top),
        top_logprobs=as_float(top_logprobs).reshape(num_rows, columns, top),
    )


def columns_of(num_tokens: int, num_top: int) -> list[np.ndarray]:
    """Where a step's record says all about its m-th token: m -> columns, for m < M = num_tokens.

    The columns are, in order, the token, its logprob, its rank, the top ids and the top logprobs; the token
    alone where num_top is -1. Status, count, drafted and accepted are columns 0 ... 3.
    """
    start = np.arange(num_tokens) + _NUM_COUNTS
    if num_top < 0:
        return [start[m : m + 1] for m in range(num_tokens)]
    singles = [start + num_tokens * part for part in range(3)]
    top = start[0] + 3 * num_tokens + np.arange(num_tokens * num_top).reshape(num_tokens, num_top)
    parts = (top, top + num_tokens * num_top)
    return [
        np.concatenate([*(single[m : m + 1] for single in singles), *(part[m] for part in parts)])
        for m in range(num_tokens)
    ]
