"""The decoder against transformers' numbers, its cache and mask, and the lookup model's promises.

Tolerance: a branch of a layer is a row of at most eight sums (norm, projection, scores, softmax, mix, output;
norm, up, down), each with a relative error near 2^-24 * sqrt(terms) where roundings are independent; errors
in a row add in quadrature. The stream is the sum of 2 L such branches with errors of their own, so their
number does not raise the relative error. Both sides round, and 4 standard deviations cover a file's elements.
"""

import dataclasses
import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsample
from models.decoder import DecoderConfig, decoder_functions
from models.load_safetensors import decoder_config, load_tensors, read_json
from models.lookup import init_lookup_cache, lookup_functions, table
from models.projection import project_by_reduction
from models.random_weights import random_weights
from models.rope import llama3_factors

DATA = pathlib.Path(__file__).parent / "data" / "models"
NAMES = (
    "llama_plain",
    "llama3_rope_tied",
    "llama3_rope_untied",
    "qwen2_tied",
    "qwen2_untied",
    "qwen3_tied",
    "qwen3_untied",
)
SMALL = DecoderConfig(
    vocab_size=50,
    width=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    mlp_width=40,
    norm_eps=1e-5,
    rope_theta=10000.0,
)


def tolerance(config, values):
    longest = max(config.width, config.mlp_width)
    return 4 * np.sqrt(2) * 2.0**-24 * np.sqrt(8 * longest) * np.abs(values).max()


def load(name):
    config = decoder_config(read_json(DATA / name / "config.json"))
    weights = load_tensors(DATA / name, config, np.float32)
    with np.load(DATA / name / "expected.npz") as file:
        return config, weights, dict(file)


def new_cache(config, num_rows, num_slots, dtype=jnp.float32):
    return jaxsample.init_cache(
        config.num_layers, num_rows, num_slots, config.num_kv_heads, config.head_size, dtype
    )


commit = jax.jit(jaxsample.commit)


@functools.cache  # one compilation for all tests with the same shapes
def compiled(config, tree):
    forward, unembed = decoder_functions(config)

    @jax.jit
    def both(weights, cache, lengths, tokens):
        positions = lengths[:, None] + jnp.asarray(tree.depth)[None, :]
        mask = jaxsample.attention_mask(lengths, tree, cache.num_slots)
        hidden, staged = forward(weights, tokens, positions, cache, mask)
        return hidden, unembed(weights, hidden), staged

    return both


def run_tree(config, weights, cache, lengths, tokens, tree):
    """(hidden, logits, staged) of the nodes of one tree a row."""
    tokens, lengths = jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)
    return compiled(config, tree)(weights, cache, lengths, tokens)


def run_full(config, weights, tokens):
    cache = new_cache(config, tokens.shape[0], 1)
    lengths = np.zeros(tokens.shape[0], np.int32)
    return run_tree(config, weights, cache, lengths, tokens, jaxsample.chain(tokens.shape[1] - 1))


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_hidden_states_equal_transformers(name):
    config, weights, expected = load(name)
    hidden, logits, _ = run_full(config, weights, expected["input_ids"])
    for actual, wanted in ((hidden, expected["hidden"]), (logits, expected["logits"])):
        assert np.abs(np.asarray(actual) - wanted).max() <= tolerance(config, wanted)


@pytest.mark.parametrize(
    "name", [pytest.param("llama3_rope_untied", marks=pytest.mark.large), "qwen3_untied"]
)
def test_greedy_continuation_through_the_cache_equals_transformers(name):
    config, weights, expected = load(name)
    prompts = expected["input_ids"]
    num_rows, num_tokens = prompts.shape
    limits = jaxsample.Limits(vocab_size=config.vocab_size, max_length=64)
    forward, unembed = decoder_functions(config)
    lengths = np.full(num_rows, num_tokens, np.int32)
    prefill = jaxsample.make_prefill(forward, limits)
    cache = prefill(weights, new_cache(config, num_rows, 64), prompts[:, :-1], lengths * 0, lengths - 1)
    params, stop = jaxsample.make_params(limits, temperature=0, max_tokens=16)
    params, stop = jaxsample.stack_rows([(params, stop)] * num_rows)
    requests = jax.jit(jaxsample.admit, static_argnames="limits")(
        jaxsample.empty_requests(limits, num_rows),
        np.arange(num_rows, dtype=np.int32),
        params,
        stop,
        prompts,
        lengths,
        limits=limits,
    )
    features = jaxsample.required_features(params, stop, limits=limits)
    step = jaxsample.make_decode_step(forward, unembed, limits=limits, features=features)
    emitted = []
    for _ in range(16):
        requests, cache, record = step(weights, requests, cache)
        emitted.append(jaxsample.unpack(record, features).tokens[:, 0])
    emitted = np.stack(emitted, axis=1)
    clear = np.cumprod(expected["greedy_top2_gap"] > 2 * tolerance(config, expected["logits"]), axis=1) > 0
    assert clear.mean() > 0.9
    assert (emitted == expected["greedy_ids"])[clear].all()


