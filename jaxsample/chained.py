"""A draft head that goes on from its own output: hidden state and token in, the next hidden state out.

The head is a small decoder whose position j takes the target's hidden state h_j together with the token that
was drawn from it, t_{j+1}. Its output there is an estimate of h_{j+1}, from which proposals for t_{j+2} are
drawn and which, with a proposal, is the next position's input. Where a step has emitted tokens the estimates
are replaced by the target's own hidden states. Knows nothing about what is inside the head.

Source: Li et al. 2024, "EAGLE" (arXiv 2401.15077), here for a chain.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample.draft import Draft, Tree, chain
from jaxsample.kvcache import Cache, KVCache, commit
from jaxsample.nodes import node_target
from jaxsample.params import PAD, Features, Limits
from jaxsample.propose import Past, Proposer, no_past, past_after
from jaxsample.requests import Requests
from jaxsample.verify import Verdict


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadState:
    """What a chained head knows of B requests.

    Fields:
      cache: the head's keys and values, with the slots of the target's: slot j is that of h_j and t_{j+1}.
      hidden: float[B, W], the head's output at the newest committed slot: the estimate of the root's hidden.
      start: i32[B], the first slot that holds something; the head sees those from there to the row's length.
      past: whose it is.
    """

    cache: Cache
    hidden: jax.Array
    start: jax.Array
    past: Past


def empty_head_state(cache: Cache, width: int, dtype: Any = jnp.float32) -> HeadState:
    """The state of B slots in which nobody sat.

    Args:
      cache: empty, B rows.
      width: W, of the hidden states. dtype: theirs.
    """
    num_rows = cache.num_rows
    hidden, start = jnp.zeros((num_rows, width), dtype), jnp.zeros((num_rows,), jnp.int32)
    return HeadState(cache, hidden, start, no_past(num_rows))


def chained_head_proposer(
    forward: Callable[..., Any],
    unembed: Callable[..., Any],
    tree: Tree,
    *,
    limits: Limits,
    features: Features,
    pick: Callable[..., Any],
) -> Proposer:
    """A draft head with a cache of its own; its state is a `HeadState`.

    The first proposal comes from the state, each further one from a pass of the head. When the step has its
    verdict, one more pass over the emitted tokens and the target's hidden states makes what is committed.
    Each row is shaped with its request's own parameters. A request that the state knows nothing of (a new one
    without `observe_prompt`, or a resumed one) proposes nothing in its first step, then from what it has
    emitted since. On one device.

    Args:
      forward: (weights, tokens i32[B, N], hidden float[B, N, W], positions i32[B, N], cache, mask
        bool[B, N, S + N]) -> (float[B, N, W], Staged): the head's outputs.
      unembed: (weights, outputs [B, N, W]) -> logits [B, N, Vp] over the target's vocabulary (see `widen`).
      tree: a chain of at least one proposal.
      limits, features: as in `sample`; features.transforms are not applied to drafts.
      pick: as for `model_proposer`.

    Raises:
      ValueError: a tree that branches, or the root alone.
    """
    if tree != chain(tree.max_depth) or tree.max_depth < 1:
        raise ValueError(f"tree {tree.parents} is no chain of proposals, which is what a chained head makes")
    features = dataclasses.replace(features, num_logprobs=-1, transforms=())

    def draw(logits, requests: Requests, tokens):
        """The next proposal i32[B] behind the last of tokens i32[B, n], and its Law [B, 1]."""
        level = chain(tokens.shape[1] - 1)
        last = (level.max_depth,)
        rows = node_target(
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
            only=last,
        )
        chosen, law = pick(rows, requests.length + 1, list(last), 1)
        return chosen[:, 0], jax.tree.map(lambda leaf: leaf[:, None], law)

    def propose(weights, state: HeadState, requests: Requests):
        num_rows = requests.root.shape[0]
        _check(state, num_rows, limits)
        tokens, inputs, laws = requests.root[:, None], state.hidden[:, None], []
        outputs = inputs
        for _ in range(tree.max_depth):
            token, law = draw(unembed(weights, outputs[:, -1:]), requests, tokens)
            tokens = jnp.concatenate([tokens, token[:, None]], axis=1)
            laws.append(law)
            if tokens.shape[1] <= tree.max_depth:
                # Keys of earlier proposals are made again: they cost a few tokens, and nothing to keep.
                outputs, _ = _run(forward, weights, state, requests.length, tokens[:, 1:], inputs)
                inputs = jnp.concatenate([inputs, outputs[:, -1:]], axis=1)
        law = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *laws)
        num_live = jnp.where(is_own(state.past, requests), tree.max_depth, 0)
        return Draft(tokens, num_live.astype(jnp.int32), law), ()

    def settle(weights, state: HeadState, staged, requests: Requests, verdict: Verdict, hidden):
        del staged
        inputs = jnp.take_along_axis(hidden, verdict.path[:, :, None], axis=1, mode="clip")
        start = jnp.where(is_own(state.past, requests), state.start, requests.length)
        state = dataclasses.replace(state, start=jnp.where(verdict.count > 0, start, state.start))
        state = _observe(forward, weights, state, requests.length, verdict.tokens, inputs, verdict.count)
        return dataclasses.replace(state, past=past_after(state.past, requests, verdict))

    return Proposer(tree, propose, settle)


def observe_prompt(
    forward, weights, state: HeadState, hidden, successors, lengths, counts, seed
) -> HeadState:
    """Take in known tokens before a request's first step, beside the target's prefill of the same chunk.

    Args:
      forward, weights: the head's.
      state: HeadState, whose rows hold the `lengths` slots before.
      hidden: float[B, N, W], the target's final hidden states at the chunk's tokens.
      successors: i32[B, N], the token that follows each of them; of the last one that is the root.
      lengths: i32[B], slots committed before, 0 in a request's first chunk.
      counts: i32[B], tokens of the chunk that count, 0 for a row that idles.
      seed: u32[B, 2], of the requests.
    """
    took = counts > 0
    past = Past(jnp.where(took[:, None], seed, state.past.seed), jnp.where(took, 0, state.past.num_emitted))
    state = dataclasses.replace(state, past=past, start=jnp.where(took, 0, state.start))
    return _observe(forward, weights, state, lengths, successors, hidden, counts)


def is_own(past: Past, requests: Requests):
    """Which rows' state is of the request there, which may not have emitted anything yet: bool[B]."""
    same = jnp.all(past.seed == requests.params.seed, axis=1)
    return same & (past.num_emitted == requests.history.num_emitted)


