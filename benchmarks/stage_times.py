"""Device time of a program's stages, told apart by the named scopes of its operations; the longest kernels.

Knows nothing of what a program does. A scope is a `jax.named_scope` at the outermost level, as "forward" is.
"""

import bisect
import collections
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax


def stage_times(
    call: Callable[[int], Any], program: str, stages: Sequence[str], num_calls: int = 8
) -> tuple[dict[str, float], list[tuple[str, float, float]]]:
    """Time by stage, and (name, launches, microseconds) of each kernel, longest first; all per call.

    Args:
      call: call(i) runs the program and returns the arrays to wait for.
      program: the compiled program's text.
      stages: the scopes to tell apart, in the order they run in; what belongs to none is "other".
      num_calls: calls in the profile.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for i in range(num_calls):
                jax.block_until_ready(call(i))
        file = sorted(Path(folder).glob("**/*.xplane.pb"))[-1]
        events = _events(jax.profiler.ProfileData.from_file(str(file)))
    stage_of = _stages_of_instructions(program, stages)
    found = [stage_of.get(op) or stage_of.get(_plain(name)) for _, _, name, op in events]
    totals = dict.fromkeys((*stages, "other"), 0.0)
    kernels: dict[str, list[float]] = collections.defaultdict(list)
    # Library kernels inside a CUDA graph name no instruction, and rewritten products lose their scope: they
    # are told by what runs before and after, since stages run in order.
    known = [index for index, stage in enumerate(found) if stage]
    for index, (_, duration, name, _) in enumerate(events):
        at = bisect.bisect(known, index)
        around = {found[k] for k in known[max(at - 1, 0) : at + 1]}
        if around == {"forward", "sample"}:
            around = {"unembed"}
        stage = found[index] or (around.pop() if len(around) == 1 else "other")
        totals[stage] += duration / 1e3 / num_calls
        kernels[f"{stage} {name}"].append(duration / 1e3)
    listing = [(name, len(times) / num_calls, sum(times) / num_calls) for name, times in kernels.items()]
    return totals, sorted(listing, key=lambda entry: -entry[2])


def _events(data) -> list[tuple[float, float, str, str]]:
    """(start, nanoseconds, kernel, instruction of the program or "") of what ran on the device, in order."""
    on_gpu = jax.default_backend() == "gpu"
    events = []
    for plane in data.planes:
        if on_gpu and "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if on_gpu and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                op = next((str(value) for name, value in event.stats if name == "hlo_op"), "")
                if on_gpu or op:  # on a CPU the host's own events are beside them
                    events.append((event.start_ns, event.duration_ns, event.name, op))
    return sorted(events)


def _stages_of_instructions(text: str, stages: Sequence[str]) -> dict[str, str]:
    """Stage by instruction of a compiled program, both as written and as kernels spell it."""
    found = {}
    scopes = "|".join(stages)
    pattern = rf'^\s*(?:ROOT )?%?([\w.-]+) = .*op_name="[^"]*?/({scopes})/'
    for name, stage in re.findall(pattern, text, re.MULTILINE):
        found[name] = found[_plain(name)] = stage
    return found


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "_", name)
