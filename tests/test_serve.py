"""scripts/serve.py: the text of generate.py in pieces, stop strings, bad lines, signals, drafts."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import scripts.generate
from models.draft_head import DraftHead
from models.draft_training import first_head
from models.engines import build_engine
from models.fetch import fetch_smollm2
from models.figures import progress_line
from models.load import load
from models.load_draft import save_draft_head
from models.serving import Service
from scripts.serve import main
from tests.test_generate import SCRIPT, checkpoint, json_lines, user_cache  # noqa: F401
from tests.test_text import END

SLOTS, WAITING, MAX_LENGTH = 4, 2, 96
SIZES = ["--slots", str(SLOTS), "--max-waiting", str(WAITING), "--max-length", str(MAX_LENGTH)]
LETTERS = list(range(97, 103))  # ids of the byte tokenizer
ENGINES = {}


@pytest.fixture(autouse=True)
def kept_engines(monkeypatch):
    """Lets runs of the script with the same sizes share an engine, which each leaves idle."""

    def build(config, weights, sizes, *, speculation=None, **modes):
        asked = (
            None
            if speculation is None
            else (
                speculation.num_drafts,
                speculation.verify,
                speculation.draft is None,
                speculation.head is None,
            )
        )
        key = (config, sizes, asked, *modes.items())
        if key not in ENGINES:
            ENGINES[key] = build_engine(config, weights, sizes, speculation=speculation, **modes)
        return ENGINES[key]

    monkeypatch.setattr("scripts.serve.build_engine", build)
    yield
    for engine in ENGINES.values():
        stats = engine.stats
        assert stats.num_seated == stats.num_waiting == 0 and stats.num_free_pages == stats.num_pages


def as_lines(requests):
    return b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in requests)


def run(tmp_path, folder, requests, *flags, sizes=SIZES):
    """The events of the script."""
    (tmp_path / "in.jsonl").write_bytes(as_lines(requests))
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert main(["--model", str(folder), *files, *sizes, *flags]) == 0
    return json_lines((tmp_path / "out.jsonl").read_text())


def joined(events):
    """(id as JSON, sample) -> the fields of generate.py; each sample has one end and nothing behind it."""
    replies = {}
    for event in events:
        if "line" in event:
            continue
        reply = replies.setdefault((json.dumps(event["id"]), event["index"]), {"text": "", "token_ids": []})
        assert "finish_reason" not in reply
        if "text" in event:
            assert event["text"] or event["token_ids"]
            reply["text"] += event["text"]
            reply["token_ids"] += event["token_ids"]
            if "logprobs" in event:
                reply["logprobs"] = reply.get("logprobs", []) + event["logprobs"]
                assert len(reply["logprobs"]) == len(reply["token_ids"])
        else:
            reply |= {key: value for key, value in event.items() if key not in ("id", "index")}
    for reply in replies.values():
        assert reply["num_tokens"] == len(reply["token_ids"])
        assert reply["finish_reason"] in ("stop", "length", "cancelled", "error")
    return replies


def refusals(events):
    return {event["line"]: (event["id"], event["error"]) for event in events if "line" in event}


def letters(seed, **fields):
    """A request whose reply is 12 of six letters."""
    return {
        "prompt": "hi",
        "seed": seed,
        "temperature": 1.0,
        "allowed_token_ids": LETTERS,
        "max_tokens": 12,
        **fields,
    }


def test_pieces_joined_are_the_text_tokens_and_logprobs_of_generate(checkpoint, tmp_path):  # noqa: F811
    requests = [
        {"prompt": "hey", "temperature": 0, "max_tokens": 9, "logprobs": 2},
        {"messages": [{"role": "user", "content": "x"}], "n": 2, "seed": 2, "temperature": 1.1},
        {"prompt": "日", "allowed_token_ids": [65, 66, END], "logit_bias": {str(END): 100}, "logprobs": 0},
        {"prompt": "y", "allowed_token_ids": [65, 66], "bad_words": ["A"], "stop_token_ids": [66]},
        {
            "prompt": "stops",
            "allowed_token_ids": LETTERS,
            "seed": 1,
            "stop_sequences": [[98], [99]],
            "top_p": 0.9,
        },
        letters(7, repetition_penalty=1.5, min_p=0.01, n=3),
    ]
    events = run(tmp_path, checkpoint, requests, "--max-tokens", "6")
    replies = joined(events)
    (tmp_path / "batch.jsonl").write_bytes(as_lines(requests))
    flags = ["--model", str(checkpoint), "--max-tokens", "6", "--batch-file", str(tmp_path / "batch.jsonl")]
    out, sys.stdout = sys.stdout, io.StringIO()
    try:
        assert scripts.generate.main([*flags, "--json"]) == 0
        records = json_lines(sys.stdout.getvalue())
    finally:
        sys.stdout = out
    for number, record in enumerate(records, start=1):
        for index, sample in enumerate(record.get("samples", [record])):
            reply = replies.pop((str(number), index))
            for name in ("text", "token_ids", "finish_reason"):
                assert reply[name] == sample[name], (number, index)
            assert reply["num_prompt_tokens"] == record["num_prompt_tokens"]
            assert ("logprobs" in reply) == ("logprobs" in sample)
            for entry, expected in zip(reply.get("logprobs", []), sample.get("logprobs", []), strict=True):
                assert entry["logprob"] == pytest.approx(expected["logprob"], abs=1e-4)
                assert entry["token_id"] == expected["token_id"] and len(entry["top"]) == len(expected["top"])
    assert replies == {}
    ends = {event["id"]: event["stop_reason"] for event in events if "finish_reason" in event}
    assert (ends[1], ends[3], ends[4]) == (None, None, 66) and ends[5] in ([98], [99])
    assert len([event for event in events if event["id"] == 1]) > 3, "the text comes in pieces"


def test_a_stop_string_cuts_text_tokens_and_logprobs_wherever_it_lies(checkpoint, tmp_path):  # noqa: F811
    whole = joined(run(tmp_path, checkpoint, [letters(seed, logprobs=1) for seed in range(4)]))
    requests, expected = [], []
    for number, reply in enumerate(whole.values()):
        text = reply["text"]
        assert len(text) == 12
        for start, size in ((0, 1), (3, 2), (5, 4), (10, 2)):
            stop = text[start : start + size]
            requests.append(letters(number, logprobs=1, stop=["no such", stop] if start else stop))
            expected.append((text[: text.index(stop)], stop, reply))
    replies = joined(run(tmp_path, checkpoint, requests))
    for reply, (text, stop, plain) in zip(replies.values(), expected, strict=True):
        assert (reply["text"], reply["stop_reason"], reply["finish_reason"]) == (text, stop, "stop")
        assert reply["token_ids"] == plain["token_ids"][: len(text)]
        for entry, other in zip(reply.get("logprobs", []), plain["logprobs"]):
            assert entry["logprob"] == pytest.approx(other["logprob"], abs=1e-4)


# Fault report B49: the text just before the stop string was lost.
def test_text_before_a_stop_string_in_one_token_and_text_like_a_stop_string_are_shown(checkpoint, tmp_path):  # noqa: F811
    requests = [
        {"prompt": "5", "allowed_token_ids": [12], "stop": "2", "max_tokens": 4},
        {"prompt": "5", "allowed_token_ids": [12], "stop": "2 12 1", "max_tokens": 4},
        {"prompt_token_ids": [5], "allowed_token_ids": [12], "stop": ["2 12 13"], "max_tokens": 2},
    ]
    replies = joined(run(tmp_path, checkpoint, requests, "--token-ids"))
    assert [
        (reply["text"], reply["token_ids"], reply["finish_reason"], reply["stop_reason"])
        for reply in replies.values()
    ] == [("1", [12], "stop", "2"), ("1", [12], "stop", "2 12 1"), ("12 12", [12, 12], "length", None)]


def test_bad_lines_get_one_error_each_and_touch_no_others(checkpoint, tmp_path):  # noqa: F811
    good = [letters(seed, id=["good", seed], n=1 + seed % 2) for seed in range(8)]
    bad = [
        (b"nonsense", "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"prompt": "a", "id": ' + b"[" * 500 + b"]" * 500 + b"}", "nested more than 32 deep"),
        ({"prompt": "a", "bad_words": ["b"], "bad_words_ids": None}, "bad_words_ids is None"),
        ([], "not a JSON object"),
        ({"prompt": "a", "topp": 1}, "unknown keys topp"),
        ({"temperature": 1}, "needs either"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "needs either"),
        ({"prompt_token_ids": [1, "x"]}, "prompt_token_ids"),
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [9999]}, "9999"),
        ({"prompt": "x" * 200}, "prompt"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1"),
        (b'{"prompt": "a", "top_p": NaN}', "top_p is nan"),
        ({"prompt": "a", "n": SLOTS + 1}, "n is 5"),
        ({"prompt": "a", "n": None}, "n is None"),
        ({"prompt": "a", "stop": ""}, "stop is ''"),
        ({"prompt": "a", "stop": [1]}, "stop is [1]"),
        ({"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "a", "stop_token_ids": 5}, "stop_token_ids"),
        (b'{"id": NaN, "prompt": "a"}', "id holds NaN"),
        ({"cancel": "nobody"}, 'no request with id "nobody"'),
        ({"cancel": 1, "prompt": "a"}, "cancel stands with prompt"),
        (good[7], "has not ended"),
        (b'{"prompt": "\\ud800"}', "the text has '\\ud800' at 0"),
    ]
    plain = joined(run(tmp_path, checkpoint, good))
    mixed = [x for pair in zip(bad, good) for x in (pair[0][0], b"", pair[1])] + [x for x, _ in bad[8:]]
    events = run(tmp_path, checkpoint, mixed)
    assert joined(events) == plain
    errors = refusals(events)
    lines = [3 * place + 1 for place in range(8)] + [24 + place for place in range(1, len(bad) - 7)]
    assert sorted(errors) == lines
    for number, (line, named) in zip(lines, bad, strict=True):
        chosen, error = errors[number]
        assert named in error
        own = line if isinstance(line, dict) else {}
        assert chosen == own.get("id", own.get("cancel", number) if len(own) == 1 else number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_what_runs_and_is_the_exit_code(checkpoint, tmp_path, monkeypatch, number):  # noqa: F811
    reading, writing = os.pipe()
    os.write(writing, as_lines([letters(seed, id=seed, max_tokens=80) for seed in range(12)]))
    step, num_steps = Service.step, 0

    def interrupted_step(self):
        nonlocal num_steps
        num_steps += 1
        if num_steps == 12:
            signal.raise_signal(number)
        return step(self)

    monkeypatch.setattr(Service, "step", interrupted_step)
    before = lambda *_: None
    # Whoever runs the tests in the background may have them ignore SIGINT, and then the server would too.
    outside = signal.signal(number, before)
    with os.fdopen(reading) as stdin, contextlib.ExitStack() as restored:
        restored.callback(signal.signal, number, outside)
        monkeypatch.setattr(sys, "stdin", stdin)  # its other end stays open: the reader waits for more lines
        out = tmp_path / "out.jsonl"
        assert main(["--model", str(checkpoint), "--output", str(out), *SIZES]) == 128 + number
        assert signal.getsignal(number) is before
        os.close(writing)
        for thread in threading.enumerate():
            if thread.name == "lines":
                thread.join(10)
    events = json_lines(out.read_text())
    replies, errors = joined(events), refusals(events)
    assert len(replies) == SLOTS + WAITING
    assert {reply["finish_reason"] for reply in replies.values()} == {"cancelled"}
    assert any(reply["text"] for reply in replies.values())
    assert 1 <= len(errors) <= 4
    assert all("stopped" in error for _, error in errors.values())


@pytest.mark.large
def test_prompts_are_scored_as_by_generate(checkpoint, tmp_path):  # noqa: F811
    requests = [
        letters(1, prompt="hello there", prompt_logprobs=2),
        letters(2),
        letters(3, prompt_logprobs=0, n=2),
    ]
    events = run(tmp_path, checkpoint, requests, "--max-prompt-logprobs", "2")
    scored = {event["id"]: event["prompt_logprobs"] for event in events if "prompt_logprobs" in event}
    plain = joined([event for event in events if "prompt_logprobs" not in event])
    assert sorted(scored) == [1, 3] and plain == joined(
        run(
            tmp_path,
            checkpoint,
            [
                {name: value for name, value in request.items() if name != "prompt_logprobs"}
                for request in requests
            ],
        )
    )
    (tmp_path / "batch.jsonl").write_bytes(as_lines(requests))
    out, sys.stdout = sys.stdout, io.StringIO()
    try:
        flags = ["--model", str(checkpoint), "--batch-file", str(tmp_path / "batch.jsonl"), "--json"]
        assert scripts.generate.main(flags) == 0
        records = json_lines(sys.stdout.getvalue())
    finally:
        sys.stdout = out
    for number, found in scored.items():
        expected = records[number - 1]["prompt_logprobs"]
        assert found[0] is expected[0] is None and len(found) == len(expected)
        for entry, other in zip(found[1:], expected[1:], strict=True):
            assert entry["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
            assert entry["token_id"] == other["token_id"] and len(entry["top"]) == len(other["top"])


@pytest.mark.large
@pytest.mark.parametrize("drafter", ["ngram", "draft", "head"])
def test_drafts_leave_greedy_text_as_it_is(checkpoint, tmp_path, drafter):  # noqa: F811
    requests = [
        {"prompt": prompt, "temperature": 0, "max_tokens": 14} for prompt in ("abcabcabc", "xyxyxy", "q")
    ]
    requests[1]["stop"] = joined(run(tmp_path, checkpoint, requests))["2", 0]["text"][6:9]
    plain = joined(run(tmp_path, checkpoint, requests))
    if drafter == "head":
        model = load(checkpoint, np.float32)
        head = DraftHead(*first_head(model.config, model.weights, 1, 0), None)
        save_draft_head(tmp_path / "head", head, "tiny", {})
    where = {"ngram": "ngram", "draft": f"draft:{checkpoint}", "head": f"head:{tmp_path / 'head'}"}[drafter]
    sizes = ["--slots", "1", "--max-length", str(MAX_LENGTH)]
    drafts = ["--speculate", where, "--num-draft", "2"]
    assert joined(run(tmp_path, checkpoint, requests, *drafts, sizes=sizes)) == plain
    engine = list(ENGINES.values())[-1]
    assert (
        engine.stats.num_drafted > 0
        and f"{engine.stats.num_accepted / engine.stats.num_drafted:.0%} of drafts"
        in (progress_line(engine.stats, engine.stats, 1.0))
    )


@pytest.mark.large
def test_a_mesh_leaves_the_text_as_it_is(checkpoint, tmp_path):  # noqa: F811
    requests = [
        {"prompt": "abc", "temperature": 0, "max_tokens": 14, "logprobs": 1},
        letters(3),
        letters(4, n=2, repetition_penalty=1.3),
    ]
    plain = joined(run(tmp_path, checkpoint, requests))
    found = joined(run(tmp_path, checkpoint, requests, "--mesh", "data=2,tensor=2"))
    for key, reply in plain.items():
        assert found[key]["token_ids"] == reply["token_ids"] and found[key]["text"] == reply["text"]


def test_figures_are_shown_where_they_are_asked_for(checkpoint, tmp_path, capsys):  # noqa: F811
    run(tmp_path, checkpoint, [letters(1)])
    assert capsys.readouterr().err == ""
    run(tmp_path, checkpoint, [letters(1)], "--progress")
    assert "of 4 slots" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--slots", "0"], "slots is 0"),
        (["--max-length", "100000"], "max_length is 100000"),
        (["--page-size", "7", "--max-length", "20", "--slots", "1", "--speculate", "ngram", "--num-draft", "9"], "page_size is 7"),
        (["--input", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--temperature", "-1"], "temperature"),
        (["--speculate", "magic"], "--speculate"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--prompt-logprobs", "1"], "--prompt-logprobs"),
        (["--prompt-logprobs", "5", "--max-prompt-logprobs", "2"], "--prompt-logprobs is 5, allowed are 0 ... 2"),
        (["--mesh", "model=2"], "mesh is 'model=2', expected data=D,tensor=P"),
    ],
)  # fmt: skip
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(checkpoint, capsys, flags, named):  # noqa: F811
    assert main(["--model", str(checkpoint), *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert named in captured.err


def test_the_script_runs_from_any_folder(tmp_path):
    command = [sys.executable, str(SCRIPT.parent / "serve.py"), "--model", str(tmp_path / "nowhere.gguf")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path / 'nowhere.gguf'}: no such file or folder\n"


@pytest.mark.large
def test_smollm2_streams_two_prompts_up_to_a_stop_string(tmp_path, capsys):
    path = fetch_smollm2()
    prompts = ["Why is the sky blue?", "Name three primary colours."]
    flags = ["--model", str(path), "--temperature", "0", "--max-tokens", "24"]
    assert scripts.generate.main([*prompts, *flags, "--json"]) == 0
    records = json_lines(capsys.readouterr().out)
    stops = [" ".join(record["text"].split(" ")[4:6])[1:] for record in records]  # begins inside a word
    requests = [{"id": prompt, "prompt": prompt, "stop": stop} for prompt, stop in zip(prompts, stops)]
    events = run(tmp_path, path, requests, *flags[2:], sizes=["--slots", "2", "--max-length", "128"])
    for reply, record, stop in zip(joined(events).values(), records, stops, strict=True):
        assert reply["text"] == record["text"].split(stop)[0]
        assert reply["stop_reason"] == stop
        num_kept = len(reply["token_ids"])
        assert 1 < num_kept < 24 and reply["token_ids"] == record["token_ids"][:num_kept]
