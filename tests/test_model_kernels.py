"""The kernels of the models against what XLA computes: interpreted on a CPU, as they are on a GPU."""

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsample as js
from models import command_line, joining
from models.attention import attend
from models.attention_kernel import attend_new, takes
from models.decoder import DecoderConfig, decoder_functions
from models.heads import Heads, Norms, read_heads
from models.joining import join_projections
from models.kernels import Kernels, kernels_of
from models.norm_kernel import add_norm
from models.presets import PRESETS
from models.projection_kernel import fits_whole, project_parts, project_whole, splits
from models.random_weights import random_weights
from models.rope import inverse_frequencies, rotate, rotation

ON_GPU = jax.default_backend() == "gpu"
KERNELS = Kernels(
    attend=functools.partial(attend_new, interpret=not ON_GPU),
    add_norm=functools.partial(add_norm, interpret=not ON_GPU),
    project_parts=functools.partial(project_parts, interpret=not ON_GPU),
    project_whole=functools.partial(project_whole, interpret=not ON_GPU),
)


@dataclasses.dataclass(frozen=True)
class Case:
    num_rows: int
    tree: js.Tree
    num_heads: int
    num_kv_heads: int
    size: int
    num_slots: int
    joined: bool
    bias: bool
    normed: bool
    page_size: int | None = None
    storage: str | None = None


CASES = {
    "one-token": Case(3, js.ROOT, 4, 2, 32, 200, joined=True, bias=True, normed=False),
    "tree-normed": Case(
        2, js.from_paths([(0, 0), (1,), (2, 0)]), 6, 2, 32, 100, joined=False, bias=False, normed=True
    ),
    "chain-paged": Case(3, js.chain(4), 14, 2, 64, 96, joined=True, bias=True, normed=False, page_size=16),
    "many-parts": Case(
        1, js.chain(7), 8, 1, 32, 2000, joined=False, bias=True, normed=True, storage="float16"
    ),
}


def inputs(case: Case, dtype) -> Any:
    rng = np.random.default_rng(case.num_rows)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    N, G, D, R = case.tree.num_nodes, case.num_kv_heads, case.size, case.num_heads // case.num_kv_heads
    if case.joined:
        array = draw(case.num_rows, N, G, R + 2, D)
        bias = draw(G, R + 2, D) if case.bias else None
        heads = Heads(array, bias, 0, R), Heads(array, bias, R, 1), Heads(array, bias, R + 1, 1)
    else:
        heads = tuple(
            Heads(draw(case.num_rows, N, G, n, D), draw(G, n, D) if case.bias else None, 0, n)
            for n in (R, 1, 1)
        )
    norms = Norms(draw(D), draw(D), 1e-5) if case.normed else None
    lengths = jnp.asarray(rng.integers(1, case.num_slots + 1, case.num_rows), jnp.int32)
    lengths = lengths.at[0].set(0 if case.num_rows > 1 else case.num_slots - 1)
    storage = jnp.dtype(case.storage or dtype)
    draw_cache = lambda *shape: jnp.asarray(rng.standard_normal(shape), storage)
    shape = (2, case.num_rows, case.num_slots, G, D)
    # What lies behind a row's length must not be looked at.
    behind = (jnp.arange(case.num_slots)[None, :] >= lengths[:, None])[None, :, :, None, None]
    keys, values = (jnp.where(behind, jnp.nan, draw_cache(*shape)).astype(storage) for _ in range(2))
    cache: js.KVCache | js.PagedKVCache = js.KVCache(keys, values)
    if case.page_size is not None:
        num_pages = case.num_slots // case.page_size
        order = jnp.asarray(rng.permutation(case.num_rows * num_pages), jnp.int32)
        paged = lambda x: (
            jnp.zeros_like(x)
            .reshape(2, -1, case.page_size, G, D)
            .at[:, order]
            .set(x.reshape(2, -1, case.page_size, G, D))
        )
        table = order.reshape(case.num_rows, num_pages)
        # A page the row does not need is not there.
        table = jnp.where(jnp.arange(num_pages)[None, :] * case.page_size < lengths[:, None], table, -1)
        cache = js.PagedKVCache(paged(keys), paged(values), table)
    positions = lengths[:, None] + case.tree.depth[None, :]
    cos, sin = rotation(positions, inverse_frequencies(D, 10000.0))
    mask = js.attention_mask(lengths, case.tree, case.num_slots)
    return *heads, norms, cos, sin, cache, jnp.int32(1), mask


def run(attend, query, key, value, norms, *rest, **options):
    """Jitted, where the heads lie and the eps are static."""

    def call(arrays, biases, weights, *rest):
        heads = [
            h._replace(array=a, bias=b) for h, a, b in zip((query, key, value), arrays, biases, strict=True)
        ]
        return attend(
            *heads,
            None if norms is None else norms._replace(query=weights[0], key=weights[1]),
            *rest,
            **options,
        )

    heads = query, key, value
    weights = None if norms is None else norms[:2]
    return jax.jit(call)([h.array for h in heads], [h.bias for h in heads], weights, *rest)


