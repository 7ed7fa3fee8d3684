"""Serves requests: JSONL in, JSONL out: python scripts/serve.py < requests.jsonl, by default with SmolLM2.

A line is a request, {"id": 1, "prompt": "Why?", "stop": ["\\n\\n"], "temperature": 0.7}, with "messages" or
"prompt_token_ids" in place of "prompt", or {"cancel": 1}; with --guide it may have "guidance", such as
{"target_length": 80}, with --max-prompt-logprobs 5 "prompt_logprobs" up to 5. Requests may come while others
run; lines are read as fast as the queue empties. Each piece of text is one line of output, each end of a
sample another (models/serving.py has the fields). The end of the input, Ctrl-C and SIGTERM end the script;
the latter two cancel what still runs.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, TextIO

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # models/ is not an installed package

from jaxsample.engine import Engine
from models.command_line import (
    Parser,
    add_guidance_flags,
    add_model_flags,
    add_sampling_flags,
    add_speculation_flags,
    guidance_defaults,
    keep_compiled_programs,
    load_guide,
    load_model,
    read_speculation,
    reader_is_gone,
    sampling_defaults,
)
from models.engines import Sizes, build_engine
from models.figures import progress_line
from models.json_fields import check_numbers
from models.line_reader import LineReader
from models.placement import read_mesh
from models.serving import Line, Service

_LINES_A_STEP = 64  # most lines taken between two steps
_PATIENCE = 0.1  # seconds until a signal is looked for, where nothing else happens


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 0, 2 and one line on standard error for what the user can mend, 128 + signal."""
    try:
        return run(parse(arguments))
    except BrokenPipeError:  # whoever read the events is gone
        return reader_is_gone()
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def run(options: argparse.Namespace) -> int:
    """Loads the model, compiles, serves; 0, or 128 + the signal that ended it."""
    defaults = {**sampling_defaults(options), **guidance_defaults(options)}
    # Guided requests have a top_k, which each may bring.
    check_numbers({"top_k": 1, **defaults} if "guidance" in defaults else defaults)
    if options.input is not None:
        options.input.stat()  # missing files are found before the model is loaded
    keep_compiled_programs()
    mesh = None if options.mesh is None else read_mesh(options.mesh)
    with contextlib.ExitStack() as files:
        out: TextIO = sys.stdout
        if options.output is not None:
            out = files.enter_context(options.output.open("w", encoding="utf-8"))
        model = load_model(options, mesh)
        assert model.text is not None  # `load_model` refuses models without
        engine = build_engine(
            model.config,
            model.weights,
            Sizes(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Sizes)}),
            speculation=read_speculation(options, model),
            filter_order=options.filter_order,
            logprobs_mode=options.logprobs_mode,
            guide=load_guide(options, model),
            mesh=mesh,
        )
        write = lambda event: print(_as_json(event), file=out)
        service = Service(engine, model.text, write, defaults=defaults, raw=options.raw)
        progress = Progress(engine, options.progress)
        with _signals() as caught, LineReader(_open_input(options.input)) as lines:
            return serve(service, lines, out, progress, caught)


def serve(service: Service, lines: LineReader, out: TextIO, progress: "Progress", caught: list[int]) -> int:
    """Takes lines and steps until the input has ended and all requests have, or a signal was caught."""
    waiting: Line | None = None  # a request that the queue has no room for yet
    busy = False
    while not caught:
        for _ in range(_LINES_A_STEP):
            if waiting is None:
                line = lines.take(0 if busy else _PATIENCE)
                waiting = None if line is None else service.read(*line)
            if waiting is None or not service.handle(waiting):
                break
            waiting, busy = None, True
        busy = service.step()
        out.flush()
        progress.show()
        if lines.ended and waiting is None and not busy:
            progress.close()
            return 0
    service.cancel_all()
    while service.step():
        pass
    unread = [service.read(*line) for line in lines.rest()]
    for line in unread if waiting is None else [waiting, *unread]:
        service.refuse(line, "the server was stopped before this line")
    out.flush()
    progress.close()
    return 128 + caught[0]


