"""The figures of the draft head as a section of a page, a picture and a model card; none is typed by hand.

Knows nothing of how figures are made, nor of where they lie.
"""

import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any

from models.draft_measure import CHAIN_VERIFIERS, HEAD, NGRAM, PLAIN

PICTURE = "draft_tokens.png"  # beside the others of the page
_WIDTH = 118


def draft_section(records: Sequence[dict[str, Any]], plots: str = "plots") -> str:
    """The section, as Markdown.

    Args:
      records: what `draft_measure.measure_drafts` returned, one a device, at least one.
      plots: the folder of the picture beside the page.
    """
    facts = records[0]["facts"]
    lines = [
        "## The draft head of SmolLM2-135M-Instruct",
        "",
        *_filled(
            "Replies to prompts about topics that were not trained on, chains of "
            f"K = {facts['num_drafts']} proposals. A step without proposals emits one token."
        ),
    ]
    for record in records:
        lines += _device(record)
    lines += [f"![Tokens a step]({plots}/{PICTURE})", ""]
    return "\n".join(lines)


def _device(record: dict[str, Any]) -> list[str]:
    facts = record["facts"]
    temperatures, batch = facts["temperatures"], facts["rows"]
    title = f"### {facts['device']}, {facts['dtype']}, jax {facts['jax']}"
    head = ["drafts", "verifier", *(f"T = {t:g}" for t in temperatures)]
    steps = [
        [
            drafter,
            f"`{verify}`",
            *(_told(record, drafter, verify, t, batch, "tokens_a_step", 3) for t in temperatures),
        ]
        for drafter in (NGRAM, HEAD)
        for verify in CHAIN_VERIFIERS
    ]
    clock = []
    all_rows = sorted({case["rows"] for case in record["cases"]})
    for drafter, verify in dict.fromkeys((case["drafter"], case["verify"]) for case in record["cases"]):
        name = f"`{verify}`" if verify else ""
        values = [
            _told(record, drafter, verify, t, rows, "tokens_a_second", 1)
            for rows in all_rows
            for t in temperatures
        ]
        clock.append([drafter, name, *values])
    clock_head = [
        "drafts",
        "verifier",
        *(f"B = {rows}, T = {t:g}" for rows in all_rows for t in temperatures),
    ]
    return [
        title,
        "",
        f"Tokens a step, {facts['num_prompts']} prompts, replies of at most {facts['max_tokens']} tokens:",
        "",
        *_table(head, steps),
        "Tokens a second on the host's clock, of whole batches, reply by reply to its own end:",
        "",
        *_table(clock_head, clock),
        *_losses(record),
    ]


def _losses(record: dict[str, Any]) -> list[str]:
    """Which replies are those of plain decoding, where they are to be."""
    cases = [
        case
        for case in record["cases"]
        if case["drafter"] != PLAIN and (case["temperature"] == 0 or case["verify"] == CHAIN_VERIFIERS[0])
    ]
    same, replies = sum(case["same"] for case in cases), sum(case["replies"] for case in cases)
    words = "Token for token those of plain decoding, at temperature 0 and under `match`: "
    words += f"{same} of {replies} replies."
    if same < replies:
        words += f" A step of more tokens adds up in another order, in {record['facts']['dtype']}."
    gaps = [case["gap"] for case in cases if case["same"] < case["replies"] and "gap" in case]
    if gaps:
        words += " At temperature 0 the logits of the two tokens at which replies part are at most "
        words += f"{max(gaps):.3g} apart."
    return _filled(words)


