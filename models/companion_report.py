"""The figures of the companions as a page, as pictures and as a model card; nothing in them is typed by hand.

Knows nothing of how figures are made, nor of where they lie.
"""

import math
import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any

PLOTS = "plots"  # beside the page
PICTURES = {
    "value_error": "Error by position",
    "value_calibration": "Calibration",
    "value_lengths": "Length by scale",
    "value_targets": "Hits of target lengths",
}
ROLLOUTS = "--n 2 --temperature 1 --top-k 16 --max-tokens 1024"  # how the value model's were drawn
_WIDTH = 118
_NAMES = {
    "plain": "plain",
    "unfiltered": "no filter",
    "truncated": "cut off at the target",
    "centered_exp": "`centered_exp`",
    "length_mul": "`length_mul`",
    "eq_soft": "`eq_soft`",
    "eq": "`eq`",
}


def page(value: dict[str, Any] | None, draft: str | None) -> str:
    """The page of results.

    Args:
      value: what `companion_measure.measure` returned; None: nothing was measured.
      draft: the section on the draft head; None: there is none.
    """
    lines = ["# Results", ""]
    lines += _filled(
        "Made by `python scripts/report_companions.py write` from the records in",
        "`models/companions/results/`.",
        "What the records tell of is trained and measured by the commands in `docs/training.md`.",
    )
    if value is None and draft is None:
        lines += ["There is no record yet.", ""]
    if value is not None:
        lines += _value_section(value)
    text = "\n".join(lines)
    return text if draft is None else f"{text}\n{draft.strip()}\n"


def _value_section(figures: dict[str, Any]) -> list[str]:
    facts, value, cases = figures["facts"], figures["value"], figures["cases"]
    at_prompt = value.get("prompts") or {}
    return [
        "## The value model of SmolLM2-135M-Instruct",
        "",
        *_filled(
            f"{facts['num_prompts']} prompts about topics that were not trained on; to each",
            f"{facts['num_plain']}",
            f"plain replies and {facts['num_guided']} of each other way, at temperature 1, from the",
            f"{facts['top_k']} likeliest tokens and of at most {facts['max_tokens']} tokens, where nothing",
            f"else is said. {facts['device']}, {facts['dtype']}, jax {facts['jax']}. The",
            "value",
            f"model has {facts['num_layers']} layers and gamma {facts['gamma']:.6g}. Lengths count EOS.",
        ),
        "### Predicted against realised remaining length",
        "",
        *_filled(
            f"Plain replies of at most {facts['judged_tokens']} tokens. The model ended {value['replies']}",
            f"of {value['of']} itself; of the",
            "others no length is known, and they are left out. The error is abs(l_predicted - l) / l; short",
            'remainders weigh most in its mean, so that the median stands beside it. "Position alone" is',
            "the mean",
            "error of the one length that is best by the loss for the range, which looks at no text.",
        ),
        *_table(
            ("tokens so far", "tokens", "mean error", "median error", "position alone"),
            [
                (_range(x), f"{x['tokens']:,}", *(number(x[key]) for key in ("mean", "median", "constant")))
                for x in value["ranges"]
            ],
        ),
        "",
        *_filled(
            f"Over all tokens: mean abs(v - target) {_or_none(value.get('value_error'))}, explained",
            "variance of",
            f"the target {_or_none(value.get('explained'))}, mean relative error",
            f"{_or_none(value.get('relative_error'))}. At the end of the prompt, against the mean of",
            f"{_or_none(at_prompt.get('rollouts'))} replies: {_or_none(at_prompt.get('relative_error'))}.",
        ),
        *(f"![{name}]({PLOTS}/{file}.png)\n" for file, name in list(PICTURES.items())[:2]),
        "### Length by scale",
        "",
        *_filled(
            f"Guided replies are drawn from {facts['top_k']} candidates at each token, as plain ones are.",
            "Perplexity is that of all tokens of the replies under the model",
            "itself,",
            "unguided at temperature 1. Replies that were cut off count with the length they reached.",
        ),
        *_table(
            ("way", "scale", "mean", "spread", "quartiles", "ended itself", "perplexity"),
            [_length_row(case) for case in _by_scale(cases)],
        ),
        "",
        f"![{PICTURES['value_lengths']}]({PLOTS}/value_lengths.png)\n",
        "### Lengths asked for",
        "",
        *_filled(
            "The share of replies whose length is within 10 % and 20 % of the target, and the share that",
            "is within",
            "20 % and that the model ended itself: a reply that was cut off has the right length, and no",
            "end.",
        ),
        *_table(
            (
                "target",
                "way",
                "mean",
                "spread",
                "within 10 %",
                "within 20 %",
                "and ended itself",
                "perplexity",
            ),
            [_target_row(case) for case in _by_target(cases)],
        ),
        "",
        f"![{PICTURES['value_targets']}]({PLOTS}/value_targets.png)\n",
        *_shown(figures.get("shown", [])),
    ]


