"""Generates text: python scripts/generate.py PROMPT [PROMPT ...], by default with SmolLM2-135M-Instruct.

Streams the text of a single request as it comes; of several, prints each when it is done. All requests run as
rows of one batch, each with parameters of its own. Statistics go to standard error. With --random-weights
NAME the model has that name's shapes and no tokenizer: prompts and replies are token ids, as in "12 7 900".
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # models/ is not an installed package

from jaxsample import RUNNING, STOP_EOS, STOP_TOKEN, finish_reason
from models.command_line import (
    Parser,
    add_guidance_flags,
    add_model_flags,
    add_sampling_flags,
    add_speculation_flags,
    dtype_of,
    guidance_defaults,
    keep_compiled_programs,
    load_guide,
    load_model,
    read_speculation,
    reader_is_gone,
    sampling_defaults,
)
from models.figures import print_statistics, statistics
from models.generation import Reply, Request, Sample, generate
from models.json_fields import check_numbers, logprob_fields, prepare, read_fields
from models.placement import read_mesh
from models.text import Detokenizer, Text, TokenIds


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 0, or 2 with one line on standard error for what the user can mend."""
    try:
        run(parse(arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output is gone
        return reader_is_gone()
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def run(options: argparse.Namespace) -> None:
    """Loads the model, generates, prints."""
    wishes = read_requests(options)
    for index, wish in enumerate(wishes):
        try:
            check_numbers(wish)
            if wish.get("guidance") and options.guide is None:
                raise ValueError(f"guidance is {wish['guidance']}, which says nothing without --guide")
        except ValueError as error:
            raise ValueError(f"request {index}: {error}" if len(wishes) > 1 else str(error)) from None
    keep_compiled_programs()
    mesh = None if options.mesh is None else read_mesh(options.mesh)
    started = time.perf_counter()
    model = load_model(options, mesh)
    guide = load_guide(options, model)
    load_seconds = time.perf_counter() - started
    if options.cache_slots is not None and not 1 <= options.cache_slots <= model.config.max_length:
        raise ValueError(
            f"--cache-slots is {options.cache_slots}, allowed is 1 ... {model.config.max_length}"
        )

    requests = [Request(*prepare(wish, model.text, raw=options.raw), wish.get("guidance")) for wish in wishes]
    num_samples = sum(
        request.params.get("n", 1) for request in requests if is_count(request.params.get("n", 1))
    )
    printer = Printer(model.text, quiet=options.json, labelled=num_samples > 1)
    replies, timing = generate(
        model.config,
        model.weights,
        requests,
        on_tokens=printer.add,
        filter_order=options.filter_order,
        logprobs_mode=options.logprobs_mode,
        num_slots=options.cache_slots,
        speculation=read_speculation(options, model),
        guide=guide,
        mesh=mesh,
    )
    stats = statistics(timing, load_seconds, dtype_of(options))
    print_statistics(stats)
    for index, (request, reply) in enumerate(zip(requests, replies)):
        if options.json:
            record = describe(index, request, reply, printer, model.text)
            print(json.dumps({**record, "stats": stats}, ensure_ascii=False))
        else:
            print_logprobs(index, reply, model.text)


def read_requests(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The requests of the command line and the batch file: parameters with "prompt" or "messages".

    Flags are the defaults of every request; a line of the file overrides them.

    Raises:
      ValueError: no request, or a line that is no JSON object or has an unknown key.
    """
    defaults = {**sampling_defaults(options), **guidance_defaults(options)}
    wishes = [{**defaults, "prompt": prompt} for prompt in options.prompt]
    if options.batch_file is not None:
        lines = options.batch_file.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                wishes.append({**defaults, **read_fields(line)})
            except ValueError as error:
                raise ValueError(f"{options.batch_file} line {number}: {error}") from None
    if not wishes:
        raise ValueError("no prompt: give one, or --batch-file")
    return wishes


class Printer:
    """Turns arriving tokens into text; shows it at once if there is one sample, else when a sample ends."""

    def __init__(self, text: Text | TokenIds, *, quiet: bool, labelled: bool):
        self._text, self._quiet, self._labelled = text, quiet, labelled
        self._open: dict[tuple[int, int], Detokenizer] = {}
        self.texts: dict[tuple[int, int], str] = {}

    def add(self, request: int, sample: int, token_ids: list[int], status: int) -> None:
        """Takes a step's tokens of one sample; the token that ended it (EOS, a stop id) is not shown."""
        key = (request, sample)
        stream = self._open.setdefault(key, Detokenizer(self._text))
        shown = token_ids[:-1] if status in (STOP_EOS, STOP_TOKEN) else token_ids
        piece = "".join(stream.push(token) for token in shown)
        if status != RUNNING:
            piece += stream.flush()
        self.texts[key] = self.texts.get(key, "") + piece
        if self._quiet:
            return
        if not self._labelled:
            print(piece, end="" if status == RUNNING else "\n", flush=True)
        elif status != RUNNING:
            print(f"[{request}.{sample}] {self.texts[key]}", flush=True)


def describe(
    index: int, request: Request, reply: Reply, printer: Printer, text: Text | TokenIds
) -> dict[str, Any]:
    """The JSON object of one request; with n > 1 the first sample's fields, and all under "samples"."""

    def sample_fields(number: int, sample: Sample) -> dict[str, Any]:
        fields = {
            "text": printer.texts.get((index, number), ""),
            "token_ids": sample.token_ids,
            "finish_reason": finish_reason(sample.status),
        }
        if sample.logprobs:
            fields["logprobs"] = [logprob_fields(entry, text) for entry in sample.logprobs]
        return fields

    samples = [sample_fields(number, sample) for number, sample in enumerate(reply.samples)]
    record = {"prompt": index, **samples[0], "num_prompt_tokens": len(request.prompt)}
    if len(samples) > 1:
        record["samples"] = samples
    if reply.prompt_logprobs:
        record["prompt_token_ids"] = request.prompt
        record["prompt_logprobs"] = [entry and logprob_fields(entry, text) for entry in reply.prompt_logprobs]
    return record


def print_logprobs(index: int, reply: Reply, text: Text | TokenIds) -> None:
    """The log-probabilities of one request as lines, where it asked for some."""
    parts = [(f"prompt {index}", [entry for entry in reply.prompt_logprobs if entry])]
    parts += [(f"[{index}.{number}]", sample.logprobs) for number, sample in enumerate(reply.samples)]
    for title, entries in parts:
        for entry in entries:
            top = ", ".join(f"{text.name_of(token)!r} {value:.4f}" for token, value in entry.top)
            name = repr(text.name_of(entry.token_id))
            print(f"{title} {name} {entry.logprob:.4f} rank {entry.rank}" + (f" top: {top}" if top else ""))


def is_count(value: Any) -> bool:
    """Whether a value is a plain positive integer."""
    return isinstance(value, int) and value > 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("prompt", nargs="*", metavar="PROMPT")
    model = add_model_flags(parser)
    model.add_argument("--cache-slots", type=int, metavar="S", help="cache slots a request has")
    model.add_argument("--mesh", metavar="data=D,tensor=P", help="split rows and weights over D * P devices")
    model.add_argument(
        "--batch-file", type=pathlib.Path, metavar="JSONL", help="requests, one JSON object a line"
    )
    model.add_argument(
        "--json", action="store_true", help="one JSON object a request, nothing else, on stdout"
    )
    add_speculation_flags(parser)
    add_guidance_flags(parser)
    add_sampling_flags(parser)
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
