"""When candidates suffice, and random rows and filters on both routes against the reference."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import mixes, reference
from tests.routes import ORDERS, by_candidates, by_rows, kept_sets, padded, route_results

# A float32 sum of V terms in a halving tree errs by at most log2(V) + 7 roundings, relative to the sum; the
# exponentials add two more. 2^-19 covers V = 151,936 and stays inside the margin 2^-18 of the contract.
MASS_TOLERANCE = 2.0**-19
# exp and log of float32 logits: a decision of min-p in logits, relative to the size of the threshold.
LOGIT_TOLERANCE = 2.0**-20
CANDIDATES = {33: 16, 1000: 64}  # by vocabulary: fewer than it has


# --- when candidates suffice -----------------------------------------------------------------------------------------


def exact_of(z, filters, filter_order, num_candidates):
    top_k, top_p, min_p = filters
    numbers = np.array([top_k], np.int32), np.array([top_p], np.float32), np.array([min_p], np.float32)
    static = dict(vocab_size=1000, num_candidates=num_candidates, filter_order=filter_order)
    return bool(by_candidates(padded(np.asarray(z, np.float32)[None]), *numbers, **static)[1][0])


@pytest.mark.parametrize("filter_order", ORDERS)
def test_exact_follows_its_rule(filter_order):
    generator = np.random.default_rng(5)
    flat = generator.normal(0, 1, 1000)
    steep = -0.5 * np.arange(1000.0)[generator.permutation(1000)]
    exact = lambda z, *filters: exact_of(z, filters, filter_order, 64)
    assert exact(flat, 0, 1.0, 0.0)  # nothing filtered
    assert exact(flat, 1, 1.0, 0.0)
    assert exact(flat, 64, 1.0, 0.0)
    assert not exact(flat, 65, 1.0, 0.0)
    assert exact(steep, 0, 1.0, 0.1)  # the min-p cut lies above the smallest candidate
    assert not exact(flat, 0, 1.0, 0.01)
    assert exact(steep, 0, 0.9, 0.0)  # the candidates' mass passes top_p
    assert not exact(flat, 0, 0.9, 0.0)
    few = np.where(np.arange(1000) % 40 == 0, flat, -np.inf)
    for filters in [(999, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 1e-6), (999, 0.9, 1e-6)]:
        assert exact(few, *filters)  # all that can be drawn are candidates
    # Min-p cuts among the candidates, so that a larger top-k does not matter.
    assert exact(steep, 65, 1.0, 0.1)


def test_top_p_over_an_unknown_mass_is_not_exact():
    # Over 500 tokens survive min-p, of which 64 are known: where top-p is measured on them it cannot be told.
    generator = np.random.default_rng(6)
    z = np.concatenate([generator.normal(8, 1, 20), generator.normal(0, 1, 980)])
    assert not exact_of(z, (0, 0.5, 1e-5), "vllm", 64)
    assert not exact_of(z, (0, 0.5, 1e-5), "joint", 64)
    assert exact_of(z, (0, 0.5, 1e-5), "hf", 64)  # measured on the row before min-p
    assert not exact_of(z, (500, 0.5, 0.0), "vllm", 64)
    assert not exact_of(z, (500, 0.5, 0.0), "hf", 64)
    assert exact_of(z, (500, 0.5, 0.0), "joint", 64)  # measured on the row before top-k


def test_a_crossing_close_to_top_p_is_left_to_the_full_row():
    z = np.log(np.array([0.5, 0.25, 0.125, 0.125] + [0.0] * 996, np.float32) + np.float32(1e-30))
    for filter_order in ORDERS:
        assert not exact_of(z, (0, 0.75, 0.0), filter_order, 64)
        assert exact_of(z, (0, 0.76, 0.0), filter_order, 64)


@pytest.mark.parametrize(
    ("num_vocab", "filter_order"),
    [
        (1000, "vllm"),
        (33, "vllm"),
        *(pytest.param(33, order, marks=pytest.mark.large) for order in ORDERS if order != "vllm"),
        *(pytest.param(1000, order, marks=pytest.mark.large) for order in ORDERS if order != "vllm"),
    ],
)
def test_exact_is_never_true_where_the_routes_cut_apart_on_crossings(filter_order, num_vocab):
    # top_p is put on the prefix masses themselves and on their neighbours, the hardest place to agree.
    generator = np.random.default_rng(7)
    for _ in range(12):
        logits = mixes.rows(generator, 64, num_vocab, ("normal", "language", "flat", "bfloat16", "masked"))
        filters = []
        for z in logits:
            top_k, _, min_p = mixes.filter_numbers(generator, num_vocab)
            top_k = int(generator.choice([top_k, generator.integers(1, 40)]))
            ids = reference.order(z)
            base = num_vocab if top_k <= 0 else min(top_k, num_vocab)
            mass = np.exp(z[ids[:base]].astype(np.float64) - z.max())
            prefix = (np.cumsum(mass) / mass.sum()).astype(np.float32)
            top_p = prefix[generator.integers(min(base, 40))]
            step = int(generator.integers(-2, 3))
            for _ in range(abs(step)):
                top_p = np.nextafter(top_p, np.float32(2 if step > 0 else -1))
            filters.append((top_k, min(float(top_p), 1.0), float(generator.choice([0.0, min_p]))))
        full, short, exact, *_ = route_results(logits, filters, filter_order, CANDIDATES[num_vocab])
        apart = exact & (full != short).any(1)
        assert not apart.any(), [(filters[b], full[b].sum(), short[b].sum()) for b in np.flatnonzero(apart)]


# --- property sweep --------------------------------------------------------------------------------------------------


def check_against_reference(logits, filters, filter_order, num_candidates):
    full, short, exact, num_kept, full_mass, short_mass = route_results(
        logits, filters, filter_order, num_candidates
    )
    apart = exact & (full != short).any(1)
    assert not apart.any(), [filters[b] for b in np.flatnonzero(apart)]
    for b, (z, numbers) in enumerate(zip(logits, filters)):
        expected, margin = reference.filters(z, *numbers, filter_order)
        assert full[b].any()
        tolerance = max(MASS_TOLERANCE, LOGIT_TOLERANCE * max(1.0, float(np.abs(z[np.isfinite(z)]).max())))
        if margin > tolerance:
            assert (full[b] == expected).all(), (numbers, full[b].sum(), expected.sum())
        if exact[b]:
            assert num_kept[b] == short[b].sum() or numbers[1] >= 1
        z64 = reference.normalised(z)
        for mask, mass in ((full[b], full_mass[b]), (short[b], short_mass[b])):
            if mask is full[b] or exact[b]:
                true = reference.log_sum_exp(np.where(mask, z64, -np.inf)) - z64.max()
                assert abs(mass - true) <= 2.0**-19 * (1 + abs(true))


# Every width with one preset, the widths that matter with all.
SWEEPS = [
    (1, 2, "vllm"),
    (3, 31, "hf"),
    (3, 32, "joint"),
    (1, 1000, "vllm"),
    (64, 33, "vllm"),
    (64, 33, "hf"),
    (64, 33, "joint"),
    (64, 1000, "vllm"),
    (64, 1000, "hf"),
    (64, 1000, "joint"),
    (3, 32000, "joint"),
]


@pytest.mark.parametrize(("num_rows", "num_vocab", "filter_order"), SWEEPS)
def test_random_rows_and_filters_are_cut_as_the_reference_cuts_them(num_rows, num_vocab, filter_order):
    @hypothesis.settings(max_examples=max(3, min(15, 200_000 // (num_rows * num_vocab))))
    @hypothesis.given(
        seed=st.integers(0, 2**32),
        kinds=st.lists(st.sampled_from(mixes.ROW_KINDS), min_size=1, max_size=11, unique=True),
    )
    def sweep(seed, kinds):
        generator = np.random.default_rng(seed)
        logits = mixes.rows(generator, num_rows, num_vocab, kinds)
        filters = [mixes.filter_numbers(generator, num_vocab) for _ in range(num_rows)]
        check_against_reference(logits, filters, filter_order, CANDIDATES.get(num_vocab, 64))

    sweep()


def test_rows_of_a_full_vocabulary_are_cut_as_the_reference_cuts_them():
    generator = np.random.default_rng(8)
    kinds = ("normal", "language", "flat", "peaked", "tied", "masked")
    for _ in range(3):
        logits = np.stack(
            [mixes.row(generator, kind, 151_936) for kind in generator.choice(kinds, 3, replace=False)]
        )
        filters = [mixes.filter_numbers(generator, 151_936) for _ in range(3)]
        check_against_reference(logits, filters, "vllm", 128)


def test_adding_a_constant_cuts_the_same_set():
    # Grid values, so that the sum with the constant is exact.
    generator = np.random.default_rng(9)
    logits = np.round(generator.normal(0, 2, (64, 1000)) * 1024).astype(np.float32) / 1024
    filters = [mixes.filter_numbers(generator, 1000) for _ in range(64)]
    for filter_order in ORDERS:
        expected = kept_sets(logits, filters, filter_order)
        for constant in (-12.0, 10.0, 100.0):
            assert kept_sets(logits + np.float32(constant), filters, filter_order) == expected


@pytest.mark.parametrize("filter_order", ORDERS)
def test_a_cut_does_not_depend_on_the_rows_beside_it(filter_order):
    generator = np.random.default_rng(10)
    logits = mixes.rows(generator, 64, 1000)
    filters = [mixes.filter_numbers(generator, 1000) for _ in range(64)]
    whole = route_results(logits, filters, filter_order, 64)
    for chosen in ([5], [0], [63]):
        part = route_results(logits[chosen], [filters[b] for b in chosen], filter_order, 64)
        for ours, theirs in zip(part, whole):
            assert ours.tobytes() == np.ascontiguousarray(theirs[chosen]).tobytes()


def test_cuts_compile_to_no_flat_index_over_rows_and_vocabulary():
    logits = jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    numbers = [jax.ShapeDtypeStruct((8,), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32)]
    static = dict(vocab_size=1000, filter_order="vllm")
    for run in (
        functools.partial(by_rows, **static),
        functools.partial(by_candidates, num_candidates=64, **static),
    ):
        assert "8192" not in str(jax.make_jaxpr(run)(logits, *numbers))
