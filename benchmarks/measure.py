"""How everything here is timed and recorded. Knows nothing about what is measured.

On a GPU the time of a call is the device's own: while its kernels and copies ran, as the profiler records
them, since launching and reading back cost more than many a kernel. On a CPU there is no such record
and the host's clock stands in; every row says which clock it was. Medians, with the spread between quartiles.
"""

import dataclasses
import datetime
import json
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

RESULTS = Path(__file__).resolve().parent / "results"
# Inputs of one benchmark together exceed this, so that a 60 MB L2 cache does not flatter it.
ROTATED_BYTES = 120e6


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one case, in microseconds; spread is the distance between the quartiles.

    Fields:
      time_us, spread_us: the device's time on a GPU, the host's elsewhere; of several devices the one that
        was busy longest in a call, waiting for others within a collective included.
      least_us: of several devices the one that was busy least, which others waited for; else time_us.
      span_us: from the start of a call's first kernel to the end of its last on one device, the longest of
        several devices; time_us on the host clock.
      host_us, host_spread_us: from the call to the result being ready, on the host clock.
      return_us: from the call to its return, before the result is ready.
      clock: "device" or "host", which of them time_us is.
    """

    time_us: float
    spread_us: float
    least_us: float
    span_us: float
    host_us: float
    host_spread_us: float
    return_us: float
    clock: str


def time_calls(call: Callable[[int], Any], num_calls: int = 20, num_warmup: int = 3) -> Timing:
    """Time `call(i)` for i = 0 ... num_calls - 1; it returns the arrays to wait for.

    The host's clock is read in calls of their own, outside the profiler, which slows launching down.
    """
    for i in range(num_warmup):
        jax.block_until_ready(call(i))
    returned, ready = [], []
    for i in range(num_calls):
        start = time.perf_counter()
        result = call(i)
        returned.append((time.perf_counter() - start) * 1e6)
        jax.block_until_ready(result)
        ready.append((time.perf_counter() - start) * 1e6)
    host_us, host_spread_us = median_and_spread(ready)
    return_us, _ = median_and_spread(returned)
    if jax.default_backend() != "gpu":
        return Timing(host_us, host_spread_us, host_us, host_us, host_us, host_spread_us, return_us, "host")
    busy, spans = call_times(_device_events(call, num_calls), num_calls)
    time_us, spread_us = median_and_spread(busy.max(axis=0))
    least_us, _ = median_and_spread(busy.min(axis=0))
    span_us, _ = median_and_spread(spans.max(axis=0))
    return Timing(time_us, spread_us, least_us, span_us, host_us, host_spread_us, return_us, "device")


def call_times(devices: list[list[tuple[float, float]]], num_calls: int) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds of each call on each device: while any kernel ran, and from its first to its last.

    Within a CUDA graph a kernel begins while the one before it drains: that time counts once.

    Args:
      devices: (start, duration) of every kernel and copy of a device, nanoseconds, in order.
      num_calls: equal calls that they belong to, one after another.

    Returns:
      f64[devices, num_calls] twice.

    Raises:
      RuntimeError: events that the calls do not divide.
    """
    busy, spans = [], []
    for events in devices:
        if not events or len(events) % num_calls:
            raise RuntimeError(f"the profiler saw {len(events)} device events in {num_calls} equal calls")
        size = len(events) // num_calls
        calls = [events[i : i + size] for i in range(0, len(events), size)]
        starts, lengths = (np.array(calls)[:, :, part] for part in (0, 1))
        ends = np.maximum.accumulate(starts + lengths, axis=1)
        idle = np.maximum(starts[:, 1:] - ends[:, :-1], 0).sum(axis=1)
        spans.append((ends[:, -1] - starts[:, 0]) / 1e3)
        busy.append(spans[-1] - idle / 1e3)
    return np.array(busy), np.array(spans)


