"""All programs of an engine, one for each bucket, ready to be compiled.

On a mesh every device holds the state of every slot whole, but for what its owner has split: keys and values
by head. Rows of a step are split along batch_axis for the model's pass and for judging; what is committed is
given to all. Every program leaves the state as it found it. Knows nothing of requests. A program's name says
what it does and its bucket; `engine` calls it by that name.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsample import slots
from jaxsample.buckets import Buckets, Name
from jaxsample.decode import StepParts, step_parts
from jaxsample.draft import ROOT
from jaxsample.guided import Scorer, guided_parts
from jaxsample.paged import PagedKVCache
from jaxsample.params import Limits
from jaxsample.prompt_scores import make_scorer
from jaxsample.propose import Proposer
from jaxsample.sample import Sampled
from jaxsample.sharding import Axis, axis_names, axis_size
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
    scorer: Scorer | None = None,
    mesh: Mesh | None = None,
    axis: Axis | None = None,
    batch_axis: Axis = (),
    draw: Callable[..., Sampled] | None = None,
) -> dict[Name, Callable[[], Any]]:
    """Name -> function that lowers the program. All programs that return the state take it donated.

        ("update", n)(state, record) -> state
        ("copy pages",)(state, pairs) -> state
        ("prefill", p, 3 + N, S)(weights, state, record) -> state
        ("prefill scored", p, 3 + N + 1, S)(weights, state, record) -> (state, scores)
        ("step", b, S, level)(weights, state, plan) -> (state, record)
        ("look ahead", b, S)(weights, state, plan) -> (drafted, ahead)
        ("complete", b, S)(weights, state, plan, drafted, ahead, masks) -> (state, record)

    With a value model also, with pairs (weights, the value model's) as weights:

        ("prefill values", p, 3 + N, S)(the value model's weights, state, record) -> state
        ("guided step", b, S)(weights, state, plan) -> (state, record)
        ("guided complete", b, S)(weights, state, plan, drafted, ahead, masks) -> (state, record)

    Args: as `Engine`; weights and state as they will be passed, on a mesh of Auto axes or without one. The
      programs of grammars exist with these only; they and guided steps have the stages of the last features.
    """
    num_slots, pages_per_row = state.cache.page_table.shape
    has_proposer = proposer is not None
    num_nodes = (proposer.tree if has_proposer else ROOT).num_nodes
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    kept = None if mesh is None else jax.tree.map(lambda leaf: leaf.sharding, state)
    if mesh is not None:
        forward = _spread_rows(forward, mesh, batch_axis)
        draft_forward = None if draft_forward is None else _spread_rows(draft_forward, mesh, batch_axis)
    placed = (mesh, axis, batch_axis, batch_axis)  # all devices get the verdict of all rows
    draws = [None if x.shapes or x.full_rows else draw for x in buckets.features]
    parts = [
        step_parts(forward, unembed, limits, x, proposer, verify, *placed, own)
        for x, own in zip(buckets.features, draws)
    ]
    if mesh is not None:
        parts = [_with_whole_state(part, mesh) for part in parts]
    guided = all_weights = None
    if scorer is not None:
        last = limits, buckets.features[-1], proposer, verify
        guided = guided_parts(forward, unembed, scorer.forward, scorer.value, *last)
        all_weights = weights, scorer.weights
    programs: dict[Name, Callable[[], Any]] = {}

    def add(name: Name, function: Callable[..., Any], donated: tuple[int, ...], out: Any, *arguments):
        program = jax.jit(function, donate_argnums=donated, out_shardings=out)
        programs[name] = lambda: program.lower(*arguments)

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole)

    told = None if mesh is None else (kept, whole)
    score = None
    if buckets.prompt_logprobs >= 0:
        score = make_scorer(unembed, limits.vocab_size, buckets.prompt_logprobs, mesh, axis, batch_axis)

    width = pack_rows(slots.blank_updates(limits, pages_per_row, 1, scorer is not None)).shape[1]
    for size in buckets.updates:
        update = functools.partial(slots.update, limits=limits)
        add(("update", size), update, (0,), kept, state, integers(size, width))
    add(("copy pages",), slots.copy_pages, (0,), kept, state, integers(num_slots, 2))
    for length in buckets.lengths:
        num_pages = length // page_size
        for prompts, tokens in buckets.prefill:
            chunk = functools.partial(slots.prefill, forward, draft_forward, has_proposer, num_pages)
            record = integers(prompts, 3 + tokens)
            plain = functools.partial(chunk, None)
            add(("prefill", *record.shape, length), plain, (1,), kept, weights, state, record)
            if score is not None:
                longer = integers(prompts, 3 + tokens + 1)
                name = ("prefill scored", *longer.shape, length)
                add(name, functools.partial(chunk, score), (1,), told, weights, state, longer)
            if scorer is not None:
                name = ("prefill values", *record.shape, length)
                chunk = functools.partial(slots.prefill_values, scorer.forward, num_pages)
                add(name, chunk, (1,), kept, scorer.weights, state, record)
        for size in buckets.rows:
            plan = integers(size, 3)
            for level, part in enumerate(parts):
                step = functools.partial(slots.step, part, has_proposer, False, num_pages)
                add(("step", size, length, level), step, (1,), told, weights, state, plan)
            if guided is not None:
                step = functools.partial(slots.step, guided, has_proposer, True, num_pages)
                add(("guided step", size, length), step, (1,), told, all_weights, state, plan)
            if grammars:
                first = functools.partial(slots.look_ahead, parts[-1], has_proposer, False, num_pages)
                last = functools.partial(slots.complete, parts[-1], has_proposer, False, num_pages)
                found = jax.eval_shape(first, weights, state, plan)
                nodes = () if num_nodes == 1 else (num_nodes,)
                masks = jax.ShapeDtypeStruct((size, *nodes, limits.num_words), jnp.uint32, sharding=whole)
                between = None
                if mesh is not None:
                    between = _between(found, state.cache, mesh, axis or (), batch_axis)
                    found = jax.tree.map(_laid_out, found, between)
                add(("look ahead", size, length), first, (), between, weights, state, plan)
                add(("complete", size, length), last, (1,), told, weights, state, plan, *found, masks)
                if guided is not None:
                    last = functools.partial(slots.complete, guided, has_proposer, True, num_pages)
                    arguments = all_weights, state, plan, *found, masks
                    add(("guided complete", size, length), last, (1,), told, *arguments)
    return programs


def _spread_rows(forward: Callable[..., Any], mesh: Mesh, batch_axis: Axis) -> Callable[..., Any]:
    """A model's pass over rows split along batch_axis, where they divide.

    What it stages is given to all devices, since all hold all pages.
    """
    batch_axes, free = axis_names(batch_axis), PartitionSpec.UNCONSTRAINED

    def spread(weights, tokens, positions, cache, mask):
        if tokens.shape[0] % axis_size(mesh, batch_axes) == 0:
            rows = _pin((tokens, positions, mask, cache.page_table), mesh)  # so that only copies are split
            tokens, positions, mask, table = _pin(rows, mesh, batch_axes)
            cache = dataclasses.replace(cache, page_table=table)
        hidden, staged = forward(weights, tokens, positions, cache, mask)
        by_head = lambda leaf: _pin(leaf, mesh, None, None, None, *[free] * (leaf.ndim - 3))
        return hidden, jax.tree.map(by_head, staged)

    return spread


def _with_whole_state(parts: StepParts, mesh: Mesh) -> StepParts:
    """The same parts, told that requests stay whole: a compiler left alone splits them and joins each one."""
    is_cache = lambda x: isinstance(x, PagedKVCache)

    def pin(tree):
        table_of = lambda cache: dataclasses.replace(cache, page_table=_pin(cache.page_table, mesh))
        each = lambda x: table_of(x) if is_cache(x) else _pin(x, mesh)
        return jax.tree.map(each, tree, is_leaf=is_cache)

    def propose(weights, requests, caches):
        return parts.propose(weights, *pin((requests, caches)))

    def forward(weights, requests, caches, drafted):
        return parts.forward(weights, *pin((requests, caches)), drafted)

    def tail(weights, requests, caches, *rest):
        return pin(parts.tail(weights, *pin((requests, caches)), *rest))

    return StepParts(propose, forward, tail)


def _pin(tree: Any, mesh: Mesh, *spec: Any) -> Any:
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec(*spec)))


def _between(found, cache, mesh: Mesh, axis: Axis, batch_axis: Axis):
    """How what "look ahead" leaves for "complete" lies on a mesh: logits as split, laws with their rows."""
    (draft, draft_staged), (hidden, staged, logits) = found
    axes, batch_axes = axis_names(axis), axis_names(batch_axis)
    num_rows, num_batches = hidden.shape[0], axis_size(mesh, batch_axes)
    kept_rows = num_batches * axis_size(mesh, axes) * -(-num_rows // num_batches // axis_size(mesh, axes))
    place = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
    by_row, heads = place(batch_axes), tuple(cache.keys.sharding.spec)[3:]

    def of_law(leaf):
        return place((*batch_axes, *axes)) if leaf.shape[0] == kept_rows else by_row

    whole = lambda tree: jax.tree.map(lambda _: place(), tree)
    draft = dataclasses.replace(whole(draft), law=jax.tree.map(of_law, draft.law))
    staged = jax.tree.map(lambda leaf: place(None, None, None, *heads[: leaf.ndim - 3]), staged)
    logits = jax.tree.map(lambda _: place(batch_axes, None, axes), logits)  # a Head leaves none
    return (draft, whole(draft_staged)), (by_row, staged, logits)


def _laid_out(shape, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