def plain(query, key, value, norms, cos, sin, cache, layer, mask):
    def norm(x, weight):
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + norms.eps)
        return (wide * scale * weight.astype(jnp.float32)[None, None, None]).astype(x.dtype)

    query, key, value = (read_heads(heads) for heads in (query, key, value))
    if norms is not None:
        query, key = norm(query, norms.query), norm(key, norms.key)
    staged = js.stage(rotate(key, cos, sin), value, cache.keys.dtype)
    committed = js.gather_layer(cache, layer)
    return attend(rotate(query, cos, sin), *committed, *js.read_staged(staged), mask), staged


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("chain-paged", jnp.float32),
        *(pytest.param(name, jnp.bfloat16, marks=pytest.mark.large) for name in CASES),
        *(
            pytest.param(name, jnp.float32, marks=pytest.mark.large)
            for name in CASES
            if name != "chain-paged"
        ),
    ],
)
def test_the_kernels_give_what_the_operations_give(name, dtype):
    given = inputs(CASES[name], dtype)
    assert takes(given[6], given[0])
    found, staged = jax.tree.map(np.asarray, run(attend_new, *given, interpret=not ON_GPU))
    wanted, wanted_staged = jax.tree.map(np.asarray, run(plain, *given))
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    # Parts of the sum are added in another order, products and sums may be fused, and weights are rounded to
    # bfloat16 against another maximum.
    bound = 2e-6 if dtype == jnp.float32 else 2.0**-7
    assert distance(found, wanted) <= bound
    for one, other in zip(
        (staged.keys, staged.values), (wanted_staged.keys, wanted_staged.values), strict=True
    ):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        # A product fused into a sum may round to the number beside it.
        step = max(float(jnp.finfo(kind).eps) for kind in (one.dtype, dtype))
        np.testing.assert_allclose(
            one.astype(np.float32), other.astype(np.float32), rtol=2 * step, atol=4 * step
        )


def distance(one, other) -> float:
    one, other = one.astype(np.float64), other.astype(np.float64)
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def test_a_staged_nan_reaches_the_nodes_that_see_it_alone():
    query, key, value, *rest = inputs(CASES["tree-normed"], jnp.float32)
    value = value._replace(array=value.array.at[0, 1, 0, 0, 0].set(jnp.nan))
    found, _ = run(attend_new, query, key, value, *rest, interpret=not ON_GPU)
    is_nan = np.isnan(
        np.asarray(found).reshape(2, query.array.shape[1], 2, -1)
    )  # by row, node, key-value head
    expected = np.zeros_like(is_nan)
    expected[0, :, 0] = CASES["tree-normed"].tree.ancestors[:, 1, None]
    np.testing.assert_array_equal(is_nan, expected)


@pytest.mark.large
def test_a_query_that_sees_nothing_gets_zeros():
    *given, mask = inputs(CASES["one-token"], jnp.float32)
    found, _ = run(attend_new, *given, jnp.zeros_like(mask), interpret=not ON_GPU)
    assert not np.asarray(found).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_parts", [None, 3])
def test_the_sum_and_its_norm(dtype, num_parts):
    rng = np.random.default_rng(0)
    x, delta, weight = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((2, 3, 96), (2, 3, 96), (96,)))
    parts = delta
    if num_parts is not None:
        parts = jnp.asarray(rng.standard_normal((num_parts, 2, 3, 96)), jnp.float32)
        delta = (parts[0] + parts[1] + parts[2]).astype(dtype)
    total, normed = add_norm(x, parts, weight, 1e-5, interpret=not ON_GPU)
    np.testing.assert_array_equal(np.asarray(total, np.float32), np.asarray(x + delta, np.float32))
    wide = np.asarray(total, np.float64)
    wanted = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5) * np.asarray(weight, np.float64)
    assert normed.dtype == dtype
    assert np.abs(np.asarray(normed, np.float64) - wanted).max() <= 4 * float(jnp.finfo(dtype).eps) * 4


@pytest.mark.parametrize(
    ("dtype", "num_tokens"),
    [
        (jnp.float32, 3),
        (jnp.bfloat16, 70),
        pytest.param(jnp.bfloat16, 1, marks=pytest.mark.large),
        pytest.param(jnp.float32, 128, marks=pytest.mark.large),
    ],
)
def test_a_product_in_parts(dtype, num_tokens):
    rng = np.random.default_rng(1)
    x, weight = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((num_tokens, 1, 448), (256, 448)))
    assert splits(x, weight)
    parts = np.asarray(jax.jit(functools.partial(project_parts, interpret=not ON_GPU))(x, weight))
    wanted = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    assert parts.dtype == np.float32
    assert parts.shape[1:] == wanted.shape
    assert len(parts) > 1
    assert distance(parts.sum(axis=0), wanted) <= (1e-6 if dtype == jnp.float32 else 1e-3)


