"""The companions of SmolLM2: python scripts/report_companions.py prompts|measure|write.

    python scripts/report_companions.py prompts --out runs/prompts
    python scripts/report_companions.py measure --prompts runs/prompts/held_out.jsonl
    python scripts/report_companions.py write

`prompts` writes the prompts of `models.companion_prompts` as token ids. `measure` has the model reply to
held-out ones with and without its value model; figures go to models/companions/results/, and no tokenizer is
needed. `write` makes docs/results.md, its plots and the model card of the figures there.
"""

import argparse
import dataclasses
import importlib
import importlib.util
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
from models.json_fields import prepare
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
    guide, text = load_guide(options, model), model.text
    assert guide is not None  # there is a default
    assert text is not None  # `load_model` refuses models without
    wishes = read_prompts(options.prompts)[: options.num_prompts]
    prompts = [prepare(wish, text, raw=options.raw)[0] for wish in wishes]
    eos = options.eos_token_id or text.eos_token_ids
    if not eos:
        raise ValueError("nothing ends a reply: give --eos-token-id")
    started = time.perf_counter()
    say = lambda line: print(line, file=sys.stderr, flush=True)
    figures = measure(model.config, model.weights, guide, prompts, eos, aims, options.rows, say)
    figures["facts"]["seconds"] = round(time.perf_counter() - started, 1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, figures)
    say(f"figures in {options.out}")


def run_write(options: argparse.Namespace) -> None:
    """Writes the page, its plots and the model card of the records that are there."""
    records = {path.stem: read_json(path) for path in sorted(options.results.glob("*.json"))}
    value, draft = records.get("value"), records.get("draft")
    if value is not None and any("text" not in entry for entry in value["shown"]):
        value["shown"] = with_texts(value, options)
        write_json(options.results / "value.json", value)
    section = None
    if draft is not None and importlib.util.find_spec("models.draft_section") is not None:
        section = importlib.import_module("models.draft_section").draft_section(draft)
    options.docs.mkdir(parents=True, exist_ok=True)
    (options.docs / "results.md").write_text(page(value, section), encoding="utf-8")
    if value is not None and not draw(options.docs / PLOTS, value):
        print("no plots: matplotlib is not installed", file=sys.stderr)
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
    jobs = parser.add_subparsers(required=True, metavar="prompts|measure|write")

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

    write = jobs.add_parser("write", help="make the page, its plots and the model card")
    write.set_defaults(run=run_write)
    write.add_argument("--results", type=pathlib.Path, default=RESULTS, metavar="DIR", help="of the records")
    write.add_argument("--docs", type=pathlib.Path, default=ROOT / "docs", metavar="DIR")
    write.add_argument("--companion", type=pathlib.Path, metavar="DIR", help="the value model, for its card")
    add_model_flags(write)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
