"""The decode step with value guidance: a value model scores candidates between the logits and the draw.

One jitted function beside `make_decode_step`'s. A value model is two pure functions:

    forward(weights, tokens i32[B, N], positions i32[B, N], cache, mask bool[B, N, S + N]) -> (hidden, Staged)
    value(weights, hidden [B, N, W]) -> z f32[B, N], the value's logit at each token's own position

It has a cache of its own, which holds prompt and output of guided rows, the root among them. All candidates
of all rows stand in slots [B, G] of one pass, each seeing its row's tokens and itself; the one that is drawn
stays, the others are dropped, so that nothing is left to do in the next step. Rows whose cache lacks tokens
(new requests) are caught up by a chunk that a step takes on top, and wait while the others go on. Knows
nothing about prefill of the model that is guided.

Source: Zhang et al., "Length Value Model", arXiv 2604.27039, for the candidates and their scores.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsample.decode import (
    StepParts,
    commit_tokens,
    judge_target,
    step_parts,
    take_verdict,
)
from jaxsample.draft import ROOT, Draft, Tree
from jaxsample.guidance import Shortlist, ends_row, guided_target, shortlist
from jaxsample.guidance_modes import guide
from jaxsample.guidance_rows import OFF, Guidance, neutral_guidance
from jaxsample.head import Head
from jaxsample.history import repeat_rows
from jaxsample.kvcache import Cache, commit
from jaxsample.nodes import node_target
from jaxsample.params import Features, Limits, set_rows
from jaxsample.propose import Proposer, check_given, check_slots
from jaxsample.requests import IDLE, RUNNING, Requests
from jaxsample.verify import Verdict, verify_match


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GuidedState:
    """What guided steps keep beside `Requests`, for the same B slots.

    Fields:
      guidance: Guidance of each slot.
      cache: the value model's KVCache or PagedKVCache.
      length: i32[B], tokens of each slot in it. A row is up to date when it holds the root too, one token
        more than the cache of the model that is guided.
    """

    guidance: Guidance
    cache: Cache
    length: jax.Array


class Scorer(NamedTuple):
    """A value model as an engine takes it.

    Fields:
      forward, value: its two functions, see the module's text. weights: theirs.
      new_cache: (num_pages, page_size, page_table i32[B, P]) -> PagedKVCache, of `init_paged_cache`: the same
        pages as the guided model's, read through its page table.
      gamma: the discount it was trained with, for requests that do not name one.
    """

    forward: Callable[..., Any]
    value: Callable[..., Any]
    weights: Any
    new_cache: Callable[[int, int, Any], Any]
    gamma: float = 0.997


class CatchUp(NamedTuple):
    """The chunk a step runs for rows that are behind: up to `num_tokens` of each of `num_rows` rows."""

    num_rows: int
    num_tokens: int


def init_guided(cache: Cache) -> GuidedState:
    """The state of B unguided slots for an empty cache of the value model."""
    guidance = jax.tree.map(jnp.asarray, neutral_guidance(cache.num_rows))
    return GuidedState(guidance, cache, jnp.zeros(cache.num_rows, jnp.int32))


def admit_guided(values: GuidedState, slots, guidance: Guidance) -> GuidedState:
    """Give slots to new requests: their guidance, and nothing in the cache.

    Args:
      values: GuidedState.
      slots: i32[n], distinct, as given to `admit`; out of range is dropped.
      guidance: Guidance of n rows.
    """
    slots = jnp.asarray(slots)
    length = set_rows(values.length, slots, jnp.zeros(slots.shape, jnp.int32))
    return GuidedState(set_rows(values.guidance, slots, guidance), values.cache, length)


def make_value_prefill(forward: Callable[..., Any]):
    """Build the jitted prefill of the value model's cache, one compilation a chunk width.

    Args:
      forward: the value model's function.

    Returns:
      prefill(weights, values, tokens i32[B, N], counts i32[B]) -> values, donated. tokens[b, :counts[b]]
      follow what the row's cache holds; commit all prompt tokens, the last one too. Rows that are not
      prefilled here are caught up by steps. N beyond the cache's slots is a ValueError.
    """

    def prefill(weights, values: GuidedState, tokens, counts):
        if tokens.shape[1] > values.cache.num_slots:
            num_slots = values.cache.num_slots
            raise ValueError(
                f"tokens have {tokens.shape[1]} columns, allowed are the cache's {num_slots} slots"
            )
        _, cache = commit_tokens(forward, weights, values.cache, tokens, values.length, counts)
        return GuidedState(values.guidance, cache, values.length + counts)

    return jax.jit(prefill, donate_argnums=(1,))


def num_catch_up_steps(num_tokens: int, catch_up: CatchUp) -> int:
    """Steps with a chunk after which a row has all its tokens, if it is first in each.

    Args:
      num_tokens: tokens of the request, prompt and output, that its value cache lacks.
      catch_up: the chunk.
    """
    return -(-num_tokens // catch_up.num_tokens)


def make_guided_step(
    forward: Callable[..., Any],
    unembed: Callable[..., Any],
    value_forward: Callable[..., Any],
    value: Callable[..., Any],
    *,
    limits: Limits,
    features: Features,
    catch_up: CatchUp | None = None,
    proposer: Proposer | None = None,
    verify: Callable[..., Verdict] = verify_match,
):
    """Build the jitted step: `make_decode_step`'s, but guided rows draw from their redistributed candidates.

    Rows that are OFF get the tokens of that step, to the bit. A batch without guided rows is better served
    by it: this one always runs the value model. A guided row that is behind waits: it emits nothing and goes
    on RUNNING.

    Args:
      forward, unembed: the model's two functions. value_forward, value: the value model's, see the module's
        text.
      limits: capacities; num_guided is G.
      features: stages; tier "filtered" or "full", num_candidates at least G.
      catch_up: the chunk for rows that are behind: those with begun prompts first, then the longest. None: no
        chunk. Build both programs and take the one with a chunk while a row may be behind, which the host
        knows from the lengths of the prompts (`num_catch_up_steps`).
      proposer, verify: speculation, as in `make_decode_step`: the candidates of all nodes are scored in the
        one pass, as siblings on their own paths, [B, K + N G] tokens. The guided law is what verifiers keep.

    Returns:
      step(weights, value_weights, requests, cache, values, allowed=None, transform_args=()) ->
      (requests, cache, values, record); requests, cache and values are donated. The rest is as in
      `make_decode_step`.

    Raises:
      ValueError: features that have no candidates or too few; a chunk that is empty.
    """
    if catch_up is not None and (catch_up.num_rows < 1 or catch_up.num_tokens < 1):
        raise ValueError(f"catch_up is {catch_up}, allowed are a row and a token or more")
    models = forward, unembed, value_forward, value
    parts = guided_parts(*models, limits, features, proposer, verify)

    def step(
        weights,
        value_weights,
        requests: Requests,
        cache,
        values: GuidedState,
        allowed=None,
        transform_args=(),
    ):
        check_given(weights, cache, limits, proposer)
        check_slots(values.cache, limits)
        if catch_up is not None:
            with jax.named_scope("catch_up"):
                values = _catch_up(value_forward, value_weights, requests, values, catch_up)
        both = (weights, value_weights), requests, (cache, values)
        requests, (cache, values), record = parts.step(*both, allowed, transform_args)
        return requests, cache, values, record

    return jax.jit(step, donate_argnums=(2, 3, 4))


def guided_parts(
    forward: Callable[..., Any],
    unembed: Callable[..., Any],
    value_forward: Callable[..., Any],
    value: Callable[..., Any],
    limits: Limits,
    features: Features,
    proposer: Proposer | None,
    verify: Callable[..., Verdict],
) -> StepParts:
    """The guided step's `StepParts`; the first two do not use the value model.

    Weights are pairs (the model's, the value model's), caches pairs (the model's, GuidedState), where the
    first of each is what `step_parts` takes.

    Raises:
      ValueError: features that have no candidates or too few.
    """
    if not features.filters or features.num_candidates < limits.num_guided:
        raise ValueError(
            f"features have tier {features.tier!r} and num_candidates {features.num_candidates}, guidance "
            f"needs 'filtered' or 'full' and at least num_guided = {limits.num_guided}"
        )
    tree: Tree = ROOT if proposer is None else proposer.tree
    if isinstance(unembed, Head):
        raise ValueError("unembed is a Head, expected a function: guided rows need their logits")
    parts = step_parts(forward, unembed, limits, features, proposer, verify)

    def propose(weights, requests: Requests, caches):
        return parts.propose(weights[0], _going(requests, caches[1]), caches[0])

    def forward_pass(weights, requests: Requests, caches, drafted):
        return parts.forward(weights[0], _going(requests, caches[1]), caches[0], drafted)

    def tail(weights, requests: Requests, caches, drafted, ahead, allowed, transform_args):
        (weights, value_weights), (cache, values) = weights, caches
        waits, going = _num_behind(requests, values) > 0, _going(requests, values)
        draft = drafted[0]
        with jax.named_scope("sample"):
            target = node_target(
                ahead[2],
                going.params,
                going.stop,
                going.history,
                going.length + 1,
                draft.tokens,
                tree,
                limits=limits,
                features=features,
                allowed=allowed,
                transform_args=transform_args,
                law=verify is not verify_match,
            )
            guidance, stop = repeat_rows((values.guidance, going.stop), tree.num_nodes)
            listed = shortlist(target, guidance, limits.num_guided)
        with jax.named_scope("value"):
            hidden, staged = _score(value_forward, value_weights, values, draft, listed.ids, tree)
            z = value(value_weights, hidden)[:, tree.num_nodes - 1 :].reshape(listed.ids.shape)
        with jax.named_scope("guide"):
            num_emitted = going.history.num_emitted[:, None] + jnp.asarray(tree.depth)[None, :]
            listed = guide(listed, z, ends_row(listed.ids, stop), guidance, num_emitted.reshape(-1))
            target = guided_target(target, listed)
        verdict, status, logprobs = judge_target(target, going, draft, tree, verify, limits)
        status = jnp.where(waits, RUNNING, status)
        judged = verdict, status, logprobs
        with jax.named_scope("update"):
            path, count = _kept(values, listed, verdict, tree)
            kept = commit(values.cache, staged, values.length, path, count)
            values = GuidedState(values.guidance, kept, values.length + count)
        requests, cache, record = take_verdict(proposer, weights, going, cache, drafted, ahead, judged)
        return requests, (cache, values), record

    return StepParts(propose, forward_pass, tail)


def _going(requests: Requests, values: GuidedState) -> Requests:
    """The requests, those that wait for their value cache being idle."""
    waits = _num_behind(requests, values) > 0
    return dataclasses.replace(requests, status=jnp.where(waits, IDLE, requests.status))


def _num_behind(requests: Requests, values: GuidedState):
    """Tokens that the caches of guided running rows lack: i32[B]."""
    guided = (requests.status == RUNNING) & (values.guidance.mode != OFF)
    return jnp.where(guided, jnp.maximum(requests.length + 1 - values.length, 0), 0)


def _catch_up(forward, weights, requests: Requests, values: GuidedState, chunk: CatchUp) -> GuidedState:
    behind = _num_behind(requests, values)
    num_rows = min(chunk.num_rows, behind.shape[0])
    # A prompt that was begun goes first, whatever comes in.
    urgency = behind + jnp.where((behind > 0) & (values.length > 0), requests.history.tokens.shape[1], 0)
    _, rows = jax.lax.top_k(urgency, num_rows)
    take = lambda x: jnp.take(x, rows, axis=0, mode="clip")
    place = take(values.length)[:, None] + jnp.arange(chunk.num_tokens, dtype=jnp.int32)[None, :]
    tokens = jnp.take_along_axis(take(requests.history.tokens), place, axis=1, mode="clip")
    counts = jnp.minimum(take(behind), chunk.num_tokens)
    _, cache = commit_tokens(forward, weights, values.cache, tokens, take(values.length), counts, rows)
    return GuidedState(values.guidance, cache, values.length.at[rows].add(counts))


def _score(forward, weights, values: GuidedState, draft: Draft, ids, tree: Tree):
    """The value model over proposals, then the candidates of each node: (hidden [B, K + N G, W], Staged)."""
    num_rows, num_nodes = draft.tokens.shape
    num_guided = ids.shape[1]
    tokens = jnp.concatenate([jnp.maximum(draft.tokens[:, 1:], 0), ids.reshape(num_rows, -1)], axis=1)
    depth, ancestors = jnp.asarray(tree.depth), jnp.asarray(tree.ancestors)
    behind = jnp.concatenate([depth[1:] - 1, jnp.repeat(depth, num_guided)])
    positions = values.length[:, None] + behind[None, :]
    # The root is in the cache. A candidate sees its node's proposals and itself.
    seen = jnp.concatenate([ancestors[1:, 1:], jnp.repeat(ancestors[:, 1:], num_guided, axis=0)])
    own = jnp.pad(jnp.eye(num_nodes * num_guided, dtype=jnp.bool_), ((num_nodes - 1, 0), (0, 0)))
    staged = jnp.concatenate([seen, own], axis=1)
    slots = jax.lax.broadcasted_iota(jnp.int32, (num_rows, len(behind), values.cache.num_slots), 2)
    committed = slots < values.length[:, None, None]
    staged = jnp.broadcast_to(staged[None], (num_rows, *staged.shape))
    mask = jnp.concatenate([committed, staged], axis=2)
    return forward(weights, tokens, positions, values.cache, mask)


def _kept(values: GuidedState, listed: Shortlist, verdict: Verdict, tree: Tree):
    """What the value model's cache takes of a pass: (nodes i32[B, M] of `_score`, count i32[B]).

    Emitted tokens are proposals up to the last, which is a candidate of the node before it. A row that is
    OFF, or drew what is no candidate, takes none and is behind from then on.
    """
    num_rows, num_columns = verdict.path.shape
    num_guided, num_nodes = listed.ids.shape[1], tree.num_nodes
    last = jnp.maximum(verdict.count - 1, 0)[:, None]
    node = jnp.take_along_axis(verdict.path, last, axis=1)
    token = jnp.take_along_axis(verdict.tokens, last, axis=1)
    ids = listed.ids.reshape(num_rows, num_nodes, num_guided)
    same = jnp.take_along_axis(ids, node[:, :, None], axis=1, mode="clip")[:, 0] == token
    candidate = num_nodes - 1 + node * num_guided + jnp.argmax(same, axis=1).astype(jnp.int32)[:, None]
    following = jnp.pad(verdict.path[:, 1:], ((0, 0), (0, 1))) - 1
    column = jnp.arange(num_columns, dtype=jnp.int32)[None, :]
    path = jnp.where(column == last, candidate, following)
    kept = jnp.any(same, axis=1) & (values.guidance.mode != OFF)
    return path, jnp.where(kept, verdict.count, 0)
