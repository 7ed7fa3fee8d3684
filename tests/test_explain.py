"""scripts/explain.py: every number of a step against float64 NumPy, and the token that decoding draws."""

import itertools
import json
import math
import os
import signal

import jax
import numpy as np
import pytest

import jaxsample as js
import scripts.explain as explain_script
import scripts.generate as generate_script
from models import known_text
from models.generation import LIST_CAPACITIES
from models.one_step import explain
from models.text import Text, TokenIds
from scripts.explain import likeliest, main, plot, stage_table, token_table
from tests import reference, reference_guidance
from tests.test_models import DATA
from tests.test_text import byte_tokenizer

V = 257
LIMITS = js.Limits(V, max_length=32, num_guided=7, **LIST_CAPACITIES)  # as the script's: one program for all
PROMPT, SAID = [5, 6, 7, 200], [40, 41, 40]
SHAPING = dict(
    repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, logit_bias={12: 1.0, 30: -math.inf},
    banned_token_ids=[3, 4], bad_words_ids=[[41, 40, 77]], min_tokens=9, eos_token_ids=[2], stop_token_ids=[8],
    token_temperature_scale={11: 0.5},
)  # fmt: skip
FILTERED = dict(temperature=0.7, top_k=40, top_p=0.93, min_p=0.02)


def shown(logits, request, filter_order="vllm", seed=5, **rest):
    params, stop = js.make_params(LIMITS, seed=seed, **request)
    tokens = np.asarray([PROMPT + SAID])
    history = js.start(LIMITS, tokens, np.asarray([len(PROMPT)]), np.asarray([len(SAID)]))
    return explain(
        logits[None], params, stop, history, tokens.size, limits=LIMITS, filter_order=filter_order, **rest
    )


@pytest.fixture(scope="module")
def logits():
    return np.random.default_rng(3).normal(0, 1.5, V).astype(np.float32)


def stage_by_stage(logits, request, filter_order):
    """Names and log-probabilities in float64, each stage from the request with the later ones left out."""
    later = [("logit_bias",), ("repetition_penalty", "frequency_penalty", "presence_penalty"),
             ("banned_token_ids", "bad_words_ids", "min_tokens", "eos_token_ids", "stop_token_ids"),
             ("temperature", "token_temperature_scale")]  # fmt: skip
    has, laws = set(), [reference.raw_logprobs(logits)]
    for names in later:
        has |= set(names)
        part = {name: value for name, value in request.items() if name in has}
        z, _, _ = reference.shape(logits, part, vocab_size=V, prompt=PROMPT, output=SAID)
        laws.append(reference.raw_logprobs(z))
    order = {"hf": ["top_k", "top_p", "min_p"]}.get(filter_order, ["min_p", "top_k", "top_p"])
    for end in range(1, 4):
        part = {name: request[name] for name in order[:end]}
        kept, margin = reference.filters(z, **part, filter_order=filter_order)
        assert margin > 1e-5
        laws.append(reference.processed_logprobs(z, kept, False))
    names = ["raw", "bias", "penalties", "masks", "temperature", *(name.replace("_", "-") for name in order)]
    return list(zip(names, laws))


@pytest.mark.parametrize("filter_order", ["vllm", pytest.param("hf", marks=pytest.mark.large)])
def test_every_stage_and_the_token_are_those_of_the_reference(logits, filter_order):
    request = {**SHAPING, **FILTERED}
    found = shown(logits, request, filter_order)
    wanted = stage_by_stage(logits, request, filter_order)
    assert [stage.name for stage in found.stages] == [name for name, _ in wanted]
    for stage, (_, law) in zip(found.stages, wanted):
        np.testing.assert_array_equal(stage.log_probs == -np.inf, law == -np.inf, stage.name)
        finite = law > -np.inf
        np.testing.assert_allclose(stage.log_probs[finite], law[finite], rtol=0, atol=2e-5)

    noise = reference.gumbel_row(5, 7, 0, V)
    np.testing.assert_allclose(found.noise, noise, rtol=2e-5, atol=1e-6)
    drawn = reference.sample(
        logits, request, vocab_size=V, noise=noise, prompt=PROMPT, output=SAID, filter_order=filter_order
    )
    assert drawn["margin"] > 1e-5 and found.token == drawn["token"]

    removed = found.removed_by()
    assert (removed[30], removed[3], removed[77], removed[2], removed[8]) == ("bias", *["masks"] * 4)
    lefts = [int((law > -np.inf).sum()) for _, law in wanted]
    assert [figure["tokens"] for figure in found.figures()] == lefts
    assert len(set(lefts[4:])) >= 3, "filters that remove nothing show nothing"
    masses = [1.0] + [np.exp(a[b > -np.inf]).sum() for (_, a), (_, b) in itertools.pairwise(wanted)]
    np.testing.assert_allclose([figure["mass"] for figure in found.figures()], masses, atol=1e-5)
    entropies = [reference_guidance.entropy(np.exp(law)) for _, law in wanted]
    np.testing.assert_allclose([figure["entropy"] for figure in found.figures()], entropies, atol=1e-4)


