"""Which proposals a step keeps, and the token that follows them.

Knows nothing about caches or stop rules. A verifier maps what was drawn at each node of the tree, and the
proposals, to a `Verdict`; `Verdict.count` alone moves everything downstream. Without proposals (the root
alone) a step emits the root's own draw: plain decoding.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample.draft import Draft, Tree
from jaxsample.params import PAD


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
    """What each row emits, M = max_depth + 1 tokens at the most.

    Fields:
      tokens: i32[B, M], the first count[b] are emitted, PAD behind.
      count: i32[B], emitted tokens = committed rows (root and accepted proposals); 0 for a bad or idle row.
      path: i32[B, M], nodes whose keys and values are committed, the root first, 0 behind.
      accepted: bool[B, K], which proposals (nodes 1 ... K) were accepted.
    """

    tokens: jax.Array
    count: jax.Array
    path: jax.Array
    accepted: jax.Array


def verify_match(sampled, valid, draft: Draft, tree: Tree) -> Verdict:
    """Accept proposals as long as they equal the token plain decoding draws; the next draw follows them.

    Lossless: the emitted tokens are those of plain decoding, given equal logits. Greedy is the case of
    temperature 0.

    Args:
      sampled: i32[B, N], the token drawn at each node with the noise of its own position.
      valid: bool[B, N], False where a node's row has no token; the walk ends there and emits nothing for it.
      draft: Draft on the tree.
      tree: static, N nodes.

    Raises:
      ValueError: shapes that do not fit the tree, at trace time.
    """
    num_rows = sampled.shape[0]
    for name, array in (("sampled", sampled), ("valid", valid), ("draft.tokens", draft.tokens)):
        if array.shape != (num_rows, tree.num_nodes):
            raise ValueError(f"{name} has shape {list(array.shape)}, expected [{num_rows}, {tree.num_nodes}]")
    if draft.num_live.shape != (num_rows,):
        raise ValueError(f"draft.num_live has shape {list(draft.num_live.shape)}, expected [{num_rows}]")
    live = jnp.arange(tree.num_nodes, dtype=jnp.int32)[None, :] <= draft.num_live[:, None]
    live &= draft.tokens != PAD

    width = max(map(len, tree.children))
    children = np.full((tree.num_nodes, max(width, 1)), -1, np.int32)
    for node, nodes in enumerate(tree.children):
        children[node, : len(nodes)] = nodes
    children = jnp.asarray(children)

    node = jnp.zeros((num_rows,), jnp.int32)
    running = jnp.ones((num_rows,), jnp.bool_)
    tokens, path, emitted = [], [], []
    for depth in range(tree.max_depth + 1):
        running &= _at(valid, node)
        token = _at(sampled, node)
        tokens.append(jnp.where(running, token, PAD))
        path.append(jnp.where(running, node, 0))
        emitted.append(running)
        if depth < tree.max_depth:
            options = children[node]  # i32[B, width]
            at = jnp.maximum(options, 0)
            same = (options >= 0) & jnp.take_along_axis(live, at, axis=1)
            same &= jnp.take_along_axis(draft.tokens, at, axis=1) == token[:, None]
            running &= jnp.any(same, axis=1)
            node = jnp.take_along_axis(options, jnp.argmax(same, axis=1)[:, None], axis=1)[:, 0]
            node = jnp.where(running, node, 0)
    path = jnp.stack(path, axis=1)
    return Verdict(
        tokens=jnp.stack(tokens, axis=1),
        count=jnp.sum(jnp.stack(emitted, axis=1), axis=1, dtype=jnp.int32),
        path=path,
        accepted=on_path(path, tree.num_nodes),
    )


def on_path(path, num_nodes: int):
    """Which of the proposals 1 ... K a path visits: bool[B, K]. The root and its fillers, 0, do not count."""
    node = jnp.arange(1, num_nodes, dtype=jnp.int32)
    return jnp.any(path[:, :, None] == node[None, None, :], axis=1)


def _at(array, node):
    return jnp.take_along_axis(array, node[:, None], axis=1)[:, 0]
