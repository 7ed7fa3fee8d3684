"""Runs the benchmarks that belong to this device one after another, then the report.

    python -m benchmarks.run_all                     # all of them
    python -m benchmarks.run_all --only sample step  # some
    python -m benchmarks.run_all --no-write          # figures on the screen alone

Each runs in a process of its own, since a device's memory and XLA's choices are those of a process. One that
fails or takes too long leaves the others running; the exit code is then 1.
"""

import argparse
import subprocess
import sys
import time

from benchmarks import measure

GPU = {
    "sample": (),
    "head": (),
    "verify": (),
    "commit": (),
    "decode": (),
    "engine": (),
    "mesh_step": (),
    "guided": (),
}
SEVERAL_GPUS = {**GPU, "sharded": ()}
CPU = {
    "sample": ("--batch", "1", "8", "--vocab", "32000", "--kinds", "lm"),
    "step": (),
    "host": (),
    "serve": (),
    "sharding": (),
}


def main() -> int:
    # Asked in another process: this one would keep memory of the device for itself.
    asked = [sys.executable, "-c", "import jax; print(jax.default_backend(), jax.device_count())"]
    found = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    backend, num_devices = found.split()[-2:]
    suite = CPU if backend != "gpu" else GPU if num_devices == "1" else SEVERAL_GPUS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(suite), choices=list(suite), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=600, help="limit of each (default %(default)s)")
    measure.add_options(parser)
    options = parser.parse_args()
    rest = ["--no-write"] * options.no_write
    rest += [] if options.commit is None else ["--commit", options.commit]
    failed = []
    for name in options.only:
        command = [sys.executable, "-m", f"benchmarks.bench_{name}", *suite[name], *rest]
        print(f"== {' '.join(command[1:])}", flush=True)
        started = time.perf_counter()
        try:
            code: int | str = subprocess.run(command, timeout=options.seconds).returncode
        except subprocess.TimeoutExpired:
            code = f"more than {options.seconds:g} s"
        print(f"== {name}: exit {code}, {time.perf_counter() - started:.0f} s", flush=True)
        failed += [name] if code != 0 else []
    if not options.no_write:
        subprocess.run([sys.executable, "-m", "benchmarks.report"], check=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
