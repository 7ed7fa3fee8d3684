"""Value models beside their base, the prompts they are trained on, and what is told of them."""

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxsample.requests import LENGTH, STOP_EOS
from models.command_line import COMPANIONS, DRAFT_HEAD
from models.companion_measure import by_position, is_ended, summary, truncated
from models.companion_prompts import held_out_prompts, train_prompts
from models.companion_report import card, page
from models.delta import DESCRIPTION, TENSORS, load_delta, save_delta
from models.generation import Sample, TokenLogprobs
from models.joining import join_projections
from models.load import LoadedModel, load
from models.load_value import load_value_model
from models.rollouts import rollout_line
from models.value_head import head_shapes
from models.value_report import Predictions
from models.value_training import first_layers, join_weights, split_weights
from scripts import generate, report_companions, train_value
from tests.test_generate import user_cache  # noqa: F401
from tests.test_loaders import same_weights
from tests.test_models import DATA

BASE, OTHER = DATA / "qwen3_tied", DATA / "qwen2_tied"
NUM_LAYERS, NUM_SHARED = 2, 1
# Of the prompts that the shipped model was trained on, in their order.
PROMPTS_SHA256 = "71b1ae6923f15a2fe62d0b43d7db7c33a474fd561f55a36853e5723ce8da3143"


def copy_of(tree):
    return jax.tree.map(lambda leaf: jnp.array(leaf), tree)


def rounded(leaf):
    return leaf.astype(jnp.bfloat16).astype(jnp.float32)


@pytest.fixture(scope="module")
def whole():
    """A base model, and a value model whose second layer, norm and head are its own: (base, config, weights)."""
    base = load(BASE, np.float32)
    config, weights = first_layers(base.config, base.weights, NUM_LAYERS, seed=3)
    trained, frozen = split_weights(weights, "last:1")
    moved = jax.tree.map(lambda leaf: rounded(leaf * 1.25 + 0.01), trained["trunk"])
    return base, config, join_weights({"trunk": moved, "head": trained["head"]}, frozen)


@pytest.fixture
def folder(whole, tmp_path):
    base, config, weights = whole
    save_delta(
        tmp_path / "delta",
        config,
        weights,
        0.95,
        num_shared=NUM_SHARED,
        base="tiny",
        base_weights=base.weights,
    )
    return tmp_path / "delta"


def test_beside_its_base_a_delta_is_the_whole_value_model_and_the_base_s_arrays_are_shared(whole, folder):
    base, config, weights = whole
    model = load_value_model(folder, np.float32, base)
    assert (model.config, model.gamma) == (config, 0.95)
    assert same_weights(model.weights, weights)
    trunk = model.weights["trunk"]
    assert trunk["embedding"]["weight"] is base.weights["embedding"]["weight"]
    assert trunk["layers"][0] is base.weights["layers"][0]
    names = set(load_file(folder / TENSORS))
    assert {name.split(".")[2] for name in names if name.startswith("model.layers")} == {str(NUM_SHARED)}
    assert not any("embed" in name for name in names) and "model.norm.weight" in names


def test_a_base_in_bfloat16_is_the_same_base_and_one_with_joined_projections_gets_joined_layers(
    whole, folder
):
    base, _, weights = whole
    model = load_value_model(folder, jnp.bfloat16, load(BASE, jnp.bfloat16))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(model.weights["trunk"])} == {"bfloat16"}
    assert same_weights(model.weights["head"], weights["head"])
    joined = join_projections(base.config, copy_of(base.weights))
    config, found, _ = load_delta(folder, *joined)
    assert config.joined_projections and config.num_layers == NUM_LAYERS
    separate = dataclasses.replace(config, joined_projections=False)
    assert same_weights(found["trunk"], join_projections(separate, copy_of(weights["trunk"]))[1])


def damaged(folder, change):
    fields = json.loads((folder / DESCRIPTION).read_text())
    change(fields)
    (folder / DESCRIPTION).write_text(json.dumps(fields))


