"""Where proposals come from: n-grams of the request itself, a draft model, a draft head.

A `Proposer` is two pure functions, called at the beginning and at the end of a step. Its state travels with
the cache and is donated; `check_given` refuses weights and caches that a step with it could not take. Knows
nothing about verification; a proposer says by `Draft.law` what its proposals were drawn from.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxsample import rng
from jaxsample.candidates import first_tokens
from jaxsample.draft import Draft, Tree
from jaxsample.draw import draw_rows
from jaxsample.history import History
from jaxsample.kvcache import Cache, attention_mask, commit
from jaxsample.lossless import by_node
from jaxsample.nodes import node_target, take_nodes
from jaxsample.params import PAD, Features, Limits
from jaxsample.requests import Requests
from jaxsample.sharding import Axis, axis_size, map_rows, pad_columns
from jaxsample.target import Target, law_of
from jaxsample.truncation import is_greedy, kept
from jaxsample.verify import Verdict


class Proposer(NamedTuple):
    """How a step gets its draft.

    Fields:
      tree: static tree of the proposals.
      propose: (weights, state, requests) -> (Draft, staged), before the target's forward pass. `staged` is
        whatever `settle` needs of it.
      settle: (weights, state, staged, requests, verdict, hidden [B, N, W]) -> state, after the verdict;
        requests are those before the step, hidden is the target's.
    """

    tree: Tree
    propose: Callable[..., Any]
    settle: Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Past:
    """Whose past a proposer's state holds, slot by slot: a slot may have another tenant, or a resumed one.

    Fields:
      seed: u32[B, 2], the request's. num_emitted: i32[B], tokens it had emitted then, -1 for nobody.
    """

    seed: jax.Array
    num_emitted: jax.Array

    def is_own(self, requests: Requests):
        """Which rows' state is of the request that sits there now: bool[B]."""
        same = jnp.all(self.seed == requests.params.seed, axis=1)
        return same & (self.num_emitted == requests.history.num_emitted) & (self.num_emitted > 0)


def no_past(num_rows: int) -> Past:
    """The past of B slots in which nobody sat."""
    return Past(jnp.zeros((num_rows, 2), jnp.uint32), jnp.full((num_rows,), -1, jnp.int32))


def past_after(past: Past, requests: Requests, verdict: Verdict) -> Past:
    """The past once a step has emitted what its verdict says; rows that emit nothing keep theirs."""
    went = verdict.count > 0
    num_emitted = requests.history.num_emitted + verdict.count
    return Past(
        jnp.where(went[:, None], requests.params.seed, past.seed),
        jnp.where(went, num_emitted, past.num_emitted),
    )


def ngram_proposer(tree: Tree, *, max_ngram: int = 3, min_ngram: int = 1) -> Proposer:
    """Prompt lookup: what followed the last time the request's last tokens occurred. No weights, no state.

    Args:
      tree: a chain.
      max_ngram, min_ngram: the longest suffix that occurred before, among these lengths, is continued; among
        equally long ones the latest.

    Source: Saxena 2023, "Prompt lookup decoding".
    """
    if any(len(nodes) > 1 for nodes in tree.children):
        raise ValueError(f"tree {tree.parents} branches, n-grams propose chains only")
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(f"min_ngram is {min_ngram}, allowed are 1 ... max_ngram = {max_ngram}")

    def propose(weights, state, requests: Requests):
        del weights, state
        return propose_ngram(requests.history, tree, max_ngram=max_ngram, min_ngram=min_ngram), ()

    return Proposer(tree, propose, _keep_state)


def propose_ngram(history: History, tree: Tree, *, max_ngram: int, min_ngram: int) -> Draft:
    """The n-gram draft of each row; see `ngram_proposer`."""
    tokens = history.tokens
    num_rows, width = tokens.shape
    total = (history.num_prompt + history.num_emitted)[:, None]
    index = jnp.arange(width, dtype=jnp.int32)[None, :]
    # run[j]: how many tokens ending at j equal the last ones; grows by comparing one token further back.
    run = jnp.zeros((num_rows, width), jnp.int32)
    alive = index < total - 1
    for back in range(max_ngram):
        at = total - 1 - back
        last = jnp.take_along_axis(tokens, jnp.maximum(at, 0), axis=1)
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=PAD)[:, :width]
        alive &= (shifted == last) & (at >= 0) & (index >= back)
        run += alive.astype(jnp.int32)
    # The longest run wins, then the latest place.
    rank = jnp.where(run >= min_ngram, run * width + index, -1)
    place = jnp.argmax(rank, axis=1).astype(jnp.int32)[:, None]
    found = jnp.max(rank, axis=1) >= 0
    follows = place + 1 + jnp.arange(tree.max_depth, dtype=jnp.int32)[None, :]
    there = (follows < total) & found[:, None]
    proposals = jnp.where(there, jnp.take_along_axis(tokens, jnp.minimum(follows, width - 1), axis=1), PAD)
    root = jnp.take_along_axis(tokens, jnp.maximum(total - 1, 0), axis=1)
    return Draft(jnp.concatenate([root, proposals], axis=1), jnp.sum(there, axis=1, dtype=jnp.int32))