def test_chunks_through_the_cache_equal_one_forward_pass():
    config, weights, expected = load("llama3_rope_tied")
    tokens = expected["input_ids"]
    _, whole, _ = run_full(config, weights, tokens)
    cache, done, parts = new_cache(config, 2, 40), 0, []
    for width in (16, 7, 1):
        lengths = np.full(2, done, np.int32)
        part = tokens[:, done : done + width]
        _, logits, staged = run_tree(config, weights, cache, lengths, part, jaxsample.chain(width - 1))
        path = np.broadcast_to(np.arange(width, dtype=np.int32), (2, width))
        cache = commit(cache, staged, jnp.asarray(lengths), path, np.full(2, width, np.int32))
        parts.append(np.asarray(logits))
        done += width
    assert np.abs(np.concatenate(parts, axis=1) - whole).max() <= tolerance(config, whole)


def test_a_tree_node_sees_its_own_path_only():
    config, weights = SMALL, random_weights(SMALL, 0)
    tree = jaxsample.from_paths([(0, 0), (0, 1), (1,)])
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, config.vocab_size, (1, 6))
    nodes = rng.integers(0, config.vocab_size, (1, tree.num_nodes))
    cache = new_cache(config, 1, 16)
    _, _, staged = run_tree(config, weights, cache, [0], prefix, jaxsample.chain(5))
    order = np.arange(6, dtype=np.int32)[None]
    cache = commit(cache, staged, jnp.zeros(1, jnp.int32), order, np.array([6], np.int32))
    _, logits, _ = run_tree(config, weights, cache, [6], nodes, tree)
    for node in range(tree.num_nodes):
        path = np.flatnonzero(tree.ancestors[node])
        tokens = np.zeros((1, 6 + tree.max_depth + 1), np.int64)  # what lies behind is not seen
        tokens[0, : 6 + len(path)] = np.concatenate([prefix[0], nodes[0, path]])
        _, alone, _ = run_full(config, weights, tokens)
        difference = np.asarray(logits)[0, node] - alone[0, 5 + len(path)]
        assert np.abs(difference).max() <= tolerance(config, alone)


def test_hidden_slots_may_hold_nan_and_nothing_else_changes():
    config, weights = SMALL, random_weights(SMALL, 1)
    tokens = np.arange(2, dtype=np.int32)[:, None]
    _, clean, _ = run_tree(config, weights, new_cache(config, 2, 8), [0, 0], tokens, jaxsample.ROOT)
    poisoned = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), new_cache(config, 2, 8))
    _, logits, _ = run_tree(config, weights, poisoned, [0, 0], tokens, jaxsample.ROOT)
    np.testing.assert_array_equal(logits, clean)
    _, logits, _ = run_tree(config, weights, poisoned, [1, 0], tokens, jaxsample.ROOT)
    assert np.isnan(logits[0]).all()
    np.testing.assert_array_equal(logits[1], clean[1])


def test_logits_are_scaled_and_then_soft_capped():
    config, weights = SMALL, random_weights(SMALL, 6)
    hidden = jax.random.normal(jax.random.key(0), (2, 3, config.width), jnp.float32)
    plain = np.asarray(decoder_functions(config)[1](weights, hidden), np.float64)
    changed = dataclasses.replace(config, logit_scale=2.5, final_logit_softcapping=3.0)
    logits = decoder_functions(changed)[1](weights, hidden)
    assert logits.dtype == jnp.float32
    assert np.abs(logits - 3 * np.tanh(2.5 * plain / 3)).max() <= 8 * 2.0**-24 * 2.5 * np.abs(plain).max()