def forget_rows(drafts: Any, rows):
    """A proposer's state of any kind, in which chained heads know nothing of some rows any more.

    Args:
      drafts: pytree, with a `HeadState` anywhere in it, or none.
      rows: i32[n]; one outside 0 ... B - 1 is passed over.
    """
    is_state = lambda x: isinstance(x, HeadState)

    def forget(state: HeadState) -> HeadState:
        num_emitted = state.past.num_emitted.at[rows].set(-1, mode="drop")
        return dataclasses.replace(state, past=dataclasses.replace(state.past, num_emitted=num_emitted))

    return jax.tree.map(lambda x: forget(x) if is_state(x) else x, drafts, is_leaf=is_state)


def _check(state: HeadState, num_rows: int, limits: Limits):
    """Raise ValueError for a cache of other rows, or of fewer slots than requests may need."""
    cache = state.cache
    # Pages come with a table as long as the step's other rows need.
    too_short = isinstance(cache, KVCache) and cache.num_slots < limits.max_length
    if too_short or cache.num_rows != num_rows:
        raise ValueError(
            f"the head's cache has {cache.num_rows} rows of {cache.num_slots} slots, "
            f"expected {num_rows} of at least max_length = {limits.max_length}"
        )


def _observe(forward, weights, state: HeadState, lengths, tokens, hidden, counts) -> HeadState:
    """Commit counts[b] tokens behind the `lengths` slots, with the target's hidden states."""
    outputs, staged = _run(forward, weights, state, lengths, tokens, hidden.astype(state.hidden.dtype))
    path = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    newest = jnp.take_along_axis(outputs, last, axis=1, mode="clip")[:, 0].astype(state.hidden.dtype)
    newest = jnp.where((counts > 0)[:, None], newest, state.hidden)
    cache = commit(state.cache, staged, lengths, path, counts)
    return dataclasses.replace(state, cache=cache, hidden=newest)


def _run(forward, weights, state: HeadState, lengths, tokens, hidden):
    """The head over a chain of tokens behind the slots start ... lengths - 1."""
    num_rows, num_tokens = tokens.shape
    order = jnp.arange(num_tokens, dtype=jnp.int32)[None, :]
    slots = jax.lax.broadcasted_iota(jnp.int32, (num_rows, num_tokens, state.cache.num_slots), 2)
    committed = (slots >= state.start[:, None, None]) & (slots < lengths[:, None, None])
    staged = np.tri(num_tokens, dtype=bool)
    mask = jnp.concatenate([committed, jnp.broadcast_to(staged, (num_rows, *staged.shape))], axis=2)
    return forward(
        weights, jnp.where(tokens == PAD, 0, tokens), hidden, lengths[:, None] + order, state.cache, mask
    )
