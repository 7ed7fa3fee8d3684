"""Commit writes exactly the accepted rows; everything else keeps its bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsample import KVCache, Staged, attention_mask, chain, commit, from_paths, init_cache

LAYERS, ROWS, SLOTS, HEADS, SIZE = 2, 4, 6, 3, 5


def _arrays(num_nodes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    cache = [rng.standard_normal((LAYERS, ROWS, SLOTS, HEADS, SIZE)).astype(dtype) for _ in range(2)]
    staged = [rng.standard_normal((LAYERS, ROWS, num_nodes, HEADS, SIZE)).astype(dtype) for _ in range(2)]
    return KVCache(*map(jnp.asarray, cache)), Staged(*map(jnp.asarray, staged)), cache, staged


def _i32(*values):
    return jnp.asarray(values, jnp.int32)


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


def test_the_write_is_in_place_on_a_donated_cache():
    cache, staged, _, _ = _arrays(2)
    path, count = jnp.tile(_i32([0, 1]), (ROWS, 1)), _i32(2, 1, 0, 2)
    compiled = jax.jit(commit, donate_argnums=0).lower(cache, staged, _i32(0, 1, 2, 3), path, count).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in (cache.keys, cache.values))
    assert memory.temp_size_in_bytes < cache.keys.nbytes


def test_the_mask_shows_committed_slots_and_ancestors():
    tree = from_paths([(0, 0), (1,)])
    mask = np.asarray(attention_mask(_i32(0, 2), tree, 3))
    assert mask.shape == (2, 4, 7)
    np.testing.assert_array_equal(mask[:, :, 3:], np.broadcast_to(tree.ancestors, (2, 4, 4)))
    np.testing.assert_array_equal(mask[0, :, :3], np.zeros((4, 3), bool))
    np.testing.assert_array_equal(mask[1, :, :3], np.tile([True, True, False], (4, 1)))


def test_an_empty_cache_has_the_stated_layout():
    cache = init_cache(LAYERS, ROWS, SLOTS, HEADS, SIZE, jnp.bfloat16)
    assert cache.keys.shape == cache.values.shape == (LAYERS, ROWS, SLOTS, HEADS, SIZE)
    assert cache.num_slots == SLOTS
    assert cache.keys.dtype == jnp.bfloat16


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


def test_counts_of_another_batch_are_refused():
    cache, staged, _, _ = _arrays(1)
    with pytest.raises(ValueError, match="count"):
        commit(cache, staged, _i32(0, 0, 0, 0), jnp.zeros((ROWS, 1), jnp.int32), _i32(1, 1, 1))


def test_a_chain_of_two_sees_its_own_first_node():
    mask = np.asarray(attention_mask(_i32(1), chain(1), 2))
    np.testing.assert_array_equal(mask[0], [[True, False, True, False], [True, False, True, True]])
