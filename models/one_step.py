"""One step's distribution taken apart: what each stage of sampling does to it, and which token is drawn.

The stages are rows of one batch that goes through the library: the first row asks for nothing, each row after
it for one stage more, and the last is the request itself. So every number is the library's own, and what a
stage removed is what its row lacks and the row before it has. Knows nothing of models, text or output.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample import (
    Features,
    Guidance,
    History,
    Limits,
    SamplingParams,
    StopRule,
    draw_target,
    ends_row,
    guide,
    guided_target,
    law_of,
    log_probs,
    make_target,
    needs_guidance,
    neutral_params,
    rng,
    shape,
    shortlist,
    stack_rows,
)
from jaxsample.guidance_rows import VALUE_BIAS

# Which fields of the parameters each stage brings in, in the order of the stages.
_SHAPING = {
    "raw": ("seed", "num_logprobs"),
    "bias": ("bias_ids", "bias_values"),
    "penalties": ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    "masks": ("allowed", "bad_words", "bad_word_lengths"),
    "temperature": ("temperature", "scale_ids", "scale_values"),
}
_FILTERS = {"min-p": ("min_p",), "top-k": ("top_k",), "top-p": ("top_p",)}
_ORDERS = {
    "vllm": ("min-p", "top-k", "top-p"),
    "hf": ("top-k", "top-p", "min-p"),
    "joint": ("min-p", "top-k", "top-p"),
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """The distribution after one stage.

    Fields:
      name: "raw", "bias", "penalties", "masks", "temperature"; then "min-p", "top-k" and "top-p" in the order
        of the filters, or "candidates" and "guided" for a guided row; "greedy" in place of "temperature" and
        all after it.
      log_probs: f32[V], normalised; -inf for what cannot be drawn.
    """

    name: str
    log_probs: np.ndarray


@dataclasses.dataclass(frozen=True)
class Explanation:
    """One step of one row.

    Fields:
      stages: in their order; the last is what was drawn from.
      token: the token drawn, PAD for a bad row.
      noise: f32[V], Gumbel noise of each token; 0 for a greedy row. The token drawn is the first of
        the order of log-probability + noise.
      values: token id -> z, the value model's logit of each candidate as guidance takes it: -inf (value 0)
        for tokens that end the row, but for value_bias. Empty for a row not guided, or with one candidate.
    """

    stages: tuple[Stage, ...]
    token: int
    noise: np.ndarray
    values: dict[int, float]

    def removed_by(self) -> list[str | None]:
        """For each token the stage that removed it, None for those that may be drawn."""
        found: list[str | None] = [None] * len(self.noise)
        for before, after in zip(self.stages, self.stages[1:]):
            for token in np.flatnonzero((before.log_probs > -np.inf) & (after.log_probs == -np.inf)):
                found[token] = after.name
        return found

    def figures(self) -> list[dict[str, Any]]:
        """For each stage: tokens left, the mass they had in the stage before, entropy in nats."""
        result, before = [], None
        for stage in self.stages:
            log_p = stage.log_probs.astype(np.float64)
            left = log_p > -np.inf
            mass = 1.0 if before is None else float(np.exp(before[left]).sum())
            entropy = float(-(np.exp(log_p[left]) * log_p[left]).sum()) + 0.0
            result.append({"stage": stage.name, "tokens": int(left.sum()), "mass": mass, "entropy": entropy})
            before = log_p
        return result


def explain(
    logits: jax.Array,
    params: SamplingParams,
    stop: StopRule,
    history: History,
    position: int,
    *,
    limits: Limits,
    filter_order: str = "vllm",
    guidance: Guidance | None = None,
    score: Callable[[jax.Array], jax.Array] | None = None,
) -> Explanation:
    """Takes one step of one row apart.

    Args:
      logits: float[1, Vp], of the last known token.
      params, stop: one row, as `make_params` gives them (NumPy).
      history: one row.
      position: index in its sequence of the token chosen.
      limits: capacities.
      filter_order: as in `Features`.
      guidance: one row, of `make_guidance`; None: not guided.
      score: the value model: candidates i32[1, G] -> z f32[1, G]; called for a guided row with two candidates
        or more, and needed where the guidance is not neutral.
    """
    features = Features(filter_order=filter_order)
    stages = _SHAPING | {name: _FILTERS[name] for name in _ORDERS[filter_order]}
    rows, (own, own_stop) = [], neutral_params(limits, 1)
    for name, fields in stages.items():
        own = dataclasses.replace(own, **{field: getattr(params, field) for field in fields})
        own_stop = stop if name == "masks" else own_stop  # its min_tokens bans ids
        rows.append((own, own_stop))
    laws, target, token, noise = _batch(
        logits,
        *stack_rows(rows),
        history,
        jnp.asarray([position], jnp.int32),
        limits=limits,
        features=features,
    )
    shown = [Stage(name, law) for name, law in zip(stages, np.asarray(laws), strict=True)]
    shaped = list(stages).index("temperature")
    if params.temperature[0] < np.finfo(np.float32).tiny:  # filters say nothing
        shown[shaped:] = [Stage("greedy", shown[-1].log_probs)]
    values: dict[int, float] = {}
    if guidance is not None and needs_guidance(guidance):
        listed = jax.jit(shortlist, static_argnums=2)(target, guidance, limits.num_guided)
        if listed.guided[0]:
            z = jnp.zeros(listed.ids.shape, jnp.float32)
            if listed.scored[0]:
                assert score is not None
                z = score(listed.ids)
                count = int(listed.count[0])
                ends = ends_row(listed.ids, stop) & (guidance.mode[0] != VALUE_BIAS)
                taken = np.asarray(jnp.where(ends, -jnp.inf, z))[0, :count]
                values = dict(zip(np.asarray(listed.ids)[0, :count].tolist(), taken.tolist()))
            shown = shown[: shaped + 1]
            candidates, law, token = _guided(target, listed, z, guidance, stop, history)
            shown += [Stage("candidates", np.asarray(candidates)), Stage("guided", np.asarray(law))]
    return Explanation(tuple(shown), int(token[0]), np.asarray(noise), values)


@functools.partial(jax.jit, static_argnames=("limits", "features"))
def _batch(logits, params, stop, history, position, *, limits: Limits, features: Features):
    """Laws of all rows f32[R, V]; then of the last one its target, its token i32[1] and noise f32[V]."""
    num_rows = params.temperature.shape[0]
    logits, history, position = jax.tree.map(
        lambda leaf: jnp.repeat(leaf, num_rows, axis=0), (logits, history, position)
    )
    shaped = shape(logits, params, position, stop=stop, history=history, limits=limits, features=features)
    target = make_target(shaped, params, position, vocab_size=limits.vocab_size, features=features, law=True)
    last = jax.tree.map(lambda leaf: leaf[-1:], target)
    words = rng.gumbel_words(last.params.seed, last.position, rng.TARGET, shaped.logits.shape[1] // 4)
    noise = jnp.stack(words, axis=-1).reshape(-1)[: limits.vocab_size]
    noise = jnp.where(last.params.temperature < jnp.finfo(jnp.float32).tiny, 0, noise)
    return log_probs(law_of(target))[:, : limits.vocab_size], last, draw_target(last), noise


@jax.jit
def _guided(target, listed, z, guidance, stop, history):
    """Laws f32[V] of the candidates before and after they are guided, and the token i32[1]."""
    before = guided_target(target, listed)
    ends = ends_row(listed.ids, stop)
    after = guided_target(target, guide(listed, z, ends, guidance, history.num_emitted))
    laws = [log_probs(law_of(each))[0, : target.vocab_size] for each in (before, after)]
    return *laws, draw_target(after)
