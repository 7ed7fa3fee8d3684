"""Verifiers that weigh the draft's probabilities: rejection, block and tree verification.

The law of the emitted tokens is the target's, whatever the draft; they differ in how many tokens a step
keeps. All have the signature verify(target, draft, tree) -> Verdict and serve mixed batches: a greedy row's
law is a point mass, a row without proposals draws from its own. Knows nothing about caches or stop rules.

Noise: acceptance of the proposal at absolute position t takes ACCEPT noise of (t, its node); the draw after
a rejection takes RESIDUAL noise of its own position; a draw where nothing was rejected takes TARGET noise, as
plain decoding would. `noise` replaces them all, to compare with other software.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample import rng
from jaxsample.candidates import tile_sum
from jaxsample.draft import Draft, Tree
from jaxsample.draw import draw_rows, split_words
from jaxsample.law import Law, log_prob_of, log_probs, log_residual, residual, take_rows
from jaxsample.target import Target, law_of
from jaxsample.verify import Verdict, at_node, check_draft, live_nodes, make_verdict


class GivenNoise(NamedTuple):
    """Noise from outside.

    Fields:
      accept: f32[B, K], uniforms in [0, 1), one for each proposal (nodes 1 ... K).
      token: f32[B, V'], Gumbel noise for the one token drawn, whatever it follows.
    """

    accept: jax.Array
    token: jax.Array


def verify_rejection(target: Target, draft: Draft, tree: Tree, noise: GivenNoise | None = None) -> Verdict:
    """Accept a chain's proposals while u < p(x) / q(x); at the first rejection draw from max(p - q, 0).

    Args:
      target: Target of B * N rows made with law=True.
      draft: Draft on a chain; without a law its proposals are point masses: u < p(x), then p without x.
      tree: a chain.
      noise: GivenNoise, or None.

    Returns:
      Verdict.

    Raises:
      ValueError: a tree that branches, or a draft that does not fit it.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1; Chen et al. 2023 (arXiv 2302.01318).
    """
    rows = _Chain(target, draft, tree)
    accepted = rows.live & (rows.uniform(noise) < jnp.exp(rows.log_p - rows.log_q))
    num_accepted = accept_prefix(accepted)
    return rows.verdict(num_accepted, jnp.zeros((rows.num_rows,)), noise)


def verify_block(target: Target, draft: Draft, tree: Tree, noise: GivenNoise | None = None) -> Verdict:
    """Accept the longest prefix of a chain whose own coin allows it; on average more than rejection keeps.

    With rho_0 = 1, rho_i = min(1, rho_{i-1} p_i(x_i) / q_i(x_i)) and n live proposals: prefix i < n passes
    with probability h_i = Z_i / (Z_i + 1 - rho_i), Z_i = sum max(rho_i p_{i+1} - q_{i+1}, 0) (h_i = 1 where
    that is 0 / 0), prefix n with h_n = rho_n. The longest that passes is kept, tau; then a draw from
    max(rho_tau p_{tau+1} - q_{tau+1}, 0), from p if that has no mass, and from p after all n.

    Args, Returns, Raises: as `verify_rejection`.

    Source: Sun et al. 2024 (arXiv 2403.10444), algorithm 2.
    """
    rows = _Chain(target, draft, tree)
    num_drafts = tree.max_depth
    log_rho, log_rhos = jnp.zeros((rows.num_rows,)), []
    for step in range(num_drafts):
        # 0 where the target has none of it, whatever the draft says; and where the draft says NaN.
        ratio = jnp.where(rows.log_p[:, step] > -jnp.inf, rows.log_p[:, step] - rows.log_q[:, step], -jnp.inf)
        counts = rows.live[:, step] & ~jnp.isnan(ratio)
        log_rho = jnp.where(counts, jnp.minimum(log_rho + ratio, 0), -jnp.inf)
        log_rhos.append(log_rho)
    log_rhos = jnp.stack(log_rhos, axis=1) if log_rhos else jnp.zeros((rows.num_rows, 0))
    step = jnp.arange(1, num_drafts + 1, dtype=jnp.int32)[None, :]
    num_live = jnp.sum(rows.live, axis=1, dtype=jnp.int32)[:, None]
    # Z_i for i = 1 ... K - 1, from target and draft rows i; the last prefix needs none.
    mass = jnp.pad(rows.residual_mass(log_rhos[:, :-1]), ((0, 0), (0, 1)))
    gap = -jnp.expm1(log_rhos)
    pass_inner = jnp.where(mass + gap > 0, mass / jnp.maximum(mass + gap, np.finfo(np.float32).tiny), 1)
    chance = jnp.where(step < num_live, pass_inner, jnp.exp(log_rhos))
    passes = rows.live & (chance > 0) & (rows.uniform(noise) <= chance)
    num_accepted = jnp.max(jnp.where(passes, step, 0), axis=1, initial=0)
    before = jnp.pad(log_rhos, ((0, 0), (1, 0)))  # log rho_0 = 0
    return rows.verdict(num_accepted, at_node(before, num_accepted), noise)


def accept_prefix(accepted):
    """Length of the leading run of True: i32[B] for bool[B, K]."""
    return jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


class _Chain:
    """What both chain verifiers need of their inputs; proposals 1 ... K are columns 0 ... K - 1."""

    def __init__(self, target: Target, draft: Draft, tree: Tree):
        check_draft(draft, tree)
        if any(len(nodes) > 1 for nodes in tree.children):
            raise ValueError(f"tree {tree.parents} branches, this verifier takes chains only")
        self.target, self.draft, self.tree = target, draft, tree
        self.num_rows, num_nodes = draft.tokens.shape
        self.law = by_node(law_of(target), num_nodes)
        self.valid = target.shaped.valid.reshape(-1, num_nodes)
        self.proposals = draft.tokens[:, 1:]
        # A proposal behind a bad row cannot be judged: it is not accepted.
        self.live = live_nodes(draft, tree, target.vocab_size)[:, 1:] & self.valid[:, :-1]
        self.log_p = log_prob_of(jax.tree.map(lambda leaf: leaf[:, :-1], self.law), self.proposals)
        self.log_q = jnp.zeros_like(self.log_p)
        if draft.law is not None and tree.max_depth > 0:
            self.log_q = log_prob_of(draft.law, self.proposals)

    def uniform(self, noise: GivenNoise | None):
        return accept_noise(self.target, self.tree) if noise is None else noise.accept

    def residual_mass(self, log_scale):
        """Z for target and draft rows 1 ... n, given log rho f32[B, n]."""
        num_rows, count = log_scale.shape
        if count == 0:
            return log_scale
        inner = jax.tree.map(lambda leaf: leaf[:, 1 : count + 1], self.law)
        if self.draft.law is None:
            next_p = jnp.exp(log_prob_of(inner, self.proposals[:, 1 : count + 1]))
            return jnp.exp(log_scale) * (1 - next_p)
        drafted = jax.tree.map(lambda leaf: leaf[:, 1 : count + 1], self.draft.law)
        flat = lambda x: x.reshape(num_rows * count, -1)
        terms = residual(flat(log_probs(inner)), flat(log_probs(drafted)), log_scale.reshape(-1, 1))
        return tile_sum(terms).reshape(num_rows, count)

    def verdict(self, num_accepted, log_scale, noise: GivenNoise | None) -> Verdict:
        """Emit the accepted proposals and one token after them, from the residual if one was refused."""
        num_live = jnp.sum(self.live, axis=1, dtype=jnp.int32)
        refused = num_accepted < num_live
        log_p = log_probs(take_rows(self.law, num_accepted))
        weights = log_p
        if self.tree.max_depth > 0:
            left = self._log_left(num_accepted, log_p, log_scale)
            has_mass = jnp.any(left > -jnp.inf, axis=1)
            weights = jnp.where((refused & has_mass)[:, None], left, log_p)
        last = draw_after(self.target, self.tree, num_accepted, refused, weights, noise)
        column = jnp.arange(self.tree.num_nodes, dtype=jnp.int32)[None, :]
        proposals = jnp.pad(self.proposals, ((0, 0), (0, 1)))
        tokens = jnp.where(column < num_accepted[:, None], proposals, last[:, None])
        is_last = column == num_accepted[:, None]
        emitted = (column < num_accepted[:, None]) | (is_last & at_node(self.valid, num_accepted)[:, None])
        return make_verdict(tokens, jnp.broadcast_to(column, tokens.shape), emitted, self.tree)

    def _log_left(self, num_accepted, log_p, log_scale):
        at = jnp.minimum(num_accepted, self.tree.max_depth - 1)
        refused = at_node(self.proposals, at)[:, None]
        if self.draft.law is None:
            ids = jax.lax.broadcasted_iota(jnp.int32, log_p.shape, 1)
            return jnp.where(ids == refused, -jnp.inf, log_p)
        return log_residual(log_p, log_probs(take_rows(self.draft.law, at)), log_scale[:, None])


def by_node(law: Law, num_nodes: int) -> Law:
    """A law of B * N rows as [B, N]."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, num_nodes, *leaf.shape[1:]), law)


def accept_noise(target: Target, tree: Tree):
    """Uniforms for the proposals, keyed by the position each would take and its node: f32[B, K]."""
    num_nodes = tree.num_nodes
    seed = target.params.seed.reshape(-1, num_nodes, 2)[:, 1:].reshape(-1, 2)
    position = target.position.reshape(-1, num_nodes)[:, :1] + jnp.asarray(tree.depth)[None, 1:] - 1
    node = jnp.broadcast_to(jnp.arange(1, num_nodes, dtype=jnp.int32)[None], position.shape)
    bits = rng.uniform(seed, position.reshape(-1), rng.ACCEPT, node.reshape(-1, 1))
    return bits.reshape(position.shape)


def draw_after(target: Target, tree: Tree, depth, refused, log_weights, noise: GivenNoise | None):
    """One token a request from log-weights f32[B, V'] at a node of i32[B] depth: i32[B].

    RESIDUAL noise where a proposal was refused there, TARGET noise elsewhere.
    """
    num_nodes = tree.num_nodes
    seed = target.params.seed.reshape(-1, num_nodes, 2)[:, 0]
    position = target.position.reshape(-1, num_nodes)[:, 0] + depth
    if noise is not None:
        words = split_words(noise.token)
    else:
        purpose = jnp.where(refused, rng.RESIDUAL, rng.TARGET)
        words = rng.gumbel_words(seed, position, purpose, log_weights.shape[1] // 4)
    return draw_rows(log_weights, words)
