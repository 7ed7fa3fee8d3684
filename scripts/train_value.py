"""Trains value models from rollouts that it can make: python scripts/train_value.py generate, then train.

    python scripts/train_value.py generate prompts.jsonl --n 8 --out rollouts.jsonl
    python scripts/train_value.py train --rollouts rollouts.jsonl --num-layers 4 --out runs/value

Prompts are a text file with one a line, or JSONL with "prompt", "messages" or "prompt_token_ids". The folder
of a run holds its log, checkpoints, figures and plots, and in model/ the value model for `models.load_value`.
With --train last --delta NAME that is a few megabytes, to be used beside the model of that name only. The
same command goes on with a run that was stopped. docs/training.md says what is trained and how.
"""

import argparse
import dataclasses
import hashlib
import pathlib
import shutil
import sys
import time
import zlib
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # models/ is not an installed package

import jax
import jax.numpy as jnp
import numpy as np

from models.checkpoints import write_json
from models.command_line import Parser, add_model_flags, keep_compiled_programs, load_model, positive
from models.decoder import DecoderConfig, Weights
from models.delta import save_delta
from models.fetch import fetch_smollm2
from models.generation import Request, generate
from models.json_fields import prepare
from models.load import load
from models.load_safetensors import read_json
from models.load_value import ValueModel, save_value_model
from models.progress import Progress
from models.prompt_files import RolloutWriter, read_prompts
from models.rollouts import FINISHED, TRUNCATED, Rollout, read_rollouts, split_by_prompt
from models.text import Text, TokenIds
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
from models.value_fit import SETTINGS, claim, fit, read_log
from models.value_report import draw_plots, predict, report
from models.value_training import (
    ALL,
    HEAD,
    LAST,
    LOSSES,
    TrainState,
    first_layers,
    first_trained,
    join_weights,
    make_optimizer,
    make_train_step,
    split_weights,
    value_logits,
)

_LONGEST_WINDOW = 3000  # tokens; what LenVM was trained with
_EPOCHS, _WARMUP = 2, 50  # and these, the latter in steps


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
    text = model.text
    assert text is not None  # `load_model` refuses models without
    if options.eos_token_id is not None:
        if not isinstance(text, TokenIds):
            raise ValueError(
                "--eos-token-id is given, allowed is it with --token-ids only: the model has its own"
            )
        text = dataclasses.replace(text, eos_token_ids=tuple(options.eos_token_id))
    sampling = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "max_tokens", "n")}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    requests = [
        Request(*prepare({**sampling, "seed": options.seed + index, **wish}, text, raw=options.raw))
        for index, wish in enumerate(wishes)
    ]
    part = options.out.with_name(options.out.name + ".part")
    with part.open("w", encoding="utf-8") as file, Progress(len(requests) * options.n) as progress:
        writer = RolloutWriter(requests, file, progress.advance)
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
    num_shared = first_trained(options.train, num_layers)
    if options.delta is not None and options.train.partition(":")[0] not in (LAST, HEAD):
        raise ValueError(f"--train is {options.train}, allowed with --delta are {LAST}, {LAST}:K and {HEAD}")
    mean = mean_value(kept, labels)
    config, weights = first_layers(model.config, model.weights, num_layers, options.seed, mean)
    run, figures = fit_value_model(options, config, weights, labels, kept, held_out, steps)
    folder = options.out / "model"
    if folder.exists():  # of a run that had come to its end
        shutil.rmtree(folder)
    if options.delta is not None:
        told = ("seconds", "device", "trained_numbers", "explained", "value_error")
        counts = {"num_rollouts": len(rollouts), "num_trained_on": len(kept), "num_held_out": len(held_out)}
        counts["num_cut_off"] = sum(not rollout.finished for rollout in rollouts)
        counts["num_tokens"] = sum(len(rollout.output) for rollout in rollouts)
        settings = read_json(options.out / SETTINGS)
        facts = {**settings, **counts, **{name: figures.get(name) for name in told}}
        names = {"base": options.delta, "base_weights": model.weights}
        save_delta(folder, config, run, gamma, num_shared=num_shared, facts=facts, **names)
    else:
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
) -> tuple[Weights, dict[str, Any]]:
    """Trains to the last step, then writes figures and plots; the weights, {"trunk", "head"}, and figures."""
    dtype, loss = jnp.dtype(options.dtype), LOSSES[options.loss]
    warmup = min(_WARMUP, steps // 10) if options.warmup is None else options.warmup
    optimizer = make_optimizer(options.learning_rate, warmup, steps, options.weight_decay)
    trained, frozen = split_weights(weights, options.train)
    state = TrainState(trained, jax.jit(optimizer.init)(trained))
    trained_shapes = jax.eval_shape(lambda: trained)  # the arrays themselves are given up to the first step
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

    started = time.perf_counter()
    with Progress(steps) as progress:

        def show(step: int, entry: dict[str, Any]) -> None:
            progress.update(step, f"loss {entry['loss']:.5f}" if entry else None)

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
    seconds = time.perf_counter() - started
    found = predictions(state)
    counts = {"rollouts": len(held_out), "judged": int((found.position == 0).sum())}
    counts |= {"seconds": round(seconds, 1), "device": jax.devices()[0].device_kind}
    counts["trained_numbers"] = sum(leaf.size for leaf in jax.tree.leaves(trained_shapes))
    figures = {**counts, **report(found, labels.gamma)}
    write_json(options.out / "figures.json", figures)
    if not draw_plots(options.out, read_log(options.out), figures):
        say("no plots: matplotlib is not installed")
    if figures.get("relative_error") is not None:
        say(
            f"held out: mean |l_predicted - l| / l is {figures['relative_error']:.3f}, mean |v - target| is "
            f"{figures['value_error']:.4f}"
        )
    return join_weights(state.trained, frozen), figures


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
    model = add_model_flags(made)
    model.add_argument("--cache-slots", type=positive(int), metavar="S")
    model.add_argument(
        "--eos-token-id", type=int, nargs="+", metavar="ID", help="with --token-ids: ends a reply"
    )

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
    how.add_argument(
        "--train",
        default=ALL,
        metavar="all|layers|last[:K]|head",
        help="layers: all but the embedding; last:K: the last K layers and the norm; default all",
    )
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
        "--delta", metavar="NAME", help="write what was trained alone, to be used beside that model only"
    )
    watch.add_argument(
        "--held-out", type=float, default=0.05, help="fraction of prompts, default %(default)s"
    )
    watch.add_argument("--save-every", type=positive(int), default=200, help="steps, default %(default)s")
    watch.add_argument("--log-every", type=positive(int), default=10, help="steps, default %(default)s")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
