"""Value models against transformers' numbers, their files whole and damaged, saving and restoring."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxsample as js
from models.load_value import DESCRIPTION, ValueModel, load_value_model, save_value_model
from models.value_head import random_value_weights, value_functions, value_weight_shapes
from tests.test_loaders import same_weights
from tests.test_models import DATA, SMALL, new_cache, tolerance

NAMES = ("qwen2_lenvm", "qwen2_lenvm_tied_lmhead_name", "qwen3_lenvm")
HEAD = "value_head.safetensors"


def expected_of(name):
    with np.load(DATA / name / "expected.npz") as file:
        return dict(file)


def copy_of(name, folder, *, head=None, tensors=None, config=None):
    """A value model's folder with changed tensors (None removes one); head=False leaves the head's file out."""
    shutil.copytree(DATA / name, folder)
    if config:
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | config))
    for file, changes in (("model.safetensors", tensors), (HEAD, head or {})):
        arrays = {**load_file(folder / file), **(changes or {})}
        save_file({key: value for key, value in arrays.items() if value is not None}, folder / file)
    if head is False:
        (folder / HEAD).unlink()
    return folder


def run(model, cache, tokens, positions, mask):
    """(hidden, z, staged) of N nodes a row."""
    forward, value = value_functions(model.config)

    @jax.jit
    def both(weights, tokens, positions, cache, mask):
        hidden, staged = forward(weights, tokens, positions, cache, mask)
        return hidden, value(weights, hidden), staged

    return both(model.weights, jnp.asarray(tokens, jnp.int32), positions, cache, mask)


def test_candidates_stand_and_see_as_in_the_published_layout():
    with np.load(DATA.parent / "tree_layout.npz") as file:
        data = dict(file)
    cached, pending = data["cached_len"], data["prefix_len"] - data["cached_len"]
    most, slots, candidates = pending.max(), cached.max(), data["num_candidates"].max()
    positions, mask = js.candidate_mask(cached, pending, int(most), int(candidates), int(slots))
    for row, (start, first) in enumerate(zip(data["row_mask_start"], data["row_pos_start"], strict=True)):
        q, k = int(data["q_len"][row]), int(data["k_len"][row])
        nodes = [*range(pending[row]), *(most + np.arange(data["num_candidates"][row]))]
        seen = np.asarray(mask)[row][nodes]
        shown = np.concatenate([seen[:, : cached[row]], seen[:, slots + np.array(nodes)]], axis=1)
        assert (shown == data["mask"][start : start + q * k].reshape(q, k)).all()
        assert seen.sum() == shown.sum()  # and nothing else, padding included
        assert (np.asarray(positions)[row, nodes] == data["positions"][first : first + q]).all()


@pytest.mark.parametrize("name", [pytest.param(NAMES[0], marks=pytest.mark.large), *NAMES[1:]])
def test_values_of_tokens_and_of_candidates_equal_transformers(name):
    """One pass over a sequence, and over seven candidates that see a part of it and not each other."""
    model, expected = load_value_model(DATA / name, np.float32), expected_of(name)
    prefix, num_candidates = int(expected["cand_prefix_len"]), len(expected["cand_ids"])
    candidates = np.broadcast_to(expected["cand_ids"], (2, num_candidates))
    tokens = np.concatenate([expected["input_ids"], candidates], axis=1)
    positions, mask = js.candidate_mask(
        np.zeros(2, np.int32), np.full(2, prefix, np.int32), 24, num_candidates, 1
    )
    sequence = js.attention_mask(np.zeros(2, np.int32), js.chain(23), 1)  # the rest of it is no padding here
    mask = mask.at[:, :24, :25].set(sequence)
    hidden, z, _ = run(model, new_cache(model.config, 2, 1), tokens, positions, mask)
    assert z.dtype == jnp.float32 and z.shape == (2, 24 + num_candidates)
    hidden, z = np.asarray(hidden), np.asarray(z)
    assert np.abs(hidden[:, :24] - expected["hidden"]).max() <= tolerance(model.config, expected["hidden"])
    # The trunk's error goes through two matrices of norm near 1 and is joined by two sums of W terms.
    bound = 2 * tolerance(model.config, expected["hidden"])
    for actual, wanted in ((z[:, :24], "z"), (z[:, 24:], "cand_z"), (expected["cand_z_tree"], "cand_z")):
        assert np.abs(actual - expected[wanted]).max() <= bound
    assert np.abs(1 / (1 + np.exp(-z[:, :24])) - expected["v"]).max() <= bound


@pytest.mark.large
def test_a_kept_candidate_leaves_the_cache_that_reading_it_as_a_token_leaves():
    """Candidates behind a committed prefix and one pending token; the chosen one's keys and values are committed."""
    model, expected = load_value_model(DATA / "qwen3_lenvm", np.float32), expected_of("qwen3_lenvm")
    length, ids = int(expected["cand_prefix_len"]), expected["cand_ids"]
    tokens = np.concatenate([expected["input_ids"][:, :length], ids[[2, 0]][:, None]], axis=1)
    new, zeros, commit = new_cache(model.config, 2, 32), np.zeros(2, np.int32), jax.jit(js.commit)
    whole = js.candidate_mask(zeros, np.full(2, length + 1, np.int32), length + 1, 0, 32)
    _, _, staged = run(model, new, tokens, *whole)
    order = np.broadcast_to(np.arange(length + 1, dtype=np.int32), tokens.shape)
    wanted = commit(new, staged, zeros, order, np.full(2, length + 1, np.int32))
    known = np.full(2, length - 1, np.int32)
    cache = commit(new, staged, zeros, order, known)

    behind = np.concatenate([tokens[:, length - 1 : length], np.broadcast_to(ids, (2, len(ids)))], axis=1)
    nodes = js.candidate_mask(known, np.ones(2, np.int32), 1, len(ids), 32)
    _, z, staged = run(model, cache, behind, *nodes)
    bound = 2 * tolerance(model.config, expected["hidden"])
    assert np.abs(np.asarray(z)[:, 1:] - expected["cand_z"]).max() <= bound
    kept = commit(cache, staged, known, np.array([[0, 3], [0, 1]], np.int32), np.full(2, 2, np.int32))
    for one, other in ((kept.keys, wanted.keys), (kept.values, wanted.values)):
        assert np.abs(np.asarray(one) - np.asarray(other)).max() <= tolerance(model.config, other)


