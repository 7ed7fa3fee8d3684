"""Tree verifiers: equal to rejection on chains, enumerated on a small tree, each coin and weight held to float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsample import (
    GivenNoise,
    chain,
    from_paths,
    verify_rejection,
    verify_tree_distinct,
    verify_tree_points,
    verify_tree_replaced,
)
from tests import laws, reference_verify
from tests.test_lossless import flips

TREE = from_paths([(0, 0), (0, 1), (1, 0)])
KINDS = {
    "replaced": verify_tree_replaced,
    "distinct": verify_tree_distinct,
    "points": verify_tree_points,
}
USUAL = [pytest.param("replaced", marks=pytest.mark.large), "distinct", "points"]
CHUNK = 4096


def _markov(kind, vocab=3):
    """(target, table), f64[V, V]: laws given the previous token, multiples of 1/4096."""
    generator = np.random.default_rng(7)
    weights = [generator.dirichlet(np.full(vocab, 1.5), vocab) * 0.85 + 0.15 / vocab for _ in range(2)]
    if kind == "zeros":  # both lack a token, not the same one
        weights[0][0, 1] = weights[1][0, 0] = weights[1][1, 2] = weights[0][2, 0] = 0
    if kind == "narrow":  # a single token to propose after 0, none in common after 1
        weights[1][0] = [0, 1, 0]
        weights[0][1], weights[1][1] = [1, 0, 1], [0, 1, 0]
    parts = [np.round(rows / rows.sum(axis=1, keepdims=True) * 4096) for rows in weights]
    for rows in parts:
        rows[np.arange(vocab), rows.argmax(axis=1)] += 4096 - rows.sum(axis=1)
    return [rows / 4096 for rows in parts]


LAWS = pytest.mark.parametrize("law", ["full", "zeros", "narrow"])


@pytest.mark.parametrize("kind", KINDS)
@LAWS
def test_the_rule_of_each_tree_is_lossless_by_enumeration(kind, law):
    target, table = _markov(law)
    found = reference_verify.tree_law(TREE.children, target, table, 0, kind, TREE.max_depth + 1)
    expected = reference_verify.sequence_law(target, 0, TREE.max_depth + 1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)


def _walks(kind, law):
    """(tokens, rows p and q, walk) for all proposals and all coins, of the laws of that name."""
    target, table = _markov(law)
    for tokens, _ in reference_verify.proposals(TREE.children, table, 0, kind):
        rows = np.where(tokens >= 0, tokens, 0)
        for walk in reference_verify.walks(TREE.children, target[rows], table[rows], tokens, kind):
            yield tokens, target[rows], table[rows], walk


def _coins(walk):
    """Uniforms for nodes 1 ... N - 1 well inside the branch, or None; and those with one coin at its boundary."""
    coins = np.full(TREE.num_nodes - 1, 0.5)
    for node, chance, error, accepted in walk.trials:
        coins[node - 1] = chance / 2 if accepted else (1 + chance) / 2
        if abs(coins[node - 1] - chance) < 2 * error:
            return None, []
    edges = []
    for node, chance, error, accepted in walk.trials:
        step = 2 * error + 2.0**-23
        uniform = chance - step if accepted else chance + step
        if 0 < uniform < 1:
            edges.append(np.where(np.arange(len(coins)) == node - 1, uniform, coins))
    return coins, edges


@pytest.mark.parametrize("kind", USUAL)
def test_each_coin_and_each_weight_of_a_tree_flips_where_float64_says(kind):
    inner, items = np.array(TREE.inner), []
    for law in ("full", "zeros", "narrow"):
        for tokens, p, q, walk in _walks(kind, law):
            coins, edges = _coins(walk)
            if coins is None:
                continue
            quiet = np.zeros(laws.VOCAB)
            items += [(tokens, p, q, walk, edge, quiet, -1) for edge in edges]
            for noise, last in flips(walk.weights, walk.weight_error):
                items.append((tokens, p, q, walk, coins, noise, last))
    generator = np.random.default_rng(0)
    if len(items) > 4 * CHUNK:
        items = [items[i] for i in generator.permutation(len(items))[: 4 * CHUNK]]
    assert {len(item[3].path) for item in items} == {1, 2, 3}
    padding = -len(items) % CHUNK
    items += items[:1] * padding
    tokens, p, q, walks, coins, noise, last = zip(*items)
    log_p, log_q = laws.logs(np.array(p)), laws.logs(np.array(q)[:, inner])
    tokens, coins = np.array(tokens, np.int32), np.array(coins, np.float32)
    noise = np.pad(np.array(noise, np.float32), ((0, 0), (0, 128 - laws.VOCAB)))
    live, seed = np.full(CHUNK, TREE.num_nodes - 1, np.int32), laws.seeds(np.arange(CHUNK))
    for start in range(0, len(items), CHUNK):
        at = slice(start, start + CHUNK)
        given = GivenNoise(jnp.asarray(coins[at]), jnp.asarray(noise[at]))
        drawn = None if kind == "points" else log_q[at]
        args = (log_p[at], drawn, tokens[at], live, seed, np.zeros(CHUNK, np.int32), given)
        verdict = jax.tree.map(np.asarray, laws.run(KINDS[kind], TREE, *args))
        for row, (walk, wanted) in enumerate(zip(walks[at], last[at])):
            count = len(walk.path)
            assert verdict.count[row] == count
            assert tuple(verdict.path[row, :count]) == walk.path and (verdict.path[row, count:] == 0).all()
            assert (verdict.tokens[row, : count - 1] == tokens[start + row, list(walk.path[1:])]).all()
            assert wanted in (-1, verdict.tokens[row, count - 1])
            assert (verdict.tokens[row, count:] == -1).all()
            assert set(np.flatnonzero(verdict.accepted[row]) + 1) == set(walk.path[1:])


@functools.cache
def _chain_batch(with_law):
    """Random laws with zeros, drafts of any length, -1 inside, on a chain of two."""
    generator = np.random.default_rng(3)
    weights = generator.dirichlet(np.full(laws.VOCAB, 0.5), (CHUNK, 5)) * (
        generator.random((CHUNK, 5, 8)) < 0.8
    )
    weights[:, :, 0] += 0.05
    weights /= weights.sum(axis=2, keepdims=True)
    p, q = weights[:, :3], weights[:, 3:]
    q[: CHUNK // 4] = p[: CHUNK // 4, :2]
    tokens = np.zeros((CHUNK, 3), np.int32)
    tokens[:, 1:] = (generator.random((CHUNK, 2, 1)) > q.cumsum(axis=2)).sum(axis=2).clip(0, 7)
    tokens[generator.random((CHUNK, 3)) < 0.05] = -1
    live = generator.integers(0, 3, CHUNK).astype(np.int32)
    seed = laws.seeds(generator.integers(0, 2**63, CHUNK))
    position = generator.integers(0, 2**20, CHUNK).astype(np.int32)
    return laws.logs(p), laws.logs(q) if with_law else None, tokens, live, seed, position


@functools.cache
def _by_rejection(with_law):
    return jax.tree.map(np.asarray, laws.run(verify_rejection, chain(2), *_chain_batch(with_law)))


@pytest.mark.parametrize("kind", USUAL)
def test_on_a_chain_each_tree_verifier_is_rejection(kind):
    with_law = kind != "points"
    expected = _by_rejection(with_law)
    found = jax.tree.map(np.asarray, laws.run(KINDS[kind], chain(2), *_chain_batch(with_law)))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert set(expected.count) == {1, 2, 3}


@pytest.mark.parametrize("kind", KINDS)
def test_a_verifier_refuses_a_draft_of_the_other_sort(kind):
    log_p, log_q, *rest = _chain_batch(True)
    with pytest.raises(ValueError, match=r"draft\.law"):
        laws.run(KINDS[kind], chain(2), log_p, log_q if kind == "points" else None, *rest)
    if kind != "points":
        with pytest.raises(ValueError, match="one for each inner node"):
            laws.run(KINDS[kind], chain(2), log_p, log_q[:, :1], *rest)
