"""A mesh over two processes draws the tokens of one; when one dies the other ends, with an error, soon."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

WORKER = pathlib.Path(__file__).parent / "process_worker.py"
SECONDS_TO_END = 60  # heartbeats stop for ten seconds, then the other process is told

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def workers(num_processes, mode):
    """Running worker processes on a free port; none outlives the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["JAX_PLATFORMS"] = "cpu"
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), f"127.0.0.1:{port}", str(num_processes), str(index), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(num_processes)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def printed(num_processes):
    with workers(num_processes, "sample") as started:
        results = [process.communicate(timeout=300) for process in started]
        assert [process.returncode for process in started] == [0] * num_processes, results
        return [json.loads(out.splitlines()[-1]) for out, _ in results]


def test_two_processes_draw_the_tokens_of_one_and_each_gets_its_own_rows():
    (alone,) = printed(1)
    both = printed(2)
    assert [set(part["rows"][0][0]) for part in both] == [set("0123"), set("4567")]
    for name in ("rows", "columns"):
        for position in range(3):
            for found in (0, 1):  # tokens, logprobs
                joined = {}
                for part in both:
                    joined |= part[name][position][found]
                assert joined == alone[name][position][found]


def test_when_a_process_dies_the_other_ends_with_an_error():
    with workers(2, "loop") as started:
        for process in started:
            assert "drawing\n" in iter(process.stdout.readline, "")  # reads up to that line
        started[1].kill()
        killed = time.monotonic()
        _, complaint = started[0].communicate(timeout=SECONDS_TO_END)
        assert time.monotonic() - killed < SECONDS_TO_END
        assert started[0].returncode != 0
        assert "Error" in complaint or "error" in complaint
