"""The text side of serving: lines of JSON to requests of an engine, the tokens they get to events.

Knows nothing of where lines come from and events go, nor of how models run.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxsample import STOP_EOS, STOP_SEQUENCE, STOP_TOKEN
from jaxsample.engine import Engine, Request
from jaxsample.streams import Sample, Stream, Tokens
from models.generation import token_logprobs
from models.json_fields import check_fields, logprob_fields, prepare, read_object
from models.stop_strings import StoppedText
from models.text import Text, TokenIds

Event = dict[str, Any]
_PROMPTS = ("prompt", "messages", "prompt_token_ids")


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of input, read but not acted on.

    Fields:
      number: its place in the input, from 1.
      id: any JSON value: the line's own, or that of the request to cancel; the number where it has none.
      fields: of a request, defaults added; None for other lines.
      error: what is wrong with the line; None for a good one. With neither, the line cancels.
    """

    number: int
    id: Any
    fields: dict[str, Any] | None = None
    error: str | None = None


class Service:
    """Requests that run in an engine, and the text they have so far.

    Events are dicts for JSON. Of a request with prompt_logprobs, before its text: {"id", "prompt_logprobs"},
    an entry a token, null for the first. Of a sample: {"id", "index", "text", "token_ids"}, with "logprobs"
    where asked for, as often as there is something new, then once {"id", "index", "finish_reason",
    "stop_reason", "num_prompt_tokens", "num_tokens"}, with "error" where the reason is that. Of a line that
    is refused: {"id", "line", "error"}.
    """

    def __init__(
        self,
        engine: Engine,
        text: Text | TokenIds,
        write: Callable[[Event], None],
        *,
        defaults: Mapping[str, Any] | None = None,
        raw: bool = False,
    ):
        """Begins without requests.

        Args:
          engine: used by nobody else while this one steps it.
          text: the model's text side.
          write: takes each event.
          defaults: fields that a request has unless it says otherwise.
          raw: whether prompts are encoded as they are, without the chat template.
        """
        self._engine, self._text, self._write = engine, text, write
        self._defaults, self._raw = dict(defaults or {}), raw
        self._running: dict[str, list[_Reply]] = {}  # by id as JSON: the samples that have not ended

    @property
    def is_idle(self) -> bool:
        """Whether every request has ended."""
        return not self._running

    def read(self, number: int, line: str | bytes) -> Line:
        """A line of input by its meaning: a request, {"cancel": id}, or neither."""
        chosen: Any = number
        try:
            fields = read_object(line)
            if "cancel" in fields:
                if len(fields) > 1:
                    raise ValueError(f"cancel stands with {', '.join(sorted(set(fields) - {'cancel'}))}")
                return Line(number, _checked_id(fields["cancel"]))
            chosen = _checked_id(fields.pop("id", number))
            fields = check_fields(fields, _PROMPTS, ("stop",))
            return Line(number, chosen, fields={**self._defaults, **fields})
        except ValueError as error:
            return Line(number, chosen, error=str(error))

    def handle(self, line: Line) -> bool:
        """Submit, cancel or refuse; False, with nothing done, for a request while the queue is full."""
        if line.fields is not None and self._engine.room == 0:
            return False
        try:
            if line.error is not None:
                raise ValueError(line.error)
            if line.fields is None:
                self._cancel(line.id)
            else:
                self._submit(line, line.fields)
        except (ValueError, TypeError) as error:
            self.refuse(line, str(error))
        return True

    def refuse(self, line: Line, error: str) -> None:
        """Write that nothing comes of a line."""
        self._write({"id": line.id, "line": line.number, "error": error})

    def step(self) -> bool:
        """Step the engine and write what is new; whether there is more to do."""
        more = self._engine.step()
        for key, replies in list(self._running.items()):
            going_on = [reply for reply in replies if not self._report(reply)]
            if going_on:
                self._running[key] = going_on
            else:
                del self._running[key]
        return more or not self.is_idle

    def cancel_all(self) -> None:
        """End all requests at the next step."""
        for replies in self._running.values():
            for reply in replies:
                self._engine.cancel(reply.sample)

    def _submit(self, line: Line, fields: dict[str, Any]) -> None:
        key = _key(line.id)
        if key in self._running:
            raise ValueError(f"id {key} belongs to a request that has not ended")
        stop_strings = _checked_stop(fields.get("stop", []))
        prompt, params = prepare(fields, self._text, raw=self._raw)
        stream = self._engine.submit(Request(prompt, params, guidance=fields.get("guidance")))
        self._running[key] = [
            _Reply(line.id, stream, sample, StoppedText(self._text, stop_strings))
            for sample in stream.samples
        ]

    def _cancel(self, chosen: Any) -> None:
        key = _key(chosen)
        if key not in self._running:
            raise ValueError(f"cancel: no request with id {key} is running")
        for reply in self._running[key]:
            self._engine.cancel(reply.sample)

    def _report(self, reply: "_Reply") -> bool:
        """Write the events of a sample; whether it has ended."""
        self._report_prompt(reply)
        text, tokens = reply.take_in()
        if text or len(tokens):
            event = {"id": reply.id, "index": reply.sample.index, "text": text}
            event["token_ids"] = tokens.token_ids.tolist()
            if tokens.logprobs is not None:
                event["logprobs"] = _logprobs(tokens, self._text)
            self._write(event)
        if reply.finish_reason is None:
            return False
        if not reply.sample.done:
            self._engine.cancel(reply.sample)
        event = {
            "id": reply.id,
            "index": reply.sample.index,
            "finish_reason": reply.finish_reason,
            "stop_reason": reply.stop_reason,
            "num_prompt_tokens": len(reply.stream.request.prompt),
            "num_tokens": reply.num_out,
        }
        if reply.sample.error is not None:
            event["error"] = reply.sample.error
        self._write(event)
        return True

    def _report_prompt(self, reply: "_Reply") -> None:
        """Write what is known of a request's prompt, once and whole, with its first sample."""
        told = reply.stream.prompt_logprobs if reply.owes_prompt else None
        if told is None or len(told) + 1 < len(reply.stream.request.prompt):
            return
        reply.owes_prompt = False
        self._write({"id": reply.id, "prompt_logprobs": [None, *_logprobs(told, self._text)]})


