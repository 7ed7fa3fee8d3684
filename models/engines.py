"""An engine of jaxsample for a decoder, sized for the model and the device where nothing else is said.

Knows nothing of text or of requests.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxsample import Features, Limits, PagedKVCache, Scorer, empty_head_state, init_paged_cache
from jaxsample.buckets import Buckets, make_buckets
from jaxsample.engine import Engine
from models.decoder import DecoderConfig, Weights, decoder_functions
from models.generation import LIST_CAPACITIES
from models.guiding import check_guide
from models.kernels import kernels_of
from models.load_value import ValueModel
from models.placement import DATA, TENSOR, head_sharding, place_model, whole_sharding
from models.speculation import Speculation, prepare
from models.value_head import value_functions

_PAGE_SIZE = 16
_LONG = 512  # slots of a row from which a second, shorter length is worth its programs on a CPU


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Capacities of an engine; None: by the model and the device.

    Fields:
      slots: samples that run at once; 8 on a CPU, else 64. On a mesh a multiple of the devices along "data".
      max_length: cache slots a sample has; what the model was made for, at most 512 on a CPU, else 4096.
      page_size: slots of a page; 16, or the multiple of it that holds what a step with drafts emits.
      pages: pages of all samples together; enough for every slot to be full.
      max_waiting: requests in the queue; 8 a slot.
      num_guided: most candidates of a guided request, its top_k; 16. Each row of a guided step has so many.
      max_prompt_logprobs: most top logprobs of prompt tokens that a request may ask for; none may ask, which
        saves a program for each prefill.
    """

    slots: int | None = None
    max_length: int | None = None
    page_size: int | None = None
    pages: int | None = None
    max_waiting: int | None = None
    num_guided: int | None = None
    max_prompt_logprobs: int | None = None


