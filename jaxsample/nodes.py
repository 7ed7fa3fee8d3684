"""One row of logits for each node of a draft, shaped as if that node's path had been emitted.

Every node gets its request's parameters, its own history and its own position, so that whatever it can emit
is what plain decoding would emit there. Knows nothing about how proposals were made or are judged.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample.draft import Tree
from jaxsample.history import History, at_nodes, repeat_rows
from jaxsample.logprobs import Logprobs
from jaxsample.params import Features, Limits, SamplingParams, StopRule
from jaxsample.shaping import shape
from jaxsample.target import Target, logprobs_of, make_target


def node_target(
    logits,
    params: SamplingParams,
    stop: StopRule,
    history: History,
    position,
    tokens,
    tree: Tree,
    *,
    limits: Limits,
    features: Features,
    allowed=None,
    transform_args: tuple = (),
    law: bool = False,
    only: tuple[int, ...] | None = None,
) -> Target:
    """Shape, summarise and cut the rows of all nodes, or of some.

    Args:
      logits: [B, N, Vp], the model's at each node.
      params, stop, history: of the B requests, at their roots.
      position: i32[B], absolute index of the token that follows the root.
      tokens: i32[B, N], the draft's; node 0 is the root.
      tree: static, N nodes.
      limits, features: as in `sample`.
      allowed: u32[B, N, W] grammar masks of the nodes, u32[B, W] where the root is alone, or None.
      transform_args: pytrees with B rows.
      law: the distribution itself is needed.
      only: static, the n nodes that logits (and masks) are given of, in order: [B, n, Vp]; None: all.

    Returns:
      Target of B * N rows, row b * N + i for node i of request b; of B * n rows with `only`.
    """
    num_rows, num_nodes = logits.shape[0], tree.num_nodes if only is None else len(only)
    if logits.ndim != 3 or logits.shape[1] != num_nodes or tokens.shape != (num_rows, tree.num_nodes):
        raise ValueError(
            f"logits {list(logits.shape)} and tokens {list(tokens.shape)} do not fit the tree's "
            f"{tree.num_nodes} nodes a row" + (f", of which {num_nodes} count" if only is not None else "")
        )
    params, position, given = node_rows(
        params, stop, history, position, tokens, tree, limits=limits, allowed=allowed, only=only
    )
    logits = logits.reshape(num_rows * num_nodes, -1)
    transform_args = repeat_rows(transform_args, num_nodes)
    shaped = shape(
        logits,
        params,
        position,
        **given,
        limits=limits,
        features=features,
        transform_args=transform_args,
    )
    return make_target(shaped, params, position, vocab_size=limits.vocab_size, features=features, law=law)


def node_rows(
    params: SamplingParams,
    stop: StopRule,
    history: History,
    position,
    tokens,
    tree: Tree,
    *,
    limits: Limits,
    allowed=None,
    only: tuple[int, ...] | None = None,
) -> tuple[SamplingParams, Any, dict[str, Any]]:
    """What the rows of all nodes are shaped by; arguments as for `node_target`.

    Returns:
      (params, position, {"stop", "history", "allowed"}) of B * N rows; of B * n with `only`.
    """
    num_rows, num_nodes = tokens.shape[0], tree.num_nodes if only is None else len(only)
    if allowed is not None:
        allowed = jnp.asarray(allowed)
        expected = (num_rows, num_nodes, limits.num_words)
        if allowed.ndim == 2 and num_nodes == 1:
            allowed = allowed[:, None]
        if allowed.shape != expected or allowed.dtype != jnp.uint32:
            raise ValueError(
                f"allowed is {allowed.dtype}{list(allowed.shape)}, expected uint32{list(expected)}"
            )
        allowed = allowed.reshape(-1, limits.num_words)
    params, stop = repeat_rows((params, stop), num_nodes)
    depth, histories = tree.depth, at_nodes(history, tokens, tree)
    if only is not None:
        chosen = np.asarray(only, np.int32)
        rows = (np.arange(num_rows, dtype=np.int32)[:, None] * tree.num_nodes + chosen).reshape(-1)
        depth, histories = depth[chosen], jax.tree.map(lambda leaf: leaf[rows], histories)
    position = (position[:, None] + jnp.asarray(depth)[None, :]).reshape(-1)
    return params, position, dict(stop=stop, history=histories, allowed=allowed)


def plain_rows(params: SamplingParams, position, tree: Tree) -> tuple[SamplingParams, Any]:
    """(params, position i32[B * N]) of all nodes' rows, where nothing looks at what came before."""
    position = position[:, None] + jnp.asarray(tree.depth)[None, :]
    return repeat_rows(params, tree.num_nodes), position.reshape(-1)


def take_nodes(target: Target, node, num_nodes: int) -> Target:
    """The target's rows at given nodes: B * M rows for i32[B, M] node."""
    row = (jnp.arange(node.shape[0], dtype=jnp.int32)[:, None] * num_nodes + node).reshape(-1)
    return jax.tree.map(lambda leaf: jnp.take(leaf, row, axis=0, mode="clip"), target)


def logprobs_of_path(target: Target, path, tokens, tree: Tree) -> Logprobs | None:
    """Logprobs of emitted tokens i32[B, M], each from the row of the node it follows: [B, M] in place of [B].

    Args:
      target: Target of B * N rows.
      path: i32[B, M], nodes. tokens: i32[B, M], PAD for none.
      tree: static, N nodes.
    """
    if target.features.num_logprobs < 0:
        return None
    if tree.num_nodes > 1:
        target = take_nodes(target, path, tree.num_nodes)
    logprobs = logprobs_of(target, tokens.reshape(-1))
    return jax.tree.map(lambda leaf: leaf.reshape(*tokens.shape, *leaf.shape[1:]), logprobs)
