"""scripts/generate.py with drafts: the same text, and figures that add up."""

import contextlib
import functools
import io
import json

import numpy as np
import pytest

from jaxsample import (
    Features,
    Limits,
    verify_block,
    verify_match,
    verify_rejection,
    verify_tree_distinct,
    verify_tree_points,
)
from models.load import load
from models.speculation import Speculation, prepare, spread_tree
from scripts.generate import main
from tests.test_generate import checkpoint, json_lines, user_cache  # noqa: F401
from tests.test_models import DATA

_BASE = ["--max-tokens", "14", "--json", "--raw", "--logprobs", "1"]
_GREEDY = {"temperature": 0}
_SAMPLED = {"temperature": 0.9, "seed": 3, "top_k": 40, "repetition_penalty": 1.2}
_PROMPTS = ("abcabcabcabc", "xyxyxyxy")


@functools.cache
def _run(folder, sampled, *flags):
    """Records of two greedy requests, and of two sampled ones behind them; one run of the script a set of flags."""
    kinds = [_GREEDY, _SAMPLED] if sampled else [_GREEDY]
    lines = [json.dumps({"prompt": prompt, **kind}) for kind in kinds for prompt in _PROMPTS]
    path = folder.parent / f"drafts_{sampled}.jsonl"
    path.write_text("\n".join(lines))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["--batch-file", str(path), "--model", str(folder), *_BASE, *flags]) == 0
    return json_lines(out.getvalue())


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
    ("verify", "drafter", "num_drafts"),
    [
        pytest.param("match", "ngram", 3, marks=pytest.mark.large),
        pytest.param("match", "draft", 2, marks=pytest.mark.large),
        pytest.param("tree", "draft", 3, marks=pytest.mark.large),
    ],
)
def test_text_is_that_of_plain_decoding(checkpoint, verify, drafter, num_drafts):  # noqa: F811
    """Greedy text from either verifier, and under `match`, which draws as the model would, sampled text too."""
    where = "ngram" if drafter == "ngram" else f"draft:{checkpoint}"
    sampled = verify == "match"
    plain = _run(checkpoint, True)
    drafts = ["--speculate", where, "--verify", verify, "--num-draft", str(num_drafts)]
    drafted = _run(checkpoint, sampled, *drafts)
    assert len(drafted) == (4 if sampled else 2)
    _same(drafted, plain[: len(drafted)])
    stats = drafted[0]["stats"]
    assert stats["drafted"] > 0
    assert stats["windows"] + stats["accepted"] == stats["generated_tokens"]
    assert stats["writes_avoided"] == stats["drafted"] - stats["accepted"]
    assert len(stats["acceptance_by_position"]) <= num_drafts
    if drafter == "draft" and verify == "match":
        # The draft model is the model itself.
        assert stats["acceptance_length"] > 2


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--speculate", "magic"], "--speculate"),
        (["--verify", "block"], "--verify is block, which says nothing without --speculate"),
        (["--num-draft", "3"], "--num-draft is 3"),
        (["--speculate", "draft:"], "--speculate"),
        (["--speculate", "draft:nowhere"], "nowhere"),
        (["--speculate", "head:"], "--speculate is head:, allowed are"),
        (["--speculate", "head:nowhere"], "nowhere: no draft_head.json"),
        (["--speculate", "head"], "--speculate is head, allowed is that for SmolLM2-135M-Instruct"),
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


@pytest.mark.parametrize(
    ("verify", "of_ngrams", "of_a_model"),
    [
        ("match", verify_match, verify_match),
        ("rejection", verify_rejection, verify_rejection),
        ("block", verify_block, verify_block),
        ("tree", verify_tree_points, verify_tree_distinct),  # n-grams are point masses
    ],
)
def test_each_name_is_its_verifier(verify, of_ngrams, of_a_model):
    model = load(DATA / "qwen2_tied", np.float32)
    draft = (model.config, model.weights)
    limits, features = Limits(model.config.vocab_size), Features()
    for drafts, verifier in ((None, of_ngrams), (draft, of_a_model)):
        asked = Speculation(2, verify, drafts)
        assert prepare(asked, model.config.vocab_size, limits, features).verify is verifier


@pytest.mark.parametrize(("num_drafts", "depth"), [(1, 1), (3, 2), (4, 3), (8, 6), (16, 11)])
def test_the_tree_of_k_proposals_has_k_of_them(num_drafts, depth):
    tree = spread_tree(num_drafts)
    assert tree.num_nodes == num_drafts + 1
    assert tree.max_depth == depth