def build_engine(
    config: DecoderConfig,
    weights: Weights,
    sizes: Sizes,
    *,
    speculation: Speculation | None = None,
    filter_order: str = "vllm",
    logprobs_mode: str = "raw",
    guide: ValueModel | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Engine:
    """Compiles all programs of an engine for a decoder.

    Args:
      config, weights: the model.
      sizes: capacities.
      speculation: how to draft and verify; None decodes plainly.
      filter_order, logprobs_mode: as in jaxsample.Features.
      guide: the value model of guided requests, over the model's vocabulary (`guiding.fit_vocabulary`); None:
        there are none. Not on a mesh.
      mesh: with the axes "data" and "tensor", see `models.placement`; None: one device.

    Raises:
      ValueError: sizes that do not fit the model or each other, what `speculation.prepare` refuses, a value
        model of another vocabulary or on a mesh, or a mesh that does not fit the model.
    """
    if guide is not None:
        check_guide(guide, config, mesh)
    num_batches, placed = 1, {}
    if mesh is not None:
        config, weights = place_model(config, weights, mesh)
        num_batches, placed = mesh.shape[DATA], {"mesh": mesh, "axis": TENSOR, "batch_axis": DATA}
        if speculation is not None and speculation.draft is not None:
            speculation = dataclasses.replace(speculation, draft=place_model(*speculation.draft, mesh))
    on_cpu = jax.default_backend() == "cpu"
    num_drafts = 0 if speculation is None else speculation.num_drafts
    settled = _settled(sizes, config, num_drafts, num_batches, on_cpu)
    slots, max_length, page_size, pages, max_waiting, num_guided = settled
    limits = Limits(config.vocab_size, max_length=max_length, num_guided=num_guided, **LIST_CAPACITIES)
    limits = dataclasses.replace(limits, num_logprobs=min(limits.num_logprobs, limits.vocab_size))
    levels = _levels(limits.num_logprobs, on_cpu, filter_order=filter_order, logprobs_mode=logprobs_mode)
    buckets = make_buckets(limits, slots, page_size, levels)
    if on_cpu:
        buckets = _fewer(buckets, limits)
    rows = {_round_up(size, num_batches) for size in buckets.rows}
    scored = -1 if sizes.max_prompt_logprobs is None else sizes.max_prompt_logprobs
    buckets = dataclasses.replace(buckets, rows=tuple(sorted(rows)), prompt_logprobs=scored)
    given: dict[str, Any] = dict(placed)
    if speculation is not None:
        drafting = prepare(speculation, config.vocab_size, limits, levels[-1], **placed)
        given |= {"proposer": drafting.proposer, "verify": drafting.verify, "draft_weights": drafting.weights}
        given["draft_forward"] = drafting.forward
        if speculation.head is not None:
            head_config, head_weights = speculation.head
            table = jnp.full((slots, buckets.lengths[-1] // page_size), -1, jnp.int32)
            given["new_drafts"] = lambda _: empty_head_state(
                _new_cache(head_config, head_weights, None, pages, page_size, table),
                head_config.width,
                head_weights["embedding"].dtype,
            )
        elif speculation.draft is not None:
            draft, table = speculation.draft, (slots, buckets.lengths[-1] // page_size)
            given["new_drafts"] = lambda _: _new_cache(
                *draft, mesh, pages, page_size, jnp.full(table, -1, jnp.int32)
            )
    if guide is not None:
        given["scorer"] = _scorer(guide)
    forward, unembed = decoder_functions(config, kernels=kernels_of(mesh))
    return Engine(
        forward,
        unembed,
        weights,
        lambda *layout: _new_cache(config, weights, mesh, *layout),
        limits=limits,
        buckets=buckets,
        num_pages=pages,
        page_size=page_size,
        max_waiting=max_waiting,
        **given,
    )


def _scorer(guide: ValueModel) -> Scorer:
    trunk = guide.weights["trunk"]
    functions = value_functions(guide.config, kernels=kernels_of())
    scorer = Scorer(*functions, guide.weights, lambda *layout: _new_cache(guide.config, trunk, None, *layout))
    return scorer if guide.gamma is None else scorer._replace(gamma=guide.gamma)


def _settled(
    sizes: Sizes, config: DecoderConfig, num_drafts: int, num_batches: int, on_cpu: bool
) -> tuple[int, ...]:
    """The sizes but the last in the order of their fields, with a number everywhere."""
    for name, given in dataclasses.asdict(sizes).items():
        least = 0 if name == "max_prompt_logprobs" else 1
        if given is not None and given < least:
            raise ValueError(f"{name} is {given}, allowed are integers from {least}")
    slots = _round_up(sizes.slots or (8 if on_cpu else 64), num_batches)
    max_length = sizes.max_length or min(config.max_length, _LONG if on_cpu else 4096)
    if max_length > config.max_length:
        raise ValueError(f"max_length is {max_length}, allowed is 1 ... {config.max_length}")
    page_size = sizes.page_size or _round_up(num_drafts + 1, _PAGE_SIZE)
    pages = sizes.pages or slots * -(-max_length // page_size)
    num_guided = sizes.num_guided or min(Limits(config.vocab_size).num_guided, config.vocab_size)
    most = min(config.vocab_size, Features().num_candidates)
    if num_guided > most:
        raise ValueError(f"num_guided is {num_guided}, allowed is 1 ... {most}")
    return slots, max_length, page_size, pages, sizes.max_waiting or 8 * slots, num_guided


def _new_cache(
    config: DecoderConfig, weights: Weights, mesh, num_pages: int, page_size: int, table
) -> PagedKVCache:
    dtype = jax.tree.leaves(weights)[0].dtype
    shape = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_size)
    if mesh is None:
        return init_paged_cache(*shape, dtype, table)
    layout = PagedKVCache(*[head_sharding(config, mesh)] * 2, whole_sharding(mesh))  # type: ignore[arg-type]
    # Made where it is to lie: no device could hold it all.
    return jax.jit(lambda table: init_paged_cache(*shape, dtype, table), out_shardings=layout)(table)


def _levels(num_logprobs: int, on_cpu: bool, **modes: Any) -> tuple[Features, ...]:
    """Stages, rising: few for a CPU, which compiles each program for seconds."""
    least = Features(tier="filtered", full_rows=False, **modes)
    between = () if on_cpu else (Features(tier="filtered", **modes),)
    return least, *between, Features(num_logprobs=num_logprobs, **modes)


def _fewer(buckets: Buckets, limits: Limits) -> Buckets:
    """Buckets of few programs: one row or all, one length unless it is long, two widths of prefill."""
    slots = buckets.rows[-1]
    widths = sorted({min(16, limits.max_length), min(128, limits.max_length)})
    return dataclasses.replace(
        buckets,
        rows=tuple(sorted({1, slots})),
        lengths=buckets.lengths if buckets.lengths[-1] > _LONG else buckets.lengths[-1:],
        prefill=tuple((max(min(slots, 32 // width), 1), width) for width in widths),
        updates=(slots,),
    )


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
