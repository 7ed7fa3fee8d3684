"""What the scripts' command lines share: flags that name a model, drafts and sampling, and what they mean.

Knows nothing of what a script does with the model.
"""

import argparse
import dataclasses
import os
import pathlib
import signal
import sys
from typing import Any

import jax
from jax.sharding import Mesh

from jaxsample.guidance_rows import CONSTRAINTS, LENGTH_MODES, MODES
from models.decoder import DecoderConfig
from models.draft_head import join_base
from models.fetch import cache_folder, fetch_smollm2
from models.guiding import WORDS, fit_vocabulary
from models.joining import join_for_kernels
from models.json_fields import PARAMS
from models.load import LoadedModel, load
from models.load_draft import load_draft_head
from models.load_safetensors import decoder_config, read_json
from models.load_value import ValueModel, load_value_model
from models.placement import weight_shardings
from models.presets import PRESETS, preset
from models.random_weights import random_weights
from models.speculation import VERIFIERS, Speculation
from models.text import TokenIds

_NUM_DRAFTS = 4
# What comes with the repository: value models by what --guide calls them, the draft head of --speculate head.
COMPANIONS = {"smollm2": pathlib.Path(__file__).parent / "companions" / "smollm2_value"}
DRAFT_HEAD = pathlib.Path(__file__).parent / "companions" / "smollm2_draft"


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, like all others."""

    def error(self, message: str):
        raise ValueError(f"{message} (see --help)")


def positive(kind: type) -> Any:
    """For `add_argument(type=)`: a reader of numbers above 0."""

    def read(word: str):
        number = kind(word)
        if not number > 0:
            raise argparse.ArgumentTypeError(f"{word} is not above 0")
        return number

    return read


def add_model_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The flags that `load_model` and `dtype_of` read, and --raw; their group, for more."""
    flags = parser.add_argument_group("model")
    flags.add_argument("--model", type=pathlib.Path, metavar="PATH", help="model folder or GGUF file")
    flags.add_argument(
        "--random-weights",
        metavar="NAME|PATH",
        help=f"shapes of {', '.join(PRESETS)}, or of a config.json; implies --token-ids",
    )
    flags.add_argument("--token-ids", action="store_true", help="prompts and replies are token ids")
    flags.add_argument("--raw", action="store_true", help="prompts as they are, without the chat template")
    flags.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16"
    )
    return flags


def add_speculation_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `read_speculation` reads."""
    flags = parser.add_argument_group("speculation")
    flags.add_argument(
        "--speculate",
        metavar="ngram|draft:PATH|head[:PATH]",
        help="where drafts come from; head alone is the one that comes with SmolLM2",
    )
    flags.add_argument("--verify", choices=VERIFIERS, help=f"default {VERIFIERS[0]}")
    flags.add_argument("--num-draft", type=int, metavar="K", help=f"default {_NUM_DRAFTS}")


def add_guidance_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `load_guide` and `guidance_defaults` read, named like make_guidance's arguments."""
    flags = parser.add_argument_group("guidance")
    flags.add_argument(
        "--guide",
        type=pathlib.Path,
        metavar="PATH",
        help=f"folder of a value model (LenVM), or {', '.join(COMPANIONS)}: the one shipped for that model",
    )
    flags.add_argument("--guide-mode", choices=tuple(MODES), help="default mul, where there is no target")
    flags.add_argument("--guide-constraint", choices=tuple(CONSTRAINTS), help="default eq, with a target")
    flags.add_argument("--guide-length-mode", choices=LENGTH_MODES, help=f"default {LENGTH_MODES[0]}")
    for name, metavar, meaning in (
        ("scale", "S", "strength of the mode"),
        ("target-length", "N", "tokens of the reply, or still to come"),
        ("target-value", "V", "value of the token chosen, 1 - gamma^length"),
        ("value-min", "V", "modes change nothing below this mean value"),
        ("entropy-threshold", "H", "nats up to which candidates are left alone"),
        ("gamma", "G", "discount of the value model, default its own or 0.997"),
    ):
        flags.add_argument(f"--guide-{name}", type=float, metavar=metavar, help=meaning)


def guidance_defaults(options: argparse.Namespace) -> dict[str, Any]:
    """What the guidance flags say, as the field "guidance" of a request; no field where they say nothing.

    Raises:
      ValueError: one of them without --guide, or --guide together with --mesh.
    """
    if options.guide is not None and options.mesh is not None:
        raise ValueError(
            f"--guide and --mesh {options.mesh} are given, allowed is one: guidance is on one device"
        )
    given = {name: getattr(options, f"guide_{name}") for name in WORDS}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if options.guide is None:
            flag = f"--guide-{name.replace('_', '-')}"
            raise ValueError(f"{flag} is {value}, which says nothing without --guide")
    return {"guidance": given} if given else {}


