"""Rows of a batch spread over the devices of a mesh: split by one all-to-all, joined by one all-gather.

A model whose head is split over the vocabulary leaves [B, V / P] on each of P devices. `split_batch` turns
that into [B / P, V], whole rows of some requests; what is worked out there is small, and `join_batch` gives
it to all devices. Rows are laid out [P, ceil(B / P)] in the order of their slots: device p owns the rows from
p * ceil(B / P) on, and everything that belongs to a request travels with its row. Where P does not divide B
the last rows are copies of row B - 1, whose results are dropped. Knows nothing of sampling.

`axis` is the mesh axis, or a tuple of them, that the vocabulary is split over. Three functions run inside a
`jax.shard_map` over it; `map_rows` makes that shard_map, or joins the caller's.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxsample.params import TILE

Axis = str | tuple[str, ...]


def map_rows(
    fn: Callable[..., Any],
    mesh: Any = None,
    axis: Axis | None = None,
    batch_axis: Axis = (),
    join_axis: Axis = (),
):
    """A function of whole rows as one over a mesh; without a mesh and an axis the function itself.

    Args:
      fn: (split, *by_row) -> (joined, kept), each a pytree of arrays with rows first. A row of its results
        depends on that row of its arguments alone.
      mesh: jax.sharding.Mesh, with Auto or Explicit axes. None: the call stands in a shard_map over `axis`.
      axis: axis or axes that the last axis of every array of `split` is split over.
      batch_axis: axes that rows are split over beforehand (data parallelism), with a mesh only.
      join_axis: () or batch_axis, along which `joined` is given to all devices too, by the same all-gather.

    Returns:
      mapped(split, *by_row) -> (joined, kept), with the arrays of
      split: [B, ..., V], V padded with zeros to a multiple of 128 * P where P does not divide it;
        in the caller's shard_map each device's own [B, ..., V / P];
      by_row: [B, ...], or the `kept` of an earlier call;
      joined: [B, ...], the same on all devices along `axis` and join_axis;
      kept: [P * ceil(B / P), ...] split over batch_axis and axis, each row where it was worked out; in the
        caller's shard_map the device's own [ceil(B / P), ...].

    Raises:
      ValueError: axes the mesh does not have, or rows that batch_axis does not divide.
    """
    if axis is None:
        if mesh is not None or batch_axis:
            if mesh is None:
                raise ValueError(f"batch_axis is {batch_axis!r}, but neither a mesh nor an axis is given")
            raise ValueError(f"axis is None, expected one of the mesh's axes {_mesh_names(mesh)}")
        return fn
    axes, batch_axes = axis_names(axis), axis_names(batch_axis)
    join_axes = axis_names(join_axis)
    if join_axes and join_axes != batch_axes:
        raise ValueError(f"join_axis is {join_axis!r}, allowed are () and batch_axis = {batch_axis!r}")
    body = functools.partial(_on_shard, fn, axes, join_axes)
    if mesh is None:
        if batch_axes:
            raise ValueError(f"batch_axis is {batch_axis!r}, but in a shard_map rows are split already")
        return body
    check_axes(mesh, axis, batch_axis)
    num_shards, num_batches = axis_size(mesh, axes), axis_size(mesh, batch_axes)

    def mapped(split, *by_row):
        num_rows = jax.tree.leaves(split)[0].shape[0]
        check_rows(mesh, num_rows, batch_axes)
        own = num_batches * num_shards * -(-num_rows // num_batches // num_shards)
        whole_spec, own_spec = PartitionSpec(batch_axes), PartitionSpec((*batch_axes, *axes))
        split = jax.tree.map(functools.partial(pad_columns, num_shards=num_shards), split)
        split_spec = lambda x: PartitionSpec(batch_axes, *[None] * (x.ndim - 2), axes)
        row_spec = lambda x: own_spec if jnp.shape(x)[0] == own else whole_spec
        in_specs = (jax.tree.map(split_spec, split), *(jax.tree.map(row_spec, tree) for tree in by_row))
        joined_spec = PartitionSpec() if join_axes else whole_spec
        return over_mesh(body, mesh, in_specs, (joined_spec, own_spec))(split, *by_row)

    return mapped


def split_batch(x, axis: Axis):
    """Whole rows from columns, by one all-to-all: [B, ..., V / P] to [ceil(B / P), ..., V]."""
    axes = axis_names(axis)
    num_shards = jax.lax.axis_size(axes)
    if num_shards == 1:
        return x
    missing = -x.shape[0] % num_shards
    if missing:
        x = jnp.concatenate([x, jnp.broadcast_to(x[-1:], (missing, *x.shape[1:]))])
    return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=x.ndim - 1, tiled=True)


def own_rows(tree: Any, axis: Axis):
    """The rows that a device owns, of arrays all devices hold: [B, ...] to [ceil(B / P), ...]."""
    axes = axis_names(axis)
    num_shards, shard = jax.lax.axis_size(axes), jax.lax.axis_index(axes)

    def take(leaf):
        leaf = jnp.asarray(leaf)
        count = -(-leaf.shape[0] // num_shards)
        row = shard * count + jnp.arange(count, dtype=jnp.int32)
        return jnp.take(leaf, jnp.minimum(row, leaf.shape[0] - 1), axis=0, mode="clip")

    return jax.tree.map(take, tree)


def join_batch(tree: Any, axis: Axis, num_rows: int, join_axis: Axis = ()):
    """All rows on all devices, by one all-gather: [ceil(B / P), ...] to [B, ...], B = num_rows.

    All arrays travel as one of 32-bit words. Along join_axis the devices' B rows each follow one another.
    """
    axes = (*axis_names(join_axis), *axis_names(axis))
    leaves, structure = jax.tree.flatten(tree)
    gather = functools.partial(jax.lax.all_gather, axis_name=axes, axis=0, tiled=True, to="invarying")
    if not leaves or jax.lax.axis_size(axes) == 1:
        # Nothing moves. Where types say on which axes an array varies, this says that it does no more.
        varies = lambda leaf: set(axes) & jax.typeof(leaf).manual_axis_type.varying
        return jax.tree.map(lambda leaf: gather(leaf) if varies(leaf) else leaf, tree)
    count = leaves[0].shape[0]
    words = jnp.concatenate([_as_words(leaf).reshape(count, -1) for leaf in leaves], axis=1)
    words = gather(words).reshape(-1, count * jax.lax.axis_size(axis_names(axis)), words.shape[1])
    words = words[:, :num_rows].reshape(-1, words.shape[2])
    num_rows = words.shape[0]
    joined, at = [], 0
    for leaf in leaves:
        width = math.prod(leaf.shape[1:])
        part = words[:, at : at + width].reshape(num_rows, *leaf.shape[1:])
        joined.append(_from_words(part, leaf.dtype))
        at += width
    return jax.tree.unflatten(structure, joined)


def over_mesh(body: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`body` as a shard_map that takes arrays split in any way, on Auto and on Explicit axes."""
    mesh = _in_context(mesh)
    specs = jax.tree.leaves((in_specs, out_specs), is_leaf=_is_spec)
    named = {name for spec in specs for entry in spec for name in axis_names(entry or ())}
    manual = [name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Manual]
    if named & set(manual):
        raise ValueError(f"a mesh is given in a shard_map over its axes {manual}: give the axis and no mesh")
    # Results that all devices compute alike are not proved alike: functions of the caller's run in here. The
    # jit is for callers without one: an operation at a time on all devices takes minutes.
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))
    explicit = explicit_axes(mesh)
    if not explicit:
        return mapped

    def place(spec, x):
        # Where a type says how an array is split, a shard_map takes it only as its specs say.
        entries = [tuple(name for name in axis_names(entry or ()) if name in explicit) for entry in spec]
        return jax.sharding.reshard(jnp.asarray(x), NamedSharding(mesh, PartitionSpec(*entries)))

    def resharded(*arguments):
        return mapped(*jax.tree.map(place, in_specs, arguments, is_leaf=_is_spec))

    return resharded


