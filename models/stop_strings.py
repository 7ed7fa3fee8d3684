"""Ends a growing reply at stop strings, looked for in its text however tokens divide it.

Knows nothing of models and batches, nor of what else ends a reply.
"""

import collections
from collections.abc import Iterable, Sequence

from models.text import Detokenizer, Text, TokenIds


class StoppedText:
    """The text of one reply up to a stop string, piece by piece; nothing given out is ever taken back.

    The stop string whose last character comes first ends the reply, as if text came one character at a time;
    of several that end at one character, the one listed first (vLLM's rule). Of two that begin at one place
    it is therefore the shorter. Nothing depends on how many tokens a push has. Stop strings are compared code
    point by code point with the text as it is shown: special tokens have none, they are stopped at by id.

    The text may end inside a token. Kept are the fewest leading tokens whose text begins with the kept text:
    a token with a character of kept text stays whole, all after it are dropped, also those without text.

    Attributes:
      stopped: the stop string that ended the reply, else None.
      num_kept: how many of the tokens pushed belong to the reply, to cut ids and logprobs by; without a stop
        string all of them.
    """

    def __init__(self, text: Text | TokenIds, stop_strings: Sequence[str], *, include_stop: bool = False):
        """Begins an empty reply.

        Args:
          text: the model's text side.
          stop_strings: texts of at least one character each; none: the reply ends by `flush` only.
          include_stop: whether the text ends just after the stop string rather than just before it.

        Raises:
          ValueError: stop_strings is no list or tuple of such texts.
        """
        self._text = text
        self._stop_strings = _reachable(_checked(stop_strings))
        self._include_stop = include_stop
        self._stream = Detokenizer(text)
        self._ended = False
        self._waiting: list[int] = []  # ids without text yet
        self._open = ""  # the end of the text, as far as a stop string may begin there
        self._recent = collections.deque[tuple[list[int], str]]()  # pieces that reach into it, with their ids
        self.stopped: str | None = None
        self.num_kept = 0

    @property
    def num_certain(self) -> int:
        """How many of the tokens pushed stay whatever comes: those that the text given out needs."""
        if self._ended or self.stopped is not None:
            return self.num_kept
        num_certain = self.num_kept - len(self._waiting)
        num_held = 0 if self._include_stop else len(self._open)
        for ids, piece in reversed(self._recent):
            if num_held < len(piece):
                return num_certain - len(ids) + self._num_needed(ids, piece[: len(piece) - num_held])
            num_certain -= len(ids)
            num_held -= len(piece)
        return num_certain

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that becomes certain with more tokens; tokens after a stop string are ignored.

        Held back are what `Detokenizer` holds back (an incomplete character) and, unless include_stop, the
        longest end of the text that begins a stop string.

        Raises:
          ValueError: the reply was flushed, and not at a stop string.
        """
        if self._ended and self.stopped is None:
            raise ValueError("push after flush, allowed is push before it: the reply has ended")
        pieces = []
        for token in token_ids:
            if self.stopped is not None:
                break
            self._waiting.append(token)
            self.num_kept += 1
            pieces.append(self._add(self._stream.push(token)))
        return "".join(pieces)

    def flush(self) -> str:
        """The text held back, at the end of the reply; it may hold a stop string too. "" from then on."""
        if self._ended or self.stopped is not None:
            return ""
        self._ended = True
        piece = self._add(self._stream.flush())
        return piece if self._include_stop or self.stopped is not None else piece + self._open

    def _add(self, piece: str) -> str:
        """The text to give out now that the reply goes on with a piece."""
        if not piece:
            return ""
        window = self._open + piece
        num_out = len(self._open) if self._include_stop else 0
        self._recent.append((self._waiting, piece))
        self._waiting = []
        found = _first_stop(window, self._stop_strings)
        if found is None:
            self._open = _open_end(window, self._stop_strings)
            self._forget()
            return window[num_out:] if self._include_stop else window[: len(window) - len(self._open)]
        self.stopped, end = found
        cut = end if self._include_stop else end - len(self.stopped)
        self._drop(len(window) - cut)
        return window[num_out:cut]

    def _forget(self) -> None:
        """Lets go of the pieces in front of those that reach into the open end."""
        reach = sum(len(piece) for _, piece in self._recent)
        while self._recent and reach - len(self._recent[0][1]) >= len(self._open):
            reach -= len(self._recent.popleft()[1])

    def _drop(self, num_chars: int) -> None:
        """Takes the last characters off, and with them all tokens that the text before does not need."""
        while self._recent and num_chars >= len(self._recent[-1][1]):
            ids, piece = self._recent.pop()
            self.num_kept -= len(ids)
            num_chars -= len(piece)
        if not self._recent:
            return
        ids, piece = self._recent[-1]
        self.num_kept -= len(ids) - self._num_needed(ids, piece[: len(piece) - num_chars])

    def _num_needed(self, ids: list[int], kept: str) -> int:
        """The fewest leading ids of a piece whose text begins with what is kept of it."""
        # Several ids where a character was incomplete, or some have no text.
        needed = (n for n in range(1, len(ids)) if self._text.decode(ids[:n]).startswith(kept))
        return next(needed, len(ids))


def _checked(stop_strings: Sequence[str]) -> list[str]:
    allowed = "texts of at least one character"
    if not isinstance(stop_strings, list | tuple):
        raise ValueError(f"stop_strings is {stop_strings!r}, allowed are lists and tuples of {allowed}")
    for stop in stop_strings:
        if not isinstance(stop, str) or not stop:
            raise ValueError(f"stop_strings holds {stop!r}, allowed are {allowed}")
    return list(stop_strings)


def _reachable(stop_strings: list[str]) -> list[str]:
    """Without those that never end a reply, since another is always found first; no text is held for them."""
    return [
        stop
        for index, stop in enumerate(stop_strings)
        if not any(other in stop[:-1] for other in stop_strings)
        and not any(stop.endswith(other) for other in stop_strings[:index])
    ]


def _first_stop(window: str, stop_strings: Sequence[str]) -> tuple[str, int] | None:
    """The stop string that ends first in a text and where it ends; of several, the first in the list."""
    ends = [(window.find(stop) + len(stop), stop) for stop in stop_strings if stop in window]
    if not ends:
        return None
    end, stop = min(ends, key=lambda pair: pair[0])
    return stop, end


def _open_end(window: str, stop_strings: Sequence[str]) -> str:
    """The longest end of a text that begins a stop string; none of them is in the text."""
    longest = max((len(stop) for stop in stop_strings), default=1) - 1
    for begin in range(max(len(window) - longest, 0), len(window)):
        end = window[begin:]
        if any(stop.startswith(end) for stop in stop_strings):
            return end
    return ""
