"""Shows one step: python scripts/explain.py PROMPT, the distribution of the token that comes next.

Two tables on standard output: how many tokens, how much mass and how much entropy each stage of sampling
leaves; and for the likeliest tokens their probability before, between and after the stages, what removed
them, and which one is drawn. The model and the parameters are those of scripts/generate.py; with --said the
step is one further on in a reply.
"""

import argparse
import importlib.util
import json
import math
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # models/ is not an installed package

import numpy as np

from jaxsample import PAD, Limits, make_params, start
from models.command_line import (
    Parser,
    add_guidance_flags,
    add_model_flags,
    add_sampling_flags,
    guidance_defaults,
    keep_compiled_programs,
    load_guide,
    load_model,
    reader_is_gone,
    sampling_defaults,
)
from models.generation import LIST_CAPACITIES
from models.guiding import guidance_of
from models.json_fields import check_numbers, prepare
from models.known_text import candidate_scorer, next_logits
from models.one_step import Explanation, explain
from models.programs import power_of_two
from models.text import Text, TokenIds, check_unicode

_MOST_CANDIDATES = 128
_LEAST_LENGTH = 32  # a capacity shared by many texts is a program shared by them
_EPILOG = """What ends a reply bears on one step only in part: --max-tokens not at all, --stop-token-ids
where --min-tokens bans them, --ignore-eos there and with --guide, which gives EOS the value 0."""


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
    """Loads the model, takes the step apart, prints."""
    wish = {**sampling_defaults(options), "prompt": options.prompt, "logprobs_mode": options.logprobs_mode}
    neutrals = (("n", 1), ("logprobs", None), ("prompt_logprobs", None), ("logprobs_mode", "raw"))
    for name, neutral in neutrals:
        if wish.get(name, neutral) != neutral:
            raise ValueError(
                f"{name} is {wish[name]}, allowed is {neutral}: one token of one sample is shown"
            )
    if options.top < 1:
        raise ValueError(f"--top is {options.top}, allowed are integers from 1")
    if options.png is not None:
        check_picture(options.png)
    check_unicode(options.said or "")
    how = guidance_defaults(options).get("guidance")
    check_numbers(wish)
    keep_compiled_programs()
    model = load_model(options)
    prompt, words = prepare(wish, model.text, raw=options.raw)
    if not prompt:
        raise ValueError("the prompt is empty and has no chat template around it, one token is needed")
    said = model.text.encode(options.said, add_special_tokens=False) if options.said else []
    tokens = prompt + said
    if len(tokens) > model.config.max_length:
        raise ValueError(f"the text has {len(tokens)} tokens, the model holds {model.config.max_length}")
    limits = Limits(
        model.config.vocab_size,
        max_length=max(power_of_two(len(tokens)), _LEAST_LENGTH),
        num_guided=min(max(words.get("top_k", 0), 1), _MOST_CANDIDATES),
        **LIST_CAPACITIES,
    )
    params, stop = make_params(limits, prompt_length=len(prompt), **words)
    guidance = score = gamma = None
    value_model = load_guide(options, model)
    if value_model is not None:
        guidance = guidance_of(limits, params, how, value_model.gamma)
        gamma = math.exp(guidance.log_gamma[0])
        score = candidate_scorer(value_model.config, value_model.weights, tokens)
    shown = explain(
        next_logits(model.config, model.weights, tokens),
        params,
        stop,
        start(limits, np.asarray([tokens]), np.asarray([len(prompt)]), np.asarray([len(said)])),
        len(tokens),
        limits=limits,
        filter_order=options.filter_order,
        guidance=guidance,
        score=score,
    )
    if shown.token == PAD:
        raise ValueError("the model's logits are not finite")
    rows = likeliest(shown, options.top)
    low, high = (int(word) for word in params.seed[0])
    about = {"position": len(tokens), "seed": low + (high << 32), "filter_order": options.filter_order}
    if options.json:
        print(json.dumps({**about, **describe(shown, rows, model.text, gamma)}, ensure_ascii=False))
    else:
        settings = {
            name: words.get(name.replace("-", "_")) for name in ("top-k", "top-p", "min-p", "temperature")
        }
        print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
        print(stage_table(shown, settings), end="\n\n")
        print(token_table(shown, rows, model.text, gamma))
        if guidance is not None and shown.stages[-1].name != "guided":
            print("\nnot guided: the guidance is neutral, or the entropy is not above its threshold")
    if options.png is not None:
        plot(shown, rows, model.text, options.png)


def likeliest(shown: Explanation, number: int) -> list[int]:
    """The tokens of the largest probability before or after all stages; the token drawn in any case."""
    either = np.maximum(shown.stages[0].log_probs, shown.stages[-1].log_probs)
    rows = np.argsort(-either, kind="stable")[:number].tolist()
    return rows if shown.token in rows else [*rows, shown.token]


