"""scripts/train_value.py: rollouts made, a value model trained, stopped and gone on with, every error one line."""

import json
import shutil

import numpy as np
import pytest

from models.load_value import load_value_model
from models.rollouts import read_rollouts, rollout_line
from scripts.train_value import main, read_prompts
from tests.test_generate import checkpoint, user_cache  # noqa: F401
from tests.test_loaders import same_weights
from tests.test_models import DATA

MODEL = DATA / "qwen3_tied"  # without a tokenizer


@pytest.mark.large
def test_rollouts_train_a_value_model_that_stops_and_goes_on(checkpoint, tmp_path, capsys):  # noqa: F811
    prompts, rollouts, run = tmp_path / "prompts.txt", tmp_path / "rollouts.jsonl", tmp_path / "run"
    prompts.write_text(
        'hey\n\n{"messages": [{"role": "user", "content": "x"}]}\n{"prompt_token_ids": [5, 6]}\n'
    )
    made = ["generate", str(prompts), "--model", str(checkpoint), "--out", str(rollouts)]
    assert main([*made, "--n", "3", "--max-tokens", "6", "--temperature", "1.5"]) == 0
    assert "9/9" in capsys.readouterr().err
    found = read_rollouts([rollouts], 300)
    texts = [x.prompt.tobytes() for x in found]
    assert sorted(set(map(texts.count, texts))) == [3] and bytes(found[0].prompt.astype(np.uint8)) == b"hey\n"
    assert (
        all(x.finished or len(x.output) == 6 for x in found) and len({x.output.tobytes() for x in found}) > 4
    )
    assert main([*made, "--n", "3"]) == 2 and "exists already" in capsys.readouterr().err

    # The model seldom ends by itself; half of its rollouts are made to have.
    lines = [json.loads(line) for line in rollouts.read_text().splitlines()]
    rollouts.write_text(
        "".join(
            json.dumps(x | {"finish_reason": "stop" if k % 2 else "length"}) + "\n"
            for k, x in enumerate(lines)
        )
    )
    train = [
        "train",
        "--rollouts",
        str(rollouts),
        "--init",
        str(checkpoint),
        "--num-layers",
        "1",
        "--out",
        str(run),
    ]
    train += ["--batch-size", "2", "--steps", "4", "--warmup", "1", "--save-every", "2", "--train", "layers"]
    train += ["--learning-rate", "0.01", "--held-out", "0.3", "--gamma", "0.9"]
    assert main(train) == 0
    assert "3 held out" in capsys.readouterr().err
    model = load_value_model(run / "model", np.float32)
    assert model.config.num_layers == 1 and model.gamma == 0.9 and model.text.chat_template
    log = (run / "log.jsonl").read_text()
    assert [json.loads(line)["step"] for line in log.splitlines()] == [2, 4]
    figures = json.loads((run / "figures.json").read_text())
    assert figures["rollouts"] == 3 and 0 < figures["judged"] < 3 and figures["tokens"] > 0

    for folder in (run / "checkpoints" / "4", run / "model"):  # as if it had been stopped at the third step
        shutil.rmtree(folder)
    assert main(train) == 0
    again = load_value_model(run / "model", np.float32)
    assert same_weights(again.weights, model.weights) and (run / "log.jsonl").read_text() == log
    assert main([*train, "--lam", "0.5"]) == 2
    assert "begun with lam 1.0, not 0.5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "generate|train"),
        (["train", "--out", "x"], "--rollouts"),
        (["train", "--rollouts", "nowhere.jsonl", "--out", "x"], "nowhere.jsonl"),
        (["train", "--gamma", "1.5"], "gamma is 1.5"),
        (["train", "--steps", "0"], "--steps"),
        (["train", "--num-layers", "9"], "num_layers is 9"),
        (["train", "--steps", "5", "--warmup", "5"], "warm-up is 5 steps of 5"),
        (["train", "--window", "1"], "no rollout can be trained on"),
        (["train", "--truncated", "mask"], "no rollout can be trained on"),
        (["train", "--lam", "2"], "lam is 2"),
        (["train", "--held-out", "1"], "held-out fraction is 1"),
        (["train", "--out", "."], "exists already"),
        (["train", "--loss", "l1"], "--loss"),
        (["generate", "nowhere.txt"], "nowhere.txt"),
        (["generate", "empty.txt"], "no prompts"),
        (["generate", "wrong.jsonl"], "line 1: needs either"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "wrong.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "r.jsonl").write_text(rollout_line([5, 6], [7, 8], "length") + "\n")
    given = {"train": ["--rollouts", "r.jsonl", "--out", "run"], "generate": ["--out", "new.jsonl"]}
    if arguments and arguments != ["train", "--out", "x"]:
        first, *rest = arguments
        model = ["--init" if first == "train" else "--model", str(MODEL)]
        arguments = [first, *given[first], *model, *rest]
    assert main(arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and named in error
    assert not (tmp_path / "new.jsonl").exists() and not (tmp_path / "run").exists()


def test_prompts_are_lines_of_text_or_of_json(tmp_path):
    path = tmp_path / "prompts"
    path.write_text('Why?\n\n{"prompt": "x", "n": 7, "answer": 1}\n  {"prompt_token_ids": [1]}\n')
    assert read_prompts(path) == [{"prompt": "Why?"}, {"prompt": "x"}, {"prompt_token_ids": [1]}]
