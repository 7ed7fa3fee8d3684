"""Generates text: python scripts/generate.py PROMPT [PROMPT ...], by default with SmolLM2-135M-Instruct.

Streams the text of a single request as it comes; of several, prints each when it is done. All requests run as
rows of one batch, each with parameters of its own. Statistics go to standard error. With --random-weights
NAME the model has that name's shapes and no tokenizer: prompts and replies are token ids, as in "12 7 900".
"""

import argparse
import dataclasses
import inspect
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # models/ is not an installed package

import jax

from jaxsample import RUNNING, STOP_EOS, STOP_TOKEN, Limits, finish_reason, make_params
from models.fetch import cache_folder, fetch_smollm2
from models.figures import print_statistics, statistics
from models.generation import Reply, Request, Sample, TokenLogprobs, generate
from models.load import LoadedModel, load
from models.placement import read_mesh
from models.presets import PRESETS, preset
from models.random_weights import random_weights
from models.speculation import VERIFIERS, Speculation
from models.text import Detokenizer, Text, TokenIds

# What make_params takes by name and a line of --batch-file may therefore hold.
_PARAMS = tuple(
    name
    for name in inspect.signature(make_params).parameters
    if name not in ("limits", "eos_token_ids", "prompt_length")
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 0, or 2 with one line on standard error for what the user can mend."""
    try:
        run(parse(arguments))
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
        except ValueError as error:
            raise ValueError(f"request {index}: {error}" if len(wishes) > 1 else str(error)) from None
    keep_compiled_programs()
    mesh = None if options.mesh is None else read_mesh(options.mesh)
    started = time.perf_counter()
    dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    model = load_model(options, jax.numpy.dtype(dtype))
    load_seconds = time.perf_counter() - started
    if options.cache_slots is not None and not 1 <= options.cache_slots <= model.config.max_length:
        raise ValueError(
            f"--cache-slots is {options.cache_slots}, allowed is 1 ... {model.config.max_length}"
        )

    requests = [prepare(wish, model.text, raw=options.raw) for wish in wishes]
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
        speculation=read_speculation(options, jax.numpy.dtype(dtype)),
        mesh=mesh,
    )
    stats = statistics(timing, load_seconds, dtype)
    print_statistics(stats)
    for index, (request, reply) in enumerate(zip(requests, replies)):
        if options.json:
            record = describe(index, request, reply, printer, model.text)
            print(json.dumps({**record, "stats": stats}, ensure_ascii=False))
        else:
            print_logprobs(index, reply, model.text)


def check_numbers(wish: dict[str, Any]) -> None:
    """Refuses what needs no model to be seen wrong, before one is loaded."""
    lists = ("logit_bias", "token_temperature_scale", "allowed_token_ids", "banned_token_ids")
    lists += ("bad_words_ids", "stop_token_ids", "stop_sequences", "seed", "n")
    numbers = {name: wish[name] for name in _PARAMS if name in wish and name not in lists}
    make_params(Limits(vocab_size=1024), **numbers)


def load_model(options: argparse.Namespace, dtype) -> LoadedModel:
    """The model of the command line; its text side is a tokenizer, or token ids where those are asked for.

    Raises:
      ValueError: two models, an unknown name, what `load` refuses, or no tokenizer where one is needed.
    """
    if options.random_weights is not None:
        if options.model is not None:
            raise ValueError("--model and --random-weights name two models, give one of them")
        config = preset(options.random_weights)
        weights = jax.block_until_ready(random_weights(config, 0, dtype))
        return LoadedModel(config, weights, TokenIds(config.vocab_size))
    path = options.model or fetch_smollm2()
    model = load(path, dtype)
    if options.token_ids:
        return dataclasses.replace(model, text=TokenIds(model.config.vocab_size))
    if model.text is None:
        raise ValueError(f"{path}: no tokenizer.json; with --token-ids prompts are token ids")
    return model


def read_speculation(options: argparse.Namespace, dtype) -> Speculation | None:
    """What --speculate, --verify and --num-draft say; None for plain decoding.

    Raises:
      ValueError: an unknown way to draft, or what `load` refuses of a draft model.
    """
    if options.speculate is None:
        return None
    kind, _, path = options.speculate.partition(":")
    if kind == "ngram" and not path:
        return Speculation(options.num_draft, options.verify)
    if kind == "draft" and path:
        model = load(pathlib.Path(path), dtype)
        return Speculation(options.num_draft, options.verify, (model.config, model.weights))
    raise ValueError(f"--speculate is {options.speculate}, allowed are ngram and draft:PATH")


def read_requests(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The requests of the command line and the batch file: parameters with "prompt" or "messages".

    Flags are the defaults of every request; a line of the file overrides them.

    Raises:
      ValueError: no request, or a line that is no JSON object or has an unknown key.
    """
    defaults = {name: getattr(options, name) for name in (*_PARAMS, "bad_words")}
    defaults = {name: value for name, value in defaults.items() if value is not None}
    wishes = [{**defaults, "prompt": prompt} for prompt in options.prompt]
    if options.batch_file is not None:
        lines = options.batch_file.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            if line.strip():
                wishes.append({**defaults, **read_line(line, f"{options.batch_file} line {number}")})
    if not wishes:
        raise ValueError("no prompt: give one, or --batch-file")
    return wishes


def read_line(line: str, where: str) -> dict[str, Any]:
    """One request of a batch file; ValueError names the line and what is wrong with it."""
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: not a JSON object")
    unknown = sorted(set(fields) - {*_PARAMS, "bad_words", "prompt", "messages"})
    if unknown:
        raise ValueError(f"{where}: unknown keys {', '.join(unknown)}")
    if ("prompt" in fields) == ("messages" in fields):
        raise ValueError(f"{where}: needs either 'prompt' or 'messages'")
    if not isinstance(fields.get("prompt", ""), str):
        raise ValueError(f"{where}: prompt is {fields['prompt']!r}, expected text")
    if not is_chat(fields.get("messages", [{"role": "", "content": ""}])):
        raise ValueError(f"{where}: messages is {fields['messages']!r}, expected a list of role and content")
    words = fields.get("bad_words", [])
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise ValueError(f"{where}: bad_words is {words!r}, expected a list of texts")
    for name in ("logit_bias", "token_temperature_scale"):
        try:  # JSON has no integer keys
            if name in fields:
                fields[name] = {int(token): value for token, value in fields[name].items()}
        except (ValueError, AttributeError):
            raise ValueError(
                f"{where}: {name} is {fields[name]!r}, expected token ids with a number each"
            ) from None
    return fields


def is_chat(messages: Any) -> bool:
    """Whether a value is a list of at least one message with a role and a content, both text."""
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(isinstance(message, dict) for message in messages)
        and all(isinstance(message.get(key), str) for message in messages for key in ("role", "content"))
    )