def load_guide(options: argparse.Namespace, model: LoadedModel) -> ValueModel | None:
    """The value model of --guide for the model's vocabulary, with --guide-gamma as its gamma; None for none.

    Raises:
      ValueError: what `load_value_model` refuses, or another vocabulary.
    """
    if options.guide is None:
        return None
    path = COMPANIONS.get(str(options.guide), options.guide)
    guide = load_value_model(path, jax.numpy.dtype(dtype_of(options)), model)
    guide = fit_vocabulary(guide, model.config, model.text, str(options.guide))
    config, trunk = join_for_kernels(guide.config, guide.weights["trunk"])
    guide = dataclasses.replace(guide, config=config, weights={**guide.weights, "trunk": trunk})
    return guide if options.guide_gamma is None else dataclasses.replace(guide, gamma=options.guide_gamma)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `sampling_defaults` reads, named like make_params' arguments."""

    def bias(item: str) -> tuple[int, float]:
        token, _, value = item.partition(":")
        return int(token), float(value)

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


def sampling_defaults(options: argparse.Namespace) -> dict[str, Any]:
    """What the sampling flags say, as fields of a request; a request's own override them."""
    fields = {name: getattr(options, name, None) for name in (*PARAMS, "bad_words")}
    fields = {name: value for name, value in fields.items() if value is not None}
    for name in {"logit_bias", "token_temperature_scale"} & set(fields):
        fields[name] = dict(fields[name])
    return fields


def dtype_of(options: argparse.Namespace) -> str:
    """The dtype of the weights."""
    return options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")


def load_model(options: argparse.Namespace, mesh: Mesh | None = None) -> LoadedModel:
    """The model of the command line, its weights on the mesh where there is one.

    Its text side is a tokenizer, or token ids where those are asked for.

    Raises:
      ValueError: two models, an unknown name, what `load` refuses, or no tokenizer where one is needed.
    """
    dtype = jax.numpy.dtype(dtype_of(options))
    if options.random_weights is not None:
        if options.model is not None:
            raise ValueError("--model and --random-weights name two models, give one of them")
        config = named_config(options.random_weights)
        weights = jax.block_until_ready(random_weights(config, 0, dtype, weight_shardings(config, mesh)))
        config, weights = join_for_kernels(config, weights, mesh)
        return LoadedModel(config, weights, TokenIds(config.vocab_size))
    path = options.model or fetch_smollm2()
    model = _joined(load(path, dtype, mesh), mesh)
    if options.token_ids:
        return dataclasses.replace(model, text=TokenIds(model.config.vocab_size))
    if model.text is None:
        raise ValueError(f"{path}: no tokenizer.json; with --token-ids prompts are token ids")
    return model


def named_config(name: str) -> DecoderConfig:
    """The configuration that --random-weights names: one of `PRESETS`, a config.json, or a folder with one.

    Raises:
      ValueError: an unknown name, or a file that `decoder_config` refuses.
    """
    path = pathlib.Path(name)
    if path.is_dir():
        path = path / "config.json"
    return decoder_config(read_json(path)) if path.is_file() else preset(name.lower())


def _joined(model: LoadedModel, mesh: Mesh | None = None) -> LoadedModel:
    config, weights = join_for_kernels(model.config, model.weights, mesh)
    return dataclasses.replace(model, config=config, weights=weights)


def read_speculation(options: argparse.Namespace, model: LoadedModel) -> Speculation | None:
    """What --speculate, --verify and --num-draft say; None for plain decoding.

    Raises:
      ValueError: an unknown way to draft, what `load` refuses of a draft model and `load_draft_head` of a
        draft head for the model, a model that no head comes with, or the other two alone.
    """
    if options.speculate is None:
        for name, given in (("--verify", options.verify), ("--num-draft", options.num_draft)):
            if given is not None:
                raise ValueError(f"{name} is {given}, which says nothing without --speculate")
        return None
    num_drafts = _NUM_DRAFTS if options.num_draft is None else options.num_draft
    verify = options.verify or VERIFIERS[0]
    kind, _, path = options.speculate.partition(":")
    if kind == "ngram" and not path:
        return Speculation(num_drafts, verify)
    if kind == "draft" and path:
        model = _joined(load(pathlib.Path(path), jax.numpy.dtype(dtype_of(options))), options.mesh)
        return Speculation(num_drafts, verify, (model.config, model.weights))
    if kind == "head" and (path or options.speculate == "head"):
        head = load_draft_head(path or _shipped_head(model), model.config)
        return Speculation(num_drafts, verify, head=(head.config, join_base(head, model.weights)))
    raise ValueError(f"--speculate is {options.speculate}, allowed are ngram, draft:PATH, head and head:PATH")


def _shipped_head(model: LoadedModel) -> pathlib.Path:
    """The folder of the draft head that comes with the repository; ValueError for a model not its own."""
    ours, given = preset("smollm2-135m"), model.config
    if (given.vocab_size, given.width, given.num_layers) != (ours.vocab_size, ours.width, ours.num_layers):
        raise ValueError(
            "--speculate is head, allowed is that for SmolLM2-135M-Instruct: the head that comes with the "
            "repository is its own; give one for another model as head:PATH"
        )
    return DRAFT_HEAD


def keep_compiled_programs() -> None:
    """Lets JAX keep compiled programs in the user's cache folder, so that a second run starts at once."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def reader_is_gone() -> int:
    """The exit status after a BrokenPipeError, 128 + SIGPIPE; standard output leads nowhere from here."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
