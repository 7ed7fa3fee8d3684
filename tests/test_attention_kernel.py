"""The attention kernel against `attend`: interpreted on a CPU, as it is on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsample as js
from models.attention import attend
from models.attention_kernel import attend_by_kernel, attention_of

ON_GPU = jax.default_backend() == "gpu"
CASES = [
    # B, tree, H, G, D, S
    (3, js.ROOT, 4, 2, 16, 200),
    (2, js.from_paths([(0, 0), (1,), (2, 0)]), 6, 2, 32, 100),
    (5, js.chain(7), 14, 2, 64, 64),
    (1, js.chain(40), 2, 1, 16, 70),  # more queries than one program holds
]


def inputs(rows, tree, heads, kv_heads, size, slots, dtype):
    rng = np.random.default_rng(rows)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    lengths = jnp.asarray(rng.integers(1, slots + 1, rows), jnp.int32)
    lengths = lengths.at[0].set(0 if rows > 1 else slots)
    # What lies behind a row's length must not be looked at.
    behind = (jnp.arange(slots)[None, :] >= lengths[:, None])[..., None, None]
    cached = [jnp.where(behind, jnp.nan, draw(rows, slots, kv_heads, size)).astype(dtype) for _ in range(2)]
    staged = [draw(rows, tree.num_nodes, kv_heads, size) for _ in range(2)]
    query = draw(rows, tree.num_nodes, heads, size)
    return query, *cached, *staged, js.attention_mask(lengths, tree, slots)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (CASES[0], jnp.float32),
        (CASES[1], jnp.bfloat16),
        (CASES[2], jnp.float32),
        (CASES[3], jnp.float32),
        *(pytest.param(case, jnp.bfloat16, marks=pytest.mark.large) for case in (CASES[0], *CASES[2:])),
        pytest.param(CASES[1], jnp.float32, marks=pytest.mark.large),
    ],
    ids=lambda value: f"B={value[0]}" if isinstance(value, tuple) else jnp.dtype(value).name,
)
def test_the_kernel_gives_what_attend_gives(case, dtype):
    given = inputs(*case, dtype)
    found = np.asarray(jax.jit(attend_by_kernel, static_argnames="interpret")(*given, interpret=not ON_GPU))
    wanted = np.asarray(jax.jit(attend)(*given))
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    # Parts of the sum are added in another order, and weights are rounded to bfloat16 against another maximum.
    bound = 1e-6 if dtype == jnp.float32 else 2.0**-7
    error = np.linalg.norm((found - wanted).astype(np.float64)) / np.linalg.norm(wanted.astype(np.float64))
    assert error <= bound


def test_a_staged_nan_reaches_the_nodes_that_see_it_alone():
    query, keys, values, staged_keys, staged_values, mask = inputs(*CASES[1], jnp.float32)
    staged_values = staged_values.at[0, 1, 0, 0].set(jnp.nan)
    given = query, keys, values, staged_keys, staged_values, mask
    found = np.asarray(attend_by_kernel(*given, interpret=not ON_GPU))
    is_nan = np.isnan(found.reshape(2, query.shape[1], 2, -1))  # by row, node and key-value head
    expected = np.zeros_like(is_nan)
    expected[0, :, 0] = CASES[1][1].ancestors[:, 1, None]
    np.testing.assert_array_equal(is_nan, expected)


def test_a_query_that_sees_nothing_gets_zeros():
    *given, mask = inputs(*CASES[0], jnp.float32)
    found = attend_by_kernel(*given, jnp.zeros_like(mask), interpret=not ON_GPU)
    assert not np.asarray(found).any()


def test_the_kernel_is_taken_on_one_gpu_alone():
    assert attention_of(64) is (attend_by_kernel if ON_GPU else attend)
    assert attention_of(80) is attend
    assert attention_of(64, mesh=object()) is attend
