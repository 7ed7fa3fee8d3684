"""Lines of a file, read a few ahead by a thread, so that whoever takes them never waits for the input.

Knows nothing of what lines mean.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

_PATIENCE = 0.1  # seconds


class LineReader(threading.Thread):
    """Lines that are not blank, with their numbers from 1.

    Attributes:
      ended: whether the input has ended and all lines were taken.
    """

    def __init__(self, source: BinaryIO, ahead: int = 2):
        """Reads begin with the `with` statement.

        Args:
          source: closed by the thread at its end. A thread that still waits in it does not keep the
            interpreter from ending.
          ahead: lines that may wait to be taken, at least 1.
        """
        super().__init__(name="lines", daemon=True)
        self._source = source
        self._lines: queue.Queue[tuple[int, bytes] | OSError | None] = queue.Queue(ahead)
        self._left = threading.Event()
        self.ended = False

    def __enter__(self) -> "LineReader":
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._left.set()

    def take(self, patience: float = 0) -> tuple[int, bytes] | None:
        """The next line; None if there is none after so many seconds, or none any more.

        Raises:
          OSError: what reading met.
        """
        if self.ended:
            time.sleep(patience)
            return None
        try:
            line = self._lines.get(timeout=patience) if patience else self._lines.get_nowait()
        except queue.Empty:
            return None
        if isinstance(line, OSError):
            raise line
        self.ended = line is None
        return line

    def rest(self) -> Iterator[tuple[int, bytes]]:
        """The lines that were read already; no more are read."""
        self._left.set()
        while (line := self.take()) is not None:
            yield line

    def run(self) -> None:
        """The thread's: read, and wait wherever lines wait to be taken."""
        with self._source:
            try:
                for number, line in enumerate(self._source, start=1):
                    if line.strip() and not self._put((number, line)):
                        return
                self._put(None)
            except OSError as error:
                self._put(error)

    def _put(self, line: tuple[int, bytes] | OSError | None) -> bool:
        while not self._left.is_set():
            with contextlib.suppress(queue.Full):
                self._lines.put(line, timeout=_PATIENCE)
                return True
        return False
