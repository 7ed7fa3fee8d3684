"""Laws: log-probabilities behind a cut, rows taken from them, and what a draft leaves of a target."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample import Cut, Law, log_probs, residual
from jaxsample.candidates import tile_sum
from jaxsample.law import log_prob_of, log_residual, take_rows
from tests import laws


def random_laws(num_rows, seed=0):
    """(probabilities f64[num_rows, 2, 8], some 0; their Law [num_rows, 2])."""
    generator = np.random.default_rng(seed)
    weights = generator.dirichlet(np.ones(8), (num_rows, 2)) * (generator.random((num_rows, 2, 8)) < 0.8)
    weights[:, :, 0] += 0.01
    weights /= weights.sum(axis=2, keepdims=True)
    return weights, jax.jit(laws.law_of_draft)(laws.logs(weights))


def test_log_probabilities_are_normalised_and_minus_infinity_where_nothing_can_be_drawn():
    expected, law = random_laws(64)
    found = np.asarray(log_probs(law))
    assert found.shape == (64, 2, 128) and (found[:, :, 8:] == -np.inf).all()
    np.testing.assert_allclose(np.exp(found[:, :, :8]), expected, rtol=4e-6)
    assert ((found[:, :, :8] == -np.inf) == (expected == 0)).all()


def test_tokens_behind_the_cut_have_no_probability_and_ties_go_by_id():
    logits = jnp.full((1, 128), -np.inf).at[0, :5].set(jnp.asarray([1.0, 2.0, 1.0, 1.0, 0.0]))
    mass = 1 + 2 * np.exp(-1)
    cut = Cut(jnp.ones(1), jnp.full(1, 2, jnp.int32), jnp.full(1, np.log(mass), jnp.float32))
    law = Law(logits, jnp.full(1, 2.0), cut)
    found = np.exp(np.asarray(log_probs(law)))[0, :5]
    np.testing.assert_allclose(found, np.array([np.exp(-1), 1, np.exp(-1), 0, 0]) / mass, rtol=1e-6)
    for token in range(5):
        one = log_prob_of(law, jnp.full(1, token, jnp.int32))
        np.testing.assert_array_equal(one, log_probs(law)[:, token])


def test_a_negative_id_has_no_probability():
    _, law = random_laws(4)
    ids = jnp.asarray([[-1, 3], [2, -1], [0, 0], [-2, 127]], jnp.int32)
    found = np.asarray(log_prob_of(law, ids))
    whole = np.take_along_axis(np.asarray(log_probs(law)), np.maximum(ids, 0)[:, :, None], axis=2)[:, :, 0]
    np.testing.assert_array_equal(found, np.where(ids < 0, -np.inf, whole))


def test_one_row_of_each_entry_is_taken_from_every_field():
    _, law = random_laws(16)
    index = jnp.asarray(np.arange(16) % 2, jnp.int32)
    for taken, leaf in zip(jax.tree.leaves(take_rows(law, index)), jax.tree.leaves(law)):
        np.testing.assert_array_equal(taken, np.asarray(leaf)[np.arange(16), index])


def test_what_a_draft_leaves_is_the_positive_part_in_both_forms():
    p, law = random_laws(512)
    scale = np.random.default_rng(1).random((512, 1)).astype(np.float32)
    log_p, log_q = log_probs(law)[:, 0], log_probs(law)[:, 1]
    expected = np.maximum(scale * p[:, 0] - p[:, 1], 0)
    found = np.asarray(residual(log_p, log_q, jnp.log(scale)))
    logs = np.asarray(log_residual(log_p, log_q, jnp.log(scale)))
    np.testing.assert_allclose(found[:, :8], expected, atol=2e-6)
    np.testing.assert_allclose(np.exp(logs), found, rtol=1e-5)
    assert ((logs == -np.inf) == (found == 0)).all()
    np.testing.assert_allclose(np.asarray(tile_sum(jnp.asarray(found))), expected.sum(axis=1), atol=4e-6)


def test_differences_of_a_few_ulp_leave_nothing():
    log_p = jnp.asarray([[-0.5, -1.0, -np.inf, -2.0]], jnp.float32)
    log_q = log_p - jnp.asarray([[2.0**-23, 2.0**-22, 0, 2.0**-12]], jnp.float32)
    for found, nothing in ((log_residual(log_p, log_q), -np.inf), (residual(log_p, log_q), 0)):
        np.testing.assert_array_equal(np.asarray(found)[0] > nothing, [False, False, False, True])
    assert (np.asarray(residual(log_p, log_p)) == 0).all()
