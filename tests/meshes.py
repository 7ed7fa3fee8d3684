"""Meshes of CPU devices, the collectives of a compiled program, and results compared to the bit."""

import collections
import math
import re

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
_COLLECTIVES = "all-to-all|all-gather|all-reduce|collective-permute|reduce-scatter|ragged-all-to-all"
_CALL = re.compile(rf"= (.*?) ({_COLLECTIVES})(?:-start)?\(")


def mesh_of(kind="auto", **sizes):
    """A mesh with the given axes and sizes, on the first CPU devices."""
    devices = np.array(jax.devices("cpu")[: math.prod(sizes.values())]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(KINDS[kind],) * len(sizes))


def collectives(compiled):
    """How often each collective occurs in a compiled program's text."""
    return dict(collections.Counter(name for _, name in _calls(compiled)))


def largest_gather(compiled):
    """The most numbers that an all-gather or all-reduce of a compiled program results in."""
    shapes = [shape for shape, name in _calls(compiled) if name in ("all-gather", "all-reduce")]
    sizes = [
        math.prod(map(int, size.split(","))) for text in shapes for size in re.findall(r"\[([\d,]+)\]", text)
    ]
    return max(sizes, default=0)


def assert_same_bits(found, expected):
    """Two trees have the same arrays, to the bit."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(one, other)
        assert one.tobytes() == other.tobytes()


def _calls(compiled):
    return [found.groups() for found in _CALL.finditer(compiled.as_text())]