def keep_layout(step: Callable[..., Any], mesh: Any, batch_axis: Axis = ()):
    """A step whose rows are split along batch_axis alone, before and after it: donation can reuse them.

    Explicit axes are Auto ones inside: what a step does to its state is indexed in ways that types refuse.

    Args:
      step: (weights, rows, state, ...) -> (rows, state, record). Rows and records have B rows first; how
        `state` is split is its caller's choice, and stays.
      mesh, batch_axis: as in `map_rows`; with no mesh the result is `step`.
    """
    if mesh is None:
        return step

    def laid_out(weights, rows, state, *rest):
        whole = NamedSharding(_in_context(mesh), PartitionSpec(axis_names(batch_axis)))
        rows = jax.lax.with_sharding_constraint(rows, whole)
        rows, state, record = step(weights, rows, state, *rest)
        rows, record = jax.lax.with_sharding_constraint((rows, record), whole)
        return rows, state, record

    explicit = explicit_axes(mesh)
    if not explicit:
        return laid_out

    def in_auto_axes(weights, rows, state, *rest):
        whole = NamedSharding(mesh, PartitionSpec(axis_names(batch_axis)))
        out = (
            whole,
            jax.tree.map(lambda leaf: NamedSharding(mesh, jax.typeof(leaf).sharding.spec), state),
            whole,
        )
        inside: Any = jax.sharding.auto_axes(laid_out, axes=explicit, out_sharding=out)
        return inside(weights, rows, state, *rest)

    return in_auto_axes