@pytest.mark.parametrize(
    ("dtype", "num_rows"),
    [
        (jnp.float32, 1),
        *(pytest.param(dtype, 3, marks=pytest.mark.large) for dtype in (jnp.float32, jnp.bfloat16)),
    ],
)
def test_projections_by_reduction_are_those_by_products_to_rounding(dtype, num_rows):
    config = dataclasses.replace(SMALL, qkv_bias=True)
    weights = random_weights(config, 7, dtype)
    rng = np.random.default_rng(0)
    cache = new_cache(config, num_rows, 8)
    cache = dataclasses.replace(
        cache,
        keys=jnp.asarray(rng.standard_normal(cache.keys.shape), dtype),
        # Slots at the length and beyond hold NaN, which must not be looked at.
        values=jnp.asarray(rng.standard_normal(cache.values.shape), dtype).at[:, :, 5:].set(jnp.nan),
    )
    tokens = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    lengths = jnp.array([5, 0, 3][:num_rows], jnp.int32)
    mask = jaxsample.attention_mask(lengths, jaxsample.ROOT, 8)
    hidden = [
        decoder_functions(config, **ways)[0](weights, tokens, lengths[:, None], cache, mask)[0]
        for ways in ({}, {"project": project_by_reduction})
    ]
    one, other = (np.asarray(x, np.float32) for x in hidden)
    scale = 1.0 if dtype == jnp.float32 else 2.0**15
    assert np.abs(one - other).max() <= scale * tolerance(config, one)


def test_a_node_with_nan_reaches_only_the_nodes_that_see_it():
    config, weights = SMALL, random_weights(SMALL, 2)
    weights["embedding"]["weight"] = weights["embedding"]["weight"].at[7].set(jnp.nan)
    tree = jaxsample.from_paths([(0, 0), (1,)])  # nodes: root, two children, one grandchild under the first
    cache = new_cache(config, 1, 4)
    _, logits, _ = run_tree(config, weights, cache, [0], [[1, 7, 3, 4]], tree)
    _, clean, _ = run_tree(config, weights, cache, [0], [[1, 2, 3, 4]], tree)
    assert np.isnan(logits[0, 1]).all()
    assert np.isnan(logits[0, 3]).all()
    np.testing.assert_array_equal(logits[0, ::2], clean[0, ::2])


def test_a_query_that_sees_nothing_gives_finite_logits():
    config, weights = SMALL, random_weights(SMALL, 3)
    forward, unembed = decoder_functions(config)
    cache = new_cache(config, 1, 4)
    zeros = jnp.zeros((1, 1), jnp.int32)
    hidden, _ = forward(weights, zeros, zeros, cache, jnp.zeros((1, 1, 5), bool))
    assert np.isfinite(unembed(weights, hidden)).all()


def test_padding_tokens_read_as_id_0():
    config, weights = SMALL, random_weights(SMALL, 4)
    _, padded, _ = run_full(config, weights, np.array([[-1], [50], [2**31 - 1]]))
    _, zero, _ = run_full(config, weights, np.zeros((3, 1), np.int32))
    np.testing.assert_array_equal(padded, zero)


@pytest.mark.parametrize(
    "variant",
    [
        {"qkv_bias": True, "tied_embeddings": True},
        *(pytest.param(variant, marks=pytest.mark.large) for variant in ({}, {"qk_norm": True})),
    ],
)
def test_bfloat16_weights_give_float32_logits_near_the_float32_ones(variant):
    config = dataclasses.replace(SMALL, **variant)
    weights = random_weights(config, 5, jnp.bfloat16)
    tokens = np.arange(12, dtype=np.int32)[None]
    cache = new_cache(config, 1, 4, jnp.bfloat16)
    _, low, staged = run_tree(config, weights, cache, [0], tokens, jaxsample.chain(11))
    _, high, _ = run_full(config, jax.tree.map(lambda x: x.astype(jnp.float32), weights), tokens)
    assert low.dtype == jnp.float32
    assert staged.keys.dtype == jnp.bfloat16
    # bfloat16 rounds every stored intermediate: 2^-9 in place of 2^-24.
    assert np.abs(np.asarray(low) - high).max() <= 2.0**15 * tolerance(config, high)


