"""What is proposed to a decode step: tokens on a static tree whose root is the last token emitted.

Knows nothing about where proposals come from, nor about probabilities. Plain decoding is the tree with the
root alone (`ROOT`); a chain of K proposals is a tree with one child a node.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Tree:
    """A static tree of N nodes, breadth-first; node 0 is the root. Hashable, so it can be a jit static.

    Args:
      parents: the parent of each node; parents[0] is -1 and every later parent comes before its child, in
        non-decreasing order (breadth-first).

    Raises:
      ValueError: parents that are no breadth-first tree.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        if not self.parents or self.parents[0] != -1:
            raise ValueError(f"parents must begin with -1 (the root), got {self.parents!r}")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(f"parents[{node}] is {parent}, allowed are 0 ... {node - 1}")
            if node > 1 and parent < self.parents[node - 1]:
                raise ValueError(f"parents must be breadth-first (non-decreasing), got {self.parents!r}")

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @functools.cached_property
    def depth(self) -> np.ndarray:
        """i32[N], edges between the root and each node."""
        depth = np.zeros(self.num_nodes, np.int32)
        for node, parent in enumerate(self.parents[1:], start=1):
            depth[node] = depth[parent] + 1
        return depth

    @property
    def max_depth(self) -> int:
        """The most proposals one step can accept; a step can emit max_depth + 1 tokens."""
        return int(self.depth.max())

    @functools.cached_property
    def ancestors(self) -> np.ndarray:
        """bool[N, N]; ancestors[i, j]: node j is node i or one of its ancestors."""
        ancestors = np.eye(self.num_nodes, dtype=bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            ancestors[node] |= ancestors[parent]
        return ancestors

    @functools.cached_property
    def paths(self) -> np.ndarray:
        """i32[N, max_depth]: the nodes below the root down to each node itself, -1 behind."""
        paths = np.full((self.num_nodes, self.max_depth), -1, np.int32)
        for node, parent in enumerate(self.parents[1:], start=1):
            paths[node] = paths[parent]
            paths[node, self.depth[node] - 1] = node
        return paths

    @functools.cached_property
    def inner(self) -> tuple[int, ...]:
        """The nodes that have children, in order: those a drafter needs a distribution for."""
        return tuple(node for node, nodes in enumerate(self.children) if nodes)

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each node, in order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(tuple(nodes) for nodes in children)


def chain(num_drafts: int) -> Tree:
    """The tree of K = num_drafts proposals one after the other: K + 1 nodes."""
    return Tree(tuple(range(-1, num_drafts)))


def from_paths(paths: Sequence[Sequence[int]]) -> Tree:
    """The tree that holds all given paths; a path lists which child to take at each level, e.g. (0, 1).

    Prefixes of a path need not be listed. Children are numbered from 0 without gaps.

    Raises:
      ValueError: a child index whose smaller siblings are missing.
    """
    nodes = {tuple(path[:length]) for path in paths for length in range(1, len(path) + 1)}
    for path in nodes:
        if path[-1] < 0 or (path[-1] > 0 and (*path[:-1], path[-1] - 1) not in nodes):
            raise ValueError(f"path {path} has no sibling {path[-1] - 1}; children count from 0 without gaps")
    ordered = [(), *sorted(nodes, key=lambda path: (len(path), path))]
    index = {path: node for node, path in enumerate(ordered)}
    return Tree((-1, *(index[path[:-1]] for path in ordered[1:])))


ROOT = chain(0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """Proposed tokens on a static tree.

    Fields:
      tokens: i32[B, N], the token of each node; node 0 holds the root, the last token emitted. PAD (-1), or
        any id outside the vocabulary, ends its branch.
      num_live: i32[B], proposals of each row (the root is not one): nodes 1 ... num_live count.
      law: the distributions the proposals were drawn from, a `Law` [B, I] for the I inner nodes of the tree
        (those with children) in order; None for proposals that were not drawn at all (a point mass each).
    """

    tokens: jax.Array
    num_live: jax.Array
    law: Any = None
