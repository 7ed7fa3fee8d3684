"""How each request is guided, as arrays of B rows; one request's own words checked and laid out as such rows.

Rows of a type of their own, beside `SamplingParams`: a program without guidance has none of these arrays.
Knows nothing about logits or value models; what the numbers do is in `guidance`. Neutral settings are
recognised here, on the host, so that a request that asks for no change is not guided at all.

Source: Zhang et al., "Length Value Model", arXiv 2604.27039, and the sampler published with it.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from jaxsample.admission import check_number
from jaxsample.params import Limits, SamplingParams

# How a row's candidates are redistributed. OFF rows are not guided; SCORES rows are by `add_scores` alone.
OFF, CENTERED_EXP, VALUE_BIAS, MUL, LINEAR, EXP, LENGTH_MUL, EQ, GE, LE, EQ_SOFT, SCORES = range(12)
MODES = {
    "centered_exp": CENTERED_EXP,
    "value_bias": VALUE_BIAS,
    "mul": MUL,
    "linear": LINEAR,
    "exp": EXP,
    "length_mul": LENGTH_MUL,
    "scores": SCORES,
}
CONSTRAINTS = {"eq": EQ, "ge": GE, "le": LE, "eq_soft": EQ_SOFT}
LENGTH_MODES = ("total", "remaining")

_TINY = float(np.finfo(np.float32).tiny)
_HUGE = float(np.finfo(np.float32).max)
_NO_CHANGE = 1e-12  # a scale as close as this to its neutral value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guidance:
    """Per-request guidance; the first axis of every field is the request.

    Fields (neutral value):
      mode: i32[B] (OFF = 0), an id of `MODES` or `CONSTRAINTS`. An OFF row is drawn as without guidance.
      scale: f32[B] (1), the strength s of the modes.
      log_gamma: f32[B] (ln 0.997), ln of the value model's discount. A logarithm, since gamma itself is so
        close to 1 that float32 would lose most of its distance from 1.
      target_length: f32[B] (0), tokens; for constraints. A target value v is held as ln(1 - v) / ln gamma.
      is_total: bool[B] (False), the target counts the tokens that were emitted already.
      value_min: f32[B] (0), modes change nothing where the candidates' mean value is below.
      entropy_threshold: f32[B] (-1), nats; rows whose candidates have no more entropy are not guided this
        step.
    """

    mode: Any
    scale: Any
    log_gamma: Any
    target_length: Any
    is_total: Any
    value_min: Any
    entropy_threshold: Any


def neutral_guidance(num_rows: int) -> Guidance:
    """Rows that are not guided, as NumPy arrays."""
    full = lambda value, dtype: np.full((num_rows,), value, dtype)
    return Guidance(
        mode=full(OFF, np.int32),
        scale=full(1, np.float32),
        log_gamma=full(math.log(0.997), np.float32),
        target_length=full(0, np.float32),
        is_total=full(False, np.bool_),
        value_min=full(0, np.float32),
        entropy_threshold=full(-1, np.float32),
    )


def needs_guidance(guidance: Guidance) -> bool:
    """Whether any row is guided, read on the host; a batch without such rows takes the unguided program."""
    return bool((np.asarray(guidance.mode) != OFF).any())


def make_guidance(
    limits: Limits,
    params: SamplingParams,
    *,
    mode: str | None = None,
    scale: float = 1.0,
    gamma: float = 0.997,
    value_min: float | None = None,
    entropy_threshold: float | None = None,
    target_value: float | None = None,
    target_length: float | None = None,
    length_mode: str | None = None,
    constraint: str | None = None,
) -> Guidance:
    """Validate one request's guidance and lay it out as rows of NumPy arrays.

    A request has a mode and a scale, or a target and a constraint. Neutral requests become neutral rows: no
    words at all; centered_exp and value_bias at scale 0; mul, linear, exp and length_mul at scale 1; mul at a
    scale of 0 or less; and greedy requests, which have one candidate.

    Args:
      limits: capacities.
      params: SamplingParams of the request, n rows from `make_params`; a guided request needs a top_k.
      mode: "centered_exp", "value_bias", "mul", "linear", "exp", "length_mul" or "scores"; None is "mul"
        where there is no target.
      scale: finite in float32; 1 is neutral, 0 for centered_exp and value_bias.
      gamma: in (0, 1), the discount the value model was trained with.
      value_min: in [0, 1]; None is 0, off.
      entropy_threshold: nats, >= 0; None is off.
      target_value: in [0, 1], wanted value 1 - gamma^l of the token chosen.
      target_length: tokens, >= 0.
      length_mode: "total" (the default: target_length counts emitted tokens too) or "remaining".
      constraint: "eq" (the default where there is a target), "ge", "le" or "eq_soft".

    Returns:
      Guidance of n rows, as many as params has.

    Raises:
      ValueError: names the argument, the value and the allowed range.
    """
    check_number("scale", scale, -_HUGE, _HUGE, "that are finite in float32")
    check_number("gamma", gamma, _TINY, math.nextafter(1, 0), "in (0, 1)")
    if value_min is not None:
        check_number("value_min", value_min, 0, 1, "in [0, 1]")
    if entropy_threshold is not None:
        check_number("entropy_threshold", entropy_threshold, 0, _HUGE, ">= 0 and finite in float32")
    if target_value is not None:
        check_number("target_value", target_value, 0, 1, "in [0, 1]")
    if target_length is not None:
        check_number("target_length", target_length, 0, _HUGE, ">= 0 and finite in float32")
    for name, value, allowed in (
        ("mode", mode, MODES),
        ("constraint", constraint, CONSTRAINTS),
        ("length_mode", length_mode, LENGTH_MODES),
    ):
        if value is not None and value not in tuple(allowed):
            raise ValueError(f"{name} is {value!r}, allowed are {', '.join(map(repr, allowed))}")
    has_target = target_value is not None or target_length is not None
    _refuse_contradictions(mode, scale, target_value, target_length, length_mode, constraint)

    kind = CONSTRAINTS[constraint or "eq"] if has_target else MODES[mode or "mul"]
    temperature, top_k = np.asarray(params.temperature), np.asarray(params.top_k)
    rows = neutral_guidance(len(temperature))
    if _is_neutral(kind, float(scale)) or bool((temperature < _TINY).all()):
        return rows
    if not ((top_k >= 1) & (top_k <= limits.num_guided)).all():
        raise ValueError(
            f"top_k is {int(top_k[0])}, allowed for a guided request are integers in "
            f"[1, {limits.num_guided}] (Limits.num_guided)"
        )
    rows.mode[:] = kind
    rows.scale[:] = scale
    rows.log_gamma[:] = math.log(gamma)
    if target_length is not None:
        rows.target_length[:] = target_length
        rows.is_total[:] = length_mode != "remaining"
    elif target_value is not None:
        length = math.log1p(-target_value) / math.log(gamma) if target_value < 1 else math.inf
        rows.target_length[:] = min(length, _HUGE)
    rows.value_min[:] = 0 if value_min is None else value_min
    rows.entropy_threshold[:] = -1 if entropy_threshold is None else entropy_threshold
    return rows


def _refuse_contradictions(mode, scale, target_value, target_length, length_mode, constraint):
    if target_value is not None and target_length is not None:
        raise ValueError(
            f"target_value is {target_value} and target_length is {target_length}, allowed is one of them"
        )
    if target_value is not None or target_length is not None:
        if mode is not None:
            raise ValueError(
                f"mode is {mode!r}, allowed with a target is None: the constraint says what is done"
            )
        if scale != 1:
            raise ValueError(f"scale is {scale}, allowed with a target is 1: constraints have no scale")
    elif constraint is not None:
        raise ValueError(f"constraint is {constraint!r}, allowed is None where there is no target")
    if length_mode is not None and target_length is None:
        raise ValueError(f"length_mode is {length_mode!r}, allowed is None where there is no target_length")


def _is_neutral(kind: int, scale: float) -> bool:
    if kind in (CENTERED_EXP, VALUE_BIAS):
        return abs(scale) <= _NO_CHANGE
    if kind in (MUL, LINEAR, EXP, LENGTH_MUL):
        return abs(scale - 1) <= _NO_CHANGE or (kind == MUL and scale <= 0)
    return False
