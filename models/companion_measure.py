"""What a value model is worth on prompts that are new to it: its errors, and the lengths it brings about.

All is told in figures for JSON. A reply's length counts its EOS. Knows nothing of files or of text.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxsample import finish_reason
from models.decoder import DecoderConfig, Weights
from models.generation import Request, Sample, generate
from models.load_value import ValueModel
from models.rollouts import FINISHED, Rollout
from models.value_batches import Labels, widths_for
from models.value_report import Predictions, calibration, predict, report
from models.value_training import predicted_length, value_logits

TOLERANCES = (0.1, 0.2)  # of a target, within which a length hits it
_SLOTS = 128  # a cache has a multiple of so many
_BATCH = 16  # replies at once where they are judged
_NUM_SHOWN = 2  # prompts whose replies are kept whole
EDGES = (0, 1, 8, 32, 64, 128, 256)  # first positions of the ranges in which errors are told


@dataclasses.dataclass(frozen=True)
class Aims:
    """What replies are drawn with.

    Fields:
      scales: of "centered_exp", the neutral 0 among them or not.
      factors: scales of "length_mul", the neutral 1 among them or not.
      targets: lengths in tokens, for "eq_soft" and "eq".
      top_k: candidates of guided replies, and of the ones that they are compared with.
      max_tokens: where guided replies, and those they are compared with, are cut off.
      judged_tokens: where plain replies are cut off whose remaining lengths are foretold; max_tokens or more.
      num_plain, num_guided: replies a prompt, plain ones and of each other way.
      seed: of the first reply.
    """

    scales: tuple[float, ...] = (-40.0, -20.0, -10.0, 10.0, 20.0, 40.0)
    factors: tuple[float, ...] = (0.25, 0.5, 2.0, 4.0)
    targets: tuple[int, ...] = (50, 100, 200)
    top_k: int = 16
    max_tokens: int = 512
    judged_tokens: int = 1024
    num_plain: int = 4
    num_guided: int = 2
    seed: int = 1_000_000  # prompts that were trained on began at 0


def measure(
    config: DecoderConfig,
    weights: Weights,
    guide: ValueModel,
    prompts: Sequence[list[int]],
    eos_token_ids: Sequence[int],
    aims: Aims,
    max_rows: int,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Draws replies in all ways and tells of them.

    Args:
      config, weights: the model.
      guide: its value model, whose gamma is known.
      prompts: token ids, at least one prompt.
      eos_token_ids: what ends a reply.
      aims: the ways.
      max_rows: replies at once.
      say: told what is being done.

    Returns:
      "value", of `judge`; "cases", a list of {"way", "at", ...} with fields of `summary`; "way" is "plain"
      (top_k candidates, as all but the next), "unfiltered", "centered_exp", "length_mul",
      "eq_soft", "eq" or "truncated", and "at" the scale or the target; "shown", replies to the first prompts
      as token ids.

    Raises:
      ValueError: a value model without gamma, or what `generate` refuses.
    """
    if guide.gamma is None:
        raise ValueError("the value model does not say its gamma")
    if aims.judged_tokens < aims.max_tokens:
        raise ValueError(
            f"judged_tokens is {aims.judged_tokens}, allowed is max_tokens, {aims.max_tokens}, or more"
        )
    longest = max(map(len, prompts)) + aims.judged_tokens
    settings: dict[str, Any] = {
        "max_rows": max_rows,
        "num_slots": min(-(-longest // _SLOTS) * _SLOTS, config.max_length),
    }

    def draw(ways: Sequence[tuple[dict[str, Any], dict[str, Any] | None]], guide: ValueModel | None):
        """The samples of each way, prompt by prompt."""
        common = {"temperature": 1.0, "max_tokens": aims.max_tokens, "logprobs": 0}
        common["eos_token_ids"] = tuple(eos_token_ids)
        requests = [
            Request(prompt, {**common, "seed": aims.seed + index, **params}, guidance)
            for params, guidance in ways
            for index, prompt in enumerate(prompts)
        ]
        replies, timing = generate(config, weights, requests, guide=guide, **settings)
        say(f"{timing.num_tokens} tokens in {timing.decode:.0f} s, compiled in {timing.compile:.0f} s")
        groups = [replies[start : start + len(prompts)] for start in range(0, len(replies), len(prompts))]
        return [[reply.samples for reply in group] for group in groups]

    say(f"plain replies to {len(prompts)} prompts")
    fields = {"n": aims.num_plain, "top_k": aims.top_k, "max_tokens": aims.judged_tokens}
    (plain,) = draw([(fields, None)], None)
    rollouts = [
        Rollout(np.array(prompt, np.int32), np.array(sample.token_ids, np.int32), is_ended(sample))
        for prompt, samples in zip(prompts, plain)
        for sample in samples
        if sample.token_ids
    ]
    say("values of the plain replies")
    value = judge(guide, rollouts)

    names: list[tuple[str, float]] = [("centered_exp", scale) for scale in aims.scales if scale != 0]
    names += [("length_mul", factor) for factor in aims.factors if factor != 1]
    names += [(constraint, target) for constraint in ("eq_soft", "eq") for target in aims.targets]
    say(f"unfiltered replies, and guided ones in {len(names)} ways")
    fields = {"n": aims.num_guided}
    ((unfiltered,), drawn) = (
        draw([(fields, None)], None),
        draw([({**fields, "top_k": aims.top_k}, _guidance(way, at)) for way, at in names], guide),
    )

    plain = [[truncated(sample, aims.max_tokens) for sample in samples] for samples in plain]
    cases = [{"way": "plain", "at": None, **summary(_flat(plain))}]
    cases.append({"way": "unfiltered", "at": None, **summary(_flat(unfiltered))})
    for (way, at), samples in zip(names, drawn):
        target = int(at) if way in ("eq_soft", "eq") else None
        cases.append({"way": way, "at": at, **summary(_flat(samples), target)})
    for target in aims.targets:  # what plain replies make of a target, left alone and cut off there
        cases.append({"way": "plain", "at": target, **summary(_flat(plain), target)})
        cut = [truncated(sample, target) for sample in _flat(plain)]
        cases.append({"way": "truncated", "at": target, **summary(cut, target)})
    shown = [
        {"way": way, "at": at, "prompt_token_ids": prompt, "token_ids": replies[0].token_ids}
        for (way, at), samples in zip([("plain", None), *names], [plain, *drawn])
        for prompt, replies in list(zip(prompts, samples))[:_NUM_SHOWN]
    ]
    facts = {**dataclasses.asdict(aims), "num_prompts": len(prompts), "gamma": guide.gamma}
    facts |= {"num_layers": guide.config.num_layers, "device": jax.devices()[0].device_kind}
    facts |= {"dtype": str(jax.tree.leaves(guide.weights["trunk"])[0].dtype), "jax": jax.__version__}
    return {"facts": facts, "value": value, "cases": cases, "shown": shown}


def judge(guide: ValueModel, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Errors of the lengths that a value model predicts along replies, of those that ended.

    Returns:
      "replies", judged of "of"; what `value_report.report` says but its ranges; "ranges", of `by_position`.
    """
    longest = max(len(rollout.tokens) for rollout in rollouts)
    labels = Labels(float(guide.gamma or 0.0), longest)
    dtype = jax.tree.leaves(guide.weights["trunk"])[0].dtype
    logits = jax.jit(value_logits(guide.config, dtype))
    widths = widths_for([len(rollout.tokens) for rollout in rollouts], longest)
    found = predict(lambda tokens: logits(guide.weights, tokens), rollouts, labels, widths, _BATCH)
    figures = report(found, labels.gamma)
    counts = {"replies": sum(rollout.finished for rollout in rollouts), "of": len(rollouts)}
    if len(found.z) == 0:
        return {**counts, **figures, "ranges": [], "calibration": []}
    del figures["by_position"]
    return {
        **counts,
        **figures,
        "ranges": by_position(found, labels.gamma),
        "calibration": calibration(found, labels.gamma),
    }


def by_position(predictions: Predictions, gamma: float) -> list[dict[str, float]]:
    """|l_predicted - l| / l in ranges of positions in the reply, l the tokens that came, EOS left out.

    Returns:
      Of each range that has tokens: "from", "to", "tokens"; "mean" and "median" of the error; "constant", the
      mean error of the one best length of the range in the sense of the loss, ln(mean gamma^l) / ln gamma,
      which knows the position and nothing of the text.
    """
    inside = predictions.remaining > 0
    remaining, position = predictions.remaining[inside].astype(np.float64), predictions.position[inside]
    error = np.abs(predicted_length(predictions.z[inside], gamma) - remaining) / remaining
    ends = [*EDGES[1:], int(position.max(initial=0)) + 1]
    ranges = []
    for low, high in zip(EDGES, ends):
        chosen = (position >= low) & (position < high)
        if not chosen.any():
            continue
        constant = np.log(np.mean(gamma ** remaining[chosen])) / np.log(gamma)
        ranges.append(
            {
                "from": low,
                "to": high - 1,
                "tokens": int(chosen.sum()),
                "mean": float(error[chosen].mean()),
                "median": float(np.median(error[chosen])),
                "constant": float((np.abs(constant - remaining[chosen]) / remaining[chosen]).mean()),
            }
        )
    return ranges


def summary(samples: Sequence[Sample], target: int | None = None) -> dict[str, Any]:
    """Lengths and perplexity of replies with logprobs.

    Args:
      samples: at least one; their logprobs are the model's own at temperature 1.
      target: a length in tokens; None: there is none.

    Returns:
      "replies"; "mean", "std" and "quartiles" of the lengths; "ended", the share that the model ended itself;
      "perplexity", exp of minus the mean logprob of all tokens. With a target also "hits", the share of
      lengths within each of TOLERANCES of it, and "ended_hits", of those that the model ended itself too.
    """
    lengths = np.array([len(sample.token_ids) for sample in samples], np.float64)
    ended = np.array([is_ended(sample) for sample in samples])
    logprobs = [entry.logprob for sample in samples for entry in sample.logprobs]
    figures: dict[str, Any] = {
        "replies": len(samples),
        "mean": float(lengths.mean()),
        "std": float(lengths.std()),
        "quartiles": [float(x) for x in np.percentile(lengths, (25, 50, 75))],
        "ended": float(ended.mean()),
        "perplexity": float(np.exp(-np.mean(logprobs))),
    }
    if target is not None:
        hits = [np.abs(lengths - target) <= share * target for share in TOLERANCES]
        figures["hits"] = [float(hit.mean()) for hit in hits]
        figures["ended_hits"] = [float((hit & ended).mean()) for hit in hits]
    return figures


def truncated(sample: Sample, most: int) -> Sample:
    """A reply cut off after so many tokens; RUNNING where it would have gone on."""
    if len(sample.token_ids) <= most:
        return sample
    return Sample(sample.token_ids[:most], sample.logprobs[:most])


def is_ended(sample: Sample) -> bool:
    """Whether the model ended the reply itself."""
    return finish_reason(sample.status) == FINISHED


def _guidance(way: str, at: float) -> dict[str, Any] | None:
    if way in ("centered_exp", "length_mul"):
        return {"mode": way, "scale": at}
    return {"target_length": at, "constraint": way}


def _flat(samples: Sequence[Sequence[Sample]]) -> list[Sample]:
    return [sample for group in samples for sample in group]