def draw_drafts(folder: pathlib.Path, records: Sequence[dict[str, Any]]) -> bool:
    """Draws the picture into a folder; whether matplotlib is there to do it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    record = records[0]
    temperatures, batch = record["facts"]["temperatures"], record["facts"]["rows"]
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes: Any = figure.add_subplot()
    width = 0.8 / (2 * len(temperatures))
    for place, (drafter, temperature) in enumerate((d, t) for d in (NGRAM, HEAD) for t in temperatures):
        heights = [
            _of(record, drafter, verify, temperature, batch)["tokens_a_step"] for verify in CHAIN_VERIFIERS
        ]
        at = [index + (place + 0.5) * width - 0.4 for index in range(len(CHAIN_VERIFIERS))]
        axes.bar(at, heights, width, label=f"{drafter}, T = {temperature:g}")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(CHAIN_VERIFIERS)), CHAIN_VERIFIERS)
    axes.set_ylabel("tokens a step")
    figure.legend(loc="outside right center", fontsize="small")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / PICTURE, dpi=120)
    return True


def draft_card(description: dict[str, Any], records: Sequence[dict[str, Any]], num_bytes: int) -> str:
    """The model card, as Markdown.

    Args:
      description: draft_head.json.
      records: as for `draft_section`, may be empty.
      num_bytes: of the head's file.
    """
    facts = description["training"]
    layers = description["config"]["num_layers"]
    lines = [
        f"# A draft head for {description['base']}",
        "",
        *_filled(
            "Proposes tokens that the model then verifies: `scripts/generate.py PROMPT --speculate head`. "
            f"{layers} decoder layer{'s' if layers > 1 else ''} of the model's shapes behind a projection of "
            f"[token; hidden state], {num_bytes / 1e6:.1f} MB in bfloat16, "
            f"{facts.get('draft_vocabulary', 'all')} tokens of its vocabulary. "
            "Embedding and LM head are the model's own."
        ),
        "| | |",
        "| --- | --- |",
        "| data | the model's own replies, at temperature 1 and 0, to prompts of "
        "`models/companion_prompts.py`; no text of others |",
        "| licence | Apache-2.0, as the model's |",
        f"| training | {facts['steps']} steps of {facts['batch_size']} rollouts out of {facts['rollouts']}, "
        f"{facts['seconds']:.0f} s on one {facts['device']}, {facts['dtype']} |",
        f"| command | `{facts.get('command', 'python scripts/train_draft.py')}` |",
        *([f"| version | {facts['note']} |"] if "note" in facts else []),
        f"| held out | {_number(facts.get('held_out_chain_tokens'))} tokens a step on given text, the first "
        "tokens of a chain of 4 being right |",
        "",
    ]
    for record in records:
        device = record["facts"]
        lines += [f"Tokens a step, K = {device['num_drafts']}, {device['device']}, held-out prompts:", ""]
        rows = [
            [
                f"`{verify}`",
                *(
                    _told(record, HEAD, verify, t, device["rows"], "tokens_a_step", 3)
                    for t in device["temperatures"]
                ),
            ]
            for verify in CHAIN_VERIFIERS
        ]
        lines += _table(["verifier", *(f"T = {t:g}" for t in device["temperatures"])], rows, 1)
    lines += _filled(
        "Limits: made for this one model and its tokenizer, from English prompts of a few kinds; on other "
        "text it proposes worse, which costs time and leaves the law of what is emitted as it is, at "
        "temperature 0 and under `match` every token, up to roundings of the model (`docs/speculation.md`). "
        "What is faster depends on the device: `docs/results.md` has tokens a second. In the engine it "
        "begins with a request's output and does not see the prompt."
    )
    return "\n".join(lines)


def _of(record, drafter, verify, temperature, rows) -> dict[str, Any]:
    for case in record["cases"]:
        if (case["drafter"], case["verify"], case["temperature"], case["rows"]) == (
            drafter,
            verify,
            temperature,
            rows,
        ):
            return case
    return {}


def _told(record, drafter, verify, temperature, rows, name: str, digits: int) -> str:
    value = _of(record, drafter, verify, temperature, rows).get(name)
    return "" if value is None else f"{value:,.{digits}f}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], num_words: int = 2) -> list[str]:
    rule = [*["---"] * num_words, *["---:"] * (len(head) - num_words)]
    return [f"| {' | '.join(line)} |" for line in (head, rule, *rows)] + [""]


def _filled(words: str) -> list[str]:
    return [*textwrap.wrap(words, _WIDTH, break_on_hyphens=False), ""]
