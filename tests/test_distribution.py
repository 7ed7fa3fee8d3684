"""Goodness of fit of the drawn tokens, the rare tail, and independence; seeds are fixed and alpha is stated."""

import jax
import numpy as np
import pytest
import scipy.stats

from jaxsample import rng
from jaxsample.admission import make_params
from jaxsample.params import Features, Limits
from jaxsample.sample import sample
from tests import reference

ALPHA = 1e-4  # of each test; with fixed seeds a test passes always or never
LIMITS = Limits(
    vocab_size=100, max_length=4, num_logit_bias=0, num_bad_words=0, num_stop_sequences=0, num_scales=0
)
# All 100 tokens are candidates, so that no row needs a full pass.
FEATURES = Features(tier="filtered", full_rows=False, num_candidates=100)
PLAIN = Features(tier="plain")
NUM_ROWS = 1 << 16
NUM_CHUNKS = 16  # 2^20 draws

run = jax.jit(sample, static_argnames=("limits", "features"))


def rows_of(request):
    params, _ = make_params(LIMITS, seed=0, **request)
    return jax.tree.map(lambda leaf: np.repeat(leaf, NUM_ROWS, axis=0), params)


def draws(logits, request, first_seed=0, by="seeds", num_chunks=NUM_CHUNKS, features=FEATURES):
    """Tokens i32[num_chunks, NUM_ROWS]: row r of chunk c has a seed (or position) of its own."""
    params = rows_of(request)
    logits = np.repeat(np.asarray(logits, np.float32)[None], NUM_ROWS, axis=0)
    tokens = []
    for chunk in range(num_chunks):
        number = np.arange(NUM_ROWS, dtype=np.uint64) + chunk * NUM_ROWS
        seed, position = (
            (number + first_seed, 0 * number) if by == "seeds" else (0 * number + first_seed, number)
        )
        params.seed[:, 0], params.seed[:, 1] = seed & 0xFFFFFFFF, seed >> 32
        result = run(logits, params, position.astype(np.int32), limits=LIMITS, features=features)
        assert np.asarray(result.valid).all()
        tokens.append(np.asarray(result.tokens))
    return np.stack(tokens)


def p_value(tokens, logits, request):
    """Chi-square of the counts against the reference's probabilities; removed tokens must not occur."""
    shaped, _, _ = reference.shape(np.asarray(logits, np.float32), request, vocab_size=100)
    numbers = {name: request[name] for name in ("top_k", "top_p", "min_p") if name in request}
    kept, margin = reference.filters(shaped, **numbers)
    assert margin > 1e-5
    expected = np.exp(reference.processed_logprobs(shaped, kept, False)) * tokens.size
    counts = np.bincount(tokens.ravel(), minlength=100)
    assert counts[~kept].sum() == 0
    counts, expected = counts[kept], expected[kept]
    rare = expected < 5  # pooled, as the chi-square law asks
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return scipy.stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue


LOGITS = np.random.default_rng(1).normal(0, 1.5, 100)
REQUESTS = {
    "unfiltered": {},
    "temperature, top-k, top-p and min-p": dict(temperature=1.3, top_k=40, top_p=0.9, min_p=0.02),
    "top-k": dict(top_k=7),
    "top-p": dict(top_p=0.8),
    "min-p": dict(min_p=0.1, temperature=0.7),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_tokens_follow_the_distribution(name):
    """2^20 draws unfiltered, 2^18 under all filters, 2^16 under one.

    Relative errors of the tokens' probabilities of 0.9 % (100 tokens), 1.5 % (40) and at most 3.1 % (100), root mean
    square, fail with probability 0.9.
    """
    num_chunks = {"unfiltered": NUM_CHUNKS, "temperature, top-k, top-p and min-p": 4}.get(name, 1)
    by = "positions" if name == "top-k" else "seeds"
    features = PLAIN if name == "unfiltered" else FEATURES
    assert (
        p_value(draws(LOGITS, REQUESTS[name], 10, by, num_chunks, features), LOGITS, REQUESTS[name]) > ALPHA
    )


def test_tokens_follow_the_distribution_on_the_full_row_path():
    # With 8 candidates most of these rows cannot be cut among them.
    features = Features(tier="filtered", full_rows=True, num_candidates=8)
    request = dict(top_k=40, top_p=0.9)
    tokens = draws(LOGITS, request, 10, num_chunks=1, features=features)
    assert p_value(tokens, LOGITS, request) > ALPHA
    assert (tokens == draws(LOGITS, request, 10, num_chunks=1)).all()


def within_poisson(count, mean):
    return scipy.stats.poisson.ppf(ALPHA / 2, mean) <= count <= scipy.stats.poisson.isf(ALPHA / 2, mean)


def test_tokens_of_probability_one_in_a_million_appear_at_their_rate():
    # 99 such tokens: about 104 draws in 2^20 fall on them, spread evenly.
    probs = np.full(100, 1e-6)
    probs[50] = 1 - 99e-6
    tokens = draws(np.log(probs), {}, 1000, features=PLAIN)
    counts = np.bincount(tokens.ravel(), minlength=100)
    rare = np.delete(counts, 50)
    assert within_poisson(rare.sum(), tokens.size * 99e-6)
    assert (rare > 0).sum() > 40
    assert rare.max() <= scipy.stats.poisson.isf(ALPHA / 99, tokens.size * 1e-6)


def independent(first, second):
    table = np.zeros((8, 8))
    np.add.at(table, (first.ravel(), second.ravel()), 1)
    return scipy.stats.chisquare(table.ravel()).pvalue > ALPHA


EIGHT = np.where(np.arange(100) < 8, 0.0, -np.inf)  # eight equal tokens


@pytest.mark.parametrize("by", ["seeds", "positions"])
def test_equal_rows_with_neighbouring_seeds_or_positions_draw_independently(by):
    tokens = draws(EIGHT, {}, 3, by, 2, PLAIN).ravel()
    assert scipy.stats.chisquare(np.bincount(tokens, minlength=8)).pvalue > ALPHA
    for distance in (1, 2, 3, 4, 64):
        assert independent(tokens[:-distance], tokens[distance:])


def test_two_seeds_draw_independently_at_equal_positions():
    first, second, far = (draws(EIGHT, {}, seed, "positions", 1, PLAIN) for seed in (0, 1, 1 << 32))
    assert independent(first, second)
    assert independent(first, far)
    assert 0.11 < (first == second).mean() < 0.14


def test_children_of_one_request_draw_independently():
    params, _ = make_params(LIMITS, seed=77, n=3)
    seeds = [low | high << 32 for low, high in params.seed.tolist()]
    streams = [draws(EIGHT, {}, seed, "positions", 1, PLAIN) for seed in seeds]
    assert independent(streams[0], streams[1])
    assert independent(streams[1], streams[2])
    assert independent(streams[0], streams[2])


@pytest.mark.parametrize("purpose", [rng.ACCEPT, rng.RESIDUAL, rng.DRAFT])
def test_a_draw_is_independent_of_the_noise_of_other_purposes(purpose):
    tokens = draws(EIGHT, {}, 5, "positions", 1, PLAIN)
    noise = jax.jit(rng.gumbel_range, static_argnums=(2, 3))
    position = np.arange(NUM_ROWS, dtype=np.int32)
    other = noise(np.array([[5, 0]] * NUM_ROWS, np.uint32), position, purpose, 8)
    assert independent(tokens, np.asarray(other).argmax(1))