def auto_mesh(mesh: Any) -> Mesh:
    """The same devices and names with Auto axes, for programs whose arrays never leave their owner."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def on_mesh(tree: Any, mesh: Mesh) -> Any:
    """Arrays on a mesh: split as they are where they lie on its devices, else whole on each of them."""

    def place(leaf):
        there, spec = getattr(leaf, "sharding", None), PartitionSpec()
        if isinstance(there, NamedSharding) and there.mesh.shape == mesh.shape:
            spec = there.spec if there.device_set == set(mesh.devices.flat) else spec
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


def explicit_axes(mesh: Any) -> tuple[str, ...]:
    """The axes of a mesh whose arrays say in their types how they are split."""
    return tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit)


def axis_names(axis: Axis) -> tuple[str, ...]:
    """The names of one axis or of several.

    Raises:
      ValueError: what is neither.
    """
    if isinstance(axis, str):
        return (axis,)
    if not isinstance(axis, (tuple, list)):
        raise ValueError(f"an axis is {axis!r}, expected the name of one or a tuple of names")
    return tuple(axis)


def axis_size(mesh: Any, axis: Axis) -> int:
    """P: devices along one axis or several of a mesh.

    Raises:
      ValueError: an axis the mesh does not have.
    """
    for name in axis_names(axis):
        if name not in mesh.shape:
            raise ValueError(f"the mesh has no axis {name!r}, only {_mesh_names(mesh)}")
    return math.prod(mesh.shape[name] for name in axis_names(axis))


def check_axes(mesh: Any, axis: Axis, batch_axis: Axis) -> None:
    """Refuse axes that the mesh does not have, and one that is named twice."""
    names = (*axis_names(axis), *axis_names(batch_axis))
    axis_size(mesh, names)
    if len(set(names)) < len(names):
        raise ValueError(f"axis is {axis!r} and batch_axis {batch_axis!r}: an axis may occur only once")


def check_rows(mesh: Any, num_rows: int, batch_axis: Axis) -> None:
    """Refuse rows that the devices along batch_axis do not divide; without a mesh none are refused."""
    size = 1 if mesh is None else axis_size(mesh, batch_axis)
    if num_rows == 0:
        raise ValueError("there are no rows, expected at least one")
    if num_rows % size:
        raise ValueError(f"{num_rows} rows on {size} devices along {batch_axis!r}: they must divide")


def pad_columns(x, num_shards: int, vocab_size: int = 0):
    """[..., V] with V padded to whole tiles on each of P shards, where P does not divide it.

    Fewer than vocab_size columns are refused: padding would pass for tokens.
    """
    x = jnp.asarray(x)
    if x.shape[-1] < vocab_size:
        raise ValueError(
            f"logits have {x.shape[-1]} columns, expected at least limits.vocab_size = {vocab_size}"
        )
    missing = -x.shape[-1] % (TILE * num_shards) if x.shape[-1] % num_shards else 0
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _on_shard(fn, axes, join_axes, split, *by_row):
    """`map_rows` inside a shard_map: split leaves are columns, the others whole or a device's own rows."""
    num_rows = jax.tree.leaves(split)[0].shape[0]
    count = -(-num_rows // jax.lax.axis_size(axes))

    def own(leaf):
        if leaf.shape[0] == num_rows and count < num_rows:
            return own_rows(leaf, axes)
        if leaf.shape[0] == count:
            return leaf
        raise ValueError(f"an array has {leaf.shape[0]} rows, expected {num_rows}, or {count} on each device")

    split = jax.tree.map(lambda leaf: split_batch(leaf, axes), split)
    joined, kept = fn(split, *jax.tree.map(lambda leaf: own(jnp.asarray(leaf)), by_row))
    return join_batch(joined, axes, num_rows, join_axes), kept


def _in_context(mesh):
    """The mesh as the surrounding code sees it: inside `keep_layout` its axes are Auto."""
    context = jax.sharding.get_abstract_mesh()
    if context.axis_names != mesh.axis_names:
        return mesh
    if context.shape != mesh.shape:
        raise ValueError(f"the mesh has axes {_mesh_names(mesh)}, that of the context {_mesh_names(context)}")
    return context


def _is_spec(value) -> bool:
    return isinstance(value, PartitionSpec)


def _as_words(x):
    if x.dtype.itemsize > 4:
        raise ValueError(f"{x.dtype} does not fit a 32-bit word")
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return jax.lax.bitcast_convert_type(x, jnp.int32) if x.dtype == jnp.uint32 else x.astype(jnp.int32)


def _from_words(words, dtype):
    if jnp.issubdtype(dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(words, jnp.float32).astype(dtype)
    return jax.lax.bitcast_convert_type(words, dtype) if dtype == jnp.uint32 else words.astype(dtype)


def _mesh_names(mesh) -> str:
    return "of no mesh" if mesh is None else ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
