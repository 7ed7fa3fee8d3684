"""Draft length by a request's own acceptance: a pure function, its state with the proposer's.

Knows nothing about how proposals are made. Off unless a proposer is wrapped.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsample.propose import Past, Proposer, no_past, past_after


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftLength:
    """Running acceptance of B requests.

    Fields:
      rate: f32[B], exponential average of the share of proposals accepted, from 1 for a new request.
      past: whose rate it is; a request that comes to a slot, new or resumed, begins with 1.
    """

    rate: jax.Array
    past: Past


def new_draft_length(num_rows: int) -> DraftLength:
    """The state to begin with."""
    return DraftLength(jnp.ones((num_rows,), jnp.float32), no_past(num_rows))


def draft_length_of(state: DraftLength, *, target_rate: float, shortest: int, longest: int):
    """How many proposals to make: i32[B].

    longest * rate / target_rate, rounded up, within [shortest, longest]. It follows from the rate alone, so
    it cannot drift: a request whose rate recovers gets the full length back.
    """
    wanted = jnp.ceil(longest * state.rate / target_rate).astype(jnp.int32)
    return jnp.clip(wanted, shortest, longest)


def update_draft_length(state: DraftLength, num_drafted, num_accepted, *, decay: float) -> DraftLength:
    """rate <- decay * rate + (1 - decay) * accepted / drafted, where anything was drafted.

    Args:
      state: DraftLength.
      num_drafted, num_accepted: i32[B], of this step.
      decay: in [0, 1).
    """
    share = num_accepted / jnp.maximum(num_drafted, 1)
    moved = decay * state.rate + (1 - decay) * share.astype(jnp.float32)
    return dataclasses.replace(state, rate=jnp.where(num_drafted > 0, moved, state.rate))


def adaptive(
    proposer: Proposer,
    *,
    target_rate: float = 0.6,
    shortest: int = 1,
    longest: int | None = None,
    decay: float = 0.8,
) -> Proposer:
    """A proposer that offers less to requests that accept little; its state is (inner state, DraftLength).

    Args:
      proposer: the proposer to wrap; nodes 1 ... length of its tree stay.
      target_rate: in (0, 1], the acceptance at which the full length is offered.
      shortest, longest: bounds; longest None is all of the tree.
      decay: in [0, 1), weight of the past.

    Raises:
      ValueError: numbers outside these ranges.
    """
    num_drafts = proposer.tree.num_nodes - 1
    longest = num_drafts if longest is None else longest
    if not 0 < target_rate <= 1:
        raise ValueError(f"target_rate is {target_rate}, allowed is (0, 1]")
    if not 0 <= decay < 1:
        raise ValueError(f"decay is {decay}, allowed is [0, 1)")
    if not 0 <= shortest <= longest <= num_drafts:
        raise ValueError(
            f"shortest is {shortest}, longest {longest}, allowed are 0 <= shortest <= longest <= {num_drafts}"
        )

    def propose(weights, state, requests):
        inner, lengths = state
        lengths = _fresh(lengths, requests)
        draft, staged = proposer.propose(weights, inner, requests)
        most = draft_length_of(lengths, target_rate=target_rate, shortest=shortest, longest=longest)
        num_live = jnp.minimum(draft.num_live, most)
        return dataclasses.replace(draft, num_live=num_live), (staged, num_live)

    def settle(weights, state, staged, requests, verdict, hidden):
        inner, lengths = state
        staged, num_live = staged
        inner = proposer.settle(weights, inner, staged, requests, verdict, hidden)
        num_accepted = jnp.sum(verdict.accepted, axis=1, dtype=jnp.int32)
        num_drafted = jnp.where(verdict.count > 0, num_live, 0)
        lengths = update_draft_length(_fresh(lengths, requests), num_drafted, num_accepted, decay=decay)
        past = past_after(lengths.past, requests, verdict)
        return inner, dataclasses.replace(lengths, past=past)

    return Proposer(proposer.tree, propose, settle)


def _fresh(lengths: DraftLength, requests) -> DraftLength:
    """A request that is new to its slot starts over, whatever the slot held before."""
    own = lengths.past.is_own(requests)
    return dataclasses.replace(lengths, rate=jnp.where(own, lengths.rate, 1))
