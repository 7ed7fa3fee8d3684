"""How well a draft head foretells its base on rollouts that it was not trained on: numbers and a picture.

Knows nothing of training.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from models.draft_batches import DraftBatch, make_draft_batch
from models.rollouts import Rollout


def figures_of(
    judge: Callable[[DraftBatch], dict[str, Any]],
    rollouts: Sequence[Rollout],
    widths: Sequence[int],
    batch_size: int,
) -> dict[str, Any]:
    """The figures of held-out rollouts, the head having seen the prompt.

    Args:
      judge: of `draft_training.make_judge`, given a batch.
      rollouts: of `learnable`.
      widths: of batches, rising; longer rollouts are cut off at the last.
      batch_size: B.

    Returns:
      "positions", in pass 1; by proposal of a chain "agreement", the share of places where its first token is
      the base's on the rollout's own text, and "overlap", the mean of sum min(p, q): the chance that
      rejection keeps a proposal; "chain_tokens", 1 + the shares of chains all of whose first tokens agree:
      tokens a step at temperature 0 where the rollouts are greedy.
    """
    sums: dict[str, np.ndarray] = {}
    ordered = sorted(rollouts, key=lambda rollout: len(rollout.tokens))
    for at in range(0, len(ordered), batch_size):
        chosen = ordered[at : at + batch_size]
        longest = min(len(chosen[-1].tokens), widths[-1])
        width = next(width for width in widths if width >= longest)
        for name, values in judge(make_draft_batch(chosen, width, batch_size)).items():
            sums[name] = sums.get(name, 0) + np.asarray(values, np.float64)
    if not sums:
        return {"positions": 0, "agreement": [], "overlap": [], "chain_tokens": None}
    positions = np.maximum(sums["positions"], 1)
    return {
        "positions": int(sums["positions"][0]),
        "agreement": (sums["same"] / positions).tolist(),
        "overlap": (sums["overlap"] / positions).tolist(),
        "chain_tokens": float(1 + (sums["chain"] / positions).sum()),
    }


def draw_loss(folder: pathlib.Path, log: Sequence[dict[str, Any]]) -> bool:
    """Draws loss.png from a run's log; whether matplotlib is there to do it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    steps = [entry["step"] for entry in log]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, [entry["loss"] for entry in log], label="loss", color="C0")
    axes.set(xlabel="step", ylabel="loss, nats", yscale="log")
    shares = axes.twinx()
    for number in range(1, 1 + sum(name.startswith("agreement_") for name in log[0]) if log else 1):
        values = [entry[f"agreement_{number}"] for entry in log]
        shares.plot(
            steps, values, label=f"first tokens, proposal {number}", color=f"C{number}", linewidth=0.8
        )
    shares.set(ylabel="share of first tokens foretold", ylim=(0, 1))
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(folder / "loss.png", dpi=120)
    return True