def test_another_base_and_damaged_folders_are_refused_in_words(whole, folder, tmp_path):
    base, config, weights = whole
    with pytest.raises(ValueError, match="loaded beside its base model only"):
        load_value_model(folder, np.float32)
    with pytest.raises(ValueError, match="dtype is bfloat16, allowed is that of the base model, float32"):
        load_value_model(folder, jnp.bfloat16, base)
    with pytest.raises(
        ValueError, match="a value model for tiny, not for this model: vocab_size is 257, not 233"
    ):
        load_value_model(folder, np.float32, load(OTHER, np.float32))
    changed = {**base.weights, "norm": {"weight": base.weights["norm"]["weight"] * 1.5}}
    with pytest.raises(ValueError, match="the shapes are the same, the weights are not"):
        load_value_model(folder, np.float32, LoadedModel(base.config, changed, None))
    with pytest.raises(ValueError, match="exists already"):
        save_delta(folder, config, weights, 0.9, num_shared=1, base="x", base_weights=base.weights)
    with pytest.raises(ValueError, match=r"num_shared is 3, allowed is 0 \.\.\. 2"):
        save_delta(tmp_path / "x", config, weights, 0.9, num_shared=3, base="x", base_weights=base.weights)
    for change, message in (
        (lambda fields: fields.update(format=9), "format 9, expected 1"),
        (lambda fields: fields.update(gamma=1.5), "gamma 1.5, num_layers 2 and num_shared 1 make no sense"),
        (lambda fields: fields["base"].pop("width"), "damaged"),
    ):
        other = tmp_path / "damaged"
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(folder, other)
        damaged(other, change)
        with pytest.raises(ValueError, match=message):
            load_value_model(other, np.float32, base)
    tensors = load_file(folder / TENSORS)
    tensors["v_head.fc.bias"] = tensors["v_head.fc.bias"][:-1]
    del tensors["model.norm.weight"]
    save_file(tensors, folder / TENSORS)
    with pytest.raises(ValueError, match=r"misshapen tensors: model\.norm\.weight, v_head\.fc\.bias"):
        load_value_model(folder, np.float32, base)
    (folder / TENSORS).unlink()
    with pytest.raises(ValueError, match=f"no {TENSORS}"):
        load_value_model(folder, np.float32, base)


@pytest.mark.parametrize(
    ("train", "layers", "norm"), [("last", {1}, True), ("last:2", {0, 1}, True), ("head", set(), False)]
)
def test_the_last_layers_are_trained_and_the_rest_is_given_back_as_it_was(whole, train, layers, norm):
    _, _, weights = whole
    trained, frozen = split_weights(weights, train)
    assert set(trained["trunk"].get("layers", {})) == layers and ("norm" in trained["trunk"]) == norm
    assert "embedding" in frozen["trunk"] and same_weights(join_weights(trained, frozen), weights)
    with pytest.raises(ValueError, match=r"train is 'last:3', allowed is last:1 \.\.\. last:2"):
        split_weights(weights, "last:3")
    for word in ("last:", "last:0", "head:1", "most"):
        with pytest.raises(ValueError, match="train is"):
            split_weights(weights, word)


@pytest.mark.slow
def test_training_the_last_layer_changes_nothing_else_goes_on_and_gives_a_delta(tmp_path, capsys):
    rollouts, run = tmp_path / "r.jsonl", tmp_path / "run"
    lines = [rollout_line([5, 6 + k % 4], [20 + k, 21, 22, 3][k % 3 :], "stop") for k in range(12)]
    rollouts.write_text("\n".join(lines))
    train = [
        "train",
        "--rollouts",
        str(rollouts),
        "--init",
        str(BASE),
        "--num-layers",
        "2",
        "--train",
        "last",
    ]
    train += ["--delta", "tiny", "--batch-size", "4", "--steps", "4", "--warmup", "1", "--save-every", "2"]
    train += ["--learning-rate", "0.01", "--held-out", "0.3", "--gamma", "0.9", "--out", str(run)]
    assert train_value.main(train) == 0
    base = load(BASE, np.float32)
    model = load_value_model(run / "model", np.float32, base)
    _, begun = first_layers(base.config, base.weights, 2, 0)
    assert not same_weights(model.weights["trunk"]["layers"][1], begun["trunk"]["layers"][1])
    fields = json.loads((run / "model" / DESCRIPTION).read_text())
    own = [begun["trunk"]["layers"][1], begun["trunk"]["norm"], head_shapes(base.config.width)]
    assert fields["facts"]["trained_numbers"] == sum(leaf.size for leaf in jax.tree.leaves(own))
    assert fields["facts"]["num_rollouts"] == 12 and fields["facts"]["seconds"] > 0
    for folder in (run / "checkpoints" / "4", run / "model"):  # as if it had been stopped at the third step
        shutil.rmtree(folder)
    assert train_value.main(train) == 0
    assert same_weights(load_value_model(run / "model", np.float32, base).weights, model.weights)

    capsys.readouterr()
    guided = ["5 6", "--token-ids", "--guide", str(run / "model"), "--top-k", "4", "--guide-scale", "2"]
    assert generate.main([*guided, "--model", str(OTHER)]) == 2
    assert "a value model for tiny, not for this model" in capsys.readouterr().err
    words = card(fields, None, 1000)
    assert "4 steps of 4 replies" in words and "Not measured yet." in words