def describe(
    shown: Explanation, rows: Sequence[int], text: Text | TokenIds, gamma: float | None
) -> dict[str, Any]:
    """The explanation as JSON; minus infinity, which JSON lacks, is null."""
    removed = shown.removed_by()

    def fields(token: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            "token_id": token,
            "token": text.name_of(token),
            "logprobs": {
                stage.name: float(value) if (value := stage.log_probs[token]) > -np.inf else None
                for stage in shown.stages
            },
            "removed_by": removed[token],
            "noise": float(shown.noise[token]),
        }
        if token in shown.values:
            value, length = value_and_length(shown.values[token], gamma)
            found |= {"value": value, "length": length}
        return found

    drawn = {"token_id": shown.token, "token": text.name_of(shown.token)}
    return {"drawn": drawn, "stages": shown.figures(), "tokens": [fields(token) for token in rows]}


def value_and_length(z: float, gamma: float | None) -> tuple[float, float]:
    """v = sigmoid(z), and the tokens it stands for, -softplus(z) / ln gamma."""
    assert gamma is not None
    softplus = max(z, 0.0) + math.log1p(math.exp(-abs(z)))
    return 1 / (1 + math.exp(-z)) if z > -700 else 0.0, -softplus / math.log(gamma)


def stage_table(shown: Explanation, settings: dict[str, Any]) -> str:
    """A line for each stage."""
    lines = [f"{'stage':<18}{'tokens':>8}{'mass kept':>12}{'entropy':>10}"]
    for figure in shown.figures():
        value = settings.get(figure["stage"])
        name = figure["stage"] + (f" {value}" if value is not None else "")
        lines.append(f"{name:<18}{figure['tokens']:>8}{figure['mass']:>12.6f}{figure['entropy']:>10.4f}")
    return "\n".join(lines)


def token_table(shown: Explanation, rows: Sequence[int], text: Text | TokenIds, gamma: float | None) -> str:
    """A line for each token; the one drawn has a star."""
    columns = shown_columns(shown)
    names = {token: repr(text.name_of(token)) for token in rows}
    width = max(5, *(len(name) for name in names.values()))
    head = f"  {'id':>7}  {'token':<{width}}{'ln raw':>10}"
    head += "".join(f"{name:>12}" for name in columns)
    head += (f"{'value':>10}{'length':>10}" if shown.values else "") + f"{'noise':>9}  removed by"
    removed, lines = shown.removed_by(), [head]
    for token in rows:
        line = f"{'*' if token == shown.token else ' '} {token:>7}  {names[token]:<{width}}"
        line += f"{shown.stages[0].log_probs[token]:>10.4f}"
        line += "".join(f"{_percent(law[token]):>12}" for law in columns.values())
        if token in shown.values:
            value, length = value_and_length(shown.values[token], gamma)
            line += f"{value:>10.5f}{length:>10.1f}"
        elif shown.values:
            line += f"{'':>20}"
        lines.append(f"{line}{shown.noise[token]:>9.3f}  {removed[token] or ''}".rstrip())
    return "\n".join(lines)


def shown_columns(shown: Explanation) -> dict[str, np.ndarray]:
    """The laws that tables and pictures show: before everything, before the filters, after them, guided."""
    laws = {stage.name: stage.log_probs for stage in shown.stages}
    last = shown.stages[-1].name
    columns = {"raw": laws["raw"]}
    if "temperature" in laws:
        columns["shaped"] = laws["temperature"]
    if last == "guided":
        columns["candidates"] = laws["candidates"]
        columns["guided"] = laws["guided"]
    else:
        columns["final"] = laws[last]
    return columns


def check_picture(path: pathlib.Path) -> None:
    """ValueError for a --png that could not be written, found before the model is loaded."""
    if path.suffix.lower() != ".png" or path.is_dir():
        raise ValueError(f"--png is {str(path)!r}, allowed are names of files that end in .png")
    if not path.parent.is_dir():
        raise ValueError(f"--png is {str(path)!r}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--png is {str(path)!r}, which may not be written")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib: pip install -e '.[plots]'")


def plot(shown: Explanation, rows: Sequence[int], text: Text | TokenIds, path: pathlib.Path) -> None:
    """A bar for each token and law."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = shown_columns(shown)
    figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.3 * len(rows)), layout="constrained")
    places = np.arange(len(rows))
    height = 0.8 / len(columns)
    for index, (name, law) in enumerate(columns.items()):
        axes.barh(
            places + (index - (len(columns) - 1) / 2) * height, np.exp(law[list(rows)]), height, label=name
        )
    marks = [("* " if token == shown.token else "") + repr(text.name_of(token)) for token in rows]
    axes.set_yticks(places, [mark.replace("$", r"\$") for mark in marks], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("probability (*: the token drawn)")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = Parser(description=__doc__.split("\n")[0], epilog=_EPILOG)
    parser.add_argument("prompt", metavar="PROMPT")
    parser.add_argument(
        "--said", metavar="TEXT", help="what the reply begins with: the step is the one after"
    )
    parser.add_argument("--top", type=int, default=20, metavar="N", help="tokens shown, default %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the tables")
    parser.add_argument("--png", type=pathlib.Path, metavar="FILE", help="a picture, by matplotlib")
    add_model_flags(parser)
    add_guidance_flags(parser)
    parser.set_defaults(mesh=None)  # one device
    add_sampling_flags(parser)
    return parser.parse_args(arguments)


def _percent(log_prob: float) -> str:
    return f"{100 * math.exp(log_prob):.4f} %" if log_prob > -math.inf else "-"


if __name__ == "__main__":
    sys.exit(main())