def prepare(wish: dict[str, Any], text: Text | TokenIds, *, raw: bool) -> Request:
    """Token ids and parameters of one request.

    A plain prompt becomes the user's turn of a chat, unless raw. Bad words are banned both at the beginning
    of the text and after a space, which are different tokens.
    """
    params = {name: value for name, value in wish.items() if name in _PARAMS}
    if wish.get("bad_words") and isinstance(text, TokenIds):
        raise ValueError("bad_words need a tokenizer, use banned_token_ids or bad_words_ids")
    words = [spelling for word in wish.get("bad_words", ()) for spelling in (word, " " + word)]
    spellings = [text.encode(word, add_special_tokens=False) for word in words]
    if spellings:
        params["bad_words_ids"] = [*params.get("bad_words_ids", ()), *spellings]
    params["eos_token_ids"] = text.eos_token_ids
    if isinstance(text, TokenIds) and "messages" in wish:
        raise ValueError("messages need a tokenizer, this model has token ids for prompts")
    raw = raw or isinstance(text, TokenIds)
    if raw and "prompt" in wish:
        return Request(text.encode(wish["prompt"]), params)
    if text.chat_template is None:
        raise ValueError("the model has no chat template: use --raw, and prompts rather than messages")
    messages = wish.get("messages") or [{"role": "user", "content": wish["prompt"]}]
    return Request(text.encode(text.render(messages), add_special_tokens=False), params)


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


def logprob_fields(entry: TokenLogprobs, text: Text | TokenIds) -> dict[str, Any]:
    """One token's log-probability as JSON; minus infinity, which JSON lacks, becomes null."""

    def finite(value: float) -> float | None:
        return value if value > float("-inf") else None

    return {
        "token_id": entry.token_id,
        "token": text.name_of(entry.token_id),
        "logprob": finite(entry.logprob),
        "rank": entry.rank,
        "top": [
            {"token_id": token, "token": text.name_of(token), "logprob": finite(value)}
            for token, value in entry.top
        ],
    }


