"""Trains a draft head from a model's own replies: python scripts/train_draft.py --rollouts FILE --out FOLDER.

    python scripts/train_value.py generate prompts.txt --n 4 --max-tokens 256 --out rollouts.jsonl
    python scripts/train_draft.py --rollouts rollouts.jsonl --out runs/draft
    python scripts/generate.py "Why is the sky blue?" --speculate head:runs/draft/model

Rollouts are those of the model that the head is to draft for. The folder of a run holds its log, checkpoints,
figures and a plot, and in model/ the head for `--speculate head:PATH`. The same command goes on with a run
that was stopped. docs/training.md says what is trained and how.
"""

import argparse
import hashlib
import pathlib
import shlex
import shutil
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # models/ is not an installed package

import jax
import jax.numpy as jnp
import numpy as np

from models.checkpoints import write_json
from models.command_line import Parser, keep_compiled_programs, positive
from models.decoder import DecoderConfig, Weights
from models.draft_batches import frequent_tokens, learnable, make_draft_batch
from models.draft_head import DraftHead
from models.draft_report import draw_loss, figures_of
from models.draft_training import Aims, first_head, frozen_weights, make_draft_step, make_judge
from models.fetch import fetch_smollm2
from models.load import load
from models.load_draft import save_draft_head
from models.progress import Progress
from models.rollouts import Rollout, read_rollouts, split_by_prompt
from models.value_batches import batches_from, widths_for
from models.value_fit import claim, fit, read_log
from models.value_training import TrainState, make_optimizer

