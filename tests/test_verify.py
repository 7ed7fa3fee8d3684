"""Matching against a walk in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsample import PAD, ROOT, Draft, accept_matching, chain, from_paths


def _walk(tree, sampled, valid, tokens, num_live):
    """What one row emits: (tokens, path)."""
    node, out, path = 0, [], []
    while valid[node]:
        out.append(int(sampled[node]))
        path.append(node)
        for child in tree.children[node]:
            if child <= num_live and tokens[child] != PAD and tokens[child] == sampled[node]:
                node = child
                break
        else:
            break
    return out, path


TREES = {
    "root": ROOT,
    "chain": chain(4),
    "tree": from_paths([(0, 0, 0), (0, 1), (1, 0), (2,), (1, 1)]),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_a_step_emits_the_walk_of_agreeing_proposals(tree):
    rng = np.random.default_rng(1)
    num_rows, num_nodes = 400, tree.num_nodes
    sampled = rng.integers(0, 3, (num_rows, num_nodes)).astype(np.int32)
    tokens = rng.integers(-1, 3, (num_rows, num_nodes)).astype(np.int32)
    valid = rng.random((num_rows, num_nodes)) < 0.9
    num_live = rng.integers(0, num_nodes, num_rows).astype(np.int32)
    verdict = jax.jit(accept_matching, static_argnums=3)(
        jnp.asarray(sampled), jnp.asarray(valid), Draft(jnp.asarray(tokens), jnp.asarray(num_live)), tree
    )
    assert verdict.tokens.shape == (num_rows, tree.max_depth + 1)
    assert verdict.accepted.shape == (num_rows, num_nodes - 1)
    for row in range(num_rows):
        out, path = _walk(tree, sampled[row], valid[row], tokens[row], num_live[row])
        padding = tree.max_depth + 1 - len(out)
        assert int(verdict.count[row]) == len(out)
        assert np.asarray(verdict.tokens[row]).tolist() == out + [PAD] * padding
        assert np.asarray(verdict.path[row]).tolist() == path + [0] * padding
        assert np.flatnonzero(np.asarray(verdict.accepted[row])).tolist() == [node - 1 for node in path[1:]]


def test_a_draft_ends_at_its_first_padding():
    # B45: drafts [1, 0, 1, -1, -1] accept at most three and never emit -1.
    tokens = jnp.asarray([[9, 1, 0, 1, -1, -1]], jnp.int32)
    sampled = jnp.asarray([[1, 0, 1, 2, 3, 3]], jnp.int32)
    draft = Draft(tokens, jnp.asarray([5], jnp.int32))
    verdict = accept_matching(sampled, jnp.ones((1, 6), bool), draft, chain(5))
    np.testing.assert_array_equal(np.asarray(verdict.tokens), [[1, 0, 1, 2, -1, -1]])
    assert int(verdict.count[0]) == 4


def test_shapes_that_do_not_fit_the_tree_are_refused():
    draft = Draft(jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32))
    good, valid = jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3), bool)
    with pytest.raises(ValueError, match="sampled"):
        accept_matching(good[:, :2], valid, draft, chain(2))
    with pytest.raises(ValueError, match="num_live"):
        accept_matching(good, valid, Draft(draft.tokens, jnp.zeros(3, jnp.int32)), chain(2))
    with pytest.raises(ValueError, match=r"draft\.tokens"):
        accept_matching(good, valid, Draft(draft.tokens[:, :2], draft.num_live), chain(2))
