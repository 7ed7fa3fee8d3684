"""The device side of an engine: programs over chosen slots of a batch whose keys and values lie in pages.

Knows nothing about which slots are chosen or who allocates pages: every program takes what the host decided
as one small array of integers. A slot below 0 or at B and above is padding.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample.chained import forget_rows
from jaxsample.decode import StepParts, commit_tokens
from jaxsample.guidance_rows import OFF, neutral_guidance
from jaxsample.guided import GuidedState
from jaxsample.paged import PagedKVCache
from jaxsample.params import PAD, Limits, SamplingParams, StopRule, neutral_params, set_rows
from jaxsample.requests import IDLE, Requests, admit, release
from jaxsample.staging import unpack_rows

ADMIT, CHANGE, RELEASE = 1, 2, 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Update:
    """What is to happen to n slots.

    Fields:
      slot: i32[n], distinct.
      kind: i32[n], ADMIT, CHANGE (parameters and stop rule) or RELEASE (ended, cancelled or
        preempted); 0 is padding.
      num_prompt, num_emitted: i32[n], for ADMIT.
      tokens: i32[n, S + 1], for ADMIT: prompt, then what the request emitted before, PAD behind.
      pages: i32[n, P], for ADMIT: its line of the page table, -1 behind. RELEASE takes all pages away.
      params, stop: n rows, for ADMIT and CHANGE. guidance: likewise; () in an engine without a value model.
    """

    slot: Any
    kind: Any
    num_prompt: Any
    num_emitted: Any
    tokens: Any
    pages: Any
    params: SamplingParams
    stop: StopRule
    guidance: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """All that an engine keeps on the device; every program takes it donated and returns it.

    Fields:
      requests: Requests of B slots.
      cache: PagedKVCache whose page table has B lines.
      drafts: the proposer's state: a pytree of arrays with B rows, in which a PagedKVCache stands for its
        pages alone and is read through the page table of `cache`. () without a proposer.
      values: GuidedState of B slots, whose cache stands for its pages alone too. () without a value model.
    """

    requests: Requests
    cache: PagedKVCache
    drafts: Any
    values: Any


def blank_updates(limits: Limits, pages_per_row: int, num_rows: int, is_guided: bool) -> Update:
    """n rows of padding, as NumPy arrays; is_guided: whether there is a value model."""
    zeros = lambda: np.zeros(num_rows, np.int32)
    params, stop = neutral_params(limits, num_rows)
    return Update(
        slot=np.full(num_rows, 2**31 - 1, np.int32),
        kind=zeros(),
        num_prompt=zeros(),
        num_emitted=zeros(),
        tokens=np.full((num_rows, limits.max_length + 1), PAD, np.int32),
        pages=np.full((num_rows, pages_per_row), -1, np.int32),
        params=params,
        stop=stop,
        guidance=neutral_guidance(num_rows) if is_guided else (),
    )


def update(state: EngineState, record, *, limits: Limits) -> EngineState:
    """Admit, change and release any number of requests in one write.

    A guided request's value cache counts as filled with all its tokens: it runs when that is so.

    Args:
      state: EngineState.
      record: i32[n, R], an Update as `staging.pack_rows` packs it.
      limits: capacities.
    """
    requests, cache = state.requests, state.cache
    num_slots = requests.status.shape[0]
    is_guided = isinstance(state.values, GuidedState)
    new: Update = unpack_rows(record, blank_updates(limits, cache.page_table.shape[1], 1, is_guided))

    def at(*kinds: int):
        return jnp.where(jnp.isin(new.kind, jnp.asarray(kinds, jnp.int32)), new.slot, num_slots)

    admitted, changed = at(ADMIT), at(CHANGE)
    requests = admit(
        requests, admitted, new.params, new.stop, new.tokens, new.num_prompt, new.num_emitted, limits=limits
    )
    pages = jnp.where((new.kind == ADMIT)[:, None], new.pages, -1)
    table = cache.page_table.at[at(ADMIT, RELEASE)].set(pages, mode="drop")
    requests = dataclasses.replace(
        release(requests, at(RELEASE)),
        params=set_rows(requests.params, changed, new.params),
        stop=set_rows(requests.stop, changed, new.stop),
    )
    values = state.values
    if is_guided:
        tokens = jnp.where(new.guidance.mode == OFF, 0, new.num_prompt + new.num_emitted)
        guidance = set_rows(values.guidance, at(ADMIT, CHANGE), new.guidance)
        values = GuidedState(guidance, values.cache, set_rows(values.length, admitted, tokens))
    # A request that comes back, be it to its old slot, has other pages.
    drafts = forget_rows(state.drafts, admitted)
    return EngineState(requests, dataclasses.replace(cache, page_table=table), drafts, values)


def copy_pages(state: EngineState, pairs) -> EngineState:
    """Copy whole pages, of the model's cache, of every cache of the proposer and of the value model's.

    Args:
      state: EngineState.
      pairs: i32[n, 2], page to read and page to write, the latter distinct; num_pages is padding.
    """

    def copied(cache: PagedKVCache) -> PagedKVCache:
        move = lambda array: array.at[:, pairs[:, 1]].set(
            jnp.take(array, pairs[:, 0], axis=1, mode="clip"), mode="drop", unique_indices=False
        )
        return dataclasses.replace(
            cache,
            keys=move(cache.keys),
            values=move(cache.values),
            key_scales=None if cache.key_scales is None else move(cache.key_scales),
            value_scales=None if cache.value_scales is None else move(cache.value_scales),
        )

    drafts, values = (_map_state(x, copied, lambda leaf: leaf) for x in (state.drafts, state.values))
    return EngineState(state.requests, copied(state.cache), drafts, values)


def prefill(
    forward: Callable[..., Any],
    draft_forward: Callable[..., Any] | None,
    has_proposer: bool,
    num_pages: int,
    scorer: Callable[..., Any] | None,
    weights,
    state: EngineState,
    record,
):
    """Commit a chunk of known tokens for n slots, in the model's cache and in the draft model's.

    Args:
      forward: the model's function. draft_forward: the draft model's, its cache being `state.drafts`; None
        where there is none.
      has_proposer: whether weights are a pair.
      num_pages: pages of each row to attend to, enough for what is committed afterwards.
      scorer: of `prompt_scores.make_scorer`; None scores nothing.
      weights: the model's, or the pair (model's, proposer's) with a proposer.
      state: EngineState.
      record: i32[n, 3 + N]: slot, tokens committed so far, tokens to commit now, N tokens. With a scorer one
        token more, which is not committed: what follows the last.

    Returns:
      EngineState; with a scorer (EngineState, i32[n, N, R]), what it says of the tokens that follow each.
    """
    slots, lengths, counts, known = record[:, 0], record[:, 1], record[:, 2], record[:, 3:]
    tokens = known if scorer is None else known[:, :-1]
    table = _lines(state.cache.page_table, slots, num_pages)
    main = weights[0] if has_proposer else weights
    cache = dataclasses.replace(state.cache, page_table=table)
    hidden, cache = commit_tokens(forward, main, cache, tokens, lengths, counts)
    drafts = state.drafts
    if draft_forward is not None:
        view = dataclasses.replace(drafts, page_table=table)
        _, view = commit_tokens(draft_forward, weights[1], view, tokens, lengths, counts)
        drafts = dataclasses.replace(view, page_table=drafts.page_table)
    cache = dataclasses.replace(cache, page_table=state.cache.page_table)
    state = EngineState(state.requests, cache, drafts, state.values)
    return state if scorer is None else (state, scorer(main, hidden, known[:, 1:]))


def prefill_values(
    forward: Callable[..., Any], num_pages: int, weights, state: EngineState, record
) -> EngineState:
    """Commit a chunk of known tokens for n slots in the value model's cache.

    Args:
      forward, weights: the value model's.
      num_pages, state, record: as `prefill`.
    """
    slots, lengths, counts, tokens = record[:, 0], record[:, 1], record[:, 2], record[:, 3:]
    cache = state.values.cache
    view = dataclasses.replace(cache, page_table=_lines(state.cache.page_table, slots, num_pages))
    _, view = commit_tokens(forward, weights, view, tokens, lengths, counts)
    kept = dataclasses.replace(view, page_table=cache.page_table)
    return dataclasses.replace(state, values=dataclasses.replace(state.values, cache=kept))


def look_ahead(
    parts: StepParts, has_proposer: bool, is_guided: bool, num_pages: int, weights, state: EngineState, plan
):
    """The part of a step that needs no mask: (drafted, ahead) for the slots of a plan.

    Args:
      parts: from `decode.step_parts`, or `guided.guided_parts` where is_guided.
      has_proposer: whether the state holds drafts.
      is_guided: whether the step uses the value model.
      num_pages: pages of each row to attend to.
      weights: as the parts want them.
      state: EngineState; not changed.
      plan: i32[b, 3]: slot, place in its line of the page table, page to put there; place -1 puts none.
    """
    requests, cache = _view(has_proposer, is_guided, num_pages, state, plan)
    drafted = parts.propose(weights, requests, cache)
    return drafted, parts.forward(weights, requests, cache, drafted)


def complete(
    parts: StepParts,
    has_proposer: bool,
    is_guided: bool,
    num_pages: int,
    weights,
    state: EngineState,
    plan,
    drafted,
    ahead,
    allowed=None,
    transform_args=(),
):
    """The rest of the step: (EngineState, record i32[b, R]); a row of padding emits nothing.

    Args: as `look_ahead`, with its results, the grammar masks u32[b, W] or u32[b, N, W], and b rows of
      arguments for the transforms.
    """
    slots = plan[:, 0]
    requests, view = _view(has_proposer, is_guided, num_pages, state, plan)
    requests, view, record = parts.tail(weights, requests, view, drafted, ahead, allowed, transform_args)
    values = state.values
    if is_guided:
        view, own = view
        cache = dataclasses.replace(own.cache, page_table=values.cache.page_table)
        values = GuidedState(values.guidance, cache, set_rows(values.length, slots, own.length))
    view, drafts = view if has_proposer else (view, ())
    # Parameters and stop rules do not change in a step: they are not written back.
    old = state.requests
    without = lambda x: dataclasses.replace(x, params=None, stop=None)
    moved = set_rows(without(old), slots, without(requests))
    return EngineState(
        requests=dataclasses.replace(moved, params=old.params, stop=old.stop),
        cache=dataclasses.replace(view, page_table=_with_pages(state.cache.page_table, plan)),
        drafts=_put_drafts(state.drafts, drafts, slots),
        values=values,
    ), record


def step(
    parts: StepParts,
    has_proposer: bool,
    is_guided: bool,
    num_pages: int,
    weights,
    state: EngineState,
    plan,
    transform_args=(),
):
    """A whole step without grammar masks: `look_ahead`, then `complete`."""
    bound = parts, has_proposer, is_guided, num_pages, weights, state, plan
    return complete(*bound, *look_ahead(*bound), None, transform_args)


def _view(has_proposer: bool, is_guided: bool, num_pages: int, state: EngineState, plan):
    """Requests and caches, as the parts of a step take them, of the plan's slots, b rows."""
    slots = plan[:, 0]
    requests = _rows(state.requests, slots)
    inside = (slots >= 0) & (slots < state.requests.status.shape[0])
    requests = dataclasses.replace(requests, status=jnp.where(inside, requests.status, IDLE))
    table = _lines(_with_pages(state.cache.page_table, plan), slots, num_pages)
    view = lambda cache: dataclasses.replace(cache, page_table=table)
    of_slots = lambda state: _map_state(state, view, lambda leaf: _rows(leaf, slots))
    caches = (view(state.cache), of_slots(state.drafts)) if has_proposer else view(state.cache)
    return requests, (caches, of_slots(state.values)) if is_guided else caches


def _with_pages(table, plan):
    slots, place, page = plan.T
    slots = jnp.where(place < 0, table.shape[0], slots)
    return table.at[slots, place].set(page, mode="drop")


def _lines(table, slots, num_pages: int):
    """The first pages of each slot's line of the table; padding has none."""
    inside = (slots >= 0) & (slots < table.shape[0])
    return jnp.where(inside[:, None], _rows(table, slots)[:, :num_pages], -1)


def _rows(tree, slots):
    return jax.tree.map(lambda leaf: jnp.take(leaf, slots, axis=0, mode="clip"), tree)


def _put_drafts(old, new, slots):
    """The proposer's state with the rows of the slots, and the caches, of a step's result."""
    is_cache = lambda x: isinstance(x, PagedKVCache)

    def put(before, after):
        if is_cache(before):
            return dataclasses.replace(after, page_table=before.page_table)
        return set_rows(before, slots, after)

    return jax.tree.map(put, old, new, is_leaf=is_cache)


def _map_state(drafts, on_cache, on_rows):
    is_cache = lambda x: isinstance(x, PagedKVCache)
    return jax.tree.map(lambda x: on_cache(x) if is_cache(x) else on_rows(x), drafts, is_leaf=is_cache)
