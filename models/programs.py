"""The compiled programs that one run of generation needs: admission, prefill by chunk size, the decode step.

All are lowered and compiled ahead of time, so that compile time is known and nothing compiles later. Knows
nothing of requests' values or of text.
"""

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from jaxsample import (
    Features,
    KVCache,
    Limits,
    admit,
    attention_mask,
    chain,
    commit,
    empty_requests,
    init_cache,
    make_decode_step,
    make_prefill,
    neutral_params,
    score,
)
from models.decoder import DecoderConfig, Weights, decoder_functions
from models.guiding import GuidedPrograms, guided_features, guided_jobs
from models.kernels import kernels_of
from models.load_value import ValueModel
from models.placement import DATA, TENSOR, cache_sharding, row_sharding
from models.speculation import Drafting, Speculation, prepare

_SMALLEST_CHUNK, _LARGEST_CHUNK = 16, 512  # prompt tokens in one prefill call
_SCORED_POSITIONS = 1024  # B * N where the logits of every position exist at once: [B, N, V] float32


@dataclasses.dataclass(frozen=True)
class Programs:
    """Compiled for B rows and one set of capacities."""

    limits: Limits
    features: Features
    num_rows: int  # B
    prompt_width: int  # LP
    chunks: tuple[int, ...]  # widths of the prefill calls, in order
    begin: Callable[..., Any]  # (params, stop, prompts i32[B, LP], lengths i32[B]) -> Requests
    new_cache: Callable[[], Any]  # with speculation the pair (model's cache, proposer's state)
    prefill: dict[int, Callable[..., Any]]  # by width, as made by make_prefill or make_watched_prefill
    step: Callable[..., Any] | None  # as made by make_decode_step; None where all batches are guided
    num_scored: int  # top prompt logprobs; -1: none
    drafting: Drafting | None  # None: plain decoding
    draft_prefill: dict[int, Callable[..., Any]]  # the draft model's, by width; empty where there is none
    guided: GuidedPrograms | None  # for batches with guided rows; None where there are none
    compile_seconds: float


