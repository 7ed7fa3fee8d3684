"""A run of training in a folder of its own: settings, log and checkpoints, from which it goes on.

    training.json   what the run was begun with; it goes on with the same only
    log.jsonl       a line each few steps: {"step", "loss", "value_error", "tokens", ...}
    checkpoints/    the newest two, through Orbax, by step

A run that was stopped gives the weights of one that was not, bit for bit on the same device: the state is
saved whole, and batches depend on the step alone. Knows nothing of what is trained.
"""

import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from models.checkpoints import write_json
from models.load_safetensors import read_json

SETTINGS, LOG, CHECKPOINTS = "training.json", "log.jsonl", "checkpoints"
_NUM_KEPT = 2


def claim(folder: pathlib.Path, settings: Mapping[str, Any]) -> None:
    """Makes a folder that of a run with these settings, or sees that it is.

    Args:
      folder: of such a run, empty, or not there yet.
      settings: what shapes the run's result, as JSON has it.

    Raises:
      ValueError: it holds something else, or a run with other settings, which are named.
    """
    path = folder / SETTINGS
    if path.is_file():
        begun = read_json(path)
        for name in sorted(set(begun) | set(settings)):
            if begun.get(name) != settings.get(name):
                raise ValueError(
                    f"{folder}: begun with {name} {begun.get(name)!r}, not {settings.get(name)!r}"
                )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: exists already and is no folder of training")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, dict(settings))


def fit(
    folder: pathlib.Path,
    state: Any,
    train_step: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]],
    batches: Callable[[int], Iterator[Any]],
    *,
    steps: int,
    save_every: int,
    log_every: int = 10,
    judge: Callable[[Any], dict[str, float]] = lambda state: {},
    show: Callable[[int, dict[str, Any]], None] = lambda step, entry: None,
) -> Any:
    """Trains from the folder's newest checkpoint, or from the state given, to the last step.

    Args:
      folder: of `claim`.
      state: to begin with, and what a checkpoint is restored as; given up to train_step.
      train_step: (state, batch) -> (state, metrics f32[] by name).
      batches: step -> the batches from that step on, the first step being 0.
      steps: all of them, those done before included.
      save_every: steps between checkpoints; the last step is saved too.
      log_every: steps between lines of the log: means since the line before, of "tokens" the sum.
      judge: state -> more fields of the line, called where a checkpoint is saved.
      show: called with the number of steps done, and with the line if one was written, else {}.

    Returns:
      The state after the last step.

    Raises:
      ValueError: a loss that is not finite, or a checkpoint that cannot be restored.
    """
    for name, number in (("steps", steps), ("save_every", save_every), ("log_every", log_every)):
        if number < 1:
            raise ValueError(f"{name} is {number}, allowed are integers from 1")
    keep: Any = ocp.training.preservation_policies.LatestN(_NUM_KEPT)
    directory = str((folder / CHECKPOINTS).absolute())
    with ocp.training.Checkpointer(
        directory, preservation_policy=keep, cleanup_tmp_directories=True
    ) as checkpointer:
        # Placed like what is restored, so that one compiled step serves both.
        done, state = 0, jax.device_put(state, jax.devices()[0])
        if checkpointer.latest is not None:
            done = checkpointer.latest.step
            state = _restore(checkpointer, done, state)
        _drop_lines_after(folder / LOG, done)
        show(done, {})
        waiting: list[dict[str, jax.Array]] = []
        with (folder / LOG).open("a", encoding="utf-8") as log:
            # No batch is made behind the last step: zip looks at the range first.
            for number, batch in zip(range(done + 1, steps + 1), batches(done)):
                state, metrics = train_step(state, batch)
                waiting.append(metrics)
                is_saved = number % save_every == 0 or number == steps
                entry: dict[str, Any] = {}
                if is_saved or number % log_every == 0:
                    entry = {"step": number, **_means(jax.device_get(waiting), number)}
                    waiting = []
                    entry |= judge(state) if is_saved else {}
                    print(json.dumps(entry), file=log, flush=True)
                if is_saved:
                    checkpointer.save(number, state)
                show(number, entry)
    return state


def read_log(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a run's log; none where nothing was logged yet."""
    path = folder / LOG
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    )


def _restore(checkpointer: ocp.training.Checkpointer, step: int, state: Any) -> Any:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), state)
    try:
        return checkpointer.load(step, wanted)
    except Exception as error:  # Orbax and its storage layer raise many kinds
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{checkpointer.directory}: step {step} cannot be restored ({reason})") from error


def _drop_lines_after(path: pathlib.Path, step: int) -> None:
    """What was logged behind the checkpoint will be logged again; a line cut off in writing goes too."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            break
    path.write_text("".join(kept), encoding="utf-8")


def _means(metrics: list[dict[str, Any]], step: int) -> dict[str, Any]:
    means: dict[str, Any] = {name: float(np.mean([x[name] for x in metrics])) for name in metrics[0]}
    if not math.isfinite(means["loss"]):
        raise ValueError(f"the loss is {means['loss']} near step {step}: try a smaller learning rate")
    if "tokens" in means:
        means["tokens"] = int(sum(x["tokens"] for x in metrics))
    return means