@pytest.mark.large
@pytest.mark.parametrize("request_", [FILTERED, dict(temperature=1.0), dict(temperature=0.0)])
def test_the_token_is_that_of_sample(logits, request_):
    params, stop = js.make_params(LIMITS, seed=6, **SHAPING, **request_)
    history = js.start(LIMITS, [PROMPT + SAID], [len(PROMPT)], [len(SAID)])
    drawn = jax.jit(js.sample, static_argnames=("limits", "features"))(
        logits[None], params, np.array([7], np.int32), stop=stop, history=history, limits=LIMITS,
        features=js.required_features(params, stop, limits=LIMITS),
    )  # fmt: skip
    assert shown(logits, {**SHAPING, **request_}, seed=6).token == int(drawn.tokens[0])


def test_a_greedy_row_keeps_its_first_token(logits):
    found = shown(logits, dict(SHAPING, temperature=0.0, top_p=0.2))
    z, _, _ = reference.shape(
        logits, dict(SHAPING, temperature=0.0), vocab_size=V, prompt=PROMPT, output=SAID
    )
    assert [stage.name for stage in found.stages] == ["raw", "bias", "penalties", "masks", "greedy"]
    assert found.token == int(z.argmax()) and not found.noise.any()
    assert found.figures()[-1]["tokens"] == 1 and found.figures()[-1]["entropy"] == 0


def test_a_guided_row_draws_from_its_candidates(logits):
    request = dict(temperature=0.9, top_k=7, logit_bias={200: 9.0, 201: 8.5}, eos_token_ids=[201])
    params, _ = js.make_params(LIMITS, seed=5, **request)
    guidance = js.make_guidance(LIMITS, params, mode="centered_exp", scale=-3.0)
    found = shown(logits, request, guidance=guidance, score=lambda ids: ids.astype(np.float32) / 100 - 1)
    z, _, _ = reference.shape(logits, request, vocab_size=V)
    ids, q, _ = reference_guidance.candidates(z, 7, 1.0, 0.0)
    values = np.where(np.array(ids) == 201, 0, 1 / (1 + np.exp(1 - np.array(ids) / 100)))
    tilted = q * np.exp(-3 * values)
    candidates, guided = (np.exp(stage.log_probs[ids]) for stage in found.stages[-2:])
    np.testing.assert_allclose(candidates, q, atol=1e-5)
    np.testing.assert_allclose(guided, tilted / tilted.sum(), atol=1e-5)
    assert list(found.values) == ids and found.values[201] == -math.inf
    assert {found.removed_by()[token] for token in range(V) if token not in ids} == {"candidates"}
    assert found.token == int((found.stages[-1].log_probs + found.noise).argmax())

    same = shown(logits, request, guidance=js.make_guidance(LIMITS, params, mode="mul", scale=1.0))
    assert [stage.name for stage in same.stages][-1] == "top-p", "neutral guidance is none"


# --- the script -------------------------------------------------------------------------------------------------------

MODEL = DATA / "qwen2_lenvm"  # decoder and value model at once
FLAGS = [
    "--model",
    str(MODEL),
    "--token-ids",
    "--seed",
    "4",
    "--temperature",
    "0.9",
    "--max-tokens",
    "2147483647",
]