def test_prompts_never_change_are_all_different_and_held_out_ones_are_about_other_things():
    trained, held_out = train_prompts(), held_out_prompts()
    assert (len(trained), len(held_out)) == (4200, 200)
    assert len({prompt.text for prompt in trained + held_out}) == 4400
    assert not {prompt.topic for prompt in trained} & {prompt.topic for prompt in held_out}
    kinds, judged = ({prompt.kind for prompt in prompts} for prompts in (trained, held_out))
    assert len(kinds) == 20 and len(kinds - judged) <= 1 and judged <= kinds
    text = "\n".join(prompt.text for prompt in trained + held_out)
    assert hashlib.sha256(text.encode()).hexdigest() == PROMPTS_SHA256
    with pytest.raises(ValueError, match=r"count is 9999, allowed is 1 \.\.\."):
        held_out_prompts(9999)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "--train", "most"], "train is 'most'"),
        (
            ["train", "--train", "last:9", "--num-layers", "2"],
            "train is 'last:9', allowed is last:1 ... last:2",
        ),
        (["train", "--delta", "x"], "--train is all, allowed with --delta are last, last:K and head"),
        (["generate", "p.jsonl", "--random-weights", "smollm2-135m", "--model", "x"], "two models"),
    ],
)
def test_wrong_flags_of_training_are_one_line_and_exit_code_2(
    tmp_path, monkeypatch, capsys, arguments, named
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.jsonl").write_text(rollout_line([5, 6], [7, 8], "stop") + "\n")
    (tmp_path / "p.jsonl").write_text('{"prompt_token_ids": [5]}\n')
    given = {"train": ["--rollouts", "r.jsonl", "--init", str(BASE)], "generate": []}[arguments[0]]
    assert train_value.main([*arguments, *given, "--out", "new"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and named in error


def sample(logprobs, status):
    entries = [TokenLogprobs(7, logprob, 1, []) for logprob in logprobs]
    return Sample([7] * len(logprobs), entries, status)


def test_lengths_hits_and_perplexity_by_hand():
    short, long = sample([-1.0] * 9, STOP_EOS), sample([-2.0] * 20, LENGTH)
    found = summary([short, long], 10)
    assert (found["replies"], found["mean"], found["std"], found["ended"]) == (2, 14.5, 5.5, 0.5)
    assert found["perplexity"] == pytest.approx(np.exp((9 * 1 + 20 * 2) / 29))
    assert found["hits"] == [0.5, 0.5] and found["ended_hits"] == [0.5, 0.5]
    cut = [truncated(x, 10) for x in (short, long)]
    assert [len(x.token_ids) for x in cut] == [9, 10] and [is_ended(x) for x in cut] == [True, False]
    found = summary(cut, 10)
    assert found["hits"] == [1.0, 1.0] and found["ended_hits"] == [0.5, 0.5]
    assert found["perplexity"] == pytest.approx(np.exp((9 * 1 + 10 * 2) / 19))


def test_errors_by_position_by_hand():
    gamma = 0.5
    # v = 1 - gamma^l as a logit, for predicted lengths 2, 2 and 4 where 4, 2 and 1 tokens came; and EOS.
    z = np.log((1 - gamma ** np.array([2.0, 2, 4, 1])) / gamma ** np.array([2.0, 2, 4, 1]))
    found = by_position(
        Predictions(z.astype(np.float32), np.array([0, 3, 4, 5]), np.array([4, 2, 1, 0]), np.zeros(4, int)),
        gamma,
    )
    assert [(x["from"], x["to"], x["tokens"]) for x in found] == [(0, 0, 1), (1, 7, 2)]
    assert found[0]["mean"] == pytest.approx(0.5) and found[0]["constant"] == pytest.approx(0)
    assert found[1]["mean"] == pytest.approx(1.5) and found[1]["median"] == pytest.approx(1.5)
    best = -np.log2((0.25 + 0.5) / 2)
    assert found[1]["constant"] == pytest.approx((abs(best - 2) / 2 + abs(best - 1)) / 2)


def test_a_page_is_made_of_records_alone_and_the_one_kept_is_that_of_the_records_kept(tmp_path):
    assert "There is no record yet." in page(None, None) and page(None, "## Draft\n").endswith("\n## Draft\n")
    options = ["write", "--no-plots", "--docs", str(tmp_path)]
    options += ["--companion", str(tmp_path), "--head", str(tmp_path / "head")]
    shipped = COMPANIONS["smollm2"]
    if shipped.is_dir():
        for name in (DESCRIPTION, TENSORS):
            shutil.copy(shipped / name, tmp_path / name)
    if DRAFT_HEAD.is_dir():
        shutil.copytree(DRAFT_HEAD, tmp_path / "head")
        (tmp_path / "head" / "README.md").unlink(missing_ok=True)
    assert report_companions.main([*options, "--head", str(tmp_path / "head")]) == 0
    kept = (report_companions.ROOT / "docs" / "results.md").read_text()
    assert (tmp_path / "results.md").read_text() == kept
    if shipped.is_dir():
        assert (tmp_path / "README.md").read_text() == (shipped / "README.md").read_text()
        assert sum(path.stat().st_size for path in shipped.iterdir()) < 10e6
    if DRAFT_HEAD.is_dir():
        assert (tmp_path / "head" / "README.md").read_text() == (DRAFT_HEAD / "README.md").read_text()
        assert sum(path.stat().st_size for path in DRAFT_HEAD.iterdir()) < 10e6


@pytest.mark.large
def test_a_value_model_is_measured_and_told_of(whole, folder, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt_token_ids": [5, 6]}\n{"prompt_token_ids": [7]}\n')
    common = ["--model", str(BASE), "--token-ids"]
    asked = [
        "measure",
        "--prompts",
        str(tmp_path / "p.jsonl"),
        "--guide",
        str(folder),
        *common,
        "--rows",
        "8",
    ]
    asked += ["--scales", "-3", "3", "--factors", "2", "--targets", "4", "--top-k", "4", "--max-tokens", "8"]
    asked += ["--judged-tokens", "12"]
    records = tmp_path / "results"
    records.mkdir()
    wanted = [*asked, "--out", str(records / "value.json")]
    assert report_companions.main(wanted) == 2  # nothing ends a reply
    assert report_companions.main([*wanted, "--eos-token-id", "3", "4"]) == 0
    figures = json.loads((records / "value.json").read_text())
    ways = [(case["way"], case["at"]) for case in figures["cases"]]
    assert ways == [
        ("plain", None), ("unfiltered", None), ("centered_exp", -3.0), ("centered_exp", 3.0), ("length_mul", 2.0),
        ("eq_soft", 4), ("eq", 4), ("plain", 4), ("truncated", 4),
    ]  # fmt: skip
    assert all(case["perplexity"] > 1 and 1 <= case["mean"] <= 8 for case in figures["cases"])
    write = ["write", "--results", str(records), "--docs", str(tmp_path / "docs")]
    write += ["--companion", str(tmp_path), "--head", str(tmp_path / "head")]
    assert report_companions.main([*write, *common]) == 0
    words = (tmp_path / "docs" / "results.md").read_text()
    assert "| `centered_exp` | -3 |" in words and "| 4 | cut off at the target |" in words


@pytest.mark.slow
def test_models_without_a_text_side_need_no_packages_for_texts():
    program = (
        "import sys\n"
        "for name in ('gguf', 'tokenizers', 'jinja2', 'matplotlib'): sys.modules[name] = None\n"
        "from scripts import report_companions, train_value\n"
        "from models.load import load\n"
        f"print(load({str(BASE)!r}, 'float32').text)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=report_companions.ROOT, capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("None\n", 0), done.stderr
