"""Prompts from files, and their rollouts to files as they come.

A prompt file is a text file with one prompt a line, or JSONL with "prompt", "messages" or
"prompt_token_ids"; other fields of a line are not read.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from jaxsample import RUNNING, finish_reason
from models.generation import Request
from models.json_fields import check_fields, read_object
from models.rollouts import FINISHED, TRUNCATED, rollout_line

_PROMPTS = ("prompt", "messages", "prompt_token_ids")


def read_prompts(path: pathlib.Path) -> list[dict[str, Any]]:
    """The prompts of a file, as fields of requests; a line that begins with a brace is JSON.

    Raises:
      ValueError: no prompts, or a line that is none.
    """
    wishes = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            wishes.append({"prompt": line})
            continue
        try:
            fields = read_object(line)
            wish = {name: fields[name] for name in _PROMPTS if name in fields}
            wishes.append(check_fields(wish, _PROMPTS))
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from None
    if not wishes:
        raise ValueError(f"no prompts in {path}")
    return wishes


class RolloutWriter:
    """Puts each rollout's tokens together and writes its line when it has ended.

    Attributes:
      counts: rollouts written, by finish reason.
      num_failed: those that ended otherwise, which are left out.
    """

    def __init__(self, requests: Sequence[Request], file: TextIO, ended: Callable[[], None]):
        """ended is called at each rollout's end."""
        self._requests, self._file, self._ended = requests, file, ended
        self._open: dict[tuple[int, int], list[int]] = {}
        self.counts = {FINISHED: 0, TRUNCATED: 0}
        self.num_failed = 0

    def add(self, request: int, sample: int, token_ids: list[int], status: int) -> None:
        """Takes a step's tokens of one sample."""
        tokens = self._open.setdefault((request, sample), [])
        tokens += token_ids
        if status == RUNNING:
            return
        reason = finish_reason(status)
        if reason in self.counts and tokens:
            self.counts[reason] += 1
            print(rollout_line(self._requests[request].prompt, tokens, reason), file=self._file)
        else:
            self.num_failed += 1
        del self._open[request, sample]
        self._ended()
