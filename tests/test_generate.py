"""scripts/generate.py and models/generation: real requests end to end, and every error in one line."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from jaxsample import LENGTH, finish_reason
from models import command_line
from models.generation import Request, generate
from models.load import load
from models.presets import PRESETS
from models.programs import chunk_widths, power_of_two
from scripts.generate import main
from tests.test_models import DATA, tolerance
from tests.test_text import END, byte_tokenizer

SCRIPT = pathlib.Path(__file__).parent.parent / "scripts" / "generate.py"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A tiny random model with a byte tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(DATA / "qwen2_tied", folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "eos_token_id": END}))
    settings = {
        "chat_template": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
        "eos_token": "<end>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(autouse=True)
def user_cache(tmp_path, monkeypatch):
    """Keeps the script from the user's cache folder, and JAX from keeping programs."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))


def json_lines(output):
    return [json.loads(line) for line in output.splitlines()]


def test_generation_gives_transformers_tokens_and_logprobs_in_one_batch():
    model = load(DATA / "qwen2_tied", np.float32)
    with np.load(DATA / "qwen2_tied" / "expected.npz") as file:
        expected = dict(file)
    prompts = expected["input_ids"].tolist()
    common = {"temperature": 0.0, "max_tokens": 16}
    requests = [
        Request(prompts[0], {**common, "logprobs": 2, "prompt_logprobs": 3}),
        Request(prompts[1], {**common, "n": 2}),
        Request(prompts[1][:1], {"seed": 5, "max_tokens": 3, "logprobs": 0}),
    ]
    heard = {}

    def listen(request, sample, token_ids, status):
        heard.setdefault((request, sample), []).append((token_ids, status))

    replies, timing = generate(model.config, model.weights, requests, on_tokens=listen, max_rows=4)
    error = tolerance(model.config, expected["logits"])
    clear = np.cumprod(expected["greedy_top2_gap"] > 2 * error, axis=1) > 0
    assert clear.mean() > 0.9
    for sample, row in ((replies[0].samples[0], 0), *((sample, 1) for sample in replies[1].samples)):
        assert (np.array(sample.token_ids) == expected["greedy_ids"][row])[clear[row]].all()
        assert finish_reason(sample.status) == "length"
    assert [len(reply.samples) for reply in replies] == [1, 2, 1]
    assert timing.num_tokens == 16 * 3 + 3
    assert min(timing.compile, timing.prefill, timing.first_token, timing.decode) > 0

    logits = expected["logits"][0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert replies[0].prompt_logprobs[0] is None
    assert len(replies[0].prompt_logprobs) == len(prompts[0])
    first = replies[0].samples[0].logprobs[0]
    for position, entry in enumerate([*replies[0].prompt_logprobs[1:], first]):
        row = logprobs[position]
        best = np.argsort(-row, kind="stable")[: len(entry.top)]
        assert [token for token, _ in entry.top] == best.tolist()
        assert np.abs(np.array([value for _, value in entry.top]) - row[best]).max() <= 2 * error
        assert abs(entry.logprob - row[entry.token_id]) <= 2 * error
        assert entry.rank == 1 + (row > row[entry.token_id]).sum()
    assert [entry.token_id for entry in replies[0].prompt_logprobs[1:]] == prompts[0][1:]
    assert [len(entry.top) for entry in replies[0].samples[0].logprobs] == [2] * 16
    assert [entry.top for entry in replies[2].samples[0].logprobs] == [[]] * 3
    assert replies[1].prompt_logprobs == replies[1].samples[0].logprobs == []

    for (request, sample), parts in heard.items():
        reply = replies[request].samples[sample]
        assert [token for tokens, _ in parts for token in tokens] == reply.token_ids
        assert parts[-1][1] == reply.status == LENGTH


@pytest.mark.parametrize("token", [-1, 211])
def test_a_prompt_with_ids_that_the_model_lacks_is_refused(token):
    model = load(DATA / "llama_plain", np.float32)
    with pytest.raises(
        ValueError, match=rf"request 1: the prompt holds {token}, allowed are ids in \[0, 211\)"
    ):
        generate(model.config, model.weights, [Request([5], {}), Request([5, token], {})])


@pytest.mark.parametrize(
    ("num_tokens", "widths"), [(0, ()), (1, (16,)), (17, (32,)), (512, (512,)), (600, (512, 128))]
)
def test_prefill_widths_are_few_and_cover_the_prompt(num_tokens, widths):
    assert chunk_widths(num_tokens, 512) == widths
    assert [power_of_two(number) for number in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


def test_one_prompt_streams_its_text_and_statistics_go_to_stderr(checkpoint, capsys):
    assert (
        main(["hi", "--model", str(checkpoint), "--seed", "1", "--max-tokens", "5", "--logprobs", "1"]) == 0
    )
    captured = capsys.readouterr()
    text, *rest = captured.out.split("\n[0.0] ")
    assert text
    assert len(rest) == 5
    assert "5 tokens" in captured.err
    for word in ("tokens/s", "first token after", "compiling", "float32"):
        assert word in captured.err


def test_json_has_one_object_a_request_each_with_its_own_parameters(checkpoint, tmp_path, capsys):
    lines = [
        {"prompt": "hey", "temperature": 0, "max_tokens": 3, "logprobs": 2, "prompt_logprobs": 1},
        {"messages": [{"role": "user", "content": "x"}], "n": 2, "seed": 2, "logit_bias": {"65": 100.0}},
        {"prompt": "日", "allowed_token_ids": [65, 66, END], "logit_bias": {str(END): 100}},
        {
            "prompt": "y",
            "allowed_token_ids": [65, 66],
            "bad_words": ["A"],
            "stop_token_ids": [66],
            "max_tokens": 2,
        },
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    flags = ["--model", str(checkpoint), "--max-tokens", "4", "--batch-file", str(path), "--json"]
    assert main(["first", *flags]) == 0
    captured = capsys.readouterr()
    records = json_lines(captured.out)
    assert [record["prompt"] for record in records] == [0, 1, 2, 3, 4]
    for record in records:
        assert {"text", "token_ids", "finish_reason", "stats", "num_prompt_tokens"} <= set(record)
        assert record["stats"]["generated_tokens"] == 4 + 3 + 8 + 1 + 1
        assert {"tokens_per_second", "time_to_first_token_s", "compile_s"} <= set(record["stats"])
    first, greedy, several, ended, stopped = records
    assert len(first["token_ids"]) == 4
    assert first["finish_reason"] == "length"
    assert "logprobs" not in first
    assert len(greedy["token_ids"]) == len(greedy["logprobs"]) == 3
    assert [entry["token_id"] for entry in greedy["logprobs"]] == greedy["token_ids"]
    assert [entry["rank"] for entry in greedy["logprobs"]] == [1, 1, 1]
    assert all(len(entry["top"]) == 2 for entry in greedy["logprobs"])
    assert greedy["prompt_token_ids"] == [*b"hey\n"]
    assert greedy["prompt_logprobs"][0] is None
    assert [entry["token_id"] for entry in greedy["prompt_logprobs"][1:]] == [*b"ey\n"]
    assert [sample["text"] for sample in several["samples"]] == ["AAAA", "AAAA"]
    assert several["text"] == "AAAA"
    assert (ended["text"], ended["token_ids"], ended["finish_reason"]) == ("", [END], "stop")
    assert (stopped["text"], stopped["token_ids"], stopped["finish_reason"]) == ("", [66], "stop")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "no prompt"),
        (["x", "--model", "nowhere"], "no such file"),
        (["x", "--temperature", "nan"], "temperature"),
        (["x", "--temperature", "-1"], "temperature"),
        (["x", "--top-p", "1.5"], "top_p"),
        (["x", "--top-k", "many"], "--top-k"),
        (["x", "--n", "0"], "n is 0"),
        (["x", "--n", "65"], "n is 65"),
        (["x", "--logprobs", "21"], "logprobs"),
        (["x", "--logit-bias", "999:1"], "logit_bias"),
        (["x", "--logit-bias", "5"], "--logit-bias"),
        (["x", "--stop-token-ids", "-3"], "stop_token_ids"),
        (["x", "--allowed-token-ids", "5", "--banned-token-ids", "5"], "banned_token_ids"),
        (["x", "--min-tokens", "9", "--max-tokens", "3"], "min_tokens"),
        (["x", "--cache-slots", "0"], "--cache-slots"),
        (["x" * 300], "the prompt has 301 tokens, the cache holds 256"),
        (["x" * 20, "--cache-slots", "8"], "the prompt has 21 tokens, the cache holds 8"),
        (["", "--raw"], "empty"),
        (["ok", "--raw", ""], "request 1: the prompt is empty"),
        (["x", "--filter-order", "best"], "--filter-order"),
        (["x", "--no-such-flag"], "--no-such-flag"),
        (["--batch-file", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(checkpoint, capsys, arguments, named):
    if "--model" not in arguments:
        arguments = [*arguments, "--model", str(checkpoint)]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert named in captured.err


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2: not valid JSON"),
        ("[]", "line 2: not a JSON object"),
        ('{"prompt": "a", "topp": 1}', "line 2: unknown keys topp"),
        ('{"temperature": 1}', "line 2: needs either"),
        ('{"prompt": "a", "messages": []}', "line 2: needs either"),
        ('{"prompt": 5}', "line 2: prompt is 5"),
        ('{"messages": []}', "line 2: messages"),
        ('{"messages": [{"role": "user"}]}', "line 2: messages"),
        ('{"messages": "hi"}', "messages"),
        ('{"prompt": "a", "seed": "x"}', "request 1: seed"),
        ('{"prompt": "a", "top_p": null}', "request 1: top_p"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "line 2: logit_bias"),
        ('{"prompt": "a", "bad_words": 3}', "bad_words"),
        ('{"prompt": "a", "bad_words": [""]}', "bad_words"),
        ('{"prompt": "a", "logprobs": "all"}', "request 1: logprobs"),
        ('{"prompt": "a", "max_tokens": "all"}', "request 1: max_tokens"),
    ],
)
def test_a_wrong_line_of_a_batch_file_is_named(checkpoint, tmp_path, capsys, line, named):
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    assert main(["--model", str(checkpoint), "--batch-file", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert named in captured.err


@pytest.mark.parametrize("fault", ["truncated weights", "no tokenizer", "no template"])
def test_damaged_and_incomplete_models_are_one_line_and_exit_code_2(checkpoint, tmp_path, capsys, fault):
    folder = tmp_path / "m"
    shutil.copytree(checkpoint, folder)
    file, named = {
        "truncated weights": ("model.safetensors", "damaged or truncated"),
        "no tokenizer": ("tokenizer.json", "tokenizer.json"),
        "no template": ("tokenizer_config.json", "--raw"),
    }[fault]
    data = (folder / file).read_bytes()
    (folder / file).unlink()
    if fault == "truncated weights":
        (folder / file).write_bytes(data[:1000])
    assert main(["x", "--model", str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert named in captured.err


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids(capsys, tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "5, 6", "n": 2, "seed": 3}\n')
    flags = ["--model", str(DATA / "qwen3_tied"), "--token-ids", "--max-tokens", "4", "--json"]
    assert main(["7 8 9", "--temperature", "0", *flags, "--batch-file", str(path)]) == 0
    greedy, several = json_lines(capsys.readouterr().out)
    assert greedy["num_prompt_tokens"] == 3
    assert several["num_prompt_tokens"] == 2
    for sample in (greedy, *several["samples"]):
        assert sample["text"] == " ".join(str(token) for token in sample["token_ids"])
        assert len(sample["token_ids"]) == 4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["hello"], "'hello' is not a list of token ids"),
        (["5 500"], "token id 500, allowed is 0 ... 232"),
        (["5", "--bad-words", "x"], "bad_words need a tokenizer"),
        (["5", "--random-weights", "gpt-5"], "--model and --random-weights"),
    ],
)
def test_what_is_no_token_id_is_one_line_and_exit_code_2(capsys, arguments, named):
    assert main([*arguments, "--model", str(DATA / "qwen3_tied"), "--token-ids"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert named in error


def test_random_weights_have_the_shapes_of_a_name_or_of_a_config(tmp_path):
    folder = DATA / "qwen3_tied"
    assert command_line.named_config("Qwen2.5-7B") is PRESETS["qwen2.5-7b"]
    assert command_line.named_config(str(folder)) == load(folder, np.float32).config
    assert command_line.named_config(str(folder / "config.json")) == load(folder, np.float32).config
    for name in ("qwen9", str(tmp_path / "config.json")):
        with pytest.raises(ValueError, match=f"no shapes are known for '{name}'; .* any config.json"):
            command_line.named_config(name)


@pytest.mark.large
def test_random_weights_of_a_known_model_generate(capsys, monkeypatch):
    tiny = dataclasses.replace(PRESETS["qwen2.5-7b"], num_layers=1, width=64, mlp_width=64, vocab_size=300)
    monkeypatch.setitem(PRESETS, "qwen2.5-7b", tiny)
    assert main(["7 8 9", "--random-weights", "qwen2.5-7b", "--max-tokens", "3", "--json"]) == 0
    (record,) = json_lines(capsys.readouterr().out)
    assert len(record["token_ids"]) == 3
    assert main(["7", "--random-weights", "qwen9"]) == 2
    assert "qwen3-8b" in capsys.readouterr().err


def test_the_script_runs_from_any_folder_and_shows_no_traceback(tmp_path):
    command = [sys.executable, str(SCRIPT), "x", "--model", str(tmp_path / "nowhere.gguf")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"error: {tmp_path / 'nowhere.gguf'}: no such file or folder\n"