@pytest.mark.parametrize(
    ("dtype", "num_tokens"), [(jnp.bfloat16, 3), pytest.param(jnp.float32, 16, marks=pytest.mark.large)]
)
def test_a_whole_product(dtype, num_tokens):
    rng = np.random.default_rng(1)
    x, weight = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((1, num_tokens, 512), (48, 512)))
    assert fits_whole(x, weight)
    found = jax.jit(functools.partial(project_whole, interpret=not ON_GPU))(x, weight)
    wanted = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    assert found.dtype == dtype
    assert found.shape == wanted.shape
    assert distance(np.asarray(found, np.float64), wanted) <= (1e-6 if dtype == jnp.float32 else 4e-3)


@pytest.mark.large
@pytest.mark.parametrize("joined", [False, True])
def test_a_decoder_with_kernels_is_the_one_without(joined):
    config = DecoderConfig(
        vocab_size=50,
        width=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=64,
        mlp_width=320,
        norm_eps=1e-5,
        rope_theta=10000.0,
        qkv_bias=True,
        qk_norm=True,
        joined_projections=joined,
    )
    weights = random_weights(config, 3)
    rng = np.random.default_rng(0)
    cache = js.KVCache(*(jnp.asarray(rng.standard_normal((2, 2, 40, 2, 64)), jnp.float32) for _ in range(2)))
    lengths, tree, tokens = jnp.array([5, 0], jnp.int32), js.chain(1), jnp.array([[3, 1], [1, 5]], jnp.int32)

    def hidden_and_staged(kernels):
        forward, _ = decoder_functions(config, kernels=kernels)
        positions = lengths[:, None] + tree.depth[None, :]
        hidden, staged = forward(weights, tokens, positions, cache, js.attention_mask(lengths, tree, 40))
        return np.asarray(hidden), np.asarray(staged.keys), np.asarray(staged.values)

    for found, wanted in zip(hidden_and_staged(KERNELS), hidden_and_staged(None), strict=True):
        assert distance(found, wanted) <= 1e-5


def test_what_the_kernels_are_made_for():
    query = inputs(CASES["one-token"], jnp.float32)[0]
    cache = js.init_cache(1, 3, 8, 2, 32, jnp.float32)
    assert takes(cache, query)
    assert not takes(js.init_cache(1, 3, 8, 2, 32, jnp.int8), query)
    assert not takes(cache, query._replace(array=jnp.zeros((3, 1, 2, 4, 80))))
    assert not takes(cache, query._replace(array=jnp.zeros((3, 65, 2, 4, 32)), count=1))
    x = jnp.zeros((128, 1, 448))
    assert splits(x, jnp.zeros((256, 448)))
    assert not splits(jnp.zeros((43, 3, 448)), jnp.zeros((256, 448)))
    assert not splits(x, jnp.zeros((192, 448)))
    assert not splits(x[:, :, :440], jnp.zeros((256, 440)))
    few = jnp.zeros((16, 1, 256))
    assert fits_whole(few, jnp.zeros((256, 256)))
    assert splits(few, jnp.zeros((128, 256)))  # a longer sum than the outputs are many
    assert not splits(few, jnp.zeros((256, 256)))
    assert not fits_whole(few, jnp.zeros((40, 256)))
    assert not fits_whole(few[:, :, :128], jnp.zeros((256, 128)))
    assert not fits_whole(jnp.zeros((17, 1, 256)), jnp.zeros((256, 256)))
    assert (kernels_of() is None) == (not ON_GPU)
    assert kernels_of(mesh=object()) is None


def test_models_of_scripts_have_joined_projections_where_kernels_are_used(monkeypatch):
    config = dataclasses.replace(PRESETS["smollm2-135m"], num_layers=1, vocab_size=64)
    monkeypatch.setattr(command_line, "named_config", lambda name: config)
    options = argparse.Namespace(
        model=None, random_weights="smollm2-135m", dtype="float32", token_ids=True, mesh=None
    )
    plain = command_line.load_model(options)
    assert plain.config == config or ON_GPU
    monkeypatch.setattr(joining, "kernels_of", lambda mesh=None: KERNELS if mesh is None else None)
    joined = command_line.load_model(options)
    expected, weights = join_projections(config, random_weights(config, 0, jnp.float32))
    assert joined.config == expected
    assert expected.joined_projections
    assert all(map(np.array_equal, jax.tree.leaves(joined.weights), jax.tree.leaves(weights)))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    assert command_line.load_model(options, mesh).config == config
