"""Top-k, top-p and min-p: the kept set on both routes, against other software and against the reference."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxsample.candidates import select_first, sorted_selection
from jaxsample.params import Features, Limits, neutral_params
from jaxsample.sample import sample
from jaxsample.shaping import shape
from tests import reference
from tests.routes import ORDERS, kept_of, kept_sets, route_results

DATA = Path(__file__).parent / "data"
run = jax.jit(sample, static_argnames=("limits", "features"))
run_shape = jax.jit(shape, static_argnames=("limits", "features"))


def vectors(name):
    """Groups of (logits, temperature, top_k, top_p, min_p, kept, file, group)."""
    inputs = np.load(DATA / "filters_hf.npz")
    source = np.load(DATA / f"filters_{name}.npz")
    for group in inputs["groups"]:
        logits = inputs[f"{group}_logits"]
        numbers = [inputs[f"{group}_{field}"] for field in ("temperature", "top_k", "top_p", "min_p")]
        bits = np.unpackbits(source[f"{group}_kept"], axis=1, bitorder="little")[:, : logits.shape[1]]
        yield logits, *numbers, bits.astype(bool), source, group


def params_of(limits, temperature, top_k, top_p, min_p, num_logprobs=-1):
    params, _ = neutral_params(limits, len(temperature))
    return dataclasses.replace(
        params,
        temperature=temperature.astype(np.float32),
        top_k=top_k.astype(np.int32),
        top_p=top_p.astype(np.float32),
        min_p=min_p.astype(np.float32),
        num_logprobs=np.full(len(temperature), num_logprobs, np.int32),
    )


# --- other software --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hf", pytest.param("vllm", marks=pytest.mark.large)])
def test_kept_sets_are_those_of_other_software_on_both_routes(name):
    num_exact = 0
    for logits, temperature, top_k, top_p, min_p, expected, _, _ in vectors(name):
        limits = Limits(vocab_size=logits.shape[1])
        params = params_of(limits, temperature, top_k, top_p, min_p)
        position = np.zeros(len(logits), np.int32)
        shaped = run_shape(logits, params, position, limits=limits, features=Features(tier="filtered"))
        scaled = np.asarray(shaped.logits)[:, : limits.vocab_size]
        num_candidates = 16 if limits.vocab_size < 1000 else 128
        full, short, exact, num_kept, full_mass, short_mass = route_results(
            scaled, list(zip(top_k, top_p, min_p)), name, num_candidates
        )
        assert (full == expected).all()
        assert (short[exact] == expected[exact]).all()
        assert (num_kept[exact] == expected.sum(1)[exact])[num_kept[exact] < num_candidates].all()
        num_exact += exact.sum()
        mass = [np.exp(z[keep].astype(np.float64) - z.max()).sum() for z, keep in zip(scaled, expected)]
        np.testing.assert_allclose(full_mass, np.log(mass), rtol=2.0**-20, atol=2.0**-20)
        np.testing.assert_allclose(short_mass[exact], np.log(mass)[exact], rtol=2.0**-20, atol=2.0**-20)
    assert 106 < num_exact < 212  # of 212: both routes are really taken


# One program a group for both tests that follow; vLLM's sets are drawn from with fewer candidates.
PROCESSED = Features(
    tier="filtered", num_candidates=128, filter_order="hf", num_logprobs=96, logprobs_mode="processed"
)
FEW = Features(tier="filtered", num_candidates=16, filter_order="vllm")


# That the kept sets are those is tested always.
@pytest.mark.large
@pytest.mark.parametrize(("name", "features"), [("hf", PROCESSED), ("vllm", FEW)], ids=["hf", "vllm"])
def test_sample_draws_from_the_kept_sets_of_other_software(name, features):
    # Noise that favours one token beyond all others shows whether that token is kept.
    for logits, temperature, top_k, top_p, min_p, expected, _, _ in vectors(name):
        limits = Limits(vocab_size=logits.shape[1], num_logprobs=96)
        params = params_of(limits, temperature, top_k, top_p, min_p)
        position = np.zeros(len(logits), np.int32)
        order = np.stack([reference.order(row) for row in logits])
        num_kept = expected.sum(1)
        last_kept = order[np.arange(len(logits)), num_kept - 1]
        first_removed = order[np.arange(len(logits)), np.minimum(num_kept, limits.vocab_size - 1)]
        for favoured in (last_kept, first_removed):
            noise = np.zeros(logits.shape, np.float32)
            noise[np.arange(len(logits)), favoured] = 1e6
            result = run(logits, params, position, limits=limits, features=features, noise=noise)
            tokens = np.asarray(result.tokens)
            assert expected[np.arange(len(logits)), tokens].all()
            is_kept = expected[np.arange(len(logits)), favoured]
            assert (tokens[is_kept] == favoured[is_kept]).all()


def test_processed_probabilities_are_those_of_other_software():
    for logits, temperature, top_k, top_p, min_p, expected, source, group in vectors("hf"):
        limits = Limits(vocab_size=logits.shape[1], num_logprobs=96)
        params = params_of(limits, temperature, top_k, top_p, min_p, num_logprobs=96)
        position, noise = np.zeros(len(logits), np.int32), np.zeros(logits.shape, np.float32)
        result = run(logits, params, position, limits=limits, features=PROCESSED, noise=noise)
        ids, logprobs = np.asarray(result.logprobs.top_ids), np.asarray(result.logprobs.top)
        offsets = source[f"{group}_probs_offset"]
        for b in range(len(logits)):
            ids_kept = np.flatnonzero(expected[b])
            probs = dict(zip(ids_kept.tolist(), source[f"{group}_probs"][offsets[b] : offsets[b + 1]]))
            inside = np.isfinite(logprobs[b])
            assert inside.sum() == min(96, len(ids_kept))
            assert set(ids[b][inside].tolist()) <= set(probs)
            # Scaled logits span less than 70, so that one rounding moves a logprob by at most 70 * 2^-23.
            theirs = np.log([probs[token] for token in ids[b][inside].tolist()])
            np.testing.assert_allclose(logprobs[b][inside], theirs, rtol=0, atol=2e-5)


# --- exact cases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filter_order", ORDERS)
def test_off_values_and_the_ends_of_the_range(filter_order):
    z = [2, 1.9, 0, -1, -2, -2.5, -3, -4]
    keep = lambda *filters: kept_of(z, filters, filter_order)
    for top_k in (0, -1, 8, 9, 2**30, 2**31 - 1):
        assert keep(top_k, 1.0, 0.0) == list(range(8))
    assert keep(0, 2.0, 0.0) == list(range(8))
    assert keep(0, 0.0, 0.0) == [0]
    assert keep(0, 1.0, 1.0) == [0]
    assert keep(1, 1.0, 0.0) == [0]
    assert keep(3, 1.0, 0.0) == [0, 1, 2]
    assert keep(7, 1.0, 0.0) == list(range(7))
    assert keep(0, 1 - 2.0**-24, 0.0) == list(range(8))


@pytest.mark.parametrize("filter_order", ORDERS)
def test_ties_go_to_the_lowest_ids(filter_order):
    for k in (1, 4, 8):
        assert kept_of([0] * 8, (k, 1.0, 0.0), filter_order) == list(range(k))
    assert kept_of([0] * 8, (0, 1.0, 1.0), filter_order) == list(range(8))
    z = [0, 0, 0, 0, 0, 1, 0, 1]
    assert kept_of(z, (1, 1.0, 0.0), filter_order) == [5]
    assert kept_of(z, (4, 1.0, 0.0), filter_order) == [0, 1, 5, 7]
    assert kept_of(z, (0, 1.0, 1.0), filter_order) == [5, 7]
    assert kept_of(z, (0, 0.0, 0.0), filter_order) == [5]


def test_ties_across_tiles_go_to_the_lowest_ids():
    z = np.zeros(1000)
    z[[900, 128, 127]] = 1
    assert kept_of(z, (2, 1.0, 0.0), "vllm", 1000) == [127, 128]
    assert kept_of(z, (131, 1.0, 0.0), "vllm", 1000) == [*range(130), 900]
    assert kept_of(z, (999, 1.0, 0.0), "vllm", 1000) == list(range(999))


# Fault report B14: a running sum in low precision stalls.
@pytest.mark.parametrize("filter_order", ORDERS)
def test_equal_tokens_are_cut_at_exact_counts(filter_order):
    for numerator in range(1, 9):
        assert kept_of([-3.25] * 8, (0, numerator / 8, 0.0), filter_order) == list(range(numerator))


def test_many_equal_tokens_are_cut_at_exact_counts():
    z = np.full((3, 151_936), -3.25, np.float32)
    filters = [(0, top_p, 0.0) for top_p in (0.25, 0.5, 1.0)]
    kept = kept_sets(z, filters, "vllm", 128)
    assert kept == [list(range(count)) for count in (37_984, 75_968, 151_936)]


# Fault report B04: the token that makes the running sum equal to top_p is the last one kept.
@pytest.mark.parametrize(
    ("num_vocab", "filter_order"), [(8, "vllm"), (8, "hf"), (8, "joint"), (1000, "vllm")]
)
def test_a_running_sum_that_equals_top_p_ends_the_set(num_vocab, filter_order):
    # Sums of halves are exact in float32 wherever exp(-ln 2) is.
    z = np.log(np.array([0.125, 0.25, 0.125, 0.5], np.float32))
    keep = lambda top_p: kept_of(z, (0, top_p, 0.0), filter_order, num_vocab)
    assert keep(0.5) == [3]
    assert keep(0.75) == [1, 3]
    assert keep(0.875) == [0, 1, 3]
    assert keep(1.0) == [0, 1, 2, 3]
    assert keep(np.nextafter(np.float32(0.75), np.float32(0))) == [1, 3]
    assert keep(0.7501) == [0, 1, 3]


def test_zeros_of_both_signs_and_subnormals_are_one_value():
    logits = np.array([[-0.0, 0.0, 1e-40, -1e-40, -0.0, 0.0]], np.float32)
    params, _ = neutral_params(Limits(6), 1)
    shaped = run_shape(
        logits, params, np.zeros(1, np.int32), limits=Limits(6), features=Features(tier="plain")
    )
    z = np.asarray(shaped.logits)[:, :6]
    assert (z.view(np.uint32) == 0).all()
    assert kept_of(z[0], (3, 1.0, 0.0), "vllm") == [0, 1, 2]


@pytest.mark.parametrize("filter_order", ORDERS)
def test_removed_tokens_are_never_kept_and_a_lone_token_always_is(filter_order):
    z = [-np.inf] * 6 + [-1e30]
    for filters in [
        (0, 1.0, 0.0),
        (5, 0.3, 0.5),
        (1, 0.0, 1.0),
        (0, 0.99, 0.0),
        (0, 1.0, 0.2),
        (7, 1.0, 0.0),
    ]:
        assert kept_of(z, filters, filter_order) == [6]


def test_presets_differ_in_what_top_p_is_measured_on():
    # p = .4 .3 .1 .1 .05 .05; top-k 2 leaves .4 and .3 (mass .7), min-p .2 leaves .4 .3 .1 .1 (mass .9).
    z = np.log(np.array([0.4, 0.3, 0.1, 0.1, 0.05, 0.05], np.float32))
    keep = lambda filters, order: kept_of(z, filters, order)
    # top-p .5: .4 / .7 = .571 reaches it where top-k comes first, .4 / .9 and .4 do not.
    assert keep((2, 0.5, 0.0), "vllm") == [0]
    assert keep((2, 0.5, 0.0), "hf") == [0]
    assert keep((2, 0.5, 0.0), "joint") == [0, 1]
    # top-p .75: (.4 + .3) / .9 = .778 reaches it where min-p comes first.
    assert keep((0, 0.75, 0.2), "vllm") == [0, 1]
    assert keep((0, 0.75, 0.2), "joint") == [0, 1]
    assert keep((0, 0.75, 0.2), "hf") == [0, 1, 2]


@pytest.mark.parametrize(("width", "count"), [(301, 7), (64, 1), (50, 50)])
def test_selecting_the_first_tokens_is_sorting_them(width, count):
    rng = np.random.default_rng(width)
    x = rng.integers(-3, 4, (6, width)).astype(np.float32)  # full of ties, also at the cut
    x[0] = rng.standard_normal(width)
    x[1], x[2, count // 2 :], x[3], x[4, -1] = -np.inf, -np.inf, 0, 9
    expected = np.argsort(-x, axis=1, kind="stable")[:, :count]
    assert (np.asarray(jax.jit(select_first, static_argnums=1)(x, count)) == np.sort(expected, axis=1)).all()
    values, places = jax.jit(sorted_selection, static_argnums=1)(x, count)
    assert (np.asarray(places) == expected).all()
    assert (
        np.asarray(values).view(np.uint32) == np.take_along_axis(x, expected, axis=1).view(np.uint32)
    ).all()
