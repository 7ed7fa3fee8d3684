"""Properties that other JAX sampling loops were seen to break, numbered as in the survey of peers.

One small case each; their whole kinds are tested with filters, verification and sharding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.sharding import NamedSharding, PartitionSpec

import jaxsample as js
from jaxsample import rng
from tests import batches, laws, mixes, reference
from tests.batches import LIMITS, PROCESSED, RAW, WIDTH
from tests.meshes import mesh_of

ALPHA = 1e-4
PLAIN = js.Features(tier="plain", full_rows=False)


def language_rows(generator, num_rows=64):
    """LM-like rows on a grid of 2^-12, so that adding a small integer is exact."""
    rows = np.stack([mixes.row(generator, "language", LIMITS.vocab_size) for _ in range(num_rows)])
    rows = np.round(rows * 4096) / 4096
    return np.pad(rows, ((0, 0), (0, WIDTH - LIMITS.vocab_size)), constant_values=np.nan).astype(np.float32)


FILTERS = [
    {},
    dict(top_k=50),
    dict(top_p=0.9),
    dict(min_p=0.1),
    dict(top_k=50, top_p=0.9, min_p=0.05),
    dict(top_k=2**30),
]


# P1
@pytest.mark.parametrize("verify", [js.verify_match, js.verify_rejection, js.verify_block])
def test_a_draft_that_is_the_arg_max_of_a_greedy_row_is_accepted_beside_sampled_rows(verify):
    tree, num_rows, vocab = js.chain(2), 8, 128
    logits = np.random.default_rng(6).normal(size=(num_rows * tree.num_nodes, vocab)).astype(np.float32)
    limits = js.Limits(vocab)
    rows = [js.make_params(limits, temperature=[0, 1.0][b % 2], seed=b)[0] for b in range(num_rows)]
    params = jax.tree.map(lambda x: jnp.repeat(x, tree.num_nodes, axis=0), js.stack_rows(rows))
    position = jnp.tile(jnp.arange(10, 10 + tree.num_nodes, dtype=jnp.int32), num_rows)
    best = logits.argmax(axis=1).reshape(num_rows, tree.num_nodes)[:, :2].astype(np.int32)
    tokens = jnp.asarray(np.concatenate([np.zeros((num_rows, 1), np.int32), best], axis=1))
    law = laws.law_of_draft(20 * jax.nn.one_hot(best, vocab, dtype=jnp.float32))  # sure of what it proposes

    @jax.jit
    def verdict(logits, params, position, tokens, law):
        shaped = js.shape(logits, params, position, limits=limits, features=PLAIN)
        target = js.make_target(shaped, params, position, vocab_size=vocab, features=PLAIN, law=True)
        draft = js.Draft(tokens, jnp.full(num_rows, 2, jnp.int32), None if verify is js.verify_match else law)
        return verify(target, draft, tree)

    count = np.asarray(verdict(logits, params, position, tokens, law).count)
    assert (count[::2] == 3).all()
    assert (count[1::2] < 3).any()


# P2
def test_adding_minus_twelve_to_all_logits_changes_no_token():
    generator = np.random.default_rng(0)
    logits = language_rows(generator)
    requests = [dict(seed=b, **FILTERS[b % len(FILTERS)]) for b in range(64)]
    first = batches.sample_rows(logits, requests, LIMITS, RAW)
    second = batches.sample_rows(logits - np.float32(12), requests, LIMITS, RAW)
    assert first.tokens.tolist() == second.tokens.tolist()
    assert np.array_equal(first.logprobs.rank, second.logprobs.rank)


# P2: and no draw falls outside the top 50
def test_no_draw_falls_outside_top_k():
    generator = np.random.default_rng(1)
    logits = language_rows(generator) - np.float32(12)
    for position in range(20):
        requests = [dict(seed=b, top_k=1 + b % 60, min_p=[0.0, 1e-6][b % 2]) for b in range(64)]
        result = batches.sample_rows(logits, requests, LIMITS, RAW, position=np.full(64, position))
        assert (result.logprobs.rank <= 1 + np.arange(64) % 60).all()


# P3
def test_a_seeded_stream_over_eight_equal_tokens_is_fair_for_any_choice_of_ids():
    generator = np.random.default_rng(2)
    choices = [
        range(8),
        [2**i for i in range(8)],
        range(0, 64, 8),
        range(0, 256, 32),
        range(325, 333),
        [0, 4, 5, 128, 131, 132, 256, 300],
    ]
    choices += [np.sort(generator.choice(333, 8, replace=False)) for _ in range(6)]
    noise = np.asarray(
        rng.gumbel_range(
            np.array([[7, 0]] * 8000, np.uint32), np.arange(8000, dtype=np.int32), rng.TARGET, 333
        )
    )
    for ids in choices:
        ids = np.array(list(ids))
        # One batch through `sample` shows that it draws by this noise; the rest follows from the noise alone.
        logits = np.full((64, WIDTH), -np.inf, np.float32)
        logits[:, ids] = 1.5
        result = batches.sample_rows(logits, [dict(seed=7)] * 64, LIMITS, RAW, position=np.arange(64))
        winners = noise[:, ids].argmax(1)
        assert result.tokens.tolist() == ids[winners[:64]].tolist()
        assert scipy.stats.chisquare(np.bincount(winners, minlength=8)).pvalue > ALPHA


# P4
def test_a_greedy_row_beside_sampled_rows_gives_its_arg_max():
    generator = np.random.default_rng(3)
    logits = language_rows(generator)
    requests = [
        dict(temperature=0.0) if b % 2 else dict(seed=b, temperature=1.5, **FILTERS[b % 6]) for b in range(64)
    ]
    result = batches.sample_rows(logits, requests, LIMITS, RAW)
    best = np.nanargmax(logits, axis=1)
    assert result.tokens[1::2].tolist() == best[1::2].tolist()
    assert (result.logprobs.rank[1::2] == 1).all()
    assert result.tokens[::2].tolist() != best[::2].tolist()


# P5
def test_min_p_is_about_probabilities():
    generator = np.random.default_rng(4)
    logits = language_rows(generator)
    thresholds = [[0.01, 0.05, 0.1, 0.3, 0.5, 0.9][b % 6] for b in range(64)]
    requests = [
        dict(seed=b, min_p=min_p, temperature=[1.0, 2.0][b % 2]) for b, min_p in enumerate(thresholds)
    ]
    for shift in (0, -20, 20):
        for position in range(8):
            result = batches.sample_rows(
                logits + np.float32(shift), requests, LIMITS, PROCESSED, position=np.full(64, position)
            )
            for b, min_p in enumerate(thresholds):
                scaled = logits[b, :333].astype(np.float64) / requests[b]["temperature"]
                assert scaled[result.tokens[b]] >= scaled.max() + np.log(min_p) - 1e-5


# P7
def test_changing_a_neighbours_top_k_leaves_a_rows_token_unchanged():
    generator = np.random.default_rng(5)
    logits = language_rows(generator)
    requests = [dict(seed=b, **FILTERS[b % 6]) for b in range(64)]
    first = batches.sample_rows(logits, requests, LIMITS, RAW).tokens
    for top_k in (1, 2, 33, 332, 0):
        changed = [dict(request, top_k=top_k) if b % 2 else request for b, request in enumerate(requests)]
        assert batches.sample_rows(logits, changed, LIMITS, RAW).tokens[::2].tolist() == first[::2].tolist()


# P7
def test_permuting_rows_permutes_tokens():
    generator = np.random.default_rng(6)
    logits = language_rows(generator)
    requests = [dict(seed=b, **FILTERS[b % 6]) for b in range(64)]
    first = batches.sample_rows(logits, requests, LIMITS, RAW).tokens
    order = generator.permutation(64)
    again = batches.sample_rows(logits[order], [requests[b] for b in order], LIMITS, RAW).tokens
    assert again.tolist() == first[order].tolist()


def test_the_kept_tokens_of_each_filter_are_those_of_the_reference():
    generator = np.random.default_rng(7)
    logits = language_rows(generator)
    requests = [dict(seed=b, logprobs=6, **FILTERS[b % 6]) for b in range(64)]
    result = batches.sample_rows(logits, requests, LIMITS, PROCESSED)
    for b, request in enumerate(requests):
        numbers = {name: request[name] for name in ("top_k", "top_p", "min_p") if name in request}
        kept, margin = reference.filters(logits[b, :333], **numbers)
        assert margin > 1e-5
        assert kept[result.tokens[b]]
        logprobs = reference.processed_logprobs(logits[b, :333], kept, False)
        np.testing.assert_allclose(result.logprobs.token[b], logprobs[result.tokens[b]], rtol=0, atol=1e-4)


def drawn_on(kind, logits, params, position, batch_axis):
    """Tokens of rows split over "data" and of a vocabulary split over "tensor", two devices each."""
    mesh = mesh_of(kind, data=2, tensor=2)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    draw = jax.jit(
        functools.partial(js.sample, features=PLAIN, mesh=mesh, axis="tensor", batch_axis=batch_axis)
    )
    given = put(logits, batch_axis, "tensor"), jax.tree.map(lambda x: put(x, batch_axis), params)
    return np.asarray(draw(*given, put(position, batch_axis)).tokens)


# P6 and P8
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_equal_logits_on_two_data_shards_draw_independently_on_either_kind_of_mesh(kind):
    num_rows = 512
    limits = js.Limits(256)
    row = np.where(np.arange(256) % 32 == 0, 0, -np.inf).astype(np.float32)
    logits = jnp.asarray(np.tile(row, (num_rows, 1)))
    params = js.stack_rows([js.make_params(limits, seed=b) for b in range(num_rows)])[0]
    position = jnp.zeros(num_rows, jnp.int32)
    tokens = drawn_on(kind, logits, params, position, "data")
    one_device = jax.jit(functools.partial(js.sample, features=PLAIN))(logits, params, position).tokens
    np.testing.assert_array_equal(tokens, one_device)
    pairs = np.zeros((8, 8))
    np.add.at(pairs, (tokens[: num_rows // 2] // 32, tokens[num_rows // 2 :] // 32), 1)
    assert scipy.stats.chisquare(pairs.ravel()).pvalue > ALPHA
