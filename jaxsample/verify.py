"""Which proposals a step keeps, and the token that follows them: the verdict, and matching on any tree.

Knows nothing about caches or stop rules. Every verifier has one signature, verify(target, draft, tree), and
returns a `Verdict`, whose count alone moves everything downstream. `verify_match` is here; `lossless` holds
those that weigh the draft's probabilities. Without proposals (the root alone) a step emits the root's own
draw: plain decoding.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample.draft import Draft, Tree
from jaxsample.params import PAD
from jaxsample.target import Target, draw_target


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


def verify_match(target: Target, draft: Draft, tree: Tree) -> Verdict:
    """Accept proposals as long as they equal the token plain decoding draws; the next draw follows them.

    Lossless: the emitted tokens are those of plain decoding, given equal logits. Greedy is the case of
    temperature 0.

    Args:
      target: Target of B * N rows, row b * N + i for node i of request b.
      draft: Draft on the tree.
      tree: static, N nodes.

    Raises:
      ValueError: shapes that do not fit the tree, at trace time.
    """
    shape = (-1, tree.num_nodes)
    sampled = draw_target(target).reshape(shape)
    return accept_matching(sampled, target.shaped.valid.reshape(shape), draft, tree)


def accept_matching(sampled, valid, draft: Draft, tree: Tree) -> Verdict:
    """`verify_match` given what was drawn.

    Args:
      sampled: i32[B, N], the token drawn at each node with the noise of its own position.
      valid: bool[B, N], False where a node's row has no token; the walk ends there and emits nothing for it.
      draft, tree: as in `verify_match`.
    """
    num_rows = draft.tokens.shape[0]
    check_draft(draft, tree)
    for name, array in (("sampled", sampled), ("valid", valid)):
        if array.shape != (num_rows, tree.num_nodes):
            raise ValueError(f"{name} has shape {list(array.shape)}, expected [{num_rows}, {tree.num_nodes}]")
    # What was drawn lies in the vocabulary, so that no other id equals it.
    live = live_nodes(draft, tree, np.iinfo(np.int32).max)
    children = child_table(tree)

    node = jnp.zeros((num_rows,), jnp.int32)
    running = jnp.ones((num_rows,), jnp.bool_)
    tokens, path, emitted = [], [], []
    for depth in range(tree.max_depth + 1):
        running &= at_node(valid, node)
        token = at_node(sampled, node)
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
    return make_verdict(jnp.stack(tokens, axis=1), jnp.stack(path, axis=1), jnp.stack(emitted, axis=1), tree)


def make_verdict(tokens, path, emitted, tree: Tree) -> Verdict:
    """Verdict of tokens i32[B, M] at nodes i32[B, M], of which the leading `emitted` bool[B, M] count."""
    path = jnp.where(emitted, path, 0)
    return Verdict(
        tokens=jnp.where(emitted, tokens, PAD),
        count=jnp.sum(emitted, axis=1, dtype=jnp.int32),
        path=path,
        accepted=on_path(path, tree.num_nodes),
    )


def on_path(path, num_nodes: int):
    """Which of the proposals 1 ... K a path visits: bool[B, K]. The root and its fillers, 0, do not count."""
    node = jnp.arange(1, num_nodes, dtype=jnp.int32)
    return jnp.any(path[:, :, None] == node[None, None, :], axis=1)


def live_nodes(draft: Draft, tree: Tree, vocab_size: int):
    """Which nodes hold a proposal that counts: bool[B, N]; below a node that does not, none does.

    Ids outside the vocabulary (PAD, placeholders that a prompt held) are no proposals.
    """
    own = jnp.arange(tree.num_nodes, dtype=jnp.int32)[None, :] <= draft.num_live[:, None]
    own &= (draft.tokens >= 0) & (draft.tokens < vocab_size)
    broken = ~own[:, None, :] & jnp.asarray(tree.ancestors)[None]
    return ~jnp.any(broken[:, :, 1:], axis=2)


def child_table(tree: Tree):
    """i32[N, width]: the children of each node, -1 behind."""
    width = max(1, max(map(len, tree.children)))
    children = np.full((tree.num_nodes, width), -1, np.int32)
    for node, nodes in enumerate(tree.children):
        children[node, : len(nodes)] = nodes
    return jnp.asarray(children)


def at_node(array, node):
    """array[b, node[b]] for [B, N] and i32[B]: [B]."""
    return jnp.take_along_axis(array, node[:, None], axis=1)[:, 0]


def check_draft(draft: Draft, tree: Tree):
    """Refuse a draft whose arrays do not fit the tree or each other."""
    num_rows = draft.tokens.shape[0]
    if draft.tokens.shape != (num_rows, tree.num_nodes):
        raise ValueError(
            f"draft.tokens has shape {list(draft.tokens.shape)}, expected [{num_rows}, {tree.num_nodes}]"
        )
    if draft.num_live.shape != (num_rows,):
        raise ValueError(f"draft.num_live has shape {list(draft.num_live.shape)}, expected [{num_rows}]")
    if draft.law is not None and draft.law.max.shape != (num_rows, len(tree.inner)):
        raise ValueError(
            f"draft.law has rows {list(draft.law.max.shape)}, expected [{num_rows}, {len(tree.inner)}]: "
            "one for each inner node of the tree"
        )