@pytest.fixture(autouse=True)
def user_cache(tmp_path, monkeypatch):
    """Keeps the script from the user's cache folder, and JAX from keeping programs."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))


@pytest.mark.parametrize("chunk", [512, pytest.param(16, marks=pytest.mark.large)])
def test_the_script_shows_both_models_numbers_as_transformers_has_them(capsys, monkeypatch, chunk):
    monkeypatch.setattr(known_text, "_CHUNK", chunk)
    with np.load(MODEL / "expected.npz") as file:
        expected = dict(file)
    prompt = expected["input_ids"][0, : expected["cand_prefix_len"]].tolist()
    candidates = expected["cand_ids"].tolist()
    flags = [
        "--guide",
        str(MODEL),
        "--guide-mode",
        "centered_exp",
        "--guide-scale",
        "-3",
        "--top-k",
        "7",
    ]
    flags += ["--guide-gamma", "0.99", "--top", "300", "--json", "--allowed-token-ids", *map(str, candidates)]
    assert main([" ".join(map(str, prompt)), *FLAGS, *flags]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = {row["token_id"]: row for row in told["tokens"]}
    assert {token for token, row in rows.items() if row["removed_by"] is None} == set(candidates)
    raw = reference.raw_logprobs(expected["logits"][0, len(prompt) - 1])
    np.testing.assert_allclose([rows[token]["logprobs"]["raw"] for token in range(V)], raw, atol=1e-3)
    z = expected["cand_z"][0].astype(np.float64)
    values = [rows[token]["value"] for token in candidates]
    np.testing.assert_allclose(values, 1 / (1 + np.exp(-z)), atol=2e-4)
    np.testing.assert_allclose(
        [rows[token]["length"] for token in candidates],
        [math.log1p(-value) / math.log(0.99) for value in values],
        rtol=1e-5,
    )
    noisy = {token: rows[token]["logprobs"]["guided"] + rows[token]["noise"] for token in candidates}
    assert told["drawn"]["token_id"] == max(noisy, key=noisy.__getitem__)
    assert told["position"] == len(prompt) and told["seed"] == 4


def test_the_tables_show_each_stage_and_the_token_drawn(logits):
    found = shown(logits, dict(temperature=0.9, top_k=5))
    stages = [line.split() for line in stage_table(found, {"top-k": 5}).splitlines()]
    assert [line[0] for line in stages] == [
        "stage", "raw", "bias", "penalties", "masks", "temperature", "min-p", "top-k", "top-p"]  # fmt: skip
    assert stages[-2][:3] == ["top-k", "5", "5"] and stages[1][1:3] == ["257", "1.000000"]
    rows = likeliest(found, 8)
    tokens = token_table(found, rows, TokenIds(V), None).splitlines()[1:]
    assert [int(line[1:].split()[0]) for line in tokens] == np.argsort(-logits, kind="stable")[:8].tolist()
    assert [line.startswith("*") for line in tokens] == [token == found.token for token in rows]
    assert [line.endswith("top-k") for line in tokens] == [False] * 5 + [True] * 3


def test_the_picture_is_written(logits, tmp_path):
    pytest.importorskip("matplotlib")
    found = shown(logits, dict(temperature=0.9, top_k=5))
    plot(found, likeliest(found, 3), TokenIds(V), tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--n", "2"], "n is 2, allowed is 1"),
        (["--top", "0"], "--top is 0"),
        (["--guide-scale", "2"], "--guide-scale is 2.0, which says nothing without --guide"),
        (["--guide", str(MODEL), "--guide-scale", "2"], "top_k"),
        (["--guide", "missing"], "missing: no such folder"),
        (["--logprobs-mode", "processed"], "logprobs_mode is processed, allowed is raw"),
        (["--said", "b\udce4c"], "the text has '\\udce4' at 1"),
        (["--png", "missing/x.png"], "there is no folder missing"),
        (["--png", ""], "end in .png"),
        (["--png", "."], "end in .png"),
        (["--png", "x.jpg"], "--png is 'x.jpg', allowed are names of files that end in .png"),
    ],
)
def test_what_cannot_be_shown_is_one_line(capsys, flags, named):
    assert main(["7 3", *FLAGS, *flags]) == 2
    error = capsys.readouterr().err
    assert named in error and len(error.splitlines()) == 1


def test_an_empty_prompt_is_refused_with_the_reason(capsys):
    assert main(["", *FLAGS]) == 2
    assert "the prompt is empty and has no chat template around it" in capsys.readouterr().err


@pytest.mark.parametrize("script", [explain_script, generate_script])
def test_a_prompt_that_is_not_utf8_is_one_line(capsys, script):
    assert script.main(["b\udce4c", *FLAGS]) == 2
    assert "the text has '\\udce4' at 1, allowed is text that UTF-8 can hold" in capsys.readouterr().err


def test_every_text_that_is_encoded_is_one_that_utf8_can_hold():
    text = Text(byte_tokenizer(), (), None, {})
    assert text.encode("b\u00e4\U0001f600")
    with pytest.raises(ValueError, match="at 1, allowed is text"):
        text.encode("b\udce4c")


@pytest.mark.parametrize("script", [explain_script, generate_script])
def test_a_reader_that_leaves_early_ends_the_script_without_a_word(capsys, monkeypatch, script):
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(script, "run", lambda options: print("a line"))
    with open(writing, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        assert script.main(["7 3"]) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""