def median_and_spread(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The median, and the distance between the quartiles."""
    low, middle, high = np.quantile(np.asarray(values), [0.25, 0.5, 0.75])
    return float(middle), float(high - low)


def num_rotated(num_bytes: int) -> int:
    """How many different inputs of that size to rotate through: at least two, at most 256."""
    return int(min(256, max(2, -(-ROTATED_BYTES // max(num_bytes, 1)))))


def copy_bandwidth() -> float:
    """Bytes a second that a pass over a large array reads and writes: floors are made of it."""
    num_bytes = 2**30 if jax.default_backend() == "gpu" else 2**27
    # In place, since on a CPU the pages of a fresh result cost more than the copy.
    step = jax.jit(lambda x: x + jnp.float32(1), donate_argnums=0)
    array = [jnp.zeros(num_bytes // 4, jnp.float32)]

    def call(_):
        array[0] = step(array[0])
        return array[0]

    return 2 * num_bytes / (time_calls(call, num_calls=10).time_us * 1e-6)


def peak_temporaries(compiled) -> int:
    """Bytes of temporaries a compiled program allocates, outputs and arguments not counted."""
    return int(compiled.memory_analysis().temp_size_in_bytes)


def device_name() -> str:
    """The device in letters, digits and hyphens: "nvidia-h200", "cpu"."""
    return re.sub(r"[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower()).strip("-")


def add_options(parser) -> None:
    """The options that `write` looks at."""
    parser.add_argument("--no-write", action="store_true", help="print the record, keep no file")
    parser.add_argument(
        "--commit", help="the commit measured, where the copy has no history (default: ask git)"
    )


def write(name: str, rows: list[dict], options) -> None:
    """Keep the record of a run, and print it as the last line."""
    print(json.dumps(keep(name, rows, options)), flush=True)


def keep(name: str, rows: list[dict], options) -> dict:
    """Keep the rows measured so far as NAME.DEVICE.json in RESULTS; a run that is cut short loses no more.

    Cases that the file holds of the same commit, device and versions stay beside them, so that a suite may be
    run in parts.

    Returns:
      The record of this run.
    """
    record = {
        "device": _device_text(),
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
        "commit": options.commit or _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "rows": [{key: _rounded(value) for key, value in row.items()} for row in rows],
    }
    if options.no_write:
        return record
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.{device_name()}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    alike = all(found.get(key) == record[key] for key in ("device", "versions", "commit"))
    name_of = lambda row: (row["case"], row["what"])
    new = {name_of(row) for row in record["rows"]}
    kept = [row for row in found["rows"] if name_of(row) not in new] if alike else []
    text = json.dumps({**record, "rows": []})[:-2] + "\n  "
    text += ",\n  ".join(json.dumps(row) for row in kept + record["rows"]) + "\n]}\n"
    path.write_text(text)
    return record


def _device_events(call, num_calls) -> list[list[tuple[float, float]]]:
    """(start, duration) of what each device that took part did in the calls, nanoseconds, in order."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for i in range(num_calls):
                jax.block_until_ready(call(i))
        files = sorted(Path(folder).glob("**/*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(files[-1]))
        devices = [
            sorted(
                (event.start_ns, event.duration_ns)
                for line in plane.lines
                if line.name.startswith("Stream")
                for event in line.events
            )
            for plane in data.planes
            if "GPU" in plane.name
        ]
    return [events for events in devices if events] or [[]]


def _device_text():
    name = device_name()
    if jax.default_backend() != "cpu":
        return name
    model = platform.machine()
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        model = found.group(1) if found else model
    except OSError:
        pass
    model = re.sub(r"[^A-Za-z0-9 .@-]+", "", model).strip()
    return f"{name} ({model}, {len(os.sched_getaffinity(0))} cores)"


def _commit():
    """The commit that was measured, with a "+" where the tree differed from it; "unknown" without git."""

    def git(*arguments):
        root = Path(__file__).resolve().parent.parent
        return subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _rounded(value):
    if isinstance(value, float):
        return round(value, 3 if abs(value) < 100 else 1)
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return value
