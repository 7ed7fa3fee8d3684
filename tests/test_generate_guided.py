"""scripts/generate.py with a value model: who is guided, by what, and what is refused."""

import contextlib
import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsample as js
from models.decoder import decoder_functions
from models.engines import Sizes, build_engine
from models.generation import Request, generate
from models.guiding import fit_vocabulary
from models.load import load
from models.load_value import load_value_model
from models.text import Text
from models.value_head import value_functions
from scripts.generate import main
from scripts.serve import main as serve
from tests.test_generate import json_lines, user_cache  # noqa: F401
from tests.test_models import DATA
from tests.test_text import byte_tokenizer

MODEL, GUIDE = DATA / "qwen2_tied", DATA / "qwen2_lenvm"
FLAGS = ["--model", str(MODEL), "--token-ids"]
TOP_K, MARGIN = 4, 1e-3
COMMON = {"temperature": 1.0, "top_k": TOP_K, "max_tokens": 8, "seed": 3}
LINES = [
    {"prompt": " ".join(map(str, range(20, 40))), "guidance": {"target_length": 5, "constraint": "le"}},
    {"prompt": "7 8", "guidance": {"target_length": 500, "constraint": "ge"}},
    {"prompt": "7 8 9", "guidance": {}},
    {"prompt": "5", "guidance": {"mode": "mul", "scale": 1}, "top_k": 0},
]


