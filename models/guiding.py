"""Value guidance for one run of generation: a value model beside the model, and the programs that use it.

Knows nothing of how tokens reach the user.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample import (
    Features,
    Guidance,
    GuidedState,
    Limits,
    SamplingParams,
    init_cache,
    init_guided,
    make_guidance,
    make_guided_step,
    make_value_prefill,
    needs_guidance,
)
from jaxsample.guidance_rows import OFF
from models.decoder import DecoderConfig
from models.kernels import kernels_of
from models.load_value import ValueModel
from models.text import Text, TokenIds
from models.value_head import value_functions

# What make_guidance takes by name and a request's guidance may therefore hold.
WORDS = tuple(
    name for name in inspect.signature(make_guidance).parameters if name not in ("limits", "params")
)


@dataclasses.dataclass(frozen=True)
class GuidedPrograms:
    """Compiled for the rows and capacities of the programs they stand beside.

    Fields:
      weights: the value model's.
      begin: (Guidance of B rows) -> GuidedState with an empty cache.
      chunks: widths of the prefill calls, in order.
      prefill: by width, as made by `make_value_prefill`.
      step: (weights, requests, state) -> (requests, state, record): the plain step's, whose weights and state
        are pairs with the value model's weights and GuidedState.
    """

    weights: Any
    begin: Callable[[Guidance], GuidedState]
    chunks: tuple[int, ...]
    prefill: dict[int, Callable[..., Any]]
    step: Callable[..., Any]


def fit_vocabulary(
    guide: ValueModel, config: DecoderConfig, text: Text | TokenIds | None, name: str
) -> ValueModel:
    """The value model with as many rows of embeddings as the model has, its tokens being the same.

    Published models of one family share a tokenizer and differ in the number of unused rows behind it.

    Args:
      guide: the value model.
      config, text: the model's.
      name: what the value model is called in errors.

    Raises:
      ValueError: other tokens; where a tokenizer is missing, another number of them.
    """
    ours, theirs = config.vocab_size, guide.config.vocab_size
    if isinstance(text, Text) and guide.text is not None:
        if guide.text.tokenizer.get_vocab() != text.tokenizer.get_vocab():
            raise ValueError(f"{name}: the value model's tokenizer has other tokens than the model's")
    elif theirs != ours:
        raise ValueError(
            f"{name}: the value model has {theirs} tokens, the model {ours}: they must be the same"
        )
    if theirs == ours:
        return guide
    weights = dict(guide.weights, trunk=dict(guide.weights["trunk"]))
    rows = weights["trunk"]["embedding"]["weight"]
    spare = ((0, max(ours - theirs, 0)), (0, 0))
    weights["trunk"]["embedding"] = {"weight": jnp.pad(rows[:ours], spare)}
    return dataclasses.replace(
        guide, config=dataclasses.replace(guide.config, vocab_size=ours), weights=weights
    )


def check_guide(guide: ValueModel, config: DecoderConfig, mesh: Any) -> None:
    """ValueError for a value model of another number of tokens than the model, or together with a mesh."""
    ours, theirs = config.vocab_size, guide.config.vocab_size
    if theirs != ours:
        raise ValueError(f"the value model has {theirs} tokens, the model {ours}: they must be the same")
    if mesh is not None:
        raise ValueError("a value model and a mesh are given, allowed is one: guided steps are on one device")


def guidance_of(
    limits: Limits, params: SamplingParams, words: Mapping[str, Any] | None, gamma: float | None = None
) -> Guidance:
    """The rows of one request's guidance.

    Args:
      limits: capacities. params: the request's rows.
      words: arguments of `make_guidance`; None or nothing for a request that is not guided.
      gamma: the value model's, for a request without its own; None: as make_guidance has it.

    Raises:
      ValueError: what is no mapping of such arguments, or what make_guidance refuses.
    """
    check_words(words)
    words = dict(words or {})
    if words and gamma is not None:
        words = {"gamma": gamma, **words}
    try:
        return make_guidance(limits, params, **words)
    except ValueError as error:
        raise ValueError(f"guidance: {error}") from None


def check_words(words: Any) -> None:
    """ValueError for guidance that is neither None nor a mapping of arguments of `make_guidance`."""
    if words is not None and not isinstance(words, Mapping):
        raise ValueError(f"guidance is {words!r}, expected an object with some of {', '.join(WORDS)}")
    unknown = sorted(set(words or {}) - set(WORDS))
    if unknown:
        raise ValueError(f"guidance has unknown keys {', '.join(unknown)}, allowed are {', '.join(WORDS)}")


def guided_limits(limits: Limits, rows: Sequence[tuple[SamplingParams, Guidance]]) -> Limits:
    """The capacities with slots for as many candidates as guided requests have, a power of two.

    Args:
      limits: capacities that the requests were admitted with.
      rows: parameters and guidance of each request.
    """
    most = max((int(params.top_k.max()) for params, guidance in rows if needs_guidance(guidance)), default=1)
    size = 1 << (most - 1).bit_length()
    return dataclasses.replace(limits, num_guided=min(size, limits.vocab_size))


def guided_features(features: Features) -> Features:
    """Features that a guided step can have: there are candidates."""
    return dataclasses.replace(features, tier="filtered") if features.tier == "plain" else features


def guided_jobs(
    guide: ValueModel,
    forward: Callable[..., Any],
    unembed: Callable[..., Any],
    weights: Any,
    requests: Any,
    state: Any,
    *,
    limits: Limits,
    features: Features,
    chunks: Sequence[int],
    judged: Mapping[str, Any],
) -> dict[str | tuple[str, int], Callable[[], Any]]:
    """What is to be compiled for `GuidedPrograms`: name -> function that lowers the program.

    Args:
      guide: the value model.
      forward, unembed: the model's functions.
      weights, requests, state: the plain step's arguments, or their shapes.
      limits, features: as for make_guided_step. chunks: widths of the prefill calls.
      judged: proposer and verify, or nothing.
    """
    config = guide.config
    num_rows = requests.status.shape[0]
    value_forward, value = value_functions(config, kernels=kernels_of())
    dtype = jax.tree.leaves(guide.weights["trunk"])[0].dtype
    shape = (config.num_layers, num_rows, limits.max_length, config.num_kv_heads, config.head_size)

    def begin(guidance: Guidance) -> GuidedState:
        return dataclasses.replace(init_guided(init_cache(*shape, dtype)), guidance=guidance)

    guided = make_guided_step(
        forward, unembed, value_forward, value, limits=limits, features=features, **judged
    )

    def step(weights, requests, state):
        requests, cache, values, record = guided(*weights, requests, *state)
        return requests, (cache, values), record

    rows = jax.eval_shape(lambda: init_guided(init_cache(*shape, dtype))).guidance
    values = jax.eval_shape(begin, rows)
    prefill = make_value_prefill(value_forward)
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    both = (weights, guide.weights), requests, (state, values)
    jobs: dict[str | tuple[str, int], Callable[[], Any]] = {
        "guided step": lambda: jax.jit(step, donate_argnums=(1, 2)).lower(*both),
        "guided begin": lambda: jax.jit(begin).lower(rows),
    }
    for width in dict.fromkeys(chunks):
        tokens = integers(num_rows, width)
        jobs["guided prefill", width] = lambda tokens=tokens: prefill.lower(
            guide.weights, values, tokens, integers(num_rows)
        )
    return jobs


def begin_guided(programs: GuidedPrograms, guidance: Guidance, prompts, lengths) -> GuidedState:
    """The state of a batch: the whole prompts of its guided rows are in the value model's cache.

    Args:
      programs: GuidedPrograms.
      guidance: Guidance of B rows.
      prompts: i32[B, LP], NumPy. lengths: i32[B], NumPy, tokens of each.
    """
    values = programs.begin(guidance)
    left = np.where(np.asarray(guidance.mode) != OFF, lengths, 0).astype(np.int32)
    start = 0
    for width in programs.chunks:
        counts = np.clip(left - start, 0, width).astype(np.int32)
        if not counts.any():
            break
        tokens = np.zeros((len(lengths), width), np.int32)
        held = prompts[:, start : start + width]
        tokens[:, : held.shape[1]] = np.maximum(held, 0)
        values = programs.prefill[width](programs.weights, values, tokens, counts)
        start += width
    return values
