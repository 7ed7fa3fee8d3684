"""scripts/generate.py with drafts: the same text, and figures that add up."""

import json

import numpy as np
import pytest

from jaxsample import verify_tree_points
from models.fetch import fetch_smollm2
from models.generation import Request, generate
from models.load import load
from models.speculation import Speculation, prepare, spread_tree
from scripts.generate import main
from tests.test_generate import checkpoint, json_lines, user_cache  # noqa: F401
from tests.test_models import DATA, tolerance

_BASE = ["--max-tokens", "14", "--json", "--raw", "--logprobs", "1"]


def _run(capsys, folder, *flags):
    assert main(["abcabcabcabc", "xyxyxyxy", "--model", str(folder), *_BASE, *flags]) == 0
    return json_lines(capsys.readouterr().out)


def _plain(records):
    return [{key: value for key, value in record.items() if key != "stats"} for record in records]


def _same(ours, theirs):
    """Records equal but for the last places of logprobs, which a wider forward pass may round otherwise."""
    for one, other in zip(_plain(ours), _plain(theirs), strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert one["finish_reason"] == other["finish_reason"]
        for entry, expected in zip(one["logprobs"], other["logprobs"], strict=True):
            assert entry["logprob"] == pytest.approx(expected["logprob"], abs=1e-4)
            assert entry["rank"] == expected["rank"]


@pytest.mark.parametrize(
    ("verify", "drafter"), [("match", "ngram"), ("block", "ngram"), ("match", "draft"), ("tree", "draft")]
)
def test_greedy_text_is_that_of_plain_decoding(checkpoint, capsys, verify, drafter):  # noqa: F811
    where = "ngram" if drafter == "ngram" else f"draft:{checkpoint}"
    greedy = ["--temperature", "0"]
    plain = _run(capsys, checkpoint, *greedy)
    drafts = ["--speculate", where, "--verify", verify, "--num-draft", "3"]
    drafted = _run(capsys, checkpoint, *greedy, *drafts)
    _same(drafted, plain)
    stats = drafted[0]["stats"]
    assert stats["drafted"] > 0
    assert stats["windows"] + stats["accepted"] == stats["generated_tokens"]
    assert stats["writes_avoided"] == stats["drafted"] - stats["accepted"]
    assert len(stats["acceptance_by_position"]) <= 3
    if drafter == "draft" and verify == "match":
        # The draft model is the model itself.
        assert stats["acceptance_length"] > 2


def test_matched_drafts_leave_sampled_text_unchanged(checkpoint, capsys):  # noqa: F811
    sampled = ["--temperature", "0.9", "--seed", "3", "--top-k", "40", "--repetition-penalty", "1.2"]
    plain = _run(capsys, checkpoint, *sampled)
    drafted = _run(capsys, checkpoint, *sampled, "--speculate", f"draft:{checkpoint}", "--num-draft", "2")
    _same(drafted, plain)
    assert drafted[0]["stats"]["acceptance_length"] > 1.5


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--speculate", "magic"], "--speculate"),
        (["--speculate", "draft:"], "--speculate"),
        (["--speculate", "draft:nowhere"], "nowhere"),
        (["--speculate", "ngram", "--num-draft", "0"], "num_drafts"),
        (["--speculate", "ngram", "--num-draft", "99"], "num_drafts"),
        (["--speculate", "ngram", "--verify", "hope"], "--verify"),
    ],
)
def test_wrong_speculation_flags_are_one_line_and_exit_code_2(checkpoint, capsys, flags, named):  # noqa: F811
    assert main(["x", "--model", str(checkpoint), *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert named in captured.err


def test_a_draft_model_of_another_vocabulary_is_refused():
    small, other = (load(DATA / name, np.float32) for name in ("qwen2_tied", "llama_plain"))
    asked = Speculation(2, "match", (other.config, other.weights))
    with pytest.raises(ValueError, match="211"):
        prepare(asked, small.config.vocab_size, None, None)


def test_ngrams_under_tree_verification_are_point_masses():
    assert prepare(Speculation(2, "tree"), 100, None, None).verify is verify_tree_points


@pytest.mark.parametrize(("num_drafts", "depth"), [(1, 1), (3, 2), (4, 3), (8, 6), (16, 11)])
def test_the_tree_of_k_proposals_has_k_of_them(num_drafts, depth):
    tree = spread_tree(num_drafts)
    assert tree.num_nodes == num_drafts + 1
    assert tree.max_depth == depth


@pytest.mark.slow
def test_smollm2_with_ngrams_writes_its_own_greedy_text():
    model = load(fetch_smollm2(), np.float32)
    texts = [
        "Count: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3,",
        "The cat sat on the mat. The dog sat on the",
        json.dumps({"a": [1, 2], "b": [1, 2], "c": [1, 2]})[:-1],
    ]
    wishes = {"temperature": 0.0, "max_tokens": 32, "logprobs": 2}
    requests = [Request(model.text.encode(text), wishes) for text in texts]
    plain, _ = generate(model.config, model.weights, requests)
    drafted, timing = generate(model.config, model.weights, requests, speculation=Speculation(4, "match"))
    assert sum(timing.accepted_at) > 10
    for one, other in zip(drafted, plain, strict=True):
        expected = other.samples[0]
        top = np.array([[value for _, value in entry.top] for entry in expected.logprobs])
        error = tolerance(model.config, top)
        clear = np.cumprod(top[:, 0] - top[:, 1] > 2 * error) > 0
        assert clear.mean() > 0.5
        num_clear = int(clear.sum())
        assert one.samples[0].token_ids[:num_clear] == expected.token_ids[:num_clear]
