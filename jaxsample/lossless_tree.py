"""Tree verification: siblings in order against what the refused ones before them left of the target.

At a node with target p, children x_1, x_2, ... drawn from q: r starts as p; child j is accepted with
probability min(1, r(x_j) / q_j(x_j)); if refused, r becomes max(r - q_j, 0), renormalised. When all are
refused one token is drawn from r; after a leaf, from its p. A chain is the case of one child a node, and then
all three kinds are `lossless.verify_rejection`. The kinds differ in q_j, so the caller names how the siblings
were drawn; with the wrong one the result is biased.

Source: Miao et al. 2023 (SpecInfer, arXiv 2305.09781) for draws with replacement; Jeon et al. 2024 (arXiv
2402.14160) and Chen et al. 2024 (Sequoia, arXiv 2402.12374) for draws without.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample import rng
from jaxsample.candidates import tile_sum
from jaxsample.draft import Draft, Tree
from jaxsample.law import log_probs, log_residual, take_rows
from jaxsample.lossless import GivenNoise, accept_noise, by_node, draw_after
from jaxsample.params import PAD
from jaxsample.target import Target, law_of
from jaxsample.verify import Verdict, at_node, check_draft, child_table, live_nodes, make_verdict

_TINY = np.finfo(np.float32).tiny


def verify_tree_replaced(
    target: Target, draft: Draft, tree: Tree, noise: GivenNoise | None = None
) -> Verdict:
    """Siblings drawn independently of each other from q (with replacement): q_j = q.

    Args:
      target: Target of B * N rows made with law=True.
      draft: Draft with the law of each inner node.
      tree: static, N nodes.
      noise: GivenNoise, or None.

    Returns:
      Verdict.

    Raises:
      ValueError: a draft without a law, or one that does not fit the tree.
    """
    _need_law(draft)
    return _walk(target, draft, tree, noise, lambda log_q, token: log_q)


def verify_tree_distinct(
    target: Target, draft: Draft, tree: Tree, noise: GivenNoise | None = None
) -> Verdict:
    """Siblings drawn from q without replacement, in the order drawn: q_j is q without x_1 ... x_{j-1}.

    Args, Returns, Raises: as `verify_tree_replaced`.
    """
    _need_law(draft)
    return _walk(target, draft, tree, noise, _without)


def verify_tree_points(target: Target, draft: Draft, tree: Tree, noise: GivenNoise | None = None) -> Verdict:
    """Siblings chosen without chance (top-k of the draft, n-grams): q_j is a point mass on x_j.

    Args, Returns: as `verify_tree_replaced`; draft.law is None.

    Raises:
      ValueError: a draft with a law, or one that does not fit the tree.
    """
    if draft.law is not None:
        raise ValueError("draft.law is given, but proposals of a point mass have none: use another verifier")
    return _walk(target, draft, tree, noise, None)


def _walk(target: Target, draft: Draft, tree: Tree, noise, next_q: Callable[..., Any] | None) -> Verdict:
    check_draft(draft, tree)
    num_rows, num_nodes = draft.tokens.shape
    law = by_node(law_of(target), num_nodes)
    valid = target.shaped.valid.reshape(-1, num_nodes)
    live, children = live_nodes(draft, tree, target.vocab_size), child_table(tree)
    uniform = accept_noise(target, tree) if noise is None else noise.accept
    uniform = jnp.pad(uniform, ((0, 0), (1, 0)))
    inner = np.zeros(num_nodes, np.int32)
    inner[list(tree.inner)] = np.arange(len(tree.inner))
    inner = jnp.asarray(inner)

    node = jnp.zeros((num_rows,), jnp.int32)
    walking = jnp.ones((num_rows,), jnp.bool_)
    stop_depth, stop_refused = jnp.zeros_like(node), jnp.zeros_like(walking)
    stop_weights = jnp.zeros((num_rows, law.logits.shape[-1]))
    tokens, path, emitted = [], [], []
    for depth in range(tree.max_depth + 1):
        walking &= at_node(valid, node)
        path.append(node)
        emitted.append(walking)
        left = log_probs(take_rows(law, node))
        refused, child = jnp.zeros_like(walking), jnp.full_like(node, -1)
        if depth < tree.max_depth:
            log_q = None if draft.law is None else log_probs(take_rows(draft.law, inner[node]))
            for order in range(children.shape[1]):
                trial = children[node, order]
                at = jnp.maximum(trial, 0)
                tried = walking & (child < 0) & (trial >= 0) & at_node(live, at)
                token = at_node(draft.tokens, at)
                here = jnp.maximum(token, 0)
                log_r_here = at_node(left, here)
                log_q_here = jnp.zeros_like(log_r_here) if log_q is None else at_node(log_q, here)
                accepted = tried & (at_node(uniform, at) < jnp.exp(log_r_here - log_q_here))
                child = jnp.where(accepted, trial, child)
                lost = tried & ~accepted
                refused |= lost
                without = _without(left, here) if log_q is None else _normalised(log_residual(left, log_q))
                has_mass = jnp.any(without > -jnp.inf, axis=1)
                left = jnp.where((lost & has_mass)[:, None], without, left)
                if log_q is not None and next_q is not None:
                    log_q = jnp.where(lost[:, None], next_q(log_q, here), log_q)
        stops = walking & (child < 0)
        stop_depth = jnp.where(stops, depth, stop_depth)
        stop_refused = jnp.where(stops, refused, stop_refused)
        stop_weights = jnp.where(stops[:, None], left, stop_weights)
        walking &= child >= 0
        node = jnp.where(walking, child, node)
        tokens.append(jnp.where(walking, at_node(draft.tokens, node), PAD))
    last = draw_after(target, tree, stop_depth, stop_refused, stop_weights, noise)
    column = jnp.arange(tree.max_depth + 1, dtype=jnp.int32)[None, :]
    tokens = jnp.stack(tokens, axis=1)
    tokens = jnp.where(tokens == PAD, jnp.where(column == stop_depth[:, None], last[:, None], PAD), tokens)
    return make_verdict(tokens, jnp.stack(path, axis=1), jnp.stack(emitted, axis=1), tree)


def _without(log_p, token):
    """A log-law f32[B, V'] without one token a row, renormalised; nothing if it was all there is."""
    ids = jax.lax.broadcasted_iota(jnp.int32, log_p.shape, 1)
    rest = -jnp.expm1(jnp.minimum(at_node(log_p, token), 0))
    shift = jnp.where(rest > _TINY, rng.log(jnp.maximum(rest, _TINY)), jnp.inf)
    return jnp.where(ids == token[:, None], -jnp.inf, log_p - shift[:, None])


def _normalised(log_weights):
    total = tile_sum(jnp.exp(log_weights))[:, None]
    return jnp.where(total > 0, log_weights - rng.log(jnp.maximum(total, _TINY)), -jnp.inf)


def _need_law(draft: Draft):
    if draft.law is None:
        raise ValueError("draft.law is None, but this verifier needs the law its proposals were drawn from")