def candidates_and_values(prompt, reply):
    """By models without caches: the logits before each token of a reply, and z of the first TOP_K ids there."""
    model, guide = load(MODEL, np.float32), load_value_model(GUIDE, np.float32)
    forward, unembed = decoder_functions(model.config)
    value_forward, value = value_functions(guide.config)
    size = len(prompt) + len(reply)

    @jax.jit
    def both(weights, value_weights, tokens, position, mask):
        cache = js.init_cache(
            model.config.num_layers, 1, 1, model.config.num_kv_heads, model.config.head_size, jnp.float32
        )
        value_cache = js.init_cache(
            guide.config.num_layers, 1, 1, guide.config.num_kv_heads, guide.config.head_size, jnp.float32
        )
        hidden, _ = forward(weights, tokens, position[:, :size], cache, mask[:, :size, : 1 + size])
        logits = unembed(weights, hidden)[0, len(prompt) - 1 : -1, : model.config.vocab_size]
        ids = jnp.argsort(-logits, axis=1)[:, :TOP_K].astype(jnp.int32)
        nodes = jnp.concatenate([tokens, ids.reshape(1, -1)], axis=1)
        hidden, _ = value_forward(value_weights, nodes, position, value_cache, mask)
        return logits, ids, value(value_weights, hidden)[0, size:].reshape(ids.shape)

    known = len(prompt) + np.repeat(np.arange(len(reply)), TOP_K)
    place = np.arange(size)
    seen = np.concatenate([place[None, :] <= place[:, None], place[None, :] < known[:, None]])
    own = np.pad(np.eye(len(known), dtype=bool), ((size, 0), (0, 0)))
    mask = np.concatenate([np.zeros((len(seen), 1), bool), seen, own], axis=1)[None]
    position = np.concatenate([place, known]).astype(np.int32)[None]
    found = both(model.weights, guide.weights, np.array([prompt + reply], np.int32), position, mask)
    return map(np.asarray, found)


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The tokens of LINES with the value model, and without."""
    path = tmp_path_factory.mktemp("guided") / "requests.jsonl"

    def run(lines, *flags):
        path.write_text("\n".join(json.dumps({**COMMON, **line}) for line in lines))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert main([*FLAGS, "--json", "--batch-file", str(path), *flags]) == 0
        return [record["token_ids"] for record in json_lines(out.getvalue())]

    return run(LINES, "--guide", str(GUIDE)), run([{**line, "guidance": None} for line in LINES])


@pytest.mark.large
def test_constraints_take_the_candidate_of_the_least_and_the_greatest_value(generated):
    """And rows that are not guided get the tokens of a run without a value model."""
    guided, plain = generated
    assert guided[2:] == plain[2:]
    assert guided[0] != plain[0] and guided[1] != plain[1]
    num_clear = 0
    for line, reply, best in zip(LINES, guided, (np.min, np.max), strict=False):
        logits, ids, z = candidates_and_values([int(x) for x in line["prompt"].split()], reply)
        for token, row, row_ids, row_z in zip(reply, logits, ids, z, strict=True):
            edge = np.sort(row)[-TOP_K - 1 :]
            sorted_z = np.sort(row_z)
            if edge[1] - edge[0] > MARGIN and np.diff(sorted_z)[[0, -1]].min() > MARGIN:
                num_clear += 1
                assert token == row_ids[row_z == best(row_z)][0]
    assert num_clear > 8


@pytest.mark.large
def test_a_server_gives_guided_and_other_requests_the_tokens_of_generate(generated, tmp_path):
    lines = [{**COMMON, **line, "id": number} for number, line in enumerate(LINES)]
    bad = {"id": "bad", "prompt": "5", "top_k": 9, "guidance": {"scale": 2}}
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, [*lines, bad])))
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    sizes = ["--slots", "2", "--max-length", "32", "--num-guided", "4"]
    assert serve([*FLAGS, "--guide", str(GUIDE), *files, *sizes]) == 0
    said, errors = [[] for _ in LINES], []
    for event in json_lines((tmp_path / "out.jsonl").read_text()):
        if "error" in event:
            errors.append((event["id"], event["error"]))
        else:
            said[event["id"]] += event.get("token_ids", [])
    assert said == generated[0]
    assert [name for name, _ in errors] == ["bad"] and "top_k is 9" in errors[0][1]


def test_what_is_compiled_for_batches_without_guided_requests_has_no_value_model(monkeypatch):
    model, guide = load(MODEL, np.float32), load_value_model(GUIDE, np.float32)
    neutral, guided = (Request([5], COMMON, {"mode": "centered_exp", "scale": scale}) for scale in (0, 2))

    def compiled_for(requests):
        asked = {}

        def note(*_, **given):
            asked.update(given)
            raise InterruptedError

        monkeypatch.setattr("models.generation.compile_programs", note)
        with pytest.raises(InterruptedError):
            generate(model.config, model.weights, requests, guide=guide, max_rows=1)
        assert asked["limits"].num_guided == (1 if asked["guide"] is None else TOP_K)
        return asked["guide"], asked["some_plain"]

    assert compiled_for([neutral, neutral]) == (None, True)
    assert compiled_for([guided, neutral]) == (guide, True)
    assert compiled_for([guided]) == (guide, False)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--guide-mode", "mul"], "--guide-mode is mul, which says nothing without --guide"),
        (["--guide-target-length", "0"], "--guide-target-length is 0.0, which says nothing without --guide"),
        (["--guide", "nowhere"], "nowhere: no such folder"),
        (["--guide", str(MODEL)], "not a value model"),
        (["--guide", str(DATA / "qwen3_lenvm")], "has 211 tokens, the model 257: they must be the same"),
        (["--guide", str(GUIDE), "--mesh", "data=2"], "--guide and --mesh data=2"),
        (["--guide", str(GUIDE), "--guide-mode", "more"], "--guide-mode"),
        (["--guide", str(GUIDE), "--guide-mode", "mul", "--guide-scale", "inf"], "guidance: scale is inf"),
        (["--guide", str(GUIDE), "--guide-gamma", "1"], "guidance: gamma is 1.0"),
        (["--guide", str(GUIDE), "--guide-entropy-threshold", "-1"], "guidance: entropy_threshold is -1.0"),
        (["--guide", str(GUIDE), "--guide-target-value", "2"], "guidance: target_value is 2.0"),
        (["--guide", str(GUIDE), "--guide-constraint", "eq"], "guidance: constraint is 'eq'"),
        (["--guide", str(GUIDE), "--guide-scale", "2"], "guidance: top_k is 0, allowed for a guided request"),
        (["--guide", str(GUIDE), "--guide-scale", "2", "--top-k", "17"], "in [1, 16]"),
    ],
)
def test_wrong_guidance_flags_are_one_line_and_exit_code_2(capsys, flags, named):
    assert main(["5", *FLAGS, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert named in captured.err


@pytest.mark.parametrize(
    ("guidance", "flags", "named"),
    [
        ({"scale": 2}, [], "request 1: guidance is {'scale': 2}, which says nothing without --guide"),
        ("longer", ["--guide", str(GUIDE)], "line 2: guidance is 'longer', expected an object"),
        ({"scal": 2}, ["--guide", str(GUIDE)], "line 2: guidance has unknown keys scal, allowed are mode"),
        ({"scale": "2"}, ["--guide", str(GUIDE)], "request 1: guidance: scale is '2'"),
    ],
)
def test_wrong_guidance_of_a_line_is_named(tmp_path, capsys, guidance, flags, named):
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "5"}\n' + json.dumps({"prompt": "5", "top_k": 4, "guidance": guidance}))
    assert main([*FLAGS, "--batch-file", str(path), *flags]) == 2
    assert named in capsys.readouterr().err


def test_a_value_model_with_the_same_tokens_fits_whatever_rows_are_behind_them():
    model, guide = load(MODEL, np.float32), load_value_model(GUIDE, np.float32)
    text = Text(byte_tokenizer(), (), None, {})
    guide = dataclasses.replace(guide, text=text)
    for size in (model.config.vocab_size + 7, model.config.vocab_size - 1):
        fitted = fit_vocabulary(guide, dataclasses.replace(model.config, vocab_size=size), text, "x")
        rows, old = (np.asarray(x.weights["trunk"]["embedding"]["weight"]) for x in (fitted, guide))
        assert fitted.config.vocab_size == size == len(rows)
        assert (rows[: len(old)] == old[:size]).all() and not rows[len(old) :].any()
    other = byte_tokenizer()
    other.add_tokens(["more"])
    with pytest.raises(ValueError, match="x: the value model's tokenizer has other tokens"):
        fit_vocabulary(guide, model.config, dataclasses.replace(text, tokenizer=other), "x")


def test_a_value_model_of_another_vocabulary_or_on_a_mesh_is_refused_before_anything_is_compiled():
    model, other = load(MODEL, np.float32), load_value_model(DATA / "qwen3_lenvm", np.float32)
    own = load_value_model(GUIDE, np.float32)
    mesh = jax.make_mesh((1, 1), ("data", "tensor"))
    for run in (
        lambda **given: generate(model.config, model.weights, [Request([5], COMMON)], **given),
        lambda **given: build_engine(model.config, model.weights, Sizes(), **given),
    ):
        with pytest.raises(ValueError, match="the value model has 211 tokens, the model 257"):
            run(guide=other)
        with pytest.raises(ValueError, match="a value model and a mesh are given"):
            run(guide=own, mesh=mesh)
    with pytest.raises(ValueError, match=r"num_guided is 129, allowed is 1 \.\.\. 128"):
        build_engine(model.config, model.weights, Sizes(num_guided=129), guide=own)
