"""Draft heads: learnt laws, chains as they are drawn, files, the training script."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxsample import Features, Limits, empty_head_state, init_cache, observe_prompt
from models import draft_measure, draft_section
from models.decoder import DecoderConfig
from models.draft_batches import frequent_tokens, learnable, make_draft_batch
from models.draft_head import DraftHead, draft_functions, head_config, head_shapes, join_base
from models.draft_training import (
    Aims,
    chain_outputs,
    first_head,
    frozen_weights,
    hidden_states,
    learnt_positions,
    make_draft_step,
    make_judge,
)
from models.load_draft import load_draft_head, save_draft_head
from models.random_weights import fill_randomly, random_weights
from models.rollouts import Rollout, rollout_line
from models.safetensors_file import SafetensorsFile, write_tensors
from models.speculation import Speculation, prepare
from models.value_training import TrainState, make_optimizer
from scripts.generate import main as generate
from scripts.train_draft import main
from tests.test_generate import checkpoint, user_cache  # noqa: F401
from tests.test_models import DATA

BASE = DecoderConfig(
    vocab_size=24, width=16, num_layers=2, num_heads=2, num_kv_heads=1, head_size=8, mlp_width=24, norm_eps=1e-6,
    rope_theta=1e4, tied_embeddings=True, max_length=64,
)  # fmt: skip


def rollout(prompt, output):
    return Rollout(np.asarray(prompt, np.int32), np.asarray(output, np.int32), True)


def random_rollouts(number, seed=0):
    rng = np.random.default_rng(seed)
    return [rollout(rng.integers(0, 24, 3), rng.integers(0, 24, rng.integers(4, 9))) for _ in range(number)]


@pytest.fixture(scope="module")
def base():
    weights = random_weights(BASE, 3)
    weights["embedding"]["weight"] = 3 * weights["embedding"]["weight"]  # sharper laws
    return weights


def test_training_sees_chains_as_they_are_drawn(base):
    """Pass s at position j is s - 1 outputs fed back behind the slots start ... j - s + 1, made of true hidden states."""
    config, head = first_head(BASE, base, 1, seed=0)
    batch = make_draft_batch(random_rollouts(2), 12, 2, without_prompt=0.5)
    hidden = hidden_states(BASE)(base, batch.tokens)
    found = chain_outputs(config)(head, base["embedding"]["weight"], batch, hidden, 3)
    forward, weights = jax.jit(draft_functions(config)[0]), join_base(DraftHead(config, head, None), base)
    nothing = init_cache(1, 1, 0, config.num_kv_heads, config.head_size, jnp.float32)
    mask, begin = jnp.asarray(np.tri(9, dtype=bool))[None], 4
    for row, start in enumerate([2, 0]):  # row 0 begins at the last token of its prompt
        assert batch.start[row] == start
        tokens = jnp.asarray(np.pad(batch.tokens[row], (0, 9))[None, start + 1 : start + 10])
        positions = start + jnp.arange(9, dtype=jnp.int32)[None]
        inputs = jnp.pad(hidden[row : row + 1, start : begin + 1], ((0, 0), (0, 9), (0, 0)))[:, :9]
        for number in range(3):
            place = begin + number - start
            outputs, _ = forward(
                weights, tokens, inputs, positions, nothing, mask
            )  # no token sees those behind it
            np.testing.assert_allclose(outputs[0, place], found[number][row, begin + number], atol=2e-5)
            inputs = inputs.at[:, place + 1].set(outputs[:, place])


def test_a_prompt_is_taken_in_as_in_training(base):
    """What a head knows behind the prompt is what training has there, and so are its keys."""
    config, head = first_head(BASE, base, 1, seed=0)
    batch = make_draft_batch([rollout([3, 1, 4, 1, 5], [9, 2, 6])], 8, 1)
    hidden = hidden_states(BASE)(base, batch.tokens)
    found = chain_outputs(config)(head, base["embedding"]["weight"], batch, hidden, 1)[0]
    forward, weights = jax.jit(draft_functions(config)[0]), join_base(DraftHead(config, head, None), base)
    state = empty_head_state(init_cache(1, 1, 8, config.num_kv_heads, config.head_size, jnp.float32), 16)
    seed, chunk = jnp.asarray([[1, 2]], jnp.uint32), lambda array, at: array[:, at : at + 2]
    for at in (0, 2):
        given = (
            chunk(hidden, at),
            jnp.asarray(chunk(batch.tokens[:, 1:], at)),
            jnp.asarray([at]),
            jnp.asarray([2]),
        )
        state = observe_prompt(forward, weights, state, *given, seed)
    assert batch.first[0] == 4 and state.past.num_emitted.tolist() == [0]
    np.testing.assert_allclose(state.hidden[0], found[0, 3], atol=2e-5)


def test_what_is_learnt_are_the_laws_of_output_tokens():
    batch = make_draft_batch([rollout([1, 2, 3], [4, 5, 6]), rollout([1], [2, 3])], 8, 3, without_prompt=0.4)
    np.testing.assert_array_equal(batch.start, [2, 0, 0])
    places = lambda number: [
        np.flatnonzero(row).tolist() for row in np.asarray(learnt_positions(batch, number))
    ]
    # Row 0 sees nothing before the last prompt token, so that its first law is that of the second output token.
    assert places(1) == [[2, 3], [0], []]
    assert places(2) == [[3], [], []]
    whole = make_draft_batch([rollout([1, 2, 3], [4, 5, 6])], 8, 1)
    assert np.flatnonzero(np.asarray(learnt_positions(whole, 1))[0]).tolist() == [1, 2, 3]
    assert learnable([rollout([1], [2])], 9) == [] == learnable([rollout([1] * 8, [2, 3])], 9)


def test_the_draft_vocabulary_is_the_most_frequent_tokens():
    ids, share = frequent_tokens([rollout([9, 9, 9], [5, 3, 5]), rollout([9], [7, 5])], 12, 2)
    assert ids.tolist() == [3, 5] and ids.dtype == np.int32 and share == 4 / 5
    with pytest.raises(ValueError, match="13 tokens, allowed is 1"):
        frequent_tokens([rollout([1], [2])], 12, 13)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"num_passes": 0}, "passes are 0"),
        ({"decay": 0.0}, "decay is 0"),
        ({"regression": -1.0}, "regression is -1"),
    ],
)
def test_aims_out_of_range_are_refused(wrong, named):
    with pytest.raises(ValueError, match=named):
        Aims(**wrong)


@pytest.mark.large
def test_a_head_learns_what_its_base_says(base):
    config = head_config(BASE)
    head = fill_randomly(head_shapes(config), 5, jnp.float32)
    frozen = frozen_weights(base, np.arange(1, 24, dtype=np.int32), jnp.float32)
    optimizer = make_optimizer(1e-2, 5, 120)
    step = make_draft_step(BASE, config, optimizer, Aims(2, 0.8, 0.1), jnp.float32)
    judge = make_judge(BASE, config, 2, jnp.float32)
    train, held_out = random_rollouts(64, 1), make_draft_batch(random_rollouts(32, 2), 12, 32)
    before = judge(head, frozen, held_out)
    state = TrainState(head, optimizer.init(head))
    losses = []
    for number in range(120):
        chosen = [train[(16 * number + row) % 64] for row in range(16)]
        state, metrics = step(state, frozen, make_draft_batch(chosen, 12, 16, 0.25))
        losses.append(float(metrics["loss"]))
    after = judge(state.trained, frozen, held_out)
    assert np.mean(losses[-10:]) < 0.4 * np.mean(losses[:3])
    share = lambda sums, name: np.asarray(sums[name] / sums["positions"])
    for name in ("same", "overlap", "chain"):
        assert (share(after, name) > share(before, name) + 0.1).all(), (
            name,
            share(before, name),
            share(after, name),
        )
    assert (after["chain"] <= after["same"]).all() and after["chain"][0] == after["same"][0]


@pytest.fixture
def saved(tmp_path):
    """A folder of a head with a draft vocabulary of 12 tokens."""
    weights = fill_randomly(head_shapes(BASE), 1, jnp.float32)
    config = head_config(BASE)
    weights["layers"] = {0: weights["layers"][0]}
    save_draft_head(
        tmp_path / "head", DraftHead(config, weights, np.arange(3, 15, dtype=np.int32)), "tiny", {}
    )
    return tmp_path / "head"


def test_a_head_comes_back_from_its_folder_in_two_bytes_a_number(saved, base):
    head = load_draft_head(saved, BASE)
    assert head.ids.tolist() == list(range(3, 15)) and head.config == head_config(BASE)
    assert jax.tree.map(lambda leaf: leaf.shape, head.weights) == jax.tree.map(
        lambda leaf: leaf.shape, head_shapes(head.config)
    )
    num_bytes = sum(2 * leaf.size for leaf in jax.tree.leaves(head.weights)) + 12 * 4
    assert num_bytes < (saved / "draft_head.safetensors").stat().st_size < num_bytes + 4096
    logits = draft_functions(head.config)[1](join_base(head, base), jnp.ones((1, 1, 16)))
    assert np.flatnonzero(np.isfinite(np.asarray(logits[0, 0]))).tolist() == head.ids.tolist()
    with pytest.raises(ValueError, match="exists already"):
        save_draft_head(saved, head, "tiny", {})


@pytest.mark.parametrize(
    ("base", "named"),
    [
        ({"width": 32}, "a draft head for tiny, whose width is 16; the model's is 32"),
        ({"vocab_size": 25}, "whose vocab_size is 24; the model's is 25"),
        ({"num_layers": 7, "max_length": 99, "norm_eps": float(np.float32(1e-6))}, None),
        ({"norm_eps": 2e-6}, "whose norm_eps is 1e-06"),
    ],
)
def test_a_head_for_another_model_is_refused_in_words(saved, base, named):
    other = dataclasses.replace(BASE, **base)
    if named is None:
        assert load_draft_head(saved, other).config.max_length == 99
        return
    with pytest.raises(ValueError, match=named):
        load_draft_head(saved, other)


def _tensors(folder, change):
    file = SafetensorsFile(folder / "draft_head.safetensors")
    tensors = {
        name: file.read(name, np.int32 if name == "ids" else ml_dtypes.bfloat16) for name in file.shapes
    }
    change(tensors)
    write_tensors(folder / "draft_head.safetensors", tensors)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: (folder / "draft_head.json").unlink(), "no draft_head.json"),
        (lambda folder: (folder / "draft_head.safetensors").unlink(), "no draft_head.safetensors"),
        (lambda folder: (folder / "draft_head.json").write_text('{"format": 2}'), "format 2, expected 1"),
        (
            lambda folder: (folder / "draft_head.json").write_text('{"format": 1}'),
            "not a decoder's configuration",
        ),
        (
            lambda folder: _tensors(folder, lambda x: x.pop("norm.weight")),
            r"norm.weight is missing, expected \[16\]",
        ),
        (
            lambda folder: _tensors(folder, lambda x: x.update(more=x["ids"])),
            r"more is \[12\], expected missing",
        ),
        (
            lambda folder: _tensors(folder, lambda x: x.update(ids=x["ids"][::-1])),
            "no rising token ids in 0 ... 23",
        ),
        (
            lambda folder: (folder / "draft_head.safetensors").write_bytes(
                (folder / "draft_head.safetensors").read_bytes()[:-9]
            ),
            "damaged or truncated",
        ),
    ],
)
def test_damaged_folders_are_refused_in_words(saved, damage, named):
    damage(saved)
    with pytest.raises(ValueError, match=named):
        load_draft_head(saved, BASE)


def test_a_head_is_for_chains_and_one_device():
    asked = Speculation(2, "tree", head=(head_config(BASE), {}))
    with pytest.raises(ValueError, match="allowed with a draft head are match, rejection, block"):
        prepare(asked, 24, Limits(24), Features())
    asked = dataclasses.replace(asked, verify="match")
    with pytest.raises(ValueError, match="a head is on one device"):
        prepare(asked, 24, Limits(24), Features(), mesh=object())


@pytest.mark.large
def test_a_head_trained_in_two_goes_drafts_the_text_of_plain_decoding(checkpoint, tmp_path, capsys):  # noqa: F811
    rng, run = np.random.default_rng(0), tmp_path / "run"
    ids = lambda number: rng.integers(97, 123, number).tolist()
    lines = [rollout_line(ids(4), ids(12), "stop") for _ in range(24)]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines))
    train = ["--rollouts", str(tmp_path / "rollouts.jsonl"), "--init", str(checkpoint), "--out", str(run)]
    train += [
        "--batch-size",
        "4",
        "--steps",
        "40",
        "--save-every",
        "20",
        "--learning-rate",
        "0.01",
        "--warmup",
        "4",
    ]
    train += ["--passes", "2", "--held-out", "0.2", "--draft-vocab", "280"]
    assert main(train) == 0
    assert "tokens a step" in capsys.readouterr().err
    figures, log = json.loads((run / "figures.json").read_text()), (run / "log.jsonl").read_text()
    assert figures["positions"] > 0 and len(figures["agreement"]) == 4
    head = (run / "model" / "draft_head.safetensors").read_bytes()
    for folder in (run / "checkpoints" / "40", run / "model"):  # as if it had been stopped behind step 20
        shutil.rmtree(folder)
    assert main(train) == 0
    assert (run / "model" / "draft_head.safetensors").read_bytes() == head and (
        run / "log.jsonl"
    ).read_text() == log
    assert main([*train, "--decay", "0.5"]) == 2
    assert "begun with decay 0.8, not 0.5" in capsys.readouterr().err

    prompts = ["--model", str(checkpoint), "--raw", "--json", "--max-tokens", "12", "--temperature", "0"]
    texts = []
    for drafts in (
        [],
        ["--speculate", f"head:{run / 'model'}", "--num-draft", "2", "--prompt-logprobs", "0"],
    ):
        assert generate(["abcabc", *prompts, *drafts]) == 0
        texts.append(json.loads(capsys.readouterr().out))
    assert texts[0]["token_ids"] == texts[1]["token_ids"]
    stats = texts[1]["stats"]
    # The prompt was taken in: the first step proposes too.
    assert stats["drafted"] == 2 * stats["windows"] and stats["accepted"] > 0 and texts[1]["prompt_logprobs"]


def test_where_replies_part_the_gap_is_that_of_the_models_logits(base):
    prompts, texts = [[3, 4], [5], [6, 7]], [[8, 9, 10], [2, 1], [4]]
    others = [[8, 11, 10], [2, 1, 7], [4]]  # of the second one goes on
    found = draft_measure.logit_gaps(BASE, base, prompts, texts, others)
    hidden = hidden_states(BASE)(base, jnp.asarray([[3, 4, 8]]))[0, -1]
    logits = np.asarray(base["embedding"]["weight"] @ hidden)
    assert found == [pytest.approx(abs(logits[9] - logits[11]), rel=1e-4)]


@pytest.mark.large
def test_drafts_are_measured_and_told_of(saved, base, monkeypatch):
    """Under `match` all replies are those of plain decoding; tokens and steps add up; the page has the numbers."""
    for module in (draft_measure, draft_section):
        monkeypatch.setattr(module, "CHAIN_VERIFIERS", ("match",))  # each way is a program of its own
    head = load_draft_head(saved, BASE)
    aims = draft_measure.DraftAims(num_drafts=2, max_tokens=6, temperatures=(1.0,), rows=2, alone=1)
    prompts = [[3, 4, 5], [6, 7], [8, 9, 10]]
    record = draft_measure.measure_drafts(BASE, base, head, prompts, (), aims)
    cases = record["cases"]
    ways = [(case["drafter"], case["rows"], case["replies"]) for case in cases]
    assert ways == [(drafter, *at) for at in ((2, 3), (1, 2)) for drafter in ("plain", "ngram", "head")]
    for case in cases:
        assert case["same"] == case["replies"] and case["tokens"] == 6 * case["replies"]
        assert case["tokens_a_step"] == case["tokens"] / case["steps"] and case["tokens_a_second"] > 0
        assert case["tokens_a_step"] == 1 or case["drafter"] != "plain"
    with pytest.raises(ValueError, match="prompts are 2, allowed is above 2"):
        draft_measure.measure_drafts(BASE, base, head, prompts[:2], (), aims)
    words = draft_section.draft_section([record])
    told = f"{cases[2]['tokens_a_step']:.3f} |"
    assert told in words and "under `match`: 10 of 10 replies." in words
    facts = {"steps": 1, "batch_size": 2, "rollouts": 3, "seconds": 4.0, "device": "cpu", "dtype": "float32"}
    description = json.loads((saved / "draft_head.json").read_text()) | {"training": facts}
    assert told in draft_section.draft_card(description, [record], 10**6)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--rollouts"),
        (["--steps", "0"], "--steps"),
        (["--passes", "2", "--decay", "2"], "decay is 2"),
        (["--num-layers", "9"], "num_layers is 9"),
        (["--window", "3"], "no rollout can be learnt from"),
        (["--without-prompt", "2"], "--without-prompt is 2"),
        (["--out", "."], "exists already"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.jsonl").write_text(rollout_line([5, 6], [7, 8, 9], "length") + "\n")
    given = ["--rollouts", "r.jsonl", "--init", str(DATA / "qwen3_tied"), "--out", "run"] if arguments else []
    assert main([*given, *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and named in error
    assert not (tmp_path / "run").exists()
