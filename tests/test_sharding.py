"""Rows spread over a mesh: which device owns which row, what travels, what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxsample.params import TILE
from jaxsample.sharding import join_batch, map_rows, own_rows, split_batch
from tests.meshes import assert_same_bits, collectives, largest_gather, mesh_of


def summed(x, rows):
    """Row by row: exact sums of integers, and everything of a row handed back."""
    return (x.astype(jnp.int32).sum(axis=-1), rows), x[:, :1]


def batch(num_rows, width):
    generator = np.random.default_rng(num_rows * width)
    rows = {
        "f32": generator.normal(size=(num_rows, 3)).astype(np.float32),
        "u32": generator.integers(0, 2**32, num_rows, np.uint32),
        "u8": generator.integers(0, 256, (num_rows, 2, 2), np.uint8),
        "bool": generator.random((num_rows, 5)) < 0.5,
        "bf16": generator.normal(size=num_rows).astype(jnp.bfloat16),
        "empty": np.zeros((num_rows, 0), np.int32),
        "none": None,
    }
    rows["f32"][0, 0] = np.nan
    return generator.integers(-9, 9, (num_rows, width)).astype(np.float32), rows


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 8])
def test_rows_come_back_in_order_with_all_that_is_theirs(kind, num_shards):
    mesh = mesh_of(kind, any_name=num_shards)
    mapped = jax.jit(map_rows(summed, mesh, "any_name"))
    for num_rows, width in ((1, 24), (13, 1000)):
        x, rows = batch(num_rows, width)
        (sums, back), kept = mapped(x, rows)
        np.testing.assert_array_equal(sums, x.astype(np.int32).sum(axis=1))
        assert_same_bits(back, rows)
        np.testing.assert_array_equal(np.asarray(kept)[:num_rows], x[:, :1])
        assert kept.shape[0] == num_shards * -(-num_rows // num_shards)


@pytest.mark.parametrize(
    ("kind", "sizes", "axis", "batch_axis"),
    [
        ("auto", dict(data=2, tensor=4), "tensor", "data"),
        ("explicit", dict(data=4, tensor=2), "tensor", ("data",)),
        ("explicit", dict(data=2, tensor=3), ("tensor",), "data"),
        ("auto", dict(data=2, tensor=3), ("data", "tensor"), ()),
        ("explicit", dict(a=2, b=2, c=2), ("c", "a"), "b"),
        ("auto", dict(a=2, b=2, c=2), "a", ("c", "b")),
    ],
)
def test_any_axes_of_a_mesh_may_split_the_vocabulary_and_the_rows(kind, sizes, axis, batch_axis):
    x, rows = batch(20, 96)
    mapped = jax.jit(map_rows(summed, mesh_of(kind, **sizes), axis, batch_axis))
    (sums, back), kept = mapped(x, rows)
    np.testing.assert_array_equal(sums, x.astype(np.int32).sum(axis=1))
    assert_same_bits(back, rows)
    # What is kept goes in again as it is, and meets its own rows.
    check = lambda x, kept: ((kept[:, 0] == x[:, 0],), ())
    again = jax.jit(map_rows(check, mesh_of(kind, **sizes), axis, batch_axis))
    assert np.asarray(again(x, kept)[0][0]).all()


def test_device_p_owns_the_rows_from_p_times_their_share_on():
    mesh = mesh_of(x=4)
    shard = lambda x, rows: (((jnp.zeros_like(rows) + jax.lax.axis_index("x")), rows), ())
    (owner, rows), _ = jax.jit(map_rows(shard, mesh, "x"))(
        np.zeros((10, 8), np.float32), np.arange(10, dtype=np.int32)
    )
    np.testing.assert_array_equal(owner, np.arange(10) // 3)
    np.testing.assert_array_equal(rows, np.arange(10))


def test_idle_rows_are_copies_of_the_last_row_so_that_nothing_divides_by_a_padding_value():
    mesh = mesh_of(x=4)
    _, kept = jax.jit(map_rows(lambda x, rows: ((), (x, 1 / rows)), mesh, "x"))(
        np.arange(10, 50, dtype=np.float32).reshape(5, 8), np.full(5, 2, np.float32)
    )
    np.testing.assert_array_equal(kept[0][:, 0], [10, 18, 26, 34, 42, 42, 42, 42])
    np.testing.assert_array_equal(kept[1], np.full(8, 0.5))


def test_several_arrays_of_any_rank_are_split_and_nodes_stay_with_their_row():
    mesh = mesh_of(x=4)
    x = np.arange(6 * 3 * 8, dtype=np.float32).reshape(6, 3, 8)
    split = {"nodes": x, "rows": x[:, 0]}
    (nodes, rows), _ = jax.jit(map_rows(lambda split: ((split["nodes"], split["rows"]), ()), mesh, "x"))(
        split
    )
    np.testing.assert_array_equal(nodes, x)
    np.testing.assert_array_equal(rows, x[:, 0])


def test_without_a_mesh_the_function_is_itself():
    assert map_rows(summed) is summed


@pytest.mark.parametrize("num_rows", [16, 13])
def test_one_all_to_all_and_one_all_gather_move_everything(num_rows):
    mesh = mesh_of(data=2, tensor=4) if num_rows == 16 else mesh_of(tensor=8)
    batch_axis = "data" if num_rows == 16 else ()
    x, rows = batch(num_rows, 8 * TILE)
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(batch_axis, "tensor")))
    mapped = jax.jit(map_rows(summed, mesh, "tensor", batch_axis))
    rows = jax.device_put(rows, NamedSharding(mesh, PartitionSpec(batch_axis)))
    compiled = mapped.lower(placed, rows).compile()
    assert collectives(compiled) == {"all-to-all": 1, "all-gather": 1}
    assert largest_gather(compiled) < x.size // 8


def test_on_a_mesh_of_one_device_nothing_is_sent():
    x, rows = batch(6, TILE)
    mapped = jax.jit(map_rows(summed, mesh_of("explicit", data=1, tensor=1), "tensor", "data"))
    assert collectives(mapped.lower(x, rows).compile()) == {}


def test_results_go_to_all_devices_of_both_axes_by_the_same_all_gather():
    mesh = mesh_of("explicit", data=2, tensor=3)
    x, rows = batch(10, 3 * TILE)
    place = lambda tree, *spec: jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*spec)))
    mapped = jax.jit(map_rows(summed, mesh, "tensor", "data", "data"))
    compiled = mapped.lower(place(x, "data", "tensor"), place(rows, "data")).compile()
    (sums, back), _ = compiled(place(x, "data", "tensor"), place(rows, "data"))
    assert sums.sharding.is_fully_replicated
    np.testing.assert_array_equal(sums, x.astype(np.int32).sum(axis=1))
    assert_same_bits(back, rows)
    assert collectives(compiled) == {"all-to-all": 1, "all-gather": 1}
    with pytest.raises(ValueError, match="join_axis is 'tensor', allowed are \\(\\) and batch_axis = 'data'"):
        map_rows(summed, mesh, "tensor", "data", "tensor")


def test_inside_the_callers_shard_map_three_functions_do_the_same():
    mesh = mesh_of(data=2, tensor=4)
    x, rows = batch(10, 64)
    specs = (PartitionSpec("data", "tensor"), PartitionSpec("data"))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("data"))
    def by_hand(x, rows):
        joined, _ = summed(split_batch(x, "tensor"), own_rows(rows, "tensor"))
        return join_batch(joined, "tensor", 5)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("data"))
    def mapped(x, rows):
        return map_rows(summed, axis="tensor")(x, rows)[0]

    expected = summed(x, rows)[0]
    for program in (by_hand, mapped):
        found = jax.jit(program)(x, rows)
        np.testing.assert_array_equal(found[0], expected[0])
        assert_same_bits(found[1], rows)


@pytest.mark.parametrize(
    ("arguments", "num_rows", "message"),
    [
        (dict(axis="model"), 4, "the mesh has no axis 'model', only data=2, tensor=4"),
        (dict(axis="tensor", batch_axis="rows"), 4, "the mesh has no axis 'rows', only data=2, tensor=4"),
        (dict(axis=("tensor", "data"), batch_axis="data"), 4, "an axis may occur only once"),
        (dict(axis="tensor", batch_axis="data"), 5, "5 rows on 2 devices along ('data',)"),
        (dict(), 4, "axis is None, expected one of the mesh's axes data=2, tensor=4"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_its_numbers(arguments, num_rows, message):
    x, rows = batch(num_rows, 8)
    with pytest.raises(ValueError, match=re.escape(message)):
        map_rows(summed, mesh_of(data=2, tensor=4), **arguments)(x, rows)


def test_arrays_of_other_numbers_of_rows_are_refused():
    x, rows = batch(6, 8)
    with pytest.raises(ValueError, match=r"an array has 5 rows, expected 6, or 2 on each device"):
        map_rows(summed, mesh_of(x=4), "x")(x, rows["u32"][:5])


def test_a_mesh_in_context_with_the_same_names_and_other_sizes_is_refused():
    mapped = map_rows(lambda x, row: (x.sum(axis=1), row), mesh_of(x=2), "x")
    with (
        jax.set_mesh(mesh_of(x=4)),
        pytest.raises(ValueError, match="the mesh has axes x=2, that of the context x=4"),
    ):
        mapped(np.zeros((4, 256), np.float32), np.zeros(4, np.int32))


def test_an_axis_of_no_name_is_refused():
    with pytest.raises(ValueError, match="an axis is None, expected the name of one"):
        map_rows(lambda x: (x, ()), mesh_of(x=2), "x", batch_axis=None)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_mesh_given_in_a_shard_map_over_its_axis_is_refused_and_over_another_is_not(kind):
    mesh = mesh_of(kind, data=2, x=2)
    mapped = map_rows(lambda x, row: ((x.sum(axis=1), row), ()), mesh, "x")
    rows = PartitionSpec("data")
    given = jax.device_put(
        (np.ones((4, 256), np.float32), np.arange(4, dtype=np.int32)), NamedSharding(mesh, rows)
    )
    inside = functools.partial(jax.shard_map, lambda x, row: mapped(x, row)[0], mesh=mesh, in_specs=rows)
    with pytest.raises(ValueError, match=r"a mesh is given in a shard_map over its axes \['data', 'x'\]"):
        jax.jit(inside(out_specs=rows))(*given)
    found = jax.jit(inside(out_specs=rows, axis_names={"data"}))(*given)
    assert_same_bits(found, (np.full(4, 256, np.float32), np.arange(4, dtype=np.int32)))


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="there are no rows"):
        map_rows(lambda x: (x, ()), mesh_of(x=2), "x")(np.zeros((0, 256), np.float32))