def test_llama3_scaling_leaves_short_waves_and_slows_long_ones():
    factors = llama3_factors(
        64,
        500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    assert factors[0] == 1
    assert factors[-1] == 8
    assert all(a <= b for a, b in itertools.pairwise(factors))


SEED = jnp.array([3, 9], jnp.uint32)


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def compiled_lookup(cache, lengths, tokens, hidden_slots, tree, vocab_size, padded_size):
    forward, unembed = lookup_functions(vocab_size, padded_size=padded_size)
    positions = lengths[:, None] + jnp.asarray(tree.depth)[None, :]
    mask = jaxsample.attention_mask(lengths, tree, cache.num_slots) & ~hidden_slots[None, None, :]
    hidden, staged = forward(SEED, tokens, positions, cache, mask)
    return unembed(SEED, hidden), staged


def lookup_logits(lengths, tokens, tree, cache, padded_size=None, hide=()):
    lengths, tokens = jnp.asarray(lengths, jnp.int32), jnp.asarray(tokens, jnp.int32)
    hidden_slots = np.isin(np.arange(cache.num_slots + tree.num_nodes), hide)
    logits, staged = compiled_lookup(cache, lengths, tokens, hidden_slots, tree, 37, padded_size)
    return np.asarray(logits), staged


def lookup_prefix(tokens, num_slots=8):
    """A cache that holds the given tokens, one row."""
    cache = init_lookup_cache(1, num_slots)
    _, staged = lookup_logits([0], [tokens], jaxsample.chain(len(tokens) - 1), cache)
    path, count = np.arange(len(tokens), dtype=np.int32)[None], np.array([len(tokens)], np.int32)
    return commit(cache, staged, jnp.zeros(1, jnp.int32), path, count)


@functools.partial(jax.jit, static_argnums=3)
def compiled_table(previous, token, fault, vocab_size):
    return table(SEED, previous, token, fault, vocab_size)


def expected_table(previous, token):
    return np.asarray(compiled_table(np.int32(previous), np.int32(token), np.int32(0), 37))


def test_lookup_logits_are_the_table_of_the_last_two_tokens():
    logits, _ = lookup_logits([0], [[5, 6, 5]], jaxsample.chain(2), init_lookup_cache(1, 4))
    for node, pair in enumerate([(-1, 5), (5, 6), (6, 5)]):
        np.testing.assert_array_equal(logits[0, node], expected_table(*pair))
    logits, _ = lookup_logits([3], [[9]], jaxsample.ROOT, lookup_prefix([1, 2, 30]))
    np.testing.assert_array_equal(logits[0, 0], expected_table(30, 9))
    assert (np.abs(logits) <= 8).all()
    assert len(np.unique(logits)) > 30


def test_lookup_tree_nodes_follow_their_parents():
    tree = jaxsample.from_paths([(0, 0), (0, 1), (1,)])
    logits, _ = lookup_logits([2], [[9, 10, 11, 12, 13]], tree, lookup_prefix([4, 5]))
    for node, pair in enumerate([(5, 9), (9, 10), (9, 11), (10, 12), (10, 13)]):
        np.testing.assert_array_equal(logits[0, node], expected_table(*pair))


def test_lookup_logits_are_bit_equal_in_any_batch():
    prefix = lookup_prefix([1, 2, 30])
    alone, _ = lookup_logits([3], [[9]], jaxsample.ROOT, prefix)
    nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), prefix)
    join = lambda *xs: jnp.concatenate(xs, axis=1)
    cache = jax.tree.map(join, nan, prefix, nan)
    logits, _ = lookup_logits([0, 3, 5], [[1], [9], [2]], jaxsample.ROOT, cache)
    np.testing.assert_array_equal(logits[1], alone[0])


@pytest.mark.parametrize("fault", ["short", "long", "empty", "stale values", "shifted"])
def test_lookup_logits_change_with_a_wrong_cache_or_mask(fault):
    cache, length = lookup_prefix([1, 2, 30]), 3
    if fault == "short":
        length = 2
    elif fault == "long":
        length = 4
    elif fault == "empty":
        cache = init_lookup_cache(1, 8)
    elif fault == "stale values":
        cache = dataclasses.replace(cache, values=jnp.zeros_like(cache.values))
    else:
        cache = jax.tree.map(lambda x: jnp.roll(x, 1, axis=2), cache)
    logits, _ = lookup_logits([length], [[9]], jaxsample.ROOT, cache)
    assert (logits[0, 0] != expected_table(30, 9)).any()


def test_lookup_mask_that_hides_an_early_slot_changes_logits():
    logits, _ = lookup_logits([3], [[9]], jaxsample.ROOT, lookup_prefix([1, 2, 30]), hide=[0])
    assert (logits[0, 0] != expected_table(30, 9)).any()


def test_lookup_padding_columns_are_nan():
    logits, _ = lookup_logits([0], [[5]], jaxsample.ROOT, init_lookup_cache(1, 4), padded_size=40)
    assert logits.shape == (1, 1, 40)
    assert np.isnan(logits[..., 37:]).all()
    np.testing.assert_array_equal(logits[0, 0, :37], expected_table(-1, 5))
