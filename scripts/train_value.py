"""Trains value models from rollouts that it can make: python scripts/train_value.py generate, then train.

    python scripts/train_value.py generate prompts.jsonl --n 8 --out rollouts.jsonl
    python scripts/train_value.py train --rollouts rollouts.jsonl --num-layers 4 --out runs/value

Prompts are a text file with one a line, or JSONL with "prompt", "messages" or "prompt_token_ids". The folder
of a run holds its log, checkpoints, figures and plots, and in model/ the value model for `models.load_value`.
The same command goes on with a run that was stopped. docs/training.md says what is trained and how.
"""

import argparse
import hashlib
import pathlib
import shutil
import sys
import zlib
from collections.abc import Sequence
from typing import Any, TextIO

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # models/ is not an installed package

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxsample import RUNNING, finish_reason
from models.checkpoints import write_json
from models.command_line import Parser, add_model_flags, keep_compiled_programs, load_model
from models.decoder import DecoderConfig, Weights
from models.fetch import fetch_smollm2
from models.generation import Request, generate
from models.json_fields import check_fields, prepare, read_object
from models.load import load
from models.load_value import ValueModel, save_value_model
from models.rollouts import FINISHED, TRUNCATED, Rollout, read_rollouts, rollout_line, split_by_prompt
from models.text import Text
from models.value_batches import (
    TREATMENTS,
    Labels,
    batches_from,
    gamma_of,
    make_batch,
    mean_value,
    trainable,
    widths_for,
)
from models.value_fit import claim, fit, read_log
from models.value_report import draw_plots, predict, report
from models.value_training import (
    ALL,
    LOSSES,
    PARTS,
    TrainState,
    first_layers,
    join_weights,
    make_optimizer,
    make_train_step,
    split_weights,
    value_logits,
)

_LONGEST_WINDOW = 3000  # tokens; what LenVM was trained with
_EPOCHS, _WARMUP = 2, 50  # and these, the latter in steps
_PROMPTS = ("prompt", "messages", "prompt_token_ids")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 0, or 2 with one line on standard error for what the user can mend."""
    try:
        options = parse(arguments)
        keep_compiled_programs()
        options.run(options)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def run_generate(options: argparse.Namespace) -> None:
    """Writes rollouts as they end; they appear under the file's name when all are there."""
    if options.out.exists():
        raise ValueError(f"{options.out}: exists already")
    wishes = read_prompts(options.prompts)
    model = load_model(options)
    assert model.text is not None  # `load_model` refuses models without
    sampling = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "max_tokens", "n")}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    requests = [
        Request(*prepare({**sampling, "seed": options.seed + index, **wish}, model.text, raw=options.raw))
        for index, wish in enumerate(wishes)
    ]
    part = options.out.with_name(options.out.name + ".part")
    with part.open("w", encoding="utf-8") as file, bar(len(requests) * options.n) as progress:
        writer = Writer(requests, file, progress)
        generate(
            model.config,
            model.weights,
            requests,
            on_tokens=writer.add,
            num_slots=options.cache_slots,
            max_rows=max(options.rows, options.n),
        )
    part.replace(options.out)
    say(
        f"{options.out}: {writer.counts[FINISHED]} rollouts ended, {writer.counts[TRUNCATED]} cut off, "
        f"{writer.num_failed} failed and left out"
    )


class Writer:
    """Puts each rollout's tokens together and writes its line when it has ended."""

    def __init__(self, requests: Sequence[Request], file: TextIO, progress: Progress):
        self._requests, self._file, self._progress = requests, file, progress
        self._open: dict[tuple[int, int], list[int]] = {}
        self.counts = {FINISHED: 0, TRUNCATED: 0}
        self.num_failed = 0

    def add(self, request: int, sample: int, token_ids: list[int], status: int) -> None:
        """Takes a step's tokens of one sample."""
        tokens = self._open.setdefault((request, sample), [])
        tokens += token_ids
        if status == RUNNING:
            return
        reason = finish_reason(status)
        if reason in self.counts and tokens:
            self.counts[reason] += 1
            print(rollout_line(self._requests[request].prompt, tokens, reason), file=self._file)
        else:
            self.num_failed += 1
        del self._open[request, sample]
        self._progress.advance(self._progress.task_ids[0])


