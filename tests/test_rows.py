"""Rows are independent: a row's tokens and logprobs have the same bits alone, in any batch and beside anyone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxsample import rng
from jaxsample.candidates import tidy
from jaxsample.params import Features, neutral_params, required_features, set_rows, stack_rows
from jaxsample.sample import sample
from jaxsample.shaping import shape
from tests import batches, mixes

LIMITS, WIDTH = batches.LIMITS, batches.WIDTH
MODES = {"raw": batches.RAW, "processed": batches.PROCESSED}


@functools.lru_cache
def hostile_batch():
    """64 rows: every parameter mixed, among them NaN, infinite, greedy, grammar-bound and padding rows."""
    generator = np.random.default_rng(2604)
    batch = batches.random_batch(generator, 64, LIMITS, WIDTH, chance=0.4)
    batch["logits"][3, 5] = np.nan
    batch["logits"][17, :] = np.nan
    batch["logits"][29, 100] = np.inf
    batch["logits"][41, :] = -np.inf
    batch["grammars"][50] = []
    batch["grammars"][51] = [7]
    for row in (8, 9, 33, 63):  # padding rows, as an engine leaves them
        batch["requests"][row], batch["grammars"][row] = {}, None
        batch["prompts"][row] = batch["outputs"][row] = []
    for row in (10, 20, 30):
        batch["requests"][row] = dict(temperature=0.0, logprobs=3)
    return batch


def rows_of(batch, chosen):
    take = lambda value: value[chosen] if isinstance(value, np.ndarray) else [value[b] for b in chosen]
    return {name: take(value) for name, value in batch.items()}


def bits(result):
    """Each row of a result as one bytes object."""
    leaves = jax.tree.leaves(result)
    return [b"".join(np.asarray(leaf)[b].tobytes() for leaf in leaves) for b in range(len(leaves[0]))]


@functools.lru_cache
def whole(mode):
    return bits(batches.sample_rows(**hostile_batch(), limits=LIMITS, features=MODES[mode]))


@pytest.mark.parametrize(
    ("num_rows", "mode"),
    [
        (1, "processed"),
        *(pytest.param(*case, marks=pytest.mark.large) for case in ((8, "processed"), (1, "raw"))),
    ],
)
def test_a_row_has_the_bits_it_has_in_any_smaller_batch(num_rows, mode):
    order = np.random.default_rng(num_rows).permutation(64)
    for start in range(0, 64, num_rows):
        chosen = np.resize(order[start : start + num_rows], num_rows)
        part = batches.sample_rows(**rows_of(hostile_batch(), chosen), limits=LIMITS, features=MODES[mode])
        assert bits(part) == [whole(mode)[b] for b in chosen]


@pytest.mark.parametrize("mode", MODES)
def test_permuting_rows_permutes_the_results(mode):
    order = np.random.default_rng(0).permutation(64)
    result = batches.sample_rows(**rows_of(hostile_batch(), order), limits=LIMITS, features=MODES[mode])
    assert bits(result) == [whole(mode)[b] for b in order]


@pytest.mark.parametrize("mode", MODES)
def test_a_row_does_not_feel_what_its_neighbours_become(mode):
    batch = hostile_batch()
    kept = np.arange(0, 64, 2)
    generator = np.random.default_rng(1)
    other = batches.random_batch(generator, 64, LIMITS, WIDTH, chance=0.6)
    other["logits"][::3] = np.nan
    mixed = {
        name: np.where((np.arange(64) % 2 == 0).reshape(-1, *[1] * (value.ndim - 1)), value, other[name])
        if isinstance(value, np.ndarray)
        else [mine if b % 2 == 0 else theirs for b, (mine, theirs) in enumerate(zip(value, other[name]))]
        for name, value in batch.items()
    }
    result = bits(batches.sample_rows(**mixed, limits=LIMITS, features=MODES[mode]))
    assert [result[b] for b in kept] == [whole(mode)[b] for b in kept]


@pytest.mark.large
def test_a_row_of_many_tiles_has_its_bits_alone():
    limits = dataclasses.replace(LIMITS, vocab_size=4999)
    batch = batches.random_batch(np.random.default_rng(4999), 8, limits, 4999)
    together = bits(batches.sample_rows(**batch, limits=limits, features=MODES["processed"]))
    for b in range(8):
        alone = batches.sample_rows(**rows_of(batch, [b]), limits=limits, features=MODES["processed"])
        assert bits(alone) == [together[b]]


# --- programs --------------------------------------------------------------------------------------------------------


def batch_of(kind, generator):
    """64 random rows of requests that a tier serves."""
    batch = batches.random_batch(generator, 64, LIMITS, WIDTH, chance=0.0)
    batch["grammars"] = None  # programs below the full tier have no masks
    for b, request in enumerate(batch["requests"]):
        request.clear()
        request.update(
            seed=b,
            logprobs=int(generator.integers(0, 7)),
            temperature=float(generator.choice([0.0, 0.5, 1.0, 2.0])),
        )
        if kind == "filtered" and b % 4:
            request["top_k"], request["top_p"], request["min_p"] = mixes.filter_numbers(
                generator, LIMITS.vocab_size
            )
    batch["prompts"] = [[]] * 64
    batch["outputs"] = [[]] * 64
    return batch


@pytest.mark.parametrize("mode", ["raw", pytest.param("processed", marks=pytest.mark.large)])
@pytest.mark.parametrize(
    ("kind", "tiers"), [("plain", ("plain", "filtered", "full")), ("filtered", ("filtered", "full"))]
)
def test_results_are_bit_equal_under_any_superset_of_stages(mode, kind, tiers):
    batch = batch_of(kind, np.random.default_rng(2))
    results = {}
    for tier in tiers:
        features = dataclasses.replace(MODES[mode], tier=tier)
        results[tier] = bits(batches.sample_rows(**batch, limits=LIMITS, features=features))
    assert all(result == results["full"] for result in results.values())


@pytest.mark.parametrize("filter_order", [pytest.param("vllm", marks=pytest.mark.large), "joint"])
def test_leaving_out_full_rows_where_allowed_changes_no_bit(filter_order):
    batch = batch_of("filtered", np.random.default_rng(3))
    params, stop = batches.params_of(LIMITS, batch["requests"])
    served = []
    for b in range(64):
        row = jax.tree.map(lambda leaf, b=b: leaf[b : b + 1], (params, stop))
        needed = required_features(*row, limits=LIMITS, num_candidates=32, filter_order=filter_order)
        served.append(not needed.full_rows)
    assert 16 < sum(served) < 64
    results = []
    for full_rows in (True, False):
        features = dataclasses.replace(
            MODES["processed"], filter_order=filter_order, full_rows=full_rows, tier="filtered"
        )
        results.append(bits(batches.sample_rows(**batch, limits=LIMITS, features=features)))
    assert [x for x, ok in zip(results[0], served) if ok] == [x for x, ok in zip(results[1], served) if ok]


def test_the_number_of_candidates_changes_no_token():
    batch = batch_of("filtered", np.random.default_rng(4))
    results = []
    for num_candidates in (8, 512):
        features = dataclasses.replace(MODES["raw"], tier="filtered", num_candidates=num_candidates)
        results.append(bits(batches.sample_rows(**batch, limits=LIMITS, features=features)))
    assert all(result == results[0] for result in results)


def test_required_features_give_the_bits_of_the_program_with_everything():
    generator = np.random.default_rng(5)
    for kind in ("plain", "filtered"):
        batch = batch_of(kind, generator)
        params, stop = batches.params_of(LIMITS, batch["requests"])
        needed = required_features(params, stop, limits=LIMITS, num_candidates=32, logprobs_mode="processed")
        assert needed.tier == ("filtered" if kind == "filtered" else needed.tier)
        everything = MODES["processed"]
        results = [
            bits(batches.sample_rows(**batch, limits=LIMITS, features=features))
            for features in (needed, everything)
        ]
        assert results[0] == results[1]


def test_one_trace_serves_every_value_of_a_shape_and_a_tier():
    traces = []

    def counted(logits, params, position, stop, history, allowed):
        traces.append(logits.shape)
        return sample(
            logits,
            params,
            position,
            stop=stop,
            history=history,
            allowed=allowed if features.tier == "full" else None,
            limits=LIMITS,
            features=features,
        ).tokens

    # One candidate and no full rows make the program that compiles fastest with every stage in it.
    features = Features(num_candidates=1, full_rows=False)
    step = jax.jit(counted)
    generator = np.random.default_rng(6)
    requests = [
        [{}] * 8,
        [dict(temperature=0.0)] * 8,
        [dict(top_k=3, top_p=0.5, logprobs=2, min_tokens=3)] * 8,
    ]
    requests += [batches.random_batch(generator, 8, LIMITS, WIDTH, chance=0.6)["requests"] for _ in range(3)]
    for rows in requests:
        params, stop = batches.params_of(LIMITS, rows)
        history = batches.history_of(LIMITS, [[1]] * 8, [[2]] * 8, LIMITS.max_length)
        mask = batches.bit_mask(LIMITS, [None, [3]] * 4)
        step(np.zeros((8, WIDTH), np.float32), params, np.zeros(8, np.int32), stop, history, mask)
    assert traces == [(8, WIDTH)]


# --- neutral values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_neutral_mix_leaves_logits_bit_unchanged_up_to_the_sign_of_zero(dtype):
    generator = np.random.default_rng(7)
    logits = np.pad(mixes.rows(generator, 33, 333), ((0, 0), (0, 67))).clip(-6e4, 6e4).astype(dtype)
    params, stop = neutral_params(LIMITS, 33)
    history = batches.history_of(
        LIMITS, [mixes.tokens(generator, 333, 30) for _ in range(33)], [[1, 2, 2]] * 33, 32
    )
    run = jax.jit(shape, static_argnames=("limits", "features"))
    expected = logits[:, :333].astype(np.float32)
    expected = np.where(np.abs(expected) < np.finfo(np.float32).tiny, 0, expected)
    for features in (Features(tier="plain"), Features()):
        result = run(
            logits,
            params,
            np.zeros(33, np.int32),
            stop=stop,
            history=history,
            allowed=batches.bit_mask(LIMITS, [None] * 33) if features.tier == "full" else None,
            limits=LIMITS,
            features=features,
        )
        assert np.asarray(result.logits)[:, :333].tobytes() == expected.astype(np.float32).tobytes()
        assert np.asarray(tidy(result.raw))[:, :333].tobytes() == expected.astype(np.float32).tobytes()


def test_off_values_of_filters_change_no_bit():
    generator = np.random.default_rng(8)
    batch = batch_of("plain", generator)
    plain = bits(batches.sample_rows(**batch, limits=LIMITS, features=MODES["processed"]))
    for off in (dict(top_k=-1), dict(top_k=333), dict(top_k=2**30), dict(top_p=1.0, min_p=0.0)):
        requests = [{**request, **off} for request in batch["requests"]]
        again = batches.sample_rows(
            **{**batch, "requests": requests}, limits=LIMITS, features=MODES["processed"]
        )
        assert bits(again) == plain


def test_adding_a_constant_to_a_row_changes_no_token():
    generator = np.random.default_rng(9)
    batch = batch_of("filtered", generator)
    for request in batch["requests"]:
        request["temperature"] = 1.0 if request["temperature"] == 0.5 else request["temperature"]
    # On a grid, so that the sums are exact and every difference between logits is kept.
    batch["logits"] = np.round(generator.normal(0, 2, (64, WIDTH)) * 4096).astype(np.float32) / 4096
    first = batches.sample_rows(**batch, limits=LIMITS, features=MODES["raw"])
    for constant in (-12.0, 10.0, 100.0):
        shifted = {**batch, "logits": batch["logits"] + np.float32(constant)}
        second = batches.sample_rows(**shifted, limits=LIMITS, features=MODES["raw"])
        assert second.tokens.tolist() == first.tokens.tolist()
        assert np.array_equal(second.logprobs.top_ids, first.logprobs.top_ids)
        np.testing.assert_allclose(second.logprobs.token, first.logprobs.token, atol=1e-4)


def test_a_reused_row_keeps_nothing_of_its_last_request():
    # Fault report B61: the end token stayed banned for the next request in the slot.
    first = batches.params_of(
        LIMITS,
        [
            dict(
                temperature=0.0,
                eos_token_ids=[2],
                min_tokens=30,
                banned_token_ids=[3],
                seed=9,
                ignore_eos=True,
                logit_bias={2: -9.0},
                bad_words_ids=[[2]],
            )
        ]
        * 2,
    )
    second = batches.params_of(LIMITS, [dict(temperature=0.0, eos_token_ids=[2])])
    batch = jax.tree.map(np.asarray, jax.jit(set_rows)(first, np.array([0], np.int32), second))
    fresh = stack_rows([second, jax.tree.map(lambda leaf: leaf[1:], first)])
    assert jax.tree.all(jax.tree.map(lambda x, y: x.tobytes() == y.tobytes(), batch, fresh))


# --- index width -----------------------------------------------------------------------------------------------------


def intermediate_shapes(jaxpr):
    """Shapes and dtypes of every value of a jaxpr, inner jaxprs included."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield equation.primitive.name, variable.aval.shape, variable.aval.dtype
        for inner in jax.tree.leaves(
            equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from intermediate_shapes(inner)


# Fault report B63: row times V in 32 bits wraps past 2^31.
@pytest.mark.parametrize(("num_rows", "num_vocab"), [(963 * 16, 151_936), (8561, 250_880)])
def test_no_index_runs_over_rows_times_vocabulary(num_rows, num_vocab):
    # Real arrays of this size hold over 8 GB; the program itself shows that no axis or index joins the two.
    limits = dataclasses.replace(LIMITS, vocab_size=num_vocab)
    features = dataclasses.replace(MODES["processed"], num_candidates=64)
    describe = lambda tree: jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((num_rows, *leaf.shape[1:]), leaf.dtype), tree
    )
    params, stop = describe(neutral_params(limits, 1))
    history = describe(
        jax.eval_shape(
            lambda: batches.history_module.start(
                limits, jnp.zeros((1, 4), jnp.int32), jnp.zeros(1, jnp.int32)
            )
        )
    )
    run = lambda *args: sample(*args[:3], stop=args[3], history=args[4], limits=limits, features=features)
    logits = jax.ShapeDtypeStruct((num_rows, num_vocab), jnp.float32)
    position = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    jaxpr = jax.make_jaxpr(run)(logits, params, position, stop, history)
    shapes = list(intermediate_shapes(jaxpr.jaxpr))
    assert len(shapes) > 300
    assert num_rows * num_vocab > 2**31
    for name, shape_, _ in shapes:
        # The rows keep an axis of their own; every other one stays within the padded vocabulary.
        assert all(axis in (num_rows, num_rows + 1) or axis <= num_vocab + 128 for axis in shape_), (
            name,
            shape_,
        )
        if int(np.prod(shape_, dtype=np.int64)) >= num_rows * num_vocab:
            assert shape_[0] == num_rows, (name, shape_)


