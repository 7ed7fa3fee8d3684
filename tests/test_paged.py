"""A paged cache is a contiguous one behind a page table: same reads, same writes, and no page besides."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsample as js
from models.decoder import DecoderConfig, decoder_functions
from models.lookup import lookup_functions
from models.random_weights import random_weights

LAYERS, ROWS, HEADS, SIZE = 2, 3, 2, 4
PAGES, PAGE_SIZE, PER_ROW = 11, 4, 3
SLOTS = PAGE_SIZE * PER_ROW
FP8 = jnp.float8_e4m3fn
DTYPES = [jnp.float32, jnp.bfloat16, jnp.int8, FP8]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: jnp.dtype(dtype).name)
_commit, _gather_layer = jax.jit(js.commit), jax.jit(js.gather_layer)
_admit = jax.jit(js.admit, static_argnames="limits")


def _i32(*values):
    return jnp.asarray(values, jnp.int32)


def _table(seed=0):
    return np.random.default_rng(seed).permutation(PAGES)[: ROWS * PER_ROW].reshape(ROWS, -1).astype(np.int32)


def _paged(dtype, table):
    return js.init_paged_cache(LAYERS, PAGES, PAGE_SIZE, HEADS, SIZE, dtype, table)


def _contiguous(dtype):
    return js.init_cache(LAYERS, ROWS, SLOTS, HEADS, SIZE, dtype)


def _staged(cache, num_nodes, seed=1):
    rng = np.random.default_rng(seed)
    dtype = jnp.float32 if cache.key_scales is not None else cache.keys.dtype
    make = lambda: jnp.asarray(rng.standard_normal((LAYERS, ROWS, num_nodes, HEADS, SIZE)), jnp.float32)
    return js.Staged(make().astype(dtype), make().astype(dtype))


def _with_nan(staged, rejected):
    rejected = jnp.asarray(rejected)[None, :, :, None, None]
    return jax.tree.map(lambda x: jnp.where(rejected, jnp.full((), jnp.nan, x.dtype), x), staged)


def _equal(first, second):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(
            np.asarray(a).view(f"u{a.dtype.itemsize}"), np.asarray(b).view(f"u{b.dtype.itemsize}")
        )


def _layers(cache):
    return [_gather_layer(cache, jnp.int32(layer)) for layer in range(LAYERS)]


@by_dtype
@hypothesis.settings(max_examples=15)
@hypothesis.given(data=st.data())
def test_pages_read_as_the_contiguous_cache_after_the_same_commits(dtype, data):
    paged, contiguous = _paged(dtype, _table(data.draw(st.integers(0, 99)))), _contiguous(dtype)
    lengths = np.zeros(ROWS, np.int32)
    path = jnp.tile(jnp.arange(4, dtype=jnp.int32), (ROWS, 1))
    for seed in range(5):  # up to 20 rows for 12 slots: what does not fit is dropped by both
        count = np.array(data.draw(st.lists(st.integers(0, 4), min_size=ROWS, max_size=ROWS)), np.int32)
        staged = _staged(contiguous, 5, seed)
        staged = _with_nan(staged, np.arange(5)[None, :] >= count[:, None])
        paged = _commit(paged, staged, lengths, path, count)
        contiguous = _commit(contiguous, staged, lengths, path, count)
        lengths = lengths + count
    _equal(_layers(paged), _layers(contiguous))
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(_layers(paged)))


@by_dtype
def test_a_page_not_allocated_takes_no_write_and_reads_as_zeros(dtype):
    table = _table()
    table[0, 1], table[1, 0], table[2, 2] = -1, -1, PAGES  # beyond the pages counts as not allocated too
    ones = lambda x: x if x.dtype == jnp.int32 else jnp.ones_like(x)
    cache = jax.tree.map(ones, _paged(dtype, table))
    staged = _staged(cache, 4)
    path, count = jnp.tile(_i32([0, 1, 2, 3]), (ROWS, 1)), _i32(4, 4, 4)
    lengths = _i32(2, 0, 6)
    result = _commit(cache, staged, lengths, path, count)
    for before, after in zip(jax.tree.leaves(cache)[:2], jax.tree.leaves(result)[:2], strict=True):
        changed = (np.asarray(before != after)).any(axis=(0, 3, 4))
        expected = np.zeros((PAGES, PAGE_SIZE), bool)
        expected[table[0, 0], 2:] = True  # row 0: slots 2 and 3; slots 4 and 5 lie on page -1
        expected[table[2, 1], 2:] = True  # row 2: slots 6 and 7; slots 8 and 9 lie beyond the pages
        np.testing.assert_array_equal(changed, expected)
    for layer in range(LAYERS):
        for read in js.gather_layer(result, layer):
            read = np.asarray(read, np.float32).reshape(ROWS, PER_ROW, -1)
            assert not read[0, 1].any() and not read[1, 0].any() and not read[2, 2].any()
            assert read[0, 2].all() and read[1, 1].all()


def test_a_count_of_zero_changes_no_page():
    cache = jax.tree.map(lambda x: x if x.dtype == jnp.int32 else x + 1, _paged(jnp.float32, _table()))
    staged = jax.tree.map(lambda x: x * jnp.nan, _staged(cache, 2))
    path = jnp.zeros((ROWS, 2), jnp.int32)
    _equal(_commit(cache, staged, _i32(0, 11, 12), path, _i32(0, 0, 0)), cache)


def test_rows_can_share_full_pages():
    table = _table()
    cache = _paged(jnp.float32, table)
    staged = _staged(cache, PAGE_SIZE)
    path = jnp.tile(jnp.arange(PAGE_SIZE, dtype=jnp.int32), (ROWS, 1))
    cache = _commit(cache, staged, _i32(0, 0, 0), path, _i32(PAGE_SIZE, 0, 0))
    table[1, 0] = table[0, 0]
    cache = dataclasses.replace(cache, page_table=jnp.asarray(table))
    cache = _commit(cache, staged, _i32(4, 4, 0), path, _i32(1, 2, 0))
    keys, _ = js.gather_layer(cache, 1)
    np.testing.assert_array_equal(keys[0, :PAGE_SIZE], staged.keys[1, 0])
    np.testing.assert_array_equal(keys[1, :PAGE_SIZE], staged.keys[1, 0])
    np.testing.assert_array_equal(keys[1, PAGE_SIZE : PAGE_SIZE + 2], staged.keys[1, 1, :2])


def test_pages_can_be_allocated_between_steps():
    table = np.full((ROWS, PER_ROW), -1, np.int32)
    cache = _paged(jnp.float32, table)
    staged = _staged(cache, 1)
    path = jnp.zeros((ROWS, 1), jnp.int32)
    for slot in range(6):
        for row in range(ROWS):
            table[row, slot // PAGE_SIZE] = row * PER_ROW + slot // PAGE_SIZE
        cache = dataclasses.replace(cache, page_table=jnp.asarray(table))
        at = jnp.full(ROWS, slot, jnp.int32)
        cache = _commit(cache, staged, at, path, jnp.ones(ROWS, jnp.int32))
    keys, _ = js.gather_layer(cache, 0)
    np.testing.assert_array_equal(keys[:, :6], np.broadcast_to(staged.keys[0], (ROWS, 6, HEADS, SIZE)))
    assert not np.asarray(keys[:, 6:]).any()


def _check_in_place(dtype):
    table = np.arange(64, dtype=np.int32).reshape(2, 32)
    cache = js.init_paged_cache(3, 64, 16, 2, 64, dtype, table)
    float_dtype = jnp.float32 if cache.key_scales is not None else dtype
    staged = js.Staged(*(jnp.zeros((3, 2, 2, 2, 64), float_dtype) for _ in range(2)))
    arguments = (staged, _i32(0, 1), _i32([0, 1], [0, 1]), _i32(2, 1))
    memory = jax.jit(js.commit, donate_argnums=0).lower(cache, *arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory.temp_size_in_bytes < 4 * sum(x.nbytes for x in jax.tree.leaves(staged))
    assert memory.temp_size_in_bytes < cache.keys.nbytes / 8


# On CPUs, jax 0.10.2 computes bfloat16 scatters in float32: the two dtypes here are those no version widens.
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8], ids=["float32", "int8"])
def test_the_write_is_in_place_on_donated_pages(dtype):
    _check_in_place(dtype)


@pytest.mark.gpu
@by_dtype
def test_the_write_is_in_place_on_pages_of_any_dtype_on_a_gpu(dtype):
    _check_in_place(dtype)


@pytest.mark.parametrize(
    "dtype",
    [jnp.float32, pytest.param(jnp.int8, marks=pytest.mark.large), FP8],
    ids=lambda dtype: jnp.dtype(dtype).name,
)
def test_the_decoder_gives_the_same_bits_on_pages(dtype):
    config = DecoderConfig(
        vocab_size=30, width=16, num_layers=LAYERS, num_heads=4, num_kv_heads=HEADS, head_size=SIZE,
        mlp_width=20, norm_eps=1e-5, rope_theta=10000.0,
    )  # fmt: skip
    forward, _ = decoder_functions(config)
    forward, weights = jax.jit(forward), random_weights(config, 0)
    path = jnp.tile(_i32([0, 1, 2]), (ROWS, 1))

    def run(cache):
        lengths, results = jnp.zeros(ROWS, jnp.int32), []
        for step in range(3):
            tokens = jnp.tile(_i32([1, 2, 3]) + step, (ROWS, 1))
            mask = js.attention_mask(lengths, js.chain(2), SLOTS)
            hidden, staged = forward(weights, tokens, lengths[:, None] + path, cache, mask)
            count = _i32(3, 1, 2)
            cache = _commit(cache, staged, lengths, path, count)
            lengths = lengths + count
            results.append((hidden, staged))
        return results

    _equal(run(_paged(dtype, _table())), run(_contiguous(dtype)))


V = 97
LIMITS = js.Limits(V, max_length=SLOTS)
FEATURES = js.Features(tier="plain", full_rows=False)


@functools.cache
def _programs():
    forward, unembed = lookup_functions(V)
    step = js.make_decode_step(forward, unembed, limits=LIMITS, features=FEATURES)
    return js.make_prefill(forward, LIMITS), step


def _decode(cache):
    """Tokens, and the layer of the cache in the order of the slots, after prefill and nine steps."""
    weights = jnp.asarray([7, 11], jnp.uint32)
    prompts = np.array([[3, 4, 5], [9, js.PAD, js.PAD], [1, 2, js.PAD]], np.int32)
    lengths = np.array([3, 1, 2], np.int32)
    prefill, step = _programs()
    cache = prefill(weights, cache, np.maximum(prompts, 0), np.zeros(ROWS, np.int32), lengths - 1)
    params, stop = js.stack_rows(
        [js.make_params(LIMITS, seed=row, max_tokens=5 + row) for row in range(ROWS)]
    )
    slots = np.arange(ROWS, dtype=np.int32)
    requests = js.empty_requests(LIMITS, ROWS)
    requests = _admit(requests, slots, params, stop, prompts, lengths, limits=LIMITS)
    tokens = []
    for _ in range(9):
        requests, cache, record = step(weights, requests, cache)
        tokens.append(js.unpack(record, FEATURES).tokens.tolist())
    assert (np.asarray(requests.status) == js.LENGTH).all()
    return tokens, js.gather_layer(cache, 0)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(dtype, marks=pytest.mark.large) for dtype in (jnp.float32, FP8)],
    ids=lambda dtype: jnp.dtype(dtype).name,
)
def test_a_whole_decode_is_the_same_in_pages_and_in_one_byte(dtype):
    paged = js.init_paged_cache(1, PAGES, PAGE_SIZE, 1, 1, dtype, _table())
    tokens, layer = _decode(paged)
    expected, _ = _decode(js.init_cache(1, ROWS, SLOTS, 1, 1, jnp.float32))
    assert tokens == expected
    _, contiguous = _decode(js.init_cache(1, ROWS, SLOTS, 1, 1, dtype))
    _equal(layer, contiguous)


@pytest.mark.parametrize("table", [np.zeros(3, np.int32), np.zeros((3, 2), np.float32)])
def test_a_page_table_of_another_form_is_refused(table):
    with pytest.raises(ValueError, match="page_table"):
        _paged(jnp.float32, table)


def test_the_caller_keeps_the_page_table_it_gave():
    table = jnp.asarray(_table())
    cache = _paged(jnp.float32, table)
    staged, path = _staged(cache, 1), jnp.zeros((ROWS, 1), jnp.int32)
    cache = jax.jit(js.commit, donate_argnums=0)(cache, staged, _i32(0, 0, 0), path, _i32(1, 1, 1))
    np.testing.assert_array_equal(table, cache.page_table)
    assert js.bytes_per_row(cache) == LAYERS * HEADS * SIZE * 4 * 2
    assert (cache.num_rows, cache.num_slots) == (ROWS, SLOTS)