def print_logprobs(index: int, reply: Reply, text: Text | TokenIds) -> None:
    """The log-probabilities of one request as lines, where it asked for some."""
    parts = [(f"prompt {index}", [entry for entry in reply.prompt_logprobs if entry])]
    parts += [(f"[{index}.{number}]", sample.logprobs) for number, sample in enumerate(reply.samples)]
    for title, entries in parts:
        for entry in entries:
            top = ", ".join(f"{text.name_of(token)!r} {value:.4f}" for token, value in entry.top)
            name = repr(text.name_of(entry.token_id))
            print(f"{title} {name} {entry.logprob:.4f} rank {entry.rank}" + (f" top: {top}" if top else ""))


def keep_compiled_programs() -> None:
    """Lets JAX keep compiled programs in the user's cache folder, so that a second run starts at once."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def is_count(value: Any) -> bool:
    """Whether a value is a plain positive integer."""
    return isinstance(value, int) and value > 0


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, like all others."""

    def error(self, message: str):
        raise ValueError(f"{message} (see --help)")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; names of sampling flags are those of make_params."""

    def bias(item: str) -> tuple[int, float]:
        token, _, value = item.partition(":")
        return int(token), float(value)

    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("prompt", nargs="*", metavar="PROMPT")
    model = parser.add_argument_group("model")
    model.add_argument("--model", type=pathlib.Path, metavar="PATH", help="model folder or GGUF file")
    model.add_argument(
        "--random-weights", metavar="NAME", help=f"shapes of {', '.join(PRESETS)}; implies --token-ids"
    )
    model.add_argument("--token-ids", action="store_true", help="prompts and replies are token ids")
    model.add_argument("--raw", action="store_true", help="prompts as they are, without the chat template")
    model.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16"
    )
    model.add_argument("--cache-slots", type=int, metavar="S", help="cache slots a request has")
    model.add_argument("--mesh", metavar="data=D,tensor=P", help="split rows and weights over D * P devices")
    model.add_argument(
        "--batch-file", type=pathlib.Path, metavar="JSONL", help="requests, one JSON object a line"
    )
    model.add_argument(
        "--json", action="store_true", help="one JSON object a request, nothing else, on stdout"
    )

    drafts = parser.add_argument_group("speculation")
    drafts.add_argument("--speculate", metavar="ngram|draft:PATH", help="where drafts come from")
    drafts.add_argument("--verify", choices=VERIFIERS, default="match", help="default %(default)s")
    drafts.add_argument("--num-draft", type=int, default=4, metavar="K", help="default %(default)s")

    flags = parser.add_argument_group("sampling")
    flags.add_argument("--temperature", type=float, default=0.2, help="0 is greedy, default %(default)s")
    flags.add_argument("--max-tokens", type=int, default=128, help="default %(default)s")
    for name in ("top-k", "seed", "n", "min-tokens"):
        flags.add_argument(f"--{name}", type=int)
    for name in ("top-p", "min-p", "repetition-penalty", "frequency-penalty", "presence-penalty"):
        flags.add_argument(f"--{name}", type=float)
    for name in ("logprobs", "prompt-logprobs"):
        flags.add_argument(f"--{name}", type=int, metavar="N", help="the token's own and the N best")
    flags.add_argument("--logprobs-mode", choices=("raw", "processed"), default="raw")
    flags.add_argument("--filter-order", choices=("vllm", "hf", "joint"), default="vllm")
    for name in ("allowed-token-ids", "banned-token-ids", "stop-token-ids"):
        flags.add_argument(f"--{name}", type=int, nargs="+", action="extend", metavar="ID")
    flags.add_argument("--logit-bias", type=bias, nargs="+", action="extend", metavar="ID:VALUE")
    flags.add_argument(
        "--token-temperature-scale", type=bias, nargs="+", action="extend", metavar="ID:FACTOR"
    )
    flags.add_argument("--bad-words", nargs="+", action="extend", metavar="TEXT")
    flags.add_argument("--ignore-eos", action="store_true", default=None)
    parser.set_defaults(bad_words_ids=None, stop_sequences=None)
    options = parser.parse_intermixed_args(arguments)
    for name in ("logit_bias", "token_temperature_scale"):
        if getattr(options, name) is not None:
            setattr(options, name, dict(getattr(options, name)))
    return options


if __name__ == "__main__":
    sys.exit(main())