class Progress:
    """A line on standard error, written over again at most once a second."""

    def __init__(self, engine: Engine, asked: bool):
        self._engine, self._on_terminal = engine, sys.stderr.isatty()
        self._wanted = asked or self._on_terminal
        self._last = engine.stats, time.monotonic()
        self._shown = False

    def show(self, every: float = 1.0) -> None:
        now = time.monotonic()
        before, then = self._last
        if not self._wanted or now - then < every:
            return
        stats = self._engine.stats
        self._last = stats, now
        if stats == before and self._shown:
            return
        self._shown = True
        line = progress_line(before, stats, now - then)
        print(f"\r\x1b[K{line}" if self._on_terminal else f"{line}\n", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """The last line, and the end of it."""
        self.show(every=0.01)
        if self._on_terminal and self._shown:
            print(file=sys.stderr, flush=True)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The first SIGINT or SIGTERM goes into the list; a second one does what it did before."""
    caught: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if threading.current_thread() is not threading.main_thread():
        before = {}  # only the main thread may ask for signals
    # What is ignored stays so: in scripts, shells let commands in the background ignore SIGINT.
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}

    def restore():
        for number, handler in before.items():
            signal.signal(number, handler)

    def catch(number, _):
        caught.append(number)
        restore()

    for number in before:
        signal.signal(number, catch)
    try:
        yield caught
    finally:
        restore()


def _open_input(path: pathlib.Path | None) -> BinaryIO:
    # Not sys.stdin itself: at its end the interpreter would wait for the thread that may still read from it.
    return open(os.dup(sys.stdin.fileno()) if path is None else path, "rb")


def _as_json(event: dict[str, Any]) -> str:
    text = json.dumps(event, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can spell
        text = json.dumps(event)
    return text


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; the sampling flags are the defaults of every request."""
    parser = Parser(description=__doc__.split("\n")[0])
    add_model_flags(parser)
    flags = parser.add_argument_group("serving")
    flags.add_argument("--input", type=pathlib.Path, metavar="JSONL", help="default: standard input")
    flags.add_argument("--output", type=pathlib.Path, metavar="JSONL", help="default: standard output")
    for name, metavar, meaning in (
        ("slots", "B", "samples that run at once (default: 8 on a CPU, else 64)"),
        (
            "max-length",
            "S",
            "cache slots of a sample (default: the model's, at most 512 on a CPU, else 4096)",
        ),
        ("pages", "N", "pages of all samples together (default: enough for all slots)"),
        ("page-size", "N", "cache slots of a page (default: 16, more with many drafts)"),
        ("max-waiting", "N", "requests in the queue (default: 8 a slot)"),
        ("num-guided", "G", "most candidates of a guided request, its top_k (default: 16)"),
        (
            "max-prompt-logprobs",
            "N",
            "most that prompt_logprobs may ask for (default: none may ask, and fewer programs)",
        ),
    ):
        flags.add_argument(f"--{name}", type=int, metavar=metavar, help=meaning)
    flags.add_argument("--mesh", metavar="data=D,tensor=P", help="split rows and weights over D * P devices")
    flags.add_argument(
        "--progress", action="store_true", help="figures on standard error also where it is no terminal"
    )
    add_speculation_flags(parser)
    add_guidance_flags(parser)
    add_sampling_flags(parser)
    options = parser.parse_args(arguments)
    most = options.max_prompt_logprobs
    if most is not None and options.prompt_logprobs is not None and options.prompt_logprobs > most:
        parser.error(
            f"--prompt-logprobs is {options.prompt_logprobs}, allowed are 0 ... {most}, --max-prompt-logprobs"
        )
    if options.prompt_logprobs is not None and most is None:
        parser.error("--prompt-logprobs: the engine scores prompts with --max-prompt-logprobs alone")
    return options


if __name__ == "__main__":
    sys.exit(main())
