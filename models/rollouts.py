"""Rollouts: replies of a model as token ids and how they ended, from JSONL and to JSONL.

A line is {"prompt_token_ids": [5, 6], "token_ids": [7, 8, 2], "finish_reason": "stop"}; other fields are not
read. Knows nothing of values, nor of what made the replies.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from models.json_fields import read_object

FINISHED, TRUNCATED = "stop", "length"  # finish reasons


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One prompt and one reply to it.

    Fields:
      prompt: i32[P], at least one token.
      output: i32[L], at least one token; the last one is EOS (or a stop id) where the reply is finished.
      finished: whether the model ended the reply; else a limit cut it off, and its length is not known.
    """

    prompt: np.ndarray
    output: np.ndarray
    finished: bool

    @property
    def tokens(self) -> np.ndarray:
        """i32[P + L], prompt and output."""
        return np.concatenate([self.prompt, self.output])


def rollout_line(prompt: Sequence[int], output: Sequence[int], finish_reason: str) -> str:
    """One rollout as a line of JSON, without the line's end."""
    fields = {
        "prompt_token_ids": list(prompt),
        "token_ids": list(output),
        "finish_reason": finish_reason,
    }
    return json.dumps(fields)


def read_rollouts(paths: Iterable[str | pathlib.Path], vocab_size: int) -> list[Rollout]:
    """The rollouts of JSONL files, in their order.

    Args:
      paths: the files; empty lines are passed over.
      vocab_size: token ids lie below it.

    Raises:
      ValueError: no rollouts, or a line that is none: which, and why.
      OSError: a file that cannot be read.
    """
    rollouts = []
    for path in paths:
        with pathlib.Path(path).open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    rollouts.append(_rollout(read_object(line), vocab_size))
                except ValueError as error:
                    raise ValueError(f"{path} line {number}: {error}") from None
    if not rollouts:
        raise ValueError(f"no rollouts in {', '.join(map(str, paths))}")
    return rollouts


def split_by_prompt(
    rollouts: Sequence[Rollout], fraction: float, seed: int
) -> tuple[list[Rollout], list[Rollout]]:
    """Rollouts to train on and rollouts held out; those of one prompt are on the same side.

    Args:
      rollouts: all of them.
      fraction: of the prompts that are held out, [0, 1); rounded up, but one prompt at least stays.
      seed: chooses the prompts.

    Raises:
      ValueError: a fraction outside [0, 1).
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"held-out fraction is {fraction}, allowed is [0, 1)")
    prompts = list(dict.fromkeys(rollout.prompt.tobytes() for rollout in rollouts))
    order = np.random.default_rng(seed).permutation(len(prompts))
    num_out = min(int(np.ceil(fraction * len(prompts))), len(prompts) - 1)
    chosen = {prompts[index] for index in order[:num_out]}
    is_out = [rollout.prompt.tobytes() in chosen for rollout in rollouts]
    kept = [rollout for rollout, out in zip(rollouts, is_out) if not out]
    return kept, [rollout for rollout, out in zip(rollouts, is_out) if out]


def _rollout(fields: dict[str, Any], vocab_size: int) -> Rollout:
    prompt, output = (_ids(fields, name, vocab_size) for name in ("prompt_token_ids", "token_ids"))
    reason = fields.get("finish_reason")
    if reason not in (FINISHED, TRUNCATED):
        raise ValueError(f"finish_reason is {reason!r}, allowed are {FINISHED!r} and {TRUNCATED!r}")
    return Rollout(prompt, output, reason == FINISHED)


def _ids(fields: dict[str, Any], name: str, vocab_size: int) -> np.ndarray:
    ids = fields.get(name)
    fits = lambda token: type(token) is int and 0 <= token < vocab_size
    if not isinstance(ids, list) or not ids or not all(map(fits, ids)):
        raise ValueError(
            f"{name} is {str(ids)[:60]}, expected token ids in 0 ... {vocab_size - 1}, at least one"
        )
    return np.array(ids, np.int32)
