"""The companions of SmolLM2: python scripts/report_companions.py prompts|measure|write.

    python scripts/report_companions.py prompts --out runs/prompts
    python scripts/report_companions.py measure --prompts runs/prompts/held_out.jsonl
    python scripts/report_companions.py write

`prompts` writes the prompts of `models.companion_prompts` as token ids. `measure` has the model reply to
held-out ones with and without its value model; figures go to models/companions/results/, and no tokenizer is
needed. `write` makes docs/results.md, its plots and the model card of the figures there.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # models/ is not an installed package

from models.command_line import Parser, add_model_flags, load_model
from models.companion_prompts import held_out_prompts, train_prompts
from models.json_fields import prepare


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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    jobs = parser.add_subparsers(required=True, metavar="prompts|measure|write")

    prompts = jobs.add_parser("prompts", help="write the prompts as token ids")
    prompts.set_defaults(run=run_prompts)
    prompts.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
    add_model_flags(prompts)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