def compile_programs(
    config: DecoderConfig,
    weights: Weights,
    *,
    limits: Limits,
    features: Features,
    num_rows: int,
    longest_prompt: int,
    num_scored: int = -1,
    speculation: Speculation | None = None,
    guide: ValueModel | None = None,
    some_plain: bool = True,
    mesh: jax.sharding.Mesh | None = None,
) -> Programs:
    """Lowers and compiles everything for one shape of batch.

    Args:
      config, weights: the model.
      limits, features: as for make_decode_step.
      num_rows: B, a multiple of the devices along the mesh's "data".
      longest_prompt: tokens of the longest prompt, at least 1.
      num_scored: top logprobs of each prompt token; 0 for the token's own only, -1 for none.
      speculation: how to draft and verify; None decodes plainly.
      guide: the value model of batches with guided rows; None: there are none. Not on a mesh.
      some_plain: whether there are batches without guided rows too.
      mesh: where the weights lie, see `models.placement`; None: on one device.

    Returns:
      Programs.
    """
    started = time.perf_counter()
    forward, unembed = decoder_functions(config, kernels=kernels_of(mesh))
    prompt_width = min(power_of_two(longest_prompt), limits.max_length)
    largest = _LARGEST_CHUNK
    if num_scored >= 0:
        largest = min(largest, max(_SCORED_POSITIONS // num_rows, _SMALLEST_CHUNK))
    chunks = chunk_widths(longest_prompt - 1, min(largest, limits.max_length))

    def begin(params, stop, prompts, lengths):
        # Every slot is written, spare ones with a prompt of length 0, which is refused: none stays blank.
        shapes = jax.eval_shape(lambda: empty_requests(limits, num_rows))
        blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        slots = jnp.arange(num_rows, dtype=jnp.int32)
        return admit(blank, slots, params, stop, prompts, lengths, limits=limits)

    sampled = {} if mesh is None else {"mesh": mesh, "axis": TENSOR, "batch_axis": DATA}
    drafting = None
    if speculation is not None:
        drafting = prepare(speculation, config.vocab_size, limits, features, **sampled)

    def model_cache() -> KVCache:
        dtype = jax.tree.leaves(weights)[0].dtype
        shape = (config.num_layers, num_rows, limits.max_length, config.num_kv_heads, config.head_size)
        return init_cache(*shape, dtype)

    def new_cache():
        return model_cache() if drafting is None else (model_cache(), drafting.new_state(num_rows))

    by_row = None if mesh is None else row_sharding(mesh)

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=by_row)

    rows, prompts = integers(num_rows), integers(num_rows, prompt_width)
    admission = (*neutral_params(limits, num_rows), prompts, rows)
    requests = jax.eval_shape(begin, *admission)
    cache, state = jax.eval_shape(model_cache), jax.eval_shape(new_cache)
    # What one program leaves lies where the next expects it.
    by_head = state_layout = None
    if mesh is not None:
        by_head = cache_sharding(config, num_rows, mesh)
        state_layout = by_head if drafting is None else (by_head, drafting.layout(num_rows))
        requests = _laid_out(requests, jax.tree.map(lambda _: by_row, requests))
        cache, state = _laid_out(cache, by_head), _laid_out(state, state_layout)
    begin_jit = jax.jit(begin, out_shardings=by_row)
    all_weights = weights if drafting is None else (weights, drafting.weights)
    judged = {} if drafting is None else {"proposer": drafting.proposer, "verify": drafting.verify}
    step = make_decode_step(forward, unembed, limits=limits, features=features, **judged, **sampled)
    observe = None if drafting is None else drafting.observe
    given, seeds = (weights, cache), []
    prefill: Any
    if num_scored < 0 and observe is None:
        prefill, extra = make_prefill(forward, limits), 0
    else:
        prefill, extra = make_watched_prefill(forward, unembed, config.vocab_size, num_scored, observe), 1
    if observe is not None:
        given, seeds = (all_weights, state), [jax.ShapeDtypeStruct((num_rows, 2), jnp.uint32)]
    if mesh is not None:
        step = jax.jit(step, donate_argnums=(1, 2), out_shardings=(by_row, state_layout, by_row))
        scores = () if num_scored < 0 else (by_row,)
        prefill = jax.jit(
            prefill, donate_argnums=(1,), out_shardings=(by_head, *scores) if scores else by_head
        )

    # Tracing holds the interpreter's lock, compiling does not: the longest compilation runs beside the rest.
    with ThreadPoolExecutor() as pool:
        jobs: dict[Any, Any] = {}
        guide_chunks = chunk_widths(longest_prompt, min(_LARGEST_CHUNK, limits.max_length))
        if guide is not None:
            models = guide, forward, unembed, all_weights, requests, state
            capacities = {"limits": limits, "features": guided_features(features), "chunks": guide_chunks}
            for name, lower in guided_jobs(*models, **capacities, judged=judged).items():
                jobs[name] = pool.submit(lower().compile)
        if some_plain:
            jobs["step"] = pool.submit(step.lower(all_weights, requests, state).compile)
        for width in dict.fromkeys(chunks):
            tokens = [integers(num_rows, width)] * (1 + extra)
            jobs[width] = pool.submit(prefill.lower(*given, *tokens, rows, rows, *seeds).compile)
            if drafting is not None and drafting.forward is not None:
                drafted = make_prefill(drafting.forward, limits)
                if mesh is not None:
                    drafted = jax.jit(drafted, donate_argnums=(1,), out_shardings=drafting.layout(num_rows))
                lowered = drafted.lower(drafting.weights, state[1], tokens[0], rows, rows)
                jobs["draft", width] = pool.submit(lowered.compile)
        jobs["begin"] = pool.submit(begin_jit.lower(*admission).compile)
        done = {name: job.result() for name, job in jobs.items()}
    guided = None
    if guide is not None:
        prefill_values = {width: done["guided prefill", width] for width in guide_chunks}
        begun = done["guided begin"], guide_chunks, prefill_values
        guided = GuidedPrograms(guide.weights, *begun, done["guided step"])
    return Programs(
        limits=limits,
        features=features,
        num_rows=num_rows,
        prompt_width=prompt_width,
        chunks=chunks,
        begin=done["begin"],
        new_cache=jax.jit(new_cache, out_shardings=state_layout),
        prefill={width: done[width] for width in chunks},
        step=done.get("step"),
        num_scored=num_scored,
        drafting=drafting,
        draft_prefill={
            name[1]: job for name, job in done.items() if isinstance(name, tuple) and name[0] == "draft"
        },
        guided=guided,
        compile_seconds=time.perf_counter() - started,
    )


def _laid_out(shapes: Any, shardings: Any) -> Any:
    """Shapes that say how their arrays lie."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def chunk_widths(num_tokens: int, largest: int) -> tuple[int, ...]:
    """Widths of the prefill calls for a prefix: powers of two, so that few programs serve every length.

    Args:
      num_tokens: tokens to commit, >= 0.
      largest: most tokens in one call.

    Returns:
      Widths whose sum is at least num_tokens; empty for no tokens.
    """
    widths = []
    while num_tokens > 0:
        widths.append(min(max(power_of_two(num_tokens), _SMALLEST_CHUNK), largest))
        num_tokens -= widths[-1]
    return tuple(widths)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number` (>= 1)."""
    return 1 << (number - 1).bit_length()


def make_watched_prefill(
    forward: Callable, unembed: Callable, vocab_size: int, num_top: int, observe: Callable | None = None
) -> Callable:
    """Build a jitted prefill of which more comes than a cache: logprobs of successors, a draft head's state.

    Args:
      forward, unembed: the model's two functions.
      vocab_size: V; logits may be wider.
      num_top: n, top logprobs beside the successor's own; -1: no logprobs.
      observe: as in `speculation.Drafting`; None: no draft head.

    Returns:
      prefill(weights, cache, tokens i32[B, N], successors i32[B, N], lengths i32[B], counts i32[B]) ->
      (cache, Logprobs with [B, N] in place of B), () for no logprobs. The cache is donated. Otherwise as
      `make_prefill`. With `observe` weights and cache are pairs, (model's, head's) and (model's, state), and
      u32[B, 2] seeds of the requests follow.
    """

    def prefill(weights, cache, tokens, successors, lengths, counts, *seeds):
        head, state = None, None
        if observe is not None:
            (weights, head), (cache, state) = weights, cache
        B, N = tokens.shape
        order = jnp.arange(N, dtype=jnp.int32)[None, :]
        mask = attention_mask(lengths, chain(N - 1), cache.num_slots)
        hidden, staged = forward(weights, jnp.maximum(tokens, 0), lengths[:, None] + order, cache, mask)
        scored: Any = ()
        if num_top >= 0:
            logits = unembed(weights, hidden)[..., :vocab_size]
            scored = score(logits.reshape(B * N, -1), successors.reshape(B * N), num_top)
            scored = jax.tree.map(lambda x: x.reshape(B, N, *x.shape[1:]), scored)
        cache = commit(cache, staged, lengths, jnp.broadcast_to(order, (B, N)), counts)
        if observe is not None:
            cache = cache, observe(head, state, hidden, successors, lengths, counts, *seeds)
        return cache, scored

    return jax.jit(prefill, donate_argnums=(1,))
