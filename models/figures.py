"""The figures of generation and of serving, and the lines that show them.

Knows nothing of how text was made.
"""

import sys
from typing import Any

import jax

from jaxsample.engine import EngineStats
from models.generation import Timing


def statistics(timing: Timing, load_seconds: float, dtype: str) -> dict[str, Any]:
    """What the run took; the same for every request of it."""
    return {
        "device": jax.devices()[0].device_kind,
        "dtype": dtype,
        "generated_tokens": timing.num_tokens,
        "tokens_per_second": round(timing.tokens_per_second, 3),
        "time_to_first_token_s": round(timing.first_token, 4),
        "prefill_s": round(timing.prefill, 4),
        "decode_s": round(timing.decode, 4),
        "compile_s": round(timing.compile, 4),
        "load_s": round(load_seconds, 4),
        **(draft_statistics(timing) if timing.num_drafted else {}),
    }


def print_statistics(stats: dict[str, Any]) -> None:
    print(
        f"{stats['generated_tokens']} tokens, {stats['tokens_per_second']:.1f} tokens/s, "
        f"first token after {stats['time_to_first_token_s']:.3f} s; "
        f"apart from these: compiling {stats['compile_s']:.1f} s, loading {stats['load_s']:.1f} s "
        f"({stats['dtype']} on {stats['device']})",
        file=sys.stderr,
        flush=True,
    )
    if "drafted" in stats:
        print(
            f"{stats['accepted']} of {stats['drafted']} drafts accepted, "
            f"{stats['acceptance_length']:.2f} tokens a step, by position {stats['acceptance_by_position']}, "
            f"{stats['writes_avoided']} cache rows not written",
            file=sys.stderr,
            flush=True,
        )


def draft_statistics(timing: Timing) -> dict[str, Any]:
    """Drafts and writes of the run; a step stages its root and its drafts, and commits what it emits."""
    if timing.num_windows == 0:
        return {}
    return {
        "windows": timing.num_windows,
        "drafted": timing.num_drafted,
        "accepted": sum(timing.accepted_at),
        "acceptance_length": round(timing.num_tokens / timing.num_windows, 3),
        "acceptance_by_position": [
            round(accepted / max(drafted, 1), 3)
            for accepted, drafted in zip(timing.accepted_at, timing.drafted_at, strict=True)
        ],
        "writes_avoided": timing.num_windows + timing.num_drafted - timing.num_tokens,
    }


def progress_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """What an engine does, and what it did in the seconds between two counts."""
    rate = (now.num_tokens - before.num_tokens) / seconds
    line = f"{now.num_seated} of {now.num_slots} slots, {now.num_waiting} waiting, {rate:.1f} tokens/s"
    if now.num_drafted:
        line += f", {now.num_accepted / now.num_drafted:.0%} of drafts accepted"
    return line