class _Reply:
    """One sample: its text up to a stop string, and the tokens that belong to the text given out.

    Attributes:
      num_out: tokens given out.
      finish_reason: of the sample, or "stop" at a stop string; None while it goes on.
      owes_prompt: whether the prompt's logprobs are still to be given out with it.
    """

    def __init__(self, chosen: Any, stream: Stream, sample: Sample, shown: StoppedText):
        self.id, self.stream, self.sample = chosen, stream, sample
        self.num_out = 0
        self.finish_reason: str | None = None
        self.owes_prompt = sample.index == 0 and stream.scores is not None
        self._shown = shown
        self._held: Tokens | None = None  # emitted, not given out

    @property
    def stop_reason(self) -> str | int | list[int] | None:
        """The stop string, stop id or stop sequence that ended the reply; None for other ends, EOS too."""
        if self._shown.stopped is not None:
            return self._shown.stopped
        token_ids = self.sample.tokens().token_ids.tolist()
        if self.sample.status == STOP_TOKEN:
            return token_ids[-1]
        if self.sample.status == STOP_SEQUENCE:
            sequences = self.stream.request.params["stop_sequences"]
            return next(list(x) for x in sequences if token_ids[-len(x) :] == list(x))
        return None

    def take_in(self) -> tuple[str, Tokens]:
        """What is new: text that is certain, and the tokens that are certain with it."""
        done = self.sample.done  # before the tokens, which are all there then
        new = self.sample.read()
        if len(new) == 0 and not done:
            return "", new
        # The token that ended the request has no text of its own: EOS, or a stop id.
        num_silent = int(self.sample.status in (STOP_EOS, STOP_TOKEN))
        piece = self._shown.push(new.token_ids[: len(new) - num_silent].tolist())
        if done:
            piece += self._shown.flush()
        num_certain = self._shown.num_certain
        if self._shown.stopped is not None:
            self.finish_reason = "stop"
        elif done:
            self.finish_reason = self.sample.finish_reason
            num_certain += num_silent
        held = new if self._held is None else _joined(self._held, new)
        certain, self._held = held[: num_certain - self.num_out], held[num_certain - self.num_out :]
        self.num_out = num_certain
        return piece, certain


def _joined(first: Tokens, second: Tokens) -> Tokens:
    pairs: Any = [(getattr(first, x.name), getattr(second, x.name)) for x in dataclasses.fields(Tokens)]
    fields: Any = [None if pair[0] is None else np.concatenate(pair) for pair in pairs]
    return Tokens(*fields)


def _logprobs(tokens: Tokens, text: Text | TokenIds) -> list[dict[str, Any]]:
    columns: Any = (tokens.token_ids, tokens.logprobs, tokens.ranks, tokens.top_ids, tokens.top_logprobs)
    return [
        logprob_fields(token_logprobs(token, logprob, rank, top_ids, top, len(top_ids)), text)
        for token, logprob, rank, top_ids, top in zip(*columns, strict=True)
    ]


def _checked_stop(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise ValueError(f"stop is {stop!r}, expected a text or a list of texts of at least one character")
    return stops


def _checked_id(value: Any) -> Any:
    _key(value)
    return value


def _key(value: Any) -> str:
    """An id as text, equal for equal JSON values."""
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except ValueError:
        raise ValueError("id holds NaN or Infinity, expected a JSON value") from None
