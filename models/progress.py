"""How far a long job is: a bar on standard error."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """A context in which a job of known length tells how far it is."""

    def __init__(self, total: int):
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[words]}"),
        )
        self._bar = Bar(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("", total=total, words="")

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def update(self, done: int, words: str | None = None) -> None:
        """Tells how much is done of it all, and what to say beside it; None: what was said before."""
        fields: dict[str, Any] = {} if words is None else {"words": words}
        self._bar.update(self._task, completed=done, **fields)

    def advance(self) -> None:
        """One more is done."""
        self._bar.advance(self._task)