def model_proposer(
    forward: Callable[..., Any],
    unembed: Callable[..., Any],
    tree: Tree,
    *,
    limits: Limits,
    features: Features,
    pick: Callable[..., Any],
    mesh: Any = None,
    axis: Axis | None = None,
    batch_axis: Axis = (),
) -> Proposer:
    """A draft model with a cache of its own; its state is that cache, of the target's rows and slots.

    One pass a level of the tree, and one for the leaves' keys. Each row is shaped with its request's own
    parameters, so a good draft model's law is close to the target's.

    Args:
      forward, unembed: the draft model, in the same form as the target's; logits over the target's vocabulary
        (see `widen`). The caller prefills its cache as the target's.
      tree: static.
      limits, features: as in `sample`; features.transforms are not applied to drafts.
      pick: (rows of the inner nodes of a level, i32[B] position after the root, those nodes, width) ->
        (tokens i32[B * len(nodes), width], their Law or None): `draw_proposals(rng.DRAFT)` for the verifiers
        that weigh laws, `draw_proposals(rng.TARGET)` for `verify_match`, `first_proposals` for point masses.
      mesh, axis, batch_axis: as the step's. Each device draws for its own rows; their laws stay with it.
    """
    features = dataclasses.replace(features, num_logprobs=-1, transforms=())

    def draw_level(logits, requests: Requests, tokens, *, level: Tree, inner: list[int], width: int):
        """The children of a level's inner nodes, i32[B, len(inner), width], and the law of each such node."""
        target = node_target(
            logits,
            requests.params,
            requests.stop,
            requests.history,
            requests.length + 1,
            tokens,
            level,
            limits=limits,
            features=features,
            law=True,
        )
        num_rows = tokens.shape[0]
        nodes = jnp.broadcast_to(jnp.asarray(inner, jnp.int32)[None], (num_rows, len(inner)))
        chosen, law = pick(take_nodes(target, nodes, level.num_nodes), requests.length + 1, inner, width)
        return chosen.reshape(num_rows, len(inner), width), by_node(law, len(inner))

    def propose(weights, cache, requests: Requests):
        num_rows = requests.root.shape[0]
        if cache.num_slots < limits.max_length or cache.num_rows != num_rows:
            raise ValueError(
                f"the draft's cache has {cache.num_rows} rows of {cache.num_slots} slots, "
                f"expected {num_rows} of at least max_length = {limits.max_length}"
            )
        tokens = jnp.full((num_rows, tree.num_nodes), PAD, jnp.int32).at[:, 0].set(requests.root)
        laws = []
        for depth in range(tree.max_depth):
            level = Tree(tree.parents[: int(np.sum(tree.depth <= depth))])
            hidden, _ = _run(forward, weights, requests, cache, tokens[:, : level.num_nodes], level)
            inner = [node for node in tree.inner if tree.depth[node] == depth]
            width = max(len(tree.children[node]) for node in inner)
            rows = functools.partial(draw_level, level=level, inner=inner, width=width)
            rows = map_rows(rows, mesh, axis, batch_axis)
            logits = unembed(weights, hidden)
            if mesh is not None:
                logits = pad_columns(logits, axis_size(mesh, axis or ()), limits.vocab_size)
            chosen, law = rows(logits, requests, tokens[:, : level.num_nodes])
            for order, node in enumerate(inner):
                for place, child in enumerate(tree.children[node]):
                    tokens = tokens.at[:, child].set(chosen[:, order, place])
            laws.append(law)
        _, staged = _run(forward, weights, requests, cache, tokens, tree)
        law = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *laws) if laws else None
        return Draft(tokens, jnp.full((num_rows,), tree.num_nodes - 1, jnp.int32), law), staged

    def settle(weights, cache, staged, requests: Requests, verdict: Verdict, hidden):
        del weights, hidden
        return commit(cache, staged, requests.length, verdict.path, verdict.count)

    return Proposer(tree, propose, settle)


