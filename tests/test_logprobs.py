"""Log-probabilities and ranks: raw and processed, for emitted and for given tokens."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxsample.logprobs import score
from jaxsample.params import PAD, Features, Limits, neutral_params
from tests import batches, mixes, reference

DATA = Path(__file__).parent / "data" / "logprobs.npz"
# Log-sum-exp of float32 logits: the exponentials and log2(V) halving adds are relative to a sum of at least
# one, then one rounding each of z - max and of the difference.
TOLERANCE = 2.0**-19

score_rows = jax.jit(score, static_argnums=2)


def assert_logprobs(actual, expected, tolerance=TOLERANCE):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    finite = np.isfinite(expected)
    assert (finite == np.isfinite(actual)).all()
    assert (actual[~finite] == expected[~finite]).all()
    assert (np.abs(actual[finite] - expected[finite]) <= tolerance * (1 + np.abs(expected[finite]))).all()


def test_given_tokens_have_the_logprobs_and_ranks_of_other_software():
    data = np.load(DATA)
    for group in data["groups"]:
        logits, tokens = data[f"{group}_logits"], data[f"{group}_tokens"]
        for column in range(tokens.shape[1]):
            result = score_rows(logits, tokens[:, column], 5)
            assert_logprobs(result.token, data[f"{group}_token_logprobs"][:, column])
            assert (np.asarray(result.rank) == data[f"{group}_token_ranks"][:, column]).all()
            assert (np.asarray(result.top_ids) == data[f"{group}_top5_ids"]).all()
            assert_logprobs(result.top, data[f"{group}_top5_logprobs"])


def test_emitted_tokens_have_the_logprobs_and_ranks_of_other_software():
    data = np.load(DATA)
    features = Features(tier="filtered", num_logprobs=5, full_rows=False)
    for group in data["groups"]:
        logits, tokens = data[f"{group}_logits"], data[f"{group}_tokens"]
        limits = Limits(vocab_size=logits.shape[1])
        params, _ = neutral_params(limits, len(logits))
        params.num_logprobs[:] = 5
        for column in range(tokens.shape[1]):
            noise = np.zeros(logits.shape, np.float32)
            noise[np.arange(len(logits)), tokens[:, column]] = 1e6
            result = batches.run(
                logits, params, np.zeros(len(logits), np.int32), limits=limits, features=features, noise=noise
            )
            assert (np.asarray(result.tokens) == tokens[:, column]).all()
            assert_logprobs(result.logprobs.token, data[f"{group}_token_logprobs"][:, column])
            assert (np.asarray(result.logprobs.rank) == data[f"{group}_token_ranks"][:, column]).all()
            assert (np.asarray(result.logprobs.top_ids) == data[f"{group}_top5_ids"]).all()
            assert_logprobs(result.logprobs.top, data[f"{group}_top5_logprobs"])


def test_scores_of_half_precision_logits_are_those_of_their_float32_values():
    generator = np.random.default_rng(0)
    ids = np.array([0, 31, 32, 99], np.int32)
    for dtype in (ml_dtypes.bfloat16, np.float16):
        logits = generator.normal(0, 3, (4, 100)).astype(dtype)
        half, full = score_rows(logits, ids, 7), score_rows(logits.astype(np.float32), ids, 7)
        assert jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), half, full))


@pytest.mark.parametrize("num_vocab", [1, 2, 31, 32, 33, 127, 128, 129, 1000])
def test_scores_of_any_width_follow_the_reference(num_vocab):
    generator = np.random.default_rng(num_vocab)
    logits = mixes.rows(generator, 22, num_vocab, mixes.ROW_KINDS)
    ids = generator.integers(0, num_vocab, 22).astype(np.int32)
    num_top = min(num_vocab, 20)
    result = jax.tree.map(np.asarray, score_rows(logits, ids, num_top))
    for b, z in enumerate(logits):
        logprobs = reference.raw_logprobs(reference.normalised(z))
        token, rank, top_ids, top = reference.score(z, logprobs, ids[b], num_top)
        scale = TOLERANCE + 2.0**-23 * np.abs(z[np.isfinite(z)]).max()
        assert_logprobs(result.token[b], token, scale)
        assert result.rank[b] == rank
        assert result.top_ids[b].tolist() == top_ids.tolist()
        assert_logprobs(result.top[b], top, scale)


def test_scores_of_ids_outside_the_vocabulary_are_those_of_no_token():
    result = score_rows(np.zeros((3, 5), np.float32), np.array([PAD, 5, 2**31 - 1], np.int32), 2)
    assert np.asarray(result.token).tolist() == [-np.inf] * 3
    assert np.asarray(result.rank).tolist() == [0, 0, 0]


def test_asking_for_more_top_scores_than_tokens_is_refused():
    with pytest.raises(ValueError, match="num_top"):
        score(np.zeros((1, 5), np.float32), np.zeros(1, np.int32), 6)


def one_row(logits, mode="raw", grammar=None, **request):
    """(token, Logprobs as NumPy without the row axis) of one request over at most 8 tokens."""
    features = batches.RAW if mode == "raw" else batches.PROCESSED
    result = batches.sample_eight([logits], [dict(seed=0, **request)], features, grammars=[grammar])
    return int(result.tokens[0]), jax.tree.map(lambda leaf: leaf[0], result.logprobs)


# Fault report B37.
def test_processed_probabilities_are_those_of_the_distribution_drawn_from_and_sum_to_one():
    logits = np.log([0.6, 0.3, 0.1])
    _, logprobs = one_row(logits, "processed", top_k=2, top_p=0.8, logprobs=3)
    np.testing.assert_allclose(np.exp(logprobs.top[:3]), [2 / 3, 1 / 3, 0], atol=1e-6)
    assert logprobs.top[2] == -np.inf
    assert np.exp(logprobs.top.astype(np.float64)).sum() == pytest.approx(1, abs=1e-6)
    assert set(logprobs.top_ids.tolist()) <= {*range(8), PAD}
    assert logprobs.top_ids[:2].tolist() == [0, 1]


# Fault report B39.
def test_ranks_count_from_one_with_ties_by_id():
    _, logprobs = one_row([3, 2, 1], logprobs=3)
    assert logprobs.top_ids[:3].tolist() == [0, 1, 2]
    for forced in range(3):
        token, logprobs = one_row([3, 2, 1], grammar=[forced], logprobs=1)
        assert (token, logprobs.rank) == (forced, forced + 1)
    for forced, rank in enumerate([2, 1, 3, 4, 5]):
        token, logprobs = one_row([0.0, 1.0, -0.0, 0.0, -1.0], grammar=[forced], logprobs=0)
        assert (token, logprobs.rank) == (forced, rank)


# Fault report B41.
def test_the_mode_says_at_which_stage_logprobs_are_taken():
    token, logprobs = one_row([2, 1, 0], temperature=0.5, top_k=1, logprobs=1)
    assert token == 0
    assert logprobs.token == pytest.approx(-0.40761, abs=1e-5)
    _, logprobs = one_row([2, 1, 0], "processed", temperature=0.5, logprobs=1)
    assert logprobs.top[0] == pytest.approx(-0.14293, abs=1e-5)
    _, logprobs = one_row([2, 1, 0], "processed", temperature=0.5, top_k=1, logprobs=1)
    assert logprobs.token == 0
    assert Features().logprobs_mode == "raw"


def test_raw_logprobs_do_not_change_with_any_parameter():
    logits = np.random.default_rng(3).normal(0, 2, 8).astype(np.float32)
    requests = [
        dict(temperature=0.1),
        dict(temperature=0.0),
        dict(top_k=3),
        dict(top_p=0.3),
        dict(min_p=0.3),
        dict(logit_bias={5: 3.0}),
        dict(allowed_token_ids=[1, 2, 3]),
        dict(banned_token_ids=[0]),
        dict(token_temperature_scale={4: 2.0}),
        dict(bad_words_ids=[[7]]),
    ]
    plain = one_row(logits, logprobs=6)[1]
    for request in requests:
        logprobs = one_row(logits, logprobs=6, **request)[1]
        assert logprobs.top.tobytes() == plain.top.tobytes()
        assert logprobs.top_ids.tolist() == plain.top_ids.tolist()


def test_a_greedy_row_is_a_point_mass_when_processed():
    token, logprobs = one_row([1, 3, 3, 2], "processed", temperature=0.0, top_p=0.9, logprobs=4)
    assert (token, logprobs.token, logprobs.rank) == (1, 0, 1)
    assert logprobs.top.tolist() == [0, *[-np.inf] * 5]
    assert logprobs.top_ids[0] == 1


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_rows_may_ask_for_fewer_top_logprobs_than_the_program_holds(mode):
    logits = np.random.default_rng(4).normal(0, 2, 8)
    features = batches.RAW if mode == "raw" else batches.PROCESSED
    most = batches.sample_eight([logits], [dict(seed=7, logprobs=6)], features)
    assert (most.logprobs.top_ids >= 0).all()
    for asked in ([None, 0, 1], [3, 5, 6]):
        rows = [dict(seed=7, logprobs=k) for k in asked]
        result = batches.sample_eight([logits] * 3, rows, features)
        ids, top = result.logprobs.top_ids, result.logprobs.top
        for b, k in enumerate(k or 0 for k in asked):
            assert ids[b, :k].tolist() == most.logprobs.top_ids[0, :k].tolist()
            assert top[b, :k].tolist() == most.logprobs.top[0, :k].tolist()
            assert (ids[b, k:] == PAD).all()
            assert (top[b, k:] == -np.inf).all()
            assert result.tokens[b] == most.tokens[0]
            assert asked[b] is None or result.logprobs.token[b] == most.logprobs.token[0]


def test_a_program_without_logprobs_computes_none():
    params, _ = neutral_params(Limits(5), 1)
    run = lambda: batches.run(np.zeros((1, 5), np.float32), params, np.zeros(1, np.int32))
    assert jax.eval_shape(run).logprobs is None


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("bad", [[0, np.nan, 0], [np.inf, 0, 0], [-np.inf] * 8])
def test_a_bad_row_has_the_logprobs_of_no_token(mode, bad):
    features = batches.RAW if mode == "raw" else batches.PROCESSED
    good = np.linspace(0, 1, 8)
    requests = [dict(seed=b, logprobs=2) for b in range(3)]
    result = batches.sample_eight([good, bad, good], requests, features)
    assert result.valid.tolist() == [True, False, True]
    assert result.tokens[1] == PAD
    assert (result.logprobs.token[1], result.logprobs.rank[1]) == (-np.inf, 0)
    assert not np.isnan(result.logprobs.top).any()
    clean = batches.sample_eight([good] * 3, requests, features)
    for row in (0, 2):
        take = lambda leaf, row=row: leaf[row].tobytes()
        assert jax.tree.map(take, result) == jax.tree.map(take, clean)


def test_no_array_of_probabilities_is_an_output_or_a_scatter_of_logprobs():
    # Log-sum-exp and gathers: exponentials feed sums, and nothing of size [B, V] goes through a logarithm.
    logits = jax.ShapeDtypeStruct((4, 1000), jnp.float32)
    text = str(jax.make_jaxpr(lambda z, ids: score(z, ids, 5))(logits, jax.ShapeDtypeStruct((4,), jnp.int32)))
    logs = [line for line in text.splitlines() if " log " in line or " log1p " in line or " div " in line]
    assert not [line for line in logs if "[4,10" in line.split("=")[0]]
