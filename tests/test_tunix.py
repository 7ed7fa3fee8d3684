"""Tunix's own decode loop with this library's sampler in it; runs where google-tunix is installed, as in CI.

The loop, its prefill, its cache and its donated state are Tunix's. Knows nothing of our decode step.
"""

import jax
import numpy as np
import pytest

pytest.importorskip("tunix", reason="google-tunix has an environment of its own, see .ci/run")

from tunix.generate import sampler as tunix_sampler

import jaxsample as js
from jaxsample import interop
from scripts.tunix_decode import CACHE_SLOTS, PROMPTS, SETTINGS, VOCAB, Sampler, drawing, toy_parts
from tests import reference

NUM_ROWS, NUM_STEPS, END = len(PROMPTS), 12, 1
LIMITS = js.Limits(VOCAB, max_length=CACHE_SLOTS)


@pytest.fixture(autouse=True)
def ordinary_promotion():
    """The rules of promotion that Tunix's code is written for."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def ours():
    return Sampler(*toy_parts(), draw=drawing(**SETTINGS))


def decode(sampler, **rest):
    return sampler(PROMPTS, max_generation_steps=NUM_STEPS, **rest)


def test_greedy_tokens_are_those_of_tunix(ours):
    theirs = decode(tunix_sampler.Sampler(*toy_parts()), temperature=0.0)
    greedy = decode(Sampler(*toy_parts(), draw=drawing("plain", temperature=0.0)))
    assert [row.tolist() for row in greedy.tokens] == [row.tolist() for row in theirs.tokens]
    assert len({tuple(row.tolist()) for row in theirs.tokens}) > 1
    assert decode(ours, seed=1, return_logits=True).tokens[0].tolist() == theirs.tokens[0].tolist()


def test_sampled_tokens_are_those_of_sample_on_the_same_logits(ours):
    result = decode(ours, seed=3, return_logits=True)
    start = result.padded_prompt_tokens.shape[1]
    draw = jax.jit(lambda logits, params, position: js.sample(logits, params, position, limits=LIMITS).tokens)
    told = [row.tolist() for row in result.tokens]
    for step in range(max(map(len, told))):
        alive = [row for row in range(NUM_ROWS) if step < len(told[row])]
        logits = np.zeros((NUM_ROWS, VOCAB), np.float32)
        logits[alive] = [result.logits[row][step] for row in alive]
        key = jax.random.fold_in(jax.random.PRNGKey(3), start + step - 1)
        params = interop.from_arrays(LIMITS, **SETTINGS, seed=interop.seeds_of_key(key, NUM_ROWS))
        tokens = np.asarray(draw(logits, params, np.zeros(NUM_ROWS, np.int32)))
        assert tokens[alive].tolist() == [told[row][step] for row in alive]
    again = decode(ours, seed=3, return_logits=True)
    assert [row.tolist() for row in again.tokens] == told
    assert [row.tolist() for row in decode(ours, seed=4, return_logits=True).tokens] != told


def test_first_tokens_have_the_law_of_their_rows_settings(ours):
    """Chi-square of the first token over many seeds; a wrong filter or temperature moves it far out."""
    runs = [decode(ours, seed=seed, return_logits=True) for seed in range(400)]
    first = lambda tokens: int(tokens[0]) if len(tokens) else END  # Tunix cuts the reply before it
    assert len({first(run.tokens[0]) for run in runs}) == 1, "the greedy row"
    for row in range(1, NUM_ROWS):
        numbers = {name: float(values[row]) for name, values in SETTINGS.items()}
        logits = next(run.logits[row][0] for run in runs if len(run.logits[row]))
        scaled = np.asarray(logits, np.float64) / numbers.pop("temperature")
        kept, margin = reference.filters(scaled, **{**numbers, "top_k": int(numbers["top_k"])})
        assert margin > 1e-5
        law = np.exp(reference.processed_logprobs(scaled, kept, False))
        counts = np.bincount([first(run.tokens[row]) for run in runs], minlength=VOCAB)
        assert counts[~kept].sum() == 0
        likely = law * len(runs) >= 5  # the rest is one class
        observed = np.append(counts[likely], counts[~likely].sum())
        expected = np.append(law[likely], law[~likely].sum()) * len(runs)
        observed, expected = observed[expected > 0], expected[expected > 0]
        freedom = len(observed) - 1
        assert freedom >= 2
        statistic = ((observed - expected) ** 2 / expected).sum()
        assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_the_loop_gives_its_state_away_as_it_does_with_its_own_sampler(ours):
    """Every buffer of the state that goes into the loop is taken over, the cache's among them."""
    given = {}
    compiled = ours._compiled_decode_fn

    def watched(params, state):
        given["state"] = state
        return compiled(params, state)

    ours._compiled_decode_fn = watched
    try:
        decode(ours, seed=3, return_logits=True)
    finally:
        ours._compiled_decode_fn = compiled
    cache = jax.tree.leaves(given["state"].cache)
    assert len(cache) >= 4 and all(leaf.is_deleted() for leaf in cache)
    assert given["state"].token_buffer.is_deleted() and given["state"].done.is_deleted()
