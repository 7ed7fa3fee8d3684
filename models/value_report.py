"""How good a value model's predictions are on rollouts that it was not trained on: numbers and pictures.

Only rollouts that the model ended itself are judged, since of others no length is known, and none over the
cap, since those are trained to have none. Knows nothing of training.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from models.rollouts import Rollout
from models.value_batches import Labels, end_of, make_batch
from models.value_training import predicted_length

_NUM_BINS = 12


@dataclasses.dataclass(frozen=True)
class Predictions:
    """T tokens, the last prompt token and those of the output, rollout by rollout.

    Fields:
      z: f32[T], the value's logit.
      position: i32[T], output tokens so far; 0 at the last prompt token.
      remaining: i32[T], tokens that came after; 0 at EOS.
      prompt: i32[T], which prompt, numbered from 0.
    """

    z: np.ndarray
    position: np.ndarray
    remaining: np.ndarray
    prompt: np.ndarray


def predict(
    logits: Callable[[Any], Any],
    rollouts: Sequence[Rollout],
    labels: Labels,
    widths: Sequence[int],
    batch_size: int,
) -> Predictions:
    """What a value model says of the finished rollouts among these.

    Args:
      logits: tokens i32[B, N] -> z f32[B, N].
      rollouts: passed over are unfinished ones, those over the cap, those whose prompt exceeds the window.
      labels: of which window and cap count: what lies behind the window is not looked at.
      widths: N of batches, rising, as for `models.value_batches`; the last one holds all.
      batch_size: B.
    """
    number_of: dict[bytes, int] = {}
    rows: list[list[np.ndarray]] = []
    is_capped = lambda rollout: end_of(rollout, labels) == 0.0
    judged = [x for x in rollouts if x.finished and len(x.prompt) <= labels.window and not is_capped(x)]
    judged.sort(key=lambda rollout: len(rollout.tokens))
    for start in range(0, len(judged), batch_size):
        chosen = judged[start : start + batch_size]
        longest = min(len(chosen[-1].tokens), labels.window)
        width = next(width for width in widths if width >= longest)
        z = np.asarray(logits(make_batch(chosen, labels, width, batch_size).tokens))
        for rollout, line in zip(chosen, z):
            first, length = len(rollout.prompt) - 1, min(len(rollout.tokens), labels.window)
            position = np.arange(length - first)
            number = number_of.setdefault(rollout.prompt.tobytes(), len(number_of))
            remaining = len(rollout.output) - position
            rows.append([line[first:length], position, remaining, np.full(len(position), number)])
    if not rows:
        return Predictions(np.zeros(0, np.float32), *np.zeros((3, 0), np.int32))
    columns = [np.concatenate(column) for column in zip(*rows)]
    return Predictions(columns[0].astype(np.float32), *(x.astype(np.int32) for x in columns[1:]))


def report(predictions: Predictions, gamma: float) -> dict[str, Any]:
    """The figures of the predictions, for JSON.

    Lengths are compared with the number of tokens that came, EOS left out; l is what the value says,
    ln(1 - v) / ln gamma. As v is a mean of 1 - gamma^l, that is below the mean of l where lengths vary.

    Returns:
      "tokens"; "value_error", mean |v - (1 - gamma^l)|; "explained", 1 - mean squared error / variance of
      1 - gamma^l, 0 being what a constant reaches; "relative_error", mean |l_predicted - l| / l;
      "by_position", the same in ranges of output positions, the last prompt token first; "prompts", of
      `prompt_error`; "calibration", of `calibration`. Without predictions: {"tokens": 0}.
    """
    if len(predictions.z) == 0:
        return {"tokens": 0}
    nearness, value = gamma ** predictions.remaining.astype(np.float64), _value(predictions.z)
    difference = value - (1 - nearness)
    variance = float(np.var(nearness))
    inside = predictions.remaining > 0
    length, remaining = predicted_length(predictions.z, gamma)[inside], predictions.remaining[inside]
    relative, position = np.abs(length - remaining) / remaining, predictions.position[inside]
    edges = [0, *(2**power for power in range(32) if 2**power <= max(position, default=0))]
    ranges = [(low, high) for low, high in zip(edges, [*edges[1:], int(max(position, default=0)) + 1])]
    chosen = [(low, high, relative[(position >= low) & (position < high)]) for low, high in ranges]
    return {
        "tokens": len(predictions.z),
        "value_error": float(np.mean(np.abs(difference))),
        "explained": 1 - float(np.mean(difference**2)) / variance if variance > 0 else None,
        "relative_error": float(np.mean(relative)) if len(relative) else None,
        "by_position": [
            {"from": low, "to": high - 1, "tokens": len(errors), "relative_error": float(np.mean(errors))}
            for low, high, errors in chosen
            if len(errors)
        ],
        "prompts": prompt_error(predictions, gamma),
        "calibration": calibration(predictions, gamma),
    }


def prompt_error(predictions: Predictions, gamma: float) -> dict[str, Any]:
    """Error of the length predicted at the end of prompts.

    It is compared with ln(mean gamma^L_i) / ln gamma, L_i being the lengths of the prompt's rollouts. Only
    prompts of several rollouts count; the more there are, the less of the error is the reference's own.

    Returns:
      "prompts", "rollouts" (a prompt, on average) and "relative_error"; the latter None without such prompts.
    """
    at_prompt = predictions.position == 0
    prompt, remaining = predictions.prompt[at_prompt], predictions.remaining[at_prompt]
    _, first, inverse, counts = np.unique(prompt, return_index=True, return_inverse=True, return_counts=True)
    several = counts > 1
    if not several.any():
        return {"prompts": 0, "rollouts": 0.0, "relative_error": None}
    mean = np.bincount(inverse, gamma ** remaining.astype(np.float64)) / counts
    reference = np.log(mean) / np.log(gamma)
    length = predicted_length(predictions.z[at_prompt][first], gamma)
    relative = (np.abs(length - reference) / reference)[several]
    return {
        "prompts": int(several.sum()),
        "rollouts": float(counts[several].mean()),
        "relative_error": float(relative.mean()),
    }


def calibration(predictions: Predictions, gamma: float) -> list[dict[str, float]]:
    """Predicted and realised lengths, in bins of equally many tokens by prediction.

    Returns:
      Of each bin: "tokens"; "predicted", the length of the mean value; "realised", ln(mean gamma^l) / ln
      gamma, equal to it where the model is calibrated; "mean", of l, above that where lengths vary.
    """
    bins = np.array_split(np.argsort(predictions.z, kind="stable"), min(_NUM_BINS, len(predictions.z)))
    of_mean = lambda nearness: float(np.log(np.mean(nearness)) / np.log(gamma))
    return [
        {
            "tokens": len(rows),
            "predicted": of_mean(1 - _value(predictions.z[rows])),
            "realised": of_mean(gamma ** predictions.remaining[rows].astype(np.float64)),
            "mean": float(predictions.remaining[rows].mean()),
        }
        for rows in bins
    ]


def draw_plots(folder: pathlib.Path, log: Sequence[dict[str, Any]], figures: dict[str, Any]) -> bool:
    """Draws loss.png, and calibration.png where there is a calibration; False without matplotlib.

    Args:
      folder: where they go.
      log: the lines of the run.
      figures: of `report`.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, label in (("loss", "training"), ("held_out_loss", "held out")):
        lines = [line for line in log if name in line]
        if lines:
            axes.plot([line["step"] for line in lines], [line[name] for line in lines], label=label)
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=120)
    pyplot.close(figure)
    bins = figures.get("calibration")
    if bins:
        figure, axes = pyplot.subplots(figsize=(5, 5), layout="constrained")
        predicted = [x["predicted"] for x in bins]
        axes.plot(predicted, [x["realised"] for x in bins], "o-", label="of the mean value")
        axes.plot(predicted, [x["mean"] for x in bins], "x", label="mean length")
        axes.axline((0, 0), slope=1, color="grey", linewidth=0.8)
        axes.set(xlabel="predicted remaining tokens", ylabel="realised remaining tokens")
        axes.legend()
        figure.savefig(folder / "calibration.png", dpi=120)
        pyplot.close(figure)
    return True


def _value(z: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -z.astype(np.float64)))