def card(description: dict[str, Any], figures: dict[str, Any] | None, num_bytes: int) -> str:
    """The model card of the value model.

    Args:
      description: its value_model.json.
      figures: as for `page`; None: not measured.
      num_bytes: of its files.
    """
    facts, base, gamma = description["facts"], description["base"], description["gamma"]
    layers, shared = description["num_layers"], description["num_shared"]
    own = ", ".join(f"layer {index}" for index in range(shared, layers)) + ", " if shared < layers else ""
    warmup = "" if facts["warmup"] is None else f" --warmup {facts['warmup']}"
    command = [
        f"--num-layers {layers} --train {facts['train']} --delta {base['name']}",
        f"--dtype {facts['dtype']} --batch-size {facts['batch_size']} --steps {facts['steps']}",
        f"--learning-rate {facts['learning_rate']:g}{warmup} --loss {facts['loss']}",
        f"--window {facts['window']} --lam {facts['lam']:g} --truncated {facts['truncated']}",
        f"--held-out {facts['held_out']:g} --seed {facts['seed']}",
    ]
    lines = [
        f"# Value model for {base['name']}",
        "",
        *_filled(
            "It tells at each token how much of a reply is still to come, for `--guide smollm2` of",
            "`scripts/generate.py` and `scripts/serve.py`. This card is made by",
            "`python scripts/report_companions.py write`.",
        ),
        *_filled(
            f"**Files.** {num_bytes / 1e6:.2f} MB. value_model.safetensors holds {own}the final norm",
            "(bfloat16)",
            f"and the value head (float32). The embedding and the first {shared} layers are the base",
            "model's own",
            "arrays, shared when it is loaded; another base is refused by a fingerprint of its weights.",
        ),
        *_filled(
            f"**Base and licence.** {base['name']} (HuggingFaceTB, Apache-2.0), with the Q4_1 weights that",
            "`models/fetch.py` fetches. This model is under Apache-2.0 too, the repository's licence.",
        ),
        *_filled(
            "**Data.** Prompts of `models/companion_prompts.py`, written for this repository and under its",
            "licence, and the base model's own replies to them, drawn as the command below says:",
            f"{facts['num_rollouts']:,} replies of {facts['num_tokens']:,} tokens,",
            f"{facts['num_cut_off']:,} of",
            f"them cut off by the limit. {facts['num_trained_on']:,} were trained on and",
            f"{facts['num_held_out']:,} held out to watch; the results below are from prompts about other",
            "topics.",
        ),
        *_filled(
            f"**Training.** {facts['steps']} steps of {facts['batch_size']} replies,",
            f"{facts['trained_numbers']:,} numbers trained, {facts['seconds']:.0f} s on {facts['device']};",
            f"gamma {gamma:.6g}. Explained variance on what was held out: {_or_none(facts['explained'])}.",
        ),
        "```",
        "python scripts/report_companions.py prompts --out runs/prompts",
        f"python scripts/train_value.py generate runs/prompts/train.jsonl {ROLLOUTS} \\",
        "  --out runs/rollouts.jsonl",
        "python scripts/train_value.py train --rollouts runs/rollouts.jsonl --out runs/value \\",
        *(f"  {line} \\" for line in command[:-1]),
        f"  {command[-1]}",
        "```",
        "",
        "## Results",
        "",
        *(["Not measured yet.", ""] if figures is None else _card_results(figures)),
        "## Limits",
        "",
        *_filled(
            "It was trained on replies at temperature 1 from the likeliest tokens, to short English requests",
            "of one turn",
            "with the model's default system prompt. With other settings, long chats and other languages it",
            f"extrapolates. Lengths above {math.log(0.01) / math.log(gamma):.0f} tokens are hardly told",
            "apart: there",
            "v is above .99. It judges length and nothing else: a reply that is pushed far from the length",
            "that it",
            "would have had becomes worse. `docs/results.md` shows it: shorter ones in their perplexity,",
            "longer ones in the samples, since to repeat oneself lowers perplexity. Late in a long reply it",
            "knows little more than the position tells.",
        ),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _card_results(figures: dict[str, Any]) -> list[str]:
    value, cases = figures["value"], figures["cases"]
    scaled = [
        case
        for case in cases
        if case["way"] == "centered_exp" or (case["way"], case["at"]) == ("plain", None)
    ]
    least, most = (choose(scaled, key=lambda case: case["mean"]) for choose in (min, max))
    told = [
        f"{number(x['mean'])} tokens at scale {x['at'] or 0:g} (perplexity {number(x['perplexity'])})"
        for x in (least, most)
    ]
    rows = [_target_row(case) for case in _by_target(cases)]
    return [
        *_filled(
            f"On {figures['facts']['num_prompts']} held-out prompts, `docs/results.md` has all: explained",
            "variance",
            f"{_or_none(value.get('explained'))}, mean relative error",
            f"{_or_none(value.get('relative_error'))}.",
            f"With `centered_exp` mean lengths range from {told[0]} to {told[1]}.",
        ),
        *_table(
            ("target", "way", "within 20 %", "and ended itself", "perplexity"),
            [(row[0], row[1], *row[5:]) for row in rows],
        ),
        "",
    ]


def draw(folder: pathlib.Path, figures: dict[str, Any]) -> bool:
    """Draws `PICTURES` as PNG; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    value, cases = figures["value"], figures["cases"]

    def keep(name: str, figure: Any) -> None:
        figure.savefig(folder / f"{name}.png", dpi=110, metadata={"Software": None})
        pyplot.close(figure)

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    names = [_range(entry) for entry in value["ranges"]]
    for key, label in (("mean", "mean"), ("median", "median"), ("constant", "mean, position alone")):
        axes.plot(names, [entry[key] for entry in value["ranges"]], "o-", label=label)
    axes.set(
        xlabel="tokens of the reply so far", ylabel="relative error of the remaining length", yscale="log"
    )
    axes.legend()
    keep("value_error", figure)

    figure, axes = pyplot.subplots(figsize=(5, 5), layout="constrained")
    predicted = [entry["predicted"] for entry in value["calibration"]]
    axes.plot(
        predicted, [entry["realised"] for entry in value["calibration"]], "o-", label="of the mean value"
    )
    axes.plot(predicted, [entry["mean"] for entry in value["calibration"]], "x", label="mean length")
    axes.axline((0, 0), slope=1, color="grey", linewidth=0.8)
    axes.set(xlabel="predicted remaining tokens", ylabel="realised remaining tokens")
    axes.legend()
    keep("value_calibration", figure)

    figure, columns = pyplot.subplots(1, 2, figsize=(8, 4), layout="constrained", sharey=True)
    for axes, way, neutral in zip(columns, ("centered_exp", "length_mul"), (0.0, 1.0)):
        chosen = [case for case in cases if case["way"] == way]
        chosen += [{**case, "at": neutral} for case in cases if (case["way"], case["at"]) == ("plain", None)]
        chosen.sort(key=lambda case: case["at"])
        at = [case["at"] for case in chosen]
        axes.errorbar(at, [x["mean"] for x in chosen], [x["std"] for x in chosen], fmt="o-", capsize=3)
        for case in chosen:
            axes.annotate(f"ppl {number(case['perplexity'])}", (case["at"], case["mean"]), fontsize=7)
        axes.set(xlabel=f"scale of {way}", ylabel="tokens, mean and spread" if neutral == 0 else None)
        axes.set_xscale("linear" if neutral == 0 else "log", **({} if neutral == 0 else {"base": 2}))
    keep("value_lengths", figure)

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    targets = sorted({case["at"] for case in cases if "hits" in case})
    ways = list(dict.fromkeys(case["way"] for case in _by_target(cases)))
    for index, way in enumerate(ways):
        chosen = [case for target in targets for case in cases if _is_aimed(case, way, target)]
        place = [targets.index(case["at"]) + (index - len(ways) / 2) * 0.18 for case in chosen]
        bars = axes.bar(place, [x["hits"][1] for x in chosen], 0.16, alpha=0.4)
        colour = bars.patches[0].get_facecolor()[:3] if bars.patches else None
        label = _NAMES[way].strip("`")
        axes.bar(place, [x["ended_hits"][1] for x in chosen], 0.16, color=colour, label=label)
    axes.set_xticks(range(len(targets)), [f"{target:g}" for target in targets])
    axes.set(xlabel="target, tokens", ylabel="share within 20 %, solid: ended itself")
    axes.legend(fontsize=7)
    keep("value_targets", figure)
    return True


def number(value: float) -> str:
    """Three digits that count, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _or_none(value: float | None) -> str:
    return "unknown" if value is None else number(value)


def _filled(*parts: str) -> list[str]:
    """A paragraph and an empty line."""
    return [textwrap.fill(" ".join(parts), _WIDTH, break_long_words=False, break_on_hyphens=False), ""]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    line = lambda cells: "| " + " | ".join(cells) + " |"
    words = ("way", "text", heads[0])
    return [line(heads), line(["---" if head in words else "---:" for head in heads]), *map(line, rows)]


def _range(entry: dict[str, Any]) -> str:
    return f"{entry['from']}" if entry["from"] == entry["to"] else f"{entry['from']}-{entry['to']}"


def _by_scale(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plain replies, then those by scale, in order."""
    first = [case for case in cases if case["way"] == "plain" and case["at"] is None]
    order = ("unfiltered", "centered_exp", "length_mul")
    rest = [case for case in cases if case["way"] in order]
    return first + sorted(rest, key=lambda case: (order.index(case["way"]), case["at"] or 0))


def _by_target(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    order = ("plain", "truncated", "eq_soft", "eq")
    aimed = [case for case in cases if "hits" in case]
    return sorted(aimed, key=lambda case: (case["at"], order.index(case["way"])))


def _is_aimed(case: dict[str, Any], way: str, target: float) -> bool:
    return "hits" in case and case["way"] == way and case["at"] == target


def _length_row(case: dict[str, Any]) -> tuple[str, ...]:
    at = f"{case['at']:g}" if case["way"] in ("centered_exp", "length_mul") else ""
    quartiles = ", ".join(map(number, case["quartiles"]))
    return (
        _NAMES[case["way"]],
        at,
        number(case["mean"]),
        number(case["std"]),
        quartiles,
        _share(case["ended"]),
        number(case["perplexity"]),
    )


def _target_row(case: dict[str, Any]) -> tuple[str, ...]:
    shares = (*case["hits"], case["ended_hits"][1])
    figures = (number(case["mean"]), number(case["std"]), *map(_share, shares), number(case["perplexity"]))
    return (f"{case['at']:g}", _NAMES[case["way"]], *figures)


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _shown(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Replies as text, where they were decoded: what guidance does to one."""
    entries = [entry for entry in entries if "text" in entry]
    if not entries:
        return []
    lines = ["### Replies", "", "The first reply of some ways, its beginning.", ""]
    for prompt in dict.fromkeys(entry["prompt_text"] for entry in entries):
        rows = [
            (
                _NAMES[entry["way"]],
                "" if entry["at"] is None else f"{entry['at']:g}",
                str(len(entry["token_ids"])),
                entry["text"],
            )
            for entry in entries
            if entry["prompt_text"] == prompt
        ]
        lines += [f"**{prompt}**", "", *_table(("way", "at", "tokens", "text"), rows), ""]
    return lines
