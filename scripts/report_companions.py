"""The companions of SmolLM2: python scripts/report_companions.py prompts|measure|drafts|write.

    python scripts/report_companions.py prompts --out runs/prompts
    python scripts/report_companions.py measure --prompts runs/prompts/held_out.jsonl
    python scripts/report_companions.py drafts --prompts runs/prompts/held_out.jsonl
    python scripts/report_companions.py write

`prompts` writes the prompts of `models.companion_prompts` as token ids. `measure` has the model reply to
held-out ones with and without its value model; figures go to models/companions/results/, and no tokenizer is
needed. `drafts` has it reply plainly, with n-grams and with its draft head, a record a device. `write` makes
docs/results.md, its plots and the model cards of the figures there.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # models/ is not an installed package

from models.checkpoints import write_json
from models.command_line import (
    COMPANIONS,
    DRAFT_HEAD,
    Parser,
    add_model_flags,
    keep_compiled_programs,
    load_guide,
    load_model,
)
from models.companion_measure import Aims, measure
from models.companion_prompts import held_out_prompts, train_prompts
from models.companion_report import PLOTS, card, draw, page
from models.delta import DESCRIPTION, TENSORS
from models.draft_measure import DraftAims, measure_drafts
from models.draft_section import draft_card, draft_section, draw_drafts
from models.json_fields import prepare
from models.load import LoadedModel
from models.load_draft import DESCRIPTION as HEAD_DESCRIPTION
from models.load_draft import TENSORS as HEAD_TENSORS
from models.load_draft import load_draft_head
from models.load_safetensors import read_json
from models.prompt_files import read_prompts

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "models" / "companions" / "results"
_SHOWN = 300  # characters of a reply that is shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 0, or 2 with one line on standard error for what the user can mend."""
    try:
        options = parse(arguments)
        options.run(options)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def run_prompts(options: argparse.Namespace) -> None:
    """Writes train.jsonl and held_out.jsonl: one prompt a line, as the user's turn of a chat."""
    text = load_model(options).text
    assert text is not None  # `load_model` refuses models without
    options.out.mkdir(parents=True, exist_ok=True)
    for name, prompts in (("train", train_prompts()), ("held_out", held_out_prompts())):
        with (options.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for prompt in prompts:
                ids, _ = prepare({"prompt": prompt.text}, text, raw=options.raw)
                fields = {"kind": prompt.kind, "topic": prompt.topic, "text": prompt.text}
                print(json.dumps({**fields, "prompt_token_ids": ids}), file=file)
        print(f"{options.out / name}.jsonl: {len(prompts)} prompts", file=sys.stderr)


def run_measure(options: argparse.Namespace) -> None:
    """Draws replies to held-out prompts in all ways, and writes the figures."""
    given = {name: getattr(options, name) for name in dataclasses.asdict(Aims())}
    asked: dict[str, Any] = {
        name: tuple(x) if isinstance(x, list) else x for name, x in given.items() if x is not None
    }
    aims = dataclasses.replace(Aims(), **asked)
    keep_compiled_programs()
    model = load_model(options)
    guide = load_guide(options, model)
    assert guide is not None  # there is a default
    prompts, eos = read_held_out(options, model)
    started = time.perf_counter()
    say = lambda line: print(line, file=sys.stderr, flush=True)
    figures = measure(model.config, model.weights, guide, prompts, eos, aims, options.rows, say)
    figures["facts"]["seconds"] = round(time.perf_counter() - started, 1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, figures)
    say(f"figures in {options.out}")


def read_held_out(options: argparse.Namespace, model: LoadedModel) -> tuple[list[list[int]], Sequence[int]]:
    """The prompts as token ids, and the ids that end a reply."""
    text = model.text
    assert text is not None  # `load_model` refuses models without
    wishes = read_prompts(options.prompts)[: options.num_prompts]
    eos = options.eos_token_id or text.eos_token_ids
    if not eos:
        raise ValueError("nothing ends a reply: give --eos-token-id")
    return [prepare(wish, text, raw=options.raw)[0] for wish in wishes], eos


def run_drafts(options: argparse.Namespace) -> None:
    """Draws replies to held-out prompts with all drafters, and writes the figures of this device."""
    keep_compiled_programs()
    model = load_model(options)
    head = load_draft_head(options.head, model.config)
    prompts, eos = read_held_out(options, model)
    aims = DraftAims(num_drafts=options.num_draft, max_tokens=options.max_tokens, rows=options.rows)
    aims = dataclasses.replace(aims, alone=options.alone)
    say = lambda line: print(line, file=sys.stderr, flush=True)
    figures = measure_drafts(model.config, model.weights, head, prompts, eos, aims, say)
    out = options.out or RESULTS / f"draft.{figures['facts']['platform']}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, figures)
    say(f"figures in {out}")


def run_write(options: argparse.Namespace) -> None:
    """Writes the page, its plots and the model card of the records that are there."""
    if not options.results.is_dir():
        raise ValueError(f"--results is {options.results}: no such folder")
    records = {path.stem: read_json(path) for path in sorted(options.results.glob("*.json"))}
    value = records.get("value")
    drafts = [record for name, record in records.items() if name.startswith("draft.")]
    if value is not None and any("text" not in entry for entry in value["shown"]):
        value["shown"] = with_texts(value, options)
        write_json(options.results / "value.json", value)
    drafts.sort(key=lambda record: record["facts"]["platform"] == "cpu")
    section = draft_section(drafts) if drafts else None
    options.docs.mkdir(parents=True, exist_ok=True)
    (options.docs / "results.md").write_text(page(value, section), encoding="utf-8")
    if not options.no_plots:
        drawn = value is None or draw(options.docs / PLOTS, value)
        if not (drawn and (not drafts or draw_drafts(options.docs / PLOTS, drafts))):
            print("no plots: matplotlib is not installed", file=sys.stderr)
    if (options.head / HEAD_DESCRIPTION).is_file():
        num_bytes = (options.head / HEAD_TENSORS).stat().st_size
        words = draft_card(read_json(options.head / HEAD_DESCRIPTION), drafts, num_bytes)
        (options.head / "README.md").write_text(words, encoding="utf-8")
    folder = COMPANIONS["smollm2"] if options.companion is None else options.companion
    if (folder / DESCRIPTION).is_file():
        num_bytes = sum((folder / name).stat().st_size for name in (DESCRIPTION, TENSORS))
        words = card(read_json(folder / DESCRIPTION), value, num_bytes)
        (folder / "README.md").write_text(words, encoding="utf-8")


def with_texts(figures: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The replies that are shown as text, of those ways that tell something, each cut to its beginning."""
    text = load_model(options).text
    assert text is not None  # `load_model` refuses models without
    ends = [max(figures["facts"][name], key=abs) for name in ("scales", "factors")]
    ends += [min(figures["facts"][name]) for name in ("scales", "factors", "targets")]
    kept = []
    for entry in figures["shown"]:
        if entry["at"] not in (None, 0.0, *ends) or entry["way"] == "eq":
            continue
        said = " ".join(text.decode(entry["token_ids"]).split()).replace("|", "\\|")
        asked = text.decode(entry["prompt_token_ids"]).rsplit("user\n", 1)[-1].split("\n")[0]
        cropped = said if len(said) <= _SHOWN else f"{said[:_SHOWN]} ..."
        kept.append({**entry, "text": cropped, "prompt_text": asked})
    return kept


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    jobs = parser.add_subparsers(required=True, metavar="prompts|measure|drafts|write")

    prompts = jobs.add_parser("prompts", help="write the prompts as token ids")
    prompts.set_defaults(run=run_prompts)
    prompts.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
    add_model_flags(prompts)

    made = jobs.add_parser("measure", help="reply to held-out prompts in all ways, keep the figures")
    made.set_defaults(run=run_measure, guide_gamma=None)
    made.add_argument("--prompts", type=pathlib.Path, required=True, metavar="JSONL")
    made.add_argument("--num-prompts", type=int, metavar="N", help="the first N; default all")
    made.add_argument("--guide", type=pathlib.Path, default=pathlib.Path("smollm2"), metavar="PATH")
    made.add_argument("--eos-token-id", type=int, nargs="+", metavar="ID", help="default: the tokenizer's")
    made.add_argument("--rows", type=int, default=256, help="replies at once, default %(default)s")
    made.add_argument("--out", type=pathlib.Path, default=RESULTS / "value.json", metavar="JSON")
    for name, default in dataclasses.asdict(Aims()).items():
        several = isinstance(default, tuple)
        kind, shown = (type(default[0]), " ".join(map(str, default))) if several else (type(default), default)
        flag = f"--{name.replace('_', '-')}"
        made.add_argument(flag, type=kind, nargs="+" if several else None, help=f"default {shown}")
    add_model_flags(made)

    drafts = jobs.add_parser("drafts", help="reply to held-out prompts with all drafters, keep the figures")
    drafts.set_defaults(run=run_drafts)
    drafts.add_argument("--prompts", type=pathlib.Path, required=True, metavar="JSONL")
    drafts.add_argument(
        "--num-prompts", type=int, default=64, metavar="N", help="the first N, default %(default)s"
    )
    drafts.add_argument("--head", type=pathlib.Path, default=DRAFT_HEAD, metavar="DIR", help="the draft head")
    drafts.add_argument("--eos-token-id", type=int, nargs="+", metavar="ID", help="default: the tokenizer's")
    drafts.add_argument("--num-draft", type=int, default=4, metavar="K", help="default %(default)s")
    drafts.add_argument("--max-tokens", type=int, default=128, help="default %(default)s")
    drafts.add_argument("--rows", type=int, default=16, help="replies at once, default %(default)s")
    drafts.add_argument("--alone", type=int, default=8, help="prompts timed at B = 1, default %(default)s")
    drafts.add_argument("--out", type=pathlib.Path, metavar="JSON", help="default: by the device")
    add_model_flags(drafts)

    write = jobs.add_parser("write", help="make the page, its plots and the model card")
    write.set_defaults(run=run_write)
    write.add_argument("--results", type=pathlib.Path, default=RESULTS, metavar="DIR", help="of the records")
    write.add_argument("--no-plots", action="store_true", help="the page and the card alone")
    write.add_argument("--docs", type=pathlib.Path, default=ROOT / "docs", metavar="DIR")
    write.add_argument("--head", type=pathlib.Path, default=DRAFT_HEAD, metavar="DIR", help="the draft head")
    write.add_argument("--companion", type=pathlib.Path, metavar="DIR", help="the value model, for its card")
    add_model_flags(write)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
