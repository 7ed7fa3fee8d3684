"""Commit writes exactly the accepted rows; everything else keeps its bits, whatever the cache's numbers are."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxsample import (
    KVCache,
    Staged,
    WriteMetrics,
    as_stored,
    attention_mask,
    bytes_per_row,
    chain,
    commit,
    count_writes,
    dequantize,
    from_paths,
    gather_layer,
    init_cache,
    init_paged_cache,
    init_write_metrics,
    quantize,
    read_staged,
    stage,
)
from models.decoder import DecoderConfig, decoder_functions
from models.random_weights import random_weights

LAYERS, ROWS, SLOTS, HEADS, SIZE = 2, 4, 6, 3, 5
FP8 = jnp.float8_e4m3fn
DTYPES = [jnp.float32, jnp.bfloat16, jnp.int8, FP8]
ONE_BYTE = [jnp.int8, jnp.uint8]


def _arrays(num_nodes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    cache = [rng.standard_normal((LAYERS, ROWS, SLOTS, HEADS, SIZE)).astype(dtype) for _ in range(2)]
    staged = [rng.standard_normal((LAYERS, ROWS, num_nodes, HEADS, SIZE)).astype(dtype) for _ in range(2)]
    return KVCache(*map(jnp.asarray, cache)), Staged(*map(jnp.asarray, staged)), cache, staged


def _i32(*values):
    return jnp.asarray(values, jnp.int32)


def _filled(cache, seed=0):
    """The cache with random bits in every array; in scales, random floats."""
    rng = np.random.default_rng(seed)

    def fill(x):
        if x.dtype in (jnp.int8, jnp.uint8):
            return jnp.asarray(rng.integers(0, 100, x.shape), x.dtype)
        return jnp.asarray(rng.standard_normal(x.shape), jnp.float32).astype(x.dtype)

    return jax.tree.map(fill, cache)


def _bits(tree):
    return [np.asarray(x).view(f"u{x.dtype.itemsize}") for x in jax.tree.leaves(tree)]


def _staged(num_nodes, dtype=jnp.float32, seed=1, shape=(LAYERS, ROWS, HEADS, SIZE)):
    rng = np.random.default_rng(seed)
    layers, rows, *heads = shape
    make = lambda: jnp.asarray(rng.standard_normal((layers, rows, num_nodes, *heads)), jnp.float32)
    return Staged(make().astype(dtype), make().astype(dtype))


def _float_of(cache):
    return jnp.float32 if cache.key_scales is not None else cache.keys.dtype


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_accepted_rows_are_written_and_no_byte_besides(dtype):
    cache, staged, old, new = _arrays(4, dtype)
    lengths, count = _i32(0, 2, 5, 3), _i32(3, 0, 2, 1)
    path = _i32([0, 1, 3], [0, 1, 2], [0, 2, 3], [0, 0, 0])
    result = jax.jit(commit)(cache, staged, lengths, path, count)
    for got, before, nodes in ((result.keys, old[0], new[0]), (result.values, old[1], new[1])):
        expected = before.copy()
        for row in range(ROWS):
            for step in range(int(count[row])):
                slot = int(lengths[row]) + step
                if slot < SLOTS:
                    expected[:, row, slot] = nodes[:, row, int(path[row, step])]
        np.testing.assert_array_equal(np.asarray(got), expected)


def test_a_lone_root_is_written_where_the_row_runs():
    cache, staged, old, new = _arrays(1)
    result = commit(cache, staged, _i32(1, 2, 3, 6), jnp.zeros((ROWS, 1), jnp.int32), _i32(1, 0, 1, 1))
    expected = old[0].copy()
    expected[:, 0, 1] = new[0][:, 0, 0]
    expected[:, 2, 3] = new[0][:, 2, 0]
    np.testing.assert_array_equal(np.asarray(result.keys), expected)


def test_nan_in_rejected_rows_reaches_no_slot():
    # B57: padding and rejected rows that hold NaN must land nowhere, the last slot included.
    cache, staged, old, _ = _arrays(3)
    staged = jax.tree.map(lambda x: x.at[:, :, 1:].set(jnp.nan), staged)
    result = commit(cache, staged, _i32(0, 5, 2, 3), jnp.tile(_i32([0, 1, 2]), (ROWS, 1)), _i32(1, 1, 0, 0))
    assert np.isfinite(np.asarray(result.keys)).all()
    np.testing.assert_array_equal(np.asarray(result.keys)[:, 2:], old[0][:, 2:])


_commit = jax.jit(commit)
_rows_of = lambda low, high: st.lists(st.integers(low, high), min_size=ROWS, max_size=ROWS)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: jnp.dtype(dtype).name)
@hypothesis.settings(max_examples=25)
@hypothesis.given(data=st.data())
def test_random_counts_change_the_accepted_slots_and_their_scales_alone(dtype, data):
    tree = from_paths([(0, 0), (1,)])  # nodes 1 and 2 below the root, 3 below 1
    cache = _filled(init_cache(LAYERS, ROWS, SLOTS, HEADS, SIZE, dtype))
    lengths, count = data.draw(_rows_of(0, SLOTS)), data.draw(_rows_of(0, 3))
    path = np.array([data.draw(st.sampled_from([[0, 1, 3], [0, 2, -1]])) for _ in range(ROWS)], np.int32)
    staged = _staged(tree.num_nodes, _float_of(cache))
    accepted = np.zeros((ROWS, tree.num_nodes), bool)
    for row in range(ROWS):
        count[row] = min(count[row], int((path[row] >= 0).sum()))
        accepted[row, path[row, : count[row]]] = True
    poisoned = jax.tree.map(
        lambda x: jnp.where(accepted[None, :, :, None, None], x, jnp.full((), jnp.nan, x.dtype)), staged
    )
    result = _commit(cache, poisoned, _i32(*lengths), jnp.asarray(path), _i32(*count))

    written = {"keys": staged.keys, "values": staged.values}
    if cache.key_scales is not None:
        written["keys"], written["key_scales"] = quantize(staged.keys, cache.keys.dtype)
        written["values"], written["value_scales"] = quantize(staged.values, cache.keys.dtype)
    for name, new in written.items():
        expected, new = np.array(getattr(cache, name)), np.asarray(new)
        for row in range(ROWS):
            for step in range(min(count[row], SLOTS - lengths[row])):
                expected[:, row, lengths[row] + step] = new[:, row, path[row, step]]
        np.testing.assert_array_equal(_bits(getattr(result, name))[0], _bits(expected)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: jnp.dtype(dtype).name)
def test_windows_leave_the_cache_that_single_tokens_leave(dtype):
    cache = init_cache(LAYERS, ROWS, SLOTS, HEADS, SIZE, dtype)
    staged = _staged(SLOTS, _float_of(cache))
    several = one_by_one = cache
    nodes = lambda first, end: jax.tree.map(lambda x: x[:, :, first:end], staged)
    for start, width in ((0, 3), (3, 1), (4, 2)):
        # One more row than is accepted, as a rejected proposal would be.
        path = jnp.tile(jnp.arange(width, dtype=jnp.int32), (ROWS, 1))
        at, count = jnp.full(ROWS, start, jnp.int32), jnp.full(ROWS, width, jnp.int32)
        several = _commit(several, nodes(start, start + width + 1), at, path, count)
    for slot in range(SLOTS):
        at, path = jnp.full(ROWS, slot, jnp.int32), jnp.zeros((ROWS, 1), jnp.int32)
        one_by_one = _commit(one_by_one, nodes(slot, slot + 1), at, path, jnp.ones(ROWS, jnp.int32))
    for got, expected in zip(_bits(several), _bits(one_by_one), strict=True):
        np.testing.assert_array_equal(got, expected)


def _check_in_place(dtype):
    cache = init_cache(3, 4, 512, 2, 64, dtype)
    staged = _staged(2, _float_of(cache), shape=(3, 4, 2, 64))
    path, count = jnp.tile(_i32([0, 1]), (ROWS, 1)), _i32(2, 1, 0, 2)
    compiled = jax.jit(commit, donate_argnums=0).lower(cache, staged, _i32(0, 1, 2, 3), path, count).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory.temp_size_in_bytes < 4 * sum(x.nbytes for x in jax.tree.leaves(staged))
    assert memory.temp_size_in_bytes < cache.keys.nbytes / 8


# On CPUs, jax 0.10.2 computes bfloat16 scatters in float32: the two dtypes here are those no version widens.
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8], ids=["float32", "int8"])
def test_the_write_is_in_place_on_a_donated_cache(dtype):
    _check_in_place(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, jnp.float16], ids=lambda dtype: jnp.dtype(dtype).name)
def test_the_write_is_in_place_in_any_dtype_on_a_gpu(dtype):
    _check_in_place(dtype)


def test_the_mask_shows_committed_slots_and_ancestors():
    tree = from_paths([(0, 0), (1,)])
    mask = np.asarray(attention_mask(_i32(0, 2), tree, 3))
    assert mask.shape == (2, 4, 7)
    np.testing.assert_array_equal(mask[:, :, 3:], np.broadcast_to(tree.ancestors, (2, 4, 4)))
    np.testing.assert_array_equal(mask[0, :, :3], np.zeros((4, 3), bool))
    np.testing.assert_array_equal(mask[1, :, :3], np.tile([True, True, False], (4, 1)))


def test_a_chain_of_two_sees_its_own_first_node():
    mask = np.asarray(attention_mask(_i32(1), chain(1), 2))
    np.testing.assert_array_equal(mask[0], [[True, False, True, False], [True, False, True, True]])


@pytest.mark.parametrize("dtype", [*DTYPES, jnp.float16], ids=lambda dtype: jnp.dtype(dtype).name)
def test_an_empty_cache_has_the_stated_layout(dtype):
    cache = init_cache(LAYERS, ROWS, SLOTS, HEADS, SIZE, dtype)
    assert cache.keys.shape == cache.values.shape == (LAYERS, ROWS, SLOTS, HEADS, SIZE)
    assert (cache.num_rows, cache.num_slots) == (ROWS, SLOTS)
    assert cache.keys.dtype == cache.values.dtype == (jnp.uint8 if dtype == FP8 else dtype)
    if dtype in (jnp.int8, FP8):
        assert cache.key_scales.shape == cache.value_scales.shape == (LAYERS, ROWS, SLOTS, HEADS)
        assert cache.key_scales.dtype == cache.value_scales.dtype == jnp.float32
    else:
        assert cache.key_scales is cache.value_scales is None
    assert bytes_per_row(cache) * ROWS * SLOTS == sum(x.nbytes for x in jax.tree.leaves(cache))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.float8_e5m2, jnp.bool_])
def test_a_cache_of_another_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        init_cache(LAYERS, ROWS, SLOTS, HEADS, SIZE, dtype)


def test_a_contiguous_float_layer_is_a_slice():
    cache = init_cache(LAYERS, ROWS, SLOTS, HEADS, SIZE, jnp.bfloat16)
    fixed = jax.make_jaxpr(lambda cache: gather_layer(cache, 1))(cache)
    assert {equation.primitive.name for equation in fixed.jaxpr.eqns} == {"slice", "squeeze"}
    moving = jax.make_jaxpr(gather_layer)(cache, jnp.int32(1))
    assert "gather" not in {equation.primitive.name for equation in moving.jaxpr.eqns}
    filled = _filled(cache)
    for layer in range(LAYERS):
        keys, values = jax.jit(gather_layer)(filled, jnp.int32(layer))
        np.testing.assert_array_equal(np.asarray(keys), np.asarray(filled.keys[layer]))
        np.testing.assert_array_equal(np.asarray(values), np.asarray(filled.values[layer]))


def _wide(num_rows=400, size=64, seed=3):
    """Heads of normal numbers whose magnitude runs from 2^-60 to 2^60."""
    rng = np.random.default_rng(seed)
    exponents = rng.uniform(-60, 60, (num_rows, 1))
    return jnp.asarray(rng.standard_normal((num_rows, size)) * 2.0**exponents, jnp.float32)


def test_int8_reads_within_half_a_scale_of_a_127th_of_the_largest():
    x = np.asarray(_wide(), np.float64)
    codes, scales = jax.jit(quantize, static_argnames="storage")(_wide(), storage=jnp.int8)
    largest = np.abs(x).max(-1)
    np.testing.assert_allclose(np.asarray(scales, np.float64), largest / 127, rtol=2.0**-16)
    read = np.asarray(dequantize(codes, scales), np.float64)
    assert (np.abs(read - x) <= 0.502 * np.asarray(scales, np.float64)[:, None]).all()
    assert (np.abs(np.asarray(codes, np.int32)).max(-1) == 127).all()


def test_fp8_reads_within_a_sixteenth_of_a_number():
    x = np.asarray(_wide(), np.float64)
    codes, scales = jax.jit(quantize, static_argnames="storage")(_wide(), storage=jnp.uint8)
    scales = np.asarray(scales, np.float64)[:, None]
    np.testing.assert_allclose(scales[:, 0], np.abs(x).max(-1) / 448, rtol=2.0**-16)
    read = np.asarray(dequantize(codes, jnp.asarray(scales[:, 0], jnp.float32)), np.float64)
    assert (np.abs(read - x) <= 1.01 * np.maximum(np.abs(x) * 2.0**-4, scales * 2.0**-10)).all()
    # The codes are float8_e4m3fn to the bit: another reader of them, NumPy's, reads the same.
    theirs = np.asarray(codes).view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales
    np.testing.assert_array_equal(read, theirs)


@pytest.mark.parametrize("storage", ONE_BYTE)
@pytest.mark.parametrize("size", [1, 7, 64])
def test_rounding_twice_is_rounding_once(storage, size):
    codes, scales = quantize(_wide(size=size), storage)
    again = jax.jit(lambda c, s: quantize(dequantize(c, s), storage))(codes, scales)
    np.testing.assert_array_equal(np.asarray(again[0]), np.asarray(codes))
    np.testing.assert_array_equal(np.asarray(again[1]), np.asarray(scales))


@pytest.mark.parametrize("storage", ONE_BYTE)
def test_what_is_read_is_the_exact_product_of_code_and_scale(storage):
    codes, scales = quantize(_wide(), storage)
    as_number = np.asarray(codes)
    as_number = as_number if storage == jnp.int8 else as_number.view(ml_dtypes.float8_e4m3fn)
    exact = as_number.astype(np.float64) * np.asarray(scales, np.float64)[:, None]
    np.testing.assert_array_equal(np.asarray(dequantize(codes, scales), np.float64), exact)


@pytest.mark.parametrize("storage", ONE_BYTE)
def test_heads_that_are_zero_tiny_or_not_finite_keep_to_themselves(storage):
    x = jnp.asarray([[0.0, 0.0], [1e-38, -2e-38], [np.nan, 1.0], [-np.inf, 1.0], [3.0, -1.5]], jnp.float32)
    read = np.asarray(dequantize(*quantize(x, storage)))
    np.testing.assert_array_equal(read[0], [0, 0])
    assert (np.abs(read[1]) < 1e-29).all()
    assert np.isnan(read[2:4]).all()
    np.testing.assert_allclose(read[4], [3.0, -1.5], rtol=2.0**-4)
    np.testing.assert_array_equal(read[4], np.asarray(dequantize(*quantize(x[4:], storage)))[0])


@pytest.mark.parametrize("source", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: jnp.dtype(dtype).name)
def test_a_step_sees_its_own_rows_as_later_steps_read_them(dtype, source):
    cache = init_cache(LAYERS, ROWS, SLOTS, HEADS, SIZE, dtype)
    staged = _staged(3, source)
    seen = jax.jit(as_stored)(staged, cache)
    path, count = jnp.tile(_i32([0, 1, 2]), (ROWS, 1)), jnp.full(ROWS, 3, jnp.int32)
    lengths = _i32(0, 1, 2, 3)
    after = _commit(cache, seen, lengths, path, count)
    for layer in range(LAYERS):
        for read, new in zip(gather_layer(after, layer), read_staged(seen), strict=True):
            assert read.dtype == new.dtype
            for row in range(ROWS):
                np.testing.assert_array_equal(
                    np.asarray(read[row, int(lengths[row]) :][:3]), np.asarray(new[layer, row])
                )
    if source == _float_of(cache) or cache.key_scales is not None:
        direct = _commit(cache, staged, lengths, path, count)
        for got, expected in zip(_bits(direct), _bits(after), strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=[] if jnp.dtype(dtype) == jnp.float8_e4m3fn else pytest.mark.large)
        for dtype in DTYPES[1:]
    ],
    ids=lambda dtype: jnp.dtype(dtype).name,
)
def test_the_decoder_stages_rows_that_storing_leaves_as_they_are(dtype):
    config = DecoderConfig(
        vocab_size=30, width=16, num_layers=2, num_heads=4, num_kv_heads=2, head_size=4, mlp_width=20,
        norm_eps=1e-5, rope_theta=10000.0,
    )  # fmt: skip
    forward, _ = decoder_functions(config)
    weights = random_weights(config, 0)
    cache = init_cache(2, ROWS, 8, 2, 4, dtype)
    tokens, tree = jnp.tile(_i32([3, 4, 5]), (ROWS, 1)), chain(2)
    lengths = jnp.zeros(ROWS, jnp.int32)
    mask = attention_mask(lengths, tree, 8)
    hidden, staged = jax.jit(forward)(weights, tokens, jnp.tile(_i32([0, 1, 2]), (ROWS, 1)), cache, mask)
    assert np.isfinite(np.asarray(hidden)).all()
    for got, expected in zip(_bits(as_stored(staged, cache)), _bits(staged), strict=True):
        np.testing.assert_array_equal(got, expected)
    # The last node attends to the committed first two as it did to the staged ones: what differs is the
    # order of sums of a few terms.
    path, count = jnp.tile(_i32([0, 1]), (ROWS, 1)), jnp.full(ROWS, 2, jnp.int32)
    cache = commit(cache, staged, lengths, path, count)
    mask = attention_mask(lengths + 2, chain(0), 8)
    again, _ = jax.jit(forward)(weights, tokens[:, 2:], jnp.full((ROWS, 1), 2, jnp.int32), cache, mask)
    np.testing.assert_allclose(np.asarray(again[:, 0]), np.asarray(hidden[:, 2]), atol=1e-5)


def test_writes_are_counted_and_idle_rows_count_nothing():
    metrics = init_write_metrics(3)
    metrics = count_writes(metrics, _i32(4, 1, 4), _i32(2, 1, 3), jnp.asarray([True, True, False]))
    metrics = count_writes(metrics, _i32(4, 3, 4), _i32(0, 3, 0), jnp.asarray([True, True, True]))
    expected = WriteMetrics(
        windows=[2, 2, 1], staged=[8, 4, 4], committed=[2, 4, 0], rejected=[6, 0, 4], accepted=[1, 2, 0]
    )
    for name, value in dataclasses.asdict(expected).items():
        counted = getattr(metrics, name)
        assert counted.dtype == jnp.int32
        assert counted.tolist() == value, name
    np.testing.assert_array_equal(metrics.staged, metrics.committed + metrics.rejected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: Staged(s.keys[:, :, :, :2], s.values), "staged keys"),
        (lambda s: Staged(s.keys, s.values[:1]), "staged values"),
        (lambda s: Staged(s.keys.astype(jnp.float16), s.values), "float16"),
    ],
)
def test_staged_rows_that_do_not_fit_are_refused(change, message):
    cache, staged, _, _ = _arrays(1)
    path, count = jnp.zeros((ROWS, 1), jnp.int32), _i32(1, 1, 1, 1)
    with pytest.raises(ValueError, match=message):
        commit(cache, change(staged), _i32(0, 0, 0, 0), path, count)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, s: (c, jax.tree.map(lambda x: x.astype(jnp.int8), s)), "takes floats"),
        (lambda c, s: (dataclasses.replace(c, key_scales=None), s), "scales"),
        (lambda c, s: (dataclasses.replace(c, value_scales=c.value_scales[:1]), s), "scales"),
        (lambda c, s: (dataclasses.replace(c, values=c.values.astype(jnp.uint8)), s), "values"),
        (
            lambda c, s: (c, dataclasses.replace(as_stored(s, c), key_scales=c.key_scales)),
            "staged key_scales",
        ),
        (lambda c, s: (c, dataclasses.replace(as_stored(s, c), value_scales=None)), "staged value_scales"),
        (lambda c, s: (c, jax.tree.map(lambda x: x.astype(FP8), s)), "two bytes or more"),
        (
            lambda c, s: (
                c,
                dataclasses.replace(
                    as_stored(s, c), key_scales=jnp.ones((LAYERS, ROWS, 1, HEADS), jnp.int32)
                ),
            ),
            "key_scales are int32",
        ),
        (lambda c, s: (c, dataclasses.replace(as_stored(s, c), keys=s.keys)), "staged keys are float32"),
        (lambda c, s: (init_cache(*c.keys.shape, jnp.float32), as_stored(s, c)), "staged keys are int8"),
    ],
)
def test_one_byte_caches_need_float_rows_and_their_scales(change, message):
    cache = init_cache(LAYERS, ROWS, SLOTS, HEADS, SIZE, jnp.int8)
    cache, staged = change(cache, _staged(1))
    path, count = jnp.zeros((ROWS, 1), jnp.int32), _i32(1, 1, 1, 1)
    with pytest.raises(ValueError, match=message):
        commit(cache, staged, _i32(0, 0, 0, 0), path, count)


def test_counts_of_another_batch_are_refused():
    cache, staged, _, _ = _arrays(1)
    with pytest.raises(ValueError, match="count"):
        commit(cache, staged, _i32(0, 0, 0, 0), jnp.zeros((ROWS, 1), jnp.int32), _i32(1, 1, 1))


def test_rows_are_staged_by_either_name_of_a_dtype_and_no_other_dtype_is_taken():
    keys, values = _staged(1).keys, _staged(1).values
    for one, other in zip(
        _bits(stage(keys, values, FP8)), _bits(stage(keys, values, jnp.uint8)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="dtype is int32"):
        stage(keys, values, jnp.int32)


@pytest.mark.parametrize(
    ("dtype", "paged"),
    [
        (jnp.float32, False),
        (jnp.int8, True),
        pytest.param(jnp.float32, True, marks=pytest.mark.large),
        pytest.param(jnp.int8, False, marks=pytest.mark.large),
    ],
)
def test_places_outside_the_cache_are_never_written(dtype, paged):
    if paged:
        table = np.arange(ROWS * 2, dtype=np.int32).reshape(ROWS, 2)
        cache = init_paged_cache(LAYERS, 2 * ROWS, 4, HEADS, SIZE, dtype, table)
    else:
        cache = init_cache(LAYERS, ROWS, 8, HEADS, SIZE, dtype)
    staged, path = _staged(3), jnp.tile(_i32([0, 1, 2]), (ROWS, 1))
    before = _bits(cache)
    for lengths in (_i32(-1, -3, -9, -(2**31)), _i32(8, 9, 2**31 - 1, 2**31 - 2)):
        count = jnp.where(lengths == -1, 1, 3)
        for found, old in zip(_bits(commit(cache, staged, lengths, path, count)), before, strict=True):
            np.testing.assert_array_equal(found, old)
    two = jax.tree.map(lambda x: x[:, :2], staged)
    for rows in (_i32(-1, ROWS), _i32(-ROWS, 2**31 - 1)):
        after = commit(cache, two, _i32(0, 0), path[:2], _i32(3, 3), rows)
        for found, old in zip(_bits(after), before, strict=True):
            np.testing.assert_array_equal(found, old)
    with pytest.raises(ValueError, match="rows are float32"):
        commit(cache, two, _i32(0, 0), path[:2], _i32(3, 3), jnp.zeros(2))
