"""All programs of an engine, one for each bucket, ready to be compiled.

Knows nothing of requests. A program's name says what it does and its bucket; `engine` calls it by that name.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxsample import slots
from jaxsample.buckets import Buckets, Name
from jaxsample.decode import step_parts
from jaxsample.draft import ROOT
from jaxsample.params import Limits
from jaxsample.propose import Proposer
from jaxsample.staging import pack_rows


def lower_programs(
    forward: Callable[..., Any],
    unembed: Callable[..., Any],
    weights: Any,
    state: slots.EngineState,
    *,
    limits: Limits,
    buckets: Buckets,
    page_size: int,
    grammars: bool,
    proposer: Proposer | None,
    verify: Callable[..., Any],
    draft_forward: Callable[..., Any] | None,
) -> dict[Name, Callable[[], Any]]:
    """Name -> function that lowers the program. All programs that return the state take it donated.

        ("update", n)(state, record) -> state
        ("copy pages",)(state, pairs) -> state
        ("prefill", p, 3 + N, S)(weights, state, record) -> state
        ("step", b, S, level)(weights, state, plan) -> (state, record)
        ("look ahead", b, S)(weights, state, plan) -> (drafted, ahead)
        ("complete", b, S)(weights, state, plan, drafted, ahead, masks) -> (state, record)

    Args: as `Engine`; weights and state as they will be passed. The last two exist with grammars only, and
      have the stages of the last features.
    """
    num_slots, pages_per_row = state.cache.page_table.shape
    has_proposer = proposer is not None
    num_nodes = (proposer.tree if has_proposer else ROOT).num_nodes
    parts = [step_parts(forward, unembed, limits, x, proposer, verify) for x in buckets.features]
    programs: dict[Name, Callable[[], Any]] = {}

    def add(name: Name, function: Callable[..., Any], donated: tuple[int, ...], *arguments):
        programs[name] = lambda: jax.jit(function, donate_argnums=donated).lower(*arguments)

    width = pack_rows(slots.blank_updates(limits, pages_per_row, 1)).shape[1]
    for size in buckets.updates:
        update = functools.partial(slots.update, limits=limits)
        add(("update", size), update, (0,), state, _integers(size, width))
    add(("copy pages",), slots.copy_pages, (0,), state, _integers(num_slots, 2))
    for length in buckets.lengths:
        num_pages = length // page_size
        for prompts, tokens in buckets.prefill:
            chunk = functools.partial(slots.prefill, forward, draft_forward, has_proposer, num_pages)
            record = _integers(prompts, 3 + tokens)
            add(("prefill", *record.shape, length), chunk, (1,), weights, state, record)
        for size in buckets.rows:
            plan = _integers(size, 3)
            for level, part in enumerate(parts):
                step = functools.partial(slots.step, part, has_proposer, num_pages)
                add(("step", size, length, level), step, (1,), weights, state, plan)
            if grammars:
                first = functools.partial(slots.look_ahead, parts[-1], has_proposer, num_pages)
                last = functools.partial(slots.complete, parts[-1], has_proposer, num_pages)
                found = jax.eval_shape(first, weights, state, plan)
                nodes = () if num_nodes == 1 else (num_nodes,)
                masks = jax.ShapeDtypeStruct((size, *nodes, limits.num_words), jnp.uint32)
                add(("look ahead", size, length), first, (), weights, state, plan)
                add(("complete", size, length), last, (1,), weights, state, plan, *found, masks)
    return programs


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