_EPOCHS, _WARMUP = 8, 100  # the latter in steps
_NUM_JUDGED = 4  # proposals of a chain that figures are about
_SMOLLM2 = "SmolLM2-135M-Instruct"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 0, or 2 with one line on standard error for what the user can mend."""
    try:
        options = parse(arguments)
        given = sys.argv[1:] if arguments is None else arguments
        options.command = shlex.join([pathlib.Path(x).name if x.startswith("/") else x for x in given])
        keep_compiled_programs()
        run(options)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def run(options: argparse.Namespace) -> None:
    """Trains, judges, draws and exports."""
    aims = Aims(options.passes, options.decay, options.regression)
    model = load(options.init or fetch_smollm2(), jnp.float32)
    base = model.config
    rollouts = read_rollouts(options.rollouts, base.vocab_size)
    window = min(options.window, base.max_length)
    kept, held_out = (learnable(x, window) for x in split_by_prompt(rollouts, options.held_out, options.seed))
    if not kept:
        raise ValueError(
            f"no rollout can be learnt from: all prompts exceed {window} tokens, or all are too short"
        )
    if not 0 <= options.without_prompt <= 1:
        raise ValueError(f"--without-prompt is {options.without_prompt}, allowed is [0, 1]")
    number = min(options.draft_vocab or base.vocab_size, base.vocab_size)
    ids, share = frequent_tokens(kept, base.vocab_size, number)
    chosen = None if number == base.vocab_size else ids
    steps = options.steps or options.epochs * -(-len(kept) // options.batch_size)
    say(
        f"{len(kept)} rollouts to train on, {len(held_out)} held out, of {len(rollouts)}; {number} tokens, "
        f"{100 * share:.2f} % of what they hold; {steps} steps"
    )
    config, head = first_head(base, model.weights, options.num_layers, options.seed)
    dtype = jnp.dtype(options.dtype)
    check = checksum(model.weights)
    frozen = jax.block_until_ready(frozen_weights(model.weights, chosen, dtype))
    del model
    trained, facts = train(options, aims, base, config, head, frozen, kept, held_out, steps, window, check)
    folder = options.out / "model"
    if folder.exists():  # of a run that had come to its end
        shutil.rmtree(folder)
    name = _SMOLLM2 if options.init is None else options.base_name or options.init.name
    facts |= {"draft_vocabulary": number, "share": share}
    save_draft_head(folder, DraftHead(config, jax.device_get(trained), chosen), name, facts)
    say(f"draft head in {folder}")


def train(
    options: argparse.Namespace,
    aims: Aims,
    base: DecoderConfig,
    config: DecoderConfig,
    head: Weights,
    frozen: Weights,
    kept: list[Rollout],
    held_out: list[Rollout],
    steps: int,
    window: int,
    check: int,
) -> tuple[Weights, dict[str, Any]]:
    """Trains to the last step, then writes figures and a plot: the head's weights and facts of the run."""
    dtype, size = jnp.dtype(options.dtype), options.batch_size
    warmup = min(_WARMUP, steps // 10) if options.warmup is None else options.warmup
    optimizer = make_optimizer(options.learning_rate, warmup, steps, options.weight_decay)
    state = TrainState(head, jax.jit(optimizer.init)(head))
    draft_step = make_draft_step(base, config, optimizer, aims, dtype)
    judge = make_judge(base, config, _NUM_JUDGED, dtype)
    claim(options.out, settings_of(options, steps, window, frozen, check))
    lengths = [min(len(rollout.tokens), window) for rollout in kept]
    all_lengths = [*lengths, *(min(len(rollout.tokens), window) for rollout in held_out)]
    widths = widths_for(all_lengths, window)

    def batches(step: int) -> Iterator[Any]:
        for width, chosen in batches_from(step, lengths, widths, size, options.seed):
            rollouts = [kept[index] for index in chosen]
            yield make_draft_batch(rollouts, width, size, options.without_prompt)

    def figures(state: TrainState, most: int | None = None) -> dict[str, Any]:
        judged = held_out[:most]
        return figures_of(lambda batch: judge(state.trained, frozen, batch), judged, widths, size)

    def some_figures(state: TrainState) -> dict[str, float]:
        found = figures(state, 4 * size)
        return {} if not found["positions"] else {"held_out_tokens_a_step": found["chain_tokens"]}

    started = time.perf_counter()
    with Progress(steps) as progress:

        def show(step: int, entry: dict[str, Any]) -> None:
            words = f"loss {entry['loss']:.4f}, first tokens {entry['agreement_1']:.3f}" if entry else None
            progress.update(step, words)

        state = fit(
            options.out,
            state,
            lambda state, batch: draft_step(state, frozen, batch),
            batches,
            steps=steps,
            save_every=options.save_every,
            log_every=options.log_every,
            judge=some_figures,
            show=show,
        )
    facts = {
        "command": f"python scripts/train_draft.py {options.command}",
        "rollouts": len(kept),
        "steps": steps,
        "seconds": round(time.perf_counter() - started, 1),
        "device": jax.devices()[0].device_kind,
        **{
            name: getattr(options, name)
            for name in ("batch_size", "learning_rate", "passes", "decay", "dtype")
        },
    }
    found = figures(state)
    write_json(options.out / "figures.json", {**facts, "held_out": len(held_out), **found})
    if not draw_loss(options.out, read_log(options.out)):
        say("no plot: matplotlib is not installed")
    if found["positions"]:
        same = ", ".join(f"{value:.3f}" for value in found["agreement"])
        say(
            f"held out: first tokens foretold, by proposal: {same}; {found['chain_tokens']:.3f} tokens a step"
        )
    return state.trained, {**facts, "held_out_chain_tokens": found["chain_tokens"]}


def settings_of(
    options: argparse.Namespace, steps: int, window: int, frozen: Weights, check: int
) -> dict[str, Any]:
    """What shapes the result of a run: a run goes on only with the same."""
    names = (
        "batch_size",
        "decay",
        "dtype",
        "held_out",
        "learning_rate",
        "num_layers",
        "passes",
        "regression",
        "seed",
        "warmup",
        "weight_decay",
        "without_prompt",
    )
    digest = hashlib.sha256()
    for path in options.rollouts:
        digest.update(path.read_bytes())
    return {
        **{name: getattr(options, name) for name in names},
        "steps": steps,
        "window": window,
        "draft_vocabulary": int(frozen["output"].shape[0]),
        "rollouts": digest.hexdigest(),
        "base": check,
    }


def checksum(weights: Weights) -> int:
    """CRC-32 of all weights, in the order of their tree."""
    check = 0
    for leaf in jax.tree.leaves(weights):
        check = zlib.crc32(np.asarray(leaf).data, check)
    return check


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rollouts", type=pathlib.Path, nargs="+", required=True, metavar="JSONL")
    parser.add_argument(
        "--out", type=pathlib.Path, required=True, metavar="DIR", help="new, or of the same run"
    )
    model = parser.add_argument_group("models")
    model.add_argument("--init", type=pathlib.Path, metavar="PATH", help="the base; default SmolLM2")
    model.add_argument("--base-name", metavar="NAME", help="of the base, for the head's file")
    model.add_argument("--num-layers", type=positive(int), default=1, metavar="N", help="default %(default)s")
    model.add_argument(
        "--draft-vocab",
        type=positive(int),
        metavar="N",
        help="propose the N most frequent tokens; default all",
    )
    aims = parser.add_argument_group("loss")
    aims.add_argument("--passes", type=positive(int), default=3, help="along a chain, default %(default)s")
    aims.add_argument(
        "--decay", type=float, default=0.8, help="weight of a pass over the last, default %(default)s"
    )
    aims.add_argument(
        "--regression", type=float, default=0.0, help="weight of hidden states' distance, default %(default)s"
    )
    aims.add_argument(
        "--without-prompt",
        type=float,
        default=0.25,
        help="share that begins with the output, default %(default)s",
    )
    aims.add_argument(
        "--window", type=positive(int), default=1024, help="tokens kept of each, default %(default)s"
    )
    how = parser.add_argument_group("optimisation")
    how.add_argument("--batch-size", type=positive(int), default=32, help="rollouts, default %(default)s")
    how.add_argument("--learning-rate", type=positive(float), default=1e-3, help="default %(default)s")
    how.add_argument("--warmup", type=int, help=f"steps, default {_WARMUP}, or a tenth of all")
    how.add_argument("--weight-decay", type=float, default=0.0, help="default %(default)s")
    how.add_argument("--epochs", type=positive(int), default=_EPOCHS, help="default %(default)s")
    how.add_argument("--steps", type=positive(int), help="in place of --epochs")
    how.add_argument("--seed", type=int, default=0, help="of order, split and head, default %(default)s")
    how.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the arithmetic")
    watch = parser.add_argument_group("output")
    watch.add_argument(
        "--held-out", type=float, default=0.05, help="fraction of prompts, default %(default)s"
    )
    watch.add_argument("--save-every", type=positive(int), default=500, help="steps, default %(default)s")
    watch.add_argument("--log-every", type=positive(int), default=10, help="steps, default %(default)s")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
