"""How far a long job is, on standard error: a bar where rich is installed, else a line every few seconds."""

import importlib
import sys
import time
from typing import Any

_SECONDS = 10.0  # between two lines, where there is no bar


class Progress:
    """A context in which a job of known length tells how far it is."""

    def __init__(self, total: int):
        self._total, self._done, self._words = total, 0, ""
        self._bar: Any = None
        self._shown = time.monotonic()

    def __enter__(self) -> "Progress":
        try:
            console, progress = (
                importlib.import_module("rich.console"),
                importlib.import_module("rich.progress"),
            )
        except ImportError:
            return self
        columns = (
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[words]}"),
        )
        self._bar = progress.Progress(*columns, console=console.Console(stderr=True))
        self._bar.add_task("", total=self._total, words="")
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)
        else:
            self._print()

    def update(self, done: int, words: str | None = None) -> None:
        """Tells how much is done of it all, and what to say beside it; None: what was said before."""
        self._done, self._words = done, self._words if words is None else words
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, words=self._words)
        elif time.monotonic() - self._shown > _SECONDS:
            self._print()

    def advance(self) -> None:
        """One more is done."""
        self.update(self._done + 1)

    def _print(self) -> None:
        self._shown = time.monotonic()
        print(f"{self._done}/{self._total} {self._words}".rstrip(), file=sys.stderr, flush=True)