@pytest.mark.parametrize("name", NAMES[1:2])
def test_a_head_among_the_other_tensors_is_the_head_in_a_file_of_its_own(tmp_path, name):
    head = load_file(DATA / name / HEAD)
    inside = load_value_model(copy_of(name, tmp_path / "m", head=False, tensors=head), np.float32)
    beside = load_value_model(DATA / name, np.float32)
    assert inside.config == beside.config and same_weights(inside.weights, beside.weights)
    assert "head" not in beside.weights["trunk"] and beside.gamma is None and beside.text is None


def test_the_head_stays_in_float32_beside_a_trunk_of_another_dtype():
    weights = load_value_model(DATA / "qwen2_lenvm", jnp.bfloat16).weights
    assert {leaf.dtype for leaf in jax.tree.leaves(weights["trunk"])} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(weights["head"])} == {jnp.dtype(jnp.float32)}


WRONG_HEADS = [
    ({"v_head.fc.bias": None}, r"the value head is .*; expected v_head\.fc\.bias \[64\]"),
    ({"v_head.summary.weight": np.zeros((2, 64), np.float32)}, r"v_head\.summary\.weight \[2, 64\]"),
    ({"v_head.extra": np.zeros(1, np.float32)}, r"v_head\.extra \[1\]"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_HEADS)
def test_a_head_that_does_not_fit_is_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load_value_model(copy_of("qwen2_lenvm", tmp_path / "m", head=change), np.float32)


def test_what_is_no_value_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        load_value_model(tmp_path / "none", np.float32)
    with pytest.raises(ValueError, match="not a value model"):
        load_value_model(copy_of("qwen2_lenvm", tmp_path / "a", head=False), np.float32)
    twice = copy_of("qwen2_lenvm", tmp_path / "b", tensors={"v_head.fc.bias": np.zeros(64, np.float32)})
    with pytest.raises(ValueError, match=r"v_head\.fc\.bias are in value_head\.safetensors too"):
        load_value_model(twice, np.float32)
    untied = copy_of("qwen2_lenvm_tied_lmhead_name", tmp_path / "c", config={"tie_word_embeddings": False})
    with pytest.raises(ValueError, match=r"missing tensors: model\.embed_tokens\.weight"):
        load_value_model(untied, np.float32)


@pytest.mark.parametrize("gamma", [None, 0.997])
def test_a_saved_value_model_comes_back_bit_for_bit(tmp_path, gamma):
    weights = random_value_weights(SMALL, 5, jnp.bfloat16)
    shapes = jax.tree.map(lambda leaf: leaf.shape, weights)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, value_weight_shapes(SMALL))
    save_value_model(tmp_path / "m", ValueModel(SMALL, weights, None, gamma))
    model = load_value_model(tmp_path / "m", None)
    assert same_weights(model.weights, weights) and model.gamma == gamma
    wide = load_value_model(tmp_path / "m", np.float32).weights
    assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {jnp.dtype(jnp.float32)}


def test_damage_and_full_folders_are_refused(tmp_path):
    model = ValueModel(SMALL, random_value_weights(SMALL, 1), None, 0.9)
    save_value_model(tmp_path / "m", model)
    with pytest.raises(ValueError, match="exists already"):
        save_value_model(tmp_path / "m", model)
    halved = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.weights)
    with pytest.raises(ValueError, match="float32"):
        save_value_model(tmp_path / "n", ValueModel(SMALL, halved, None, 0.9))
    description = tmp_path / "m" / DESCRIPTION
    for fields, message in (({"format": 9}, "format 9"), ({"format": 1, "gamma": 2}, "gamma is 2")):
        description.write_text(json.dumps(fields))
        with pytest.raises(ValueError, match=message):
            load_value_model(tmp_path / "m", None)
    description.write_text(json.dumps({"format": 1, "gamma": 0.9}))
    shutil.rmtree(tmp_path / "m" / "head")
    with pytest.raises(ValueError, match="cannot be restored"):
        load_value_model(tmp_path / "m", None)