@pytest.mark.gpu
def test_the_last_of_many_rows_has_the_bits_it_has_alone():
    num_rows, num_vocab = 8568, 250_880  # 2.15e9 logits, past 2^31
    limits = dataclasses.replace(LIMITS, vocab_size=num_vocab)
    features = Features(tier="filtered", num_candidates=64, num_logprobs=2, full_rows=True)
    make = lambda first, count: jax.random.normal(jax.random.key(first), (count, num_vocab), jnp.bfloat16)
    last = make(1, 8)
    logits = jax.jit(
        lambda last: jnp.concatenate([jnp.zeros((num_rows - 8, num_vocab), jnp.bfloat16), last])
    )(last)
    requests = [dict(seed=b, top_p=0.9, logprobs=2) for b in range(8)]
    few = batches.params_of(limits, requests)[0]
    many = stack_rows([neutral_params(limits, num_rows - 8)[0], few])
    run = jax.jit(functools.partial(sample, limits=limits, features=features))
    together = run(logits, many, jnp.zeros(num_rows, jnp.int32))
    alone = run(last, few, jnp.zeros(8, jnp.int32))
    assert bits(jax.tree.map(lambda leaf: leaf[-8:], together)) == bits(alone)


def test_noise_of_a_row_is_keyed_by_its_seed_and_position_alone():
    # Fault report B35: a global counter in place of the request's own position.
    batch = batch_of("plain", np.random.default_rng(10))
    for request in batch["requests"]:
        request.update(seed=7, temperature=1.0)
    batch["logits"][:] = 0
    batch["position"] = np.repeat(np.arange(16), 4)
    tokens = batches.sample_rows(**batch, limits=LIMITS, features=MODES["raw"]).tokens.reshape(16, 4)
    assert (tokens == tokens[:, :1]).all()
    assert len(set(tokens[:, 0].tolist())) > 4
    noise = rng.gumbel_range(
        np.array([[7, 0]] * 16, np.uint32), np.arange(16, dtype=np.int32), rng.TARGET, 333
    )
    assert tokens[:, 0].tolist() == np.asarray(noise).argmax(1).tolist()