def run_train(options: argparse.Namespace) -> None:
    """Trains, judges, draws and exports."""
    model = load(options.init or fetch_smollm2(), jnp.float32)
    rollouts = read_rollouts(options.rollouts, model.config.vocab_size)
    gamma = options.gamma
    if gamma is None:
        gamma = gamma_of([len(rollout.output) for rollout in rollouts])
    window = min(options.window or _LONGEST_WINDOW, model.config.max_length)
    labels = Labels(gamma, window, options.cap, options.truncated)
    kept, held_out = split_by_prompt(rollouts, options.held_out, options.seed)
    kept = trainable(kept, labels)
    if not kept:
        raise ValueError(
            f"no rollout can be trained on: all prompts exceed {window} tokens, or all are cut off"
        )
    steps = options.steps or _EPOCHS * -(-len(kept) // options.batch_size)
    say(describe(kept, held_out, rollouts, gamma, steps))

    num_layers = options.num_layers or model.config.num_layers
    mean = mean_value(kept, labels)
    config, weights = first_layers(model.config, model.weights, num_layers, options.seed, mean)
    run = fit_value_model(options, config, weights, labels, kept, held_out, steps)
    folder = options.out / "model"
    if folder.exists():  # of a run that had come to its end
        shutil.rmtree(folder)
    text = model.text if isinstance(model.text, Text) else None
    save_value_model(folder, ValueModel(config, run, text, gamma))
    say(f"value model in {folder}")


def fit_value_model(
    options: argparse.Namespace,
    config: DecoderConfig,
    weights: Weights,
    labels: Labels,
    kept: list[Rollout],
    held_out: list[Rollout],
    steps: int,
) -> Weights:
    """Trains to the last step, then writes figures and plots; the weights, {"trunk", "head"}."""
    dtype, loss = jnp.dtype(options.dtype), LOSSES[options.loss]
    warmup = min(_WARMUP, steps // 10) if options.warmup is None else options.warmup
    optimizer = make_optimizer(options.learning_rate, warmup, steps, options.weight_decay)
    trained, frozen = split_weights(weights, options.train)
    state = TrainState(trained, jax.jit(optimizer.init)(trained))
    train_step = make_train_step(
        config, optimizer, gamma=labels.gamma, lam=options.lam, loss=loss, dtype=dtype
    )
    logits = jax.jit(value_logits(config, dtype))
    claim(options.out, settings_of(options, config, weights, labels, steps))
    lengths = [len(rollout.tokens) for rollout in kept]
    widths = widths_for([*lengths, *(len(rollout.tokens) for rollout in held_out)], labels.window)

    def batches(step: int):
        for width, chosen in batches_from(step, lengths, widths, options.batch_size, options.seed):
            yield make_batch([kept[index] for index in chosen], labels, width, options.batch_size)

    def predictions(state: TrainState):
        both = join_weights(state.trained, frozen)
        return predict(lambda tokens: logits(both, tokens), held_out, labels, widths, options.batch_size)

    def judge(state: TrainState) -> dict[str, float]:
        found = predictions(state)
        if len(found.z) == 0:
            return {}
        targets = labels.gamma ** found.remaining.astype(np.float64)
        return {"held_out_loss": float(loss(jnp.asarray(found.z), jnp.asarray(targets, jnp.float32)).mean())}

    with bar(steps) as progress:

        def show(step: int, entry: dict[str, Any]) -> None:
            progress.update(progress.task_ids[0], completed=step)
            if entry:
                progress.update(progress.task_ids[0], words=f"loss {entry['loss']:.5f}")

        state = fit(
            options.out,
            state,
            lambda state, batch: train_step(state, frozen, batch),
            batches,
            steps=steps,
            save_every=options.save_every,
            log_every=options.log_every,
            judge=judge,
            show=show,
        )
    found = predictions(state)
    counts = {"rollouts": len(held_out), "judged": int((found.position == 0).sum())}
    figures = {**counts, **report(found, labels.gamma)}
    write_json(options.out / "figures.json", figures)
    if not draw_plots(options.out, read_log(options.out), figures):
        say("no plots: matplotlib is not installed")
    if figures.get("relative_error") is not None:
        say(
            f"held out: mean |l_predicted - l| / l is {figures['relative_error']:.3f}, mean |v - target| is "
            f"{figures['value_error']:.4f}"
        )
    return join_weights(state.trained, frozen)


def settings_of(
    options: argparse.Namespace, config: DecoderConfig, weights: Weights, labels: Labels, steps: int
) -> dict[str, Any]:
    """What shapes the result of a run: a run goes on only with the same."""
    names = (
        "batch_size",
        "held_out",
        "lam",
        "learning_rate",
        "loss",
        "seed",
        "train",
        "warmup",
        "weight_decay",
    )
    digest = hashlib.sha256()
    for path in options.rollouts:
        digest.update(path.read_bytes())
    check = 0
    for leaf in jax.tree.leaves(weights["trunk"]):
        check = zlib.crc32(np.asarray(leaf).data, check)
    return {
        **{name: getattr(options, name) for name in names},
        "gamma": labels.gamma,
        "window": labels.window,
        "cap": labels.cap,
        "truncated": labels.truncated,
        "dtype": options.dtype,
        "steps": steps,
        "num_layers": config.num_layers,
        "rollouts": digest.hexdigest(),
        "initial_trunk": check,
    }


def describe(
    kept: list[Rollout], held_out: list[Rollout], rollouts: list[Rollout], gamma: float, steps: int
) -> str:
    """One line of what is to be done."""
    num_cut = sum(not rollout.finished for rollout in rollouts)
    return (
        f"{len(kept)} rollouts to train on, {len(held_out)} held out, of {len(rollouts)}, of which {num_cut} "
        f"were cut off; gamma {gamma:.6g}; {steps} steps"
    )


def read_prompts(path: pathlib.Path) -> list[dict[str, Any]]:
    """The prompts of a file, as fields of requests; a line that begins with a brace is JSON.

    Raises:
      ValueError: no prompts, or a line that is none.
    """
    wishes = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            wishes.append({"prompt": line})
            continue
        try:
            fields = read_object(line)
            wish = {name: fields[name] for name in _PROMPTS if name in fields}
            wishes.append(check_fields(wish, _PROMPTS))
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from None
    if not wishes:
        raise ValueError(f"no prompts in {path}")
    return wishes


def bar(total: int) -> Progress:
    """A progress bar on standard error with one task."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[words]}"))
    progress = Progress(*columns, console=Console(stderr=True))
    progress.add_task("", total=total, words="")
    return progress


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    jobs = parser.add_subparsers(required=True, metavar="generate|train")

    made = jobs.add_parser("generate", help="make rollouts")
    made.set_defaults(run=run_generate)
    made.add_argument("prompts", type=pathlib.Path, metavar="PROMPTS", help="text, or JSONL")
    made.add_argument("--out", type=pathlib.Path, required=True, metavar="JSONL")
    made.add_argument("--n", type=positive(int), default=1, help="rollouts a prompt, default %(default)s")
    made.add_argument("--max-tokens", type=positive(int), default=512, help="default %(default)s")
    made.add_argument("--temperature", type=float, default=1.0, help="default %(default)s")
    made.add_argument("--top-p", type=float)
    made.add_argument("--top-k", type=int)
    made.add_argument("--seed", type=int, default=0, help="of the first prompt; the next has one more")
    made.add_argument("--rows", type=positive(int), default=64, help="rollouts at once, default %(default)s")
    add_model_flags(made).add_argument("--cache-slots", type=positive(int), metavar="S")

    train = jobs.add_parser("train", help="train on rollouts, or go on training")
    train.set_defaults(run=run_train)
    train.add_argument("--rollouts", type=pathlib.Path, nargs="+", required=True, metavar="JSONL")
    train.add_argument(
        "--out", type=pathlib.Path, required=True, metavar="DIR", help="new, or of the same run"
    )
    init = train.add_argument_group("model to begin with")
    init.add_argument(
        "--init", type=pathlib.Path, metavar="PATH", help="folder or GGUF file; default SmolLM2"
    )
    init.add_argument("--num-layers", type=positive(int), metavar="N", help="its first N; default all")
    aims = train.add_argument_group("targets")
    aims.add_argument(
        "--gamma", type=float, help="default: 1 - gamma^l is .99 for the 99th percentile of lengths"
    )
    aims.add_argument("--lam", type=float, default=1.0, help="of lambda-returns, default %(default)s")
    aims.add_argument("--loss", choices=tuple(LOSSES), default="squared", help="default %(default)s")
    aims.add_argument("--cap", type=positive(int), help="longer outputs count as infinite")
    aims.add_argument("--truncated", choices=TREATMENTS, default=TREATMENTS[0], help="default %(default)s")
    aims.add_argument("--window", type=positive(int), help=f"tokens kept of each, default {_LONGEST_WINDOW}")
    how = train.add_argument_group("optimisation")
    how.add_argument("--train", choices=PARTS, default=ALL, help="layers: all but the embedding; default all")
    how.add_argument("--batch-size", type=positive(int), default=32, help="rollouts, default %(default)s")
    how.add_argument("--learning-rate", type=positive(float), default=1e-4, help="default %(default)s")
    how.add_argument("--warmup", type=int, help=f"steps, default {_WARMUP}, or a tenth of all")
    how.add_argument("--weight-decay", type=float, default=0.0, help="default %(default)s")
    how.add_argument("--steps", type=positive(int), help="default: two epochs")
    how.add_argument("--seed", type=int, default=0, help="of order, split and head, default %(default)s")
    how.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the trunk's arithmetic"
    )
    watch = train.add_argument_group("output")
    watch.add_argument(
        "--held-out", type=float, default=0.05, help="fraction of prompts, default %(default)s"
    )
    watch.add_argument("--save-every", type=positive(int), default=200, help="steps, default %(default)s")
    watch.add_argument("--log-every", type=positive(int), default=10, help="steps, default %(default)s")
    return parser.parse_args(arguments)


def positive(kind: type) -> Any:
    """A reader of numbers above 0."""

    def read(word: str):
        number = kind(word)
        if not number > 0:
            raise argparse.ArgumentTypeError(f"{word} is not above 0")
        return number

    return read


if __name__ == "__main__":
    sys.exit(main())