def head_proposer(
    predict: Callable[..., Any], tree: Tree, *, width: int, dtype: Any = jnp.float32
) -> tuple[Proposer, Callable[[int], tuple[jax.Array, Past]]]:
    """A draft head: it reads the target's hidden state of the position before the root.

    Args:
      predict: (weights, hidden [B, W], requests) -> Draft on the tree; hidden is the final hidden state the
        root was drawn from.
      tree: static.
      width: W. dtype: of hidden.

    Returns:
      (Proposer, make_state): make_state(B) is the state to begin with: hidden [B, W] and whose it is. A
      request of which there is no hidden state yet (a new or resumed one) proposes nothing.
    """

    def propose(weights, state, requests: Requests):
        known, past = state
        draft = predict(weights, known, requests)
        return dataclasses.replace(draft, num_live=jnp.where(past.is_own(requests), draft.num_live, 0)), ()

    def settle(weights, state, staged, requests: Requests, verdict: Verdict, hidden):
        del weights, staged
        known, past = state
        last = jnp.maximum(verdict.count - 1, 0)[:, None]
        node = jnp.take_along_axis(verdict.path, last, axis=1)[:, :, None]
        newest = jnp.take_along_axis(hidden, node, axis=1, mode="clip")[:, 0].astype(known.dtype)
        known = jnp.where((verdict.count > 0)[:, None], newest, known)
        return known, past_after(past, requests, verdict)

    return Proposer(tree, propose, settle), lambda num_rows: (
        jnp.zeros((num_rows, width), dtype),
        no_past(num_rows),
    )


def draw_proposals(purpose: int) -> Callable[..., Any]:
    """Siblings drawn from the draft's law without replacement, the first by the law itself.

    Args:
      purpose: rng.DRAFT, noise of the root's position and the node, or rng.TARGET, noise of the proposal's
        own position: then the proposal is the target's own draw wherever the two laws agree.

    Source: Kool, van Hoof, Welling 2019 (arXiv 1903.06059): the order of z + Gumbel noise.
    """

    def pick(rows: Target, position, inner: list[int], width: int):
        law, at, node = law_of(rows), rows.position, jnp.zeros((1,), jnp.int32)
        if purpose == rng.DRAFT:
            at = jnp.repeat(position, len(inner))
            node = jnp.tile(jnp.asarray(inner, jnp.int32), position.shape[0])
        words = rng.gumbel_words(rows.params.seed, at, purpose, law.logits.shape[1] // 4, node)
        words = tuple(jnp.where(is_greedy(rows.params)[:, None], 0, word) for word in words)
        left = jnp.where(kept(law.logits, law.cut), law.logits, -jnp.inf)
        chosen = []
        for _ in range(width):
            token = draw_rows(left, words)
            there = jnp.any(left > -jnp.inf, axis=1)
            chosen.append(jnp.where(there, token, PAD))
            ids = jax.lax.broadcasted_iota(jnp.int32, left.shape, 1)
            left = jnp.where(ids == token[:, None], -jnp.inf, left)
        return jnp.stack(chosen, axis=1), law

    return pick


def first_proposals(rows: Target, position, inner: list[int], width: int):
    """The first `width` tokens of the draft's order, without chance: point masses, hence no law."""
    del position, inner
    values, ids = first_tokens(rows.shaped.logits, width)
    return jnp.where(values > -jnp.inf, ids, PAD), None


def widen(logits, ids, vocab_size: int):
    """Logits over a draft's smaller vocabulary as logits over the target's; -inf where the draft has none.

    Args:
      logits: f32[..., Vd].
      ids: i32[Vd], the target's id of each draft token, distinct.
      vocab_size: V.

    Raises:
      ValueError: ids that are not Vd distinct ones from 0 ... V - 1; traced ids are not looked at.
    """
    if not isinstance(ids, Tracer):
        known = np.asarray(ids)
        if known.shape != logits.shape[-1:] or len(np.unique(known)) != known.size:
            raise ValueError(f"ids have shape {list(known.shape)}, expected {logits.shape[-1]} distinct ones")
        if known.size and not 0 <= known.min() <= known.max() < vocab_size:
            raise ValueError(
                f"ids run from {known.min()} to {known.max()}, allowed are 0 ... {vocab_size - 1}"
            )
    wide = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, logits.dtype)
    return wide.at[..., jnp.asarray(ids)].set(logits)


def _run(forward, weights, requests: Requests, cache, tokens, tree: Tree):
    positions = requests.length[:, None] + jnp.asarray(tree.depth)[None, :]
    mask = attention_mask(requests.length, tree, cache.num_slots)
    return forward(weights, jnp.maximum(tokens, 0), positions, cache, mask)


def _keep_state(weights, state, staged, requests, verdict, hidden):
    del weights, staged, requests, verdict, hidden
    return state


def check_given(weights, cache, limits: Limits, proposer: Proposer | None):
    """Raise ValueError for a cache with too few slots, or where a proposer needs pairs and there are none."""
    if proposer is not None:
        for name, given in (("weights", weights), ("cache", cache)):
            if not isinstance(given, (tuple, list)) or len(given) != 2:
                kind = type(given).__name__
                raise ValueError(f"{name} is a {kind}, with a proposer it is a pair: (model's, proposer's)")
        cache = cache[0]
    check_slots(cache, limits)


def check_slots(cache: Cache, limits: Limits):
    """Raise ValueError for a cache with fewer slots than requests may need."""
    if cache.num_slots < limits.max_length:
        raise ValueError(
            f"the cache has {cache.num_slots} slots, expected at least max_length = {limits.max_length}"
        )
