"""What an engine takes: one request checked and laid out, before anything is queued.

Knows nothing of slots or of the device. All that can be refused is refused here.
"""

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxsample.admission import make_params
from jaxsample.buckets import Buckets
from jaxsample.grammar import Matcher
from jaxsample.guidance_rows import Guidance, make_guidance
from jaxsample.params import Limits, SamplingParams, required_features
from jaxsample.prompt_scores import PromptScores
from jaxsample.staging import pack_rows


@dataclasses.dataclass(frozen=True)
class Request:
    """What a caller wants.

    Fields:
      prompt: token ids, 1 ... S.
      params: arguments of `make_params` by name; n samples are made.
      grammar: makes a Matcher, one for each sample; None for no grammar.
      guidance: arguments of `make_guidance` by name, in an engine with a value model; None for no guidance.
    """

    prompt: Sequence[int]
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    grammar: Callable[[], Matcher] | None = None
    guidance: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Accepted:
    """A request that can be served.

    Fields:
      request: the same, its prompt an array and its seed settled.
      prompt: i32[T].
      words: i32[n, W], parameters, stop rule and, with a value model, guidance of each sample, packed.
      level: index of the features it needs.
      num_logprobs: top logprobs asked for; -1 for none.
      scores: what is to come of the prompt's; None where none were asked for.
      ends: the ids that end it.
    """

    request: Request
    prompt: np.ndarray
    words: np.ndarray
    level: int
    num_logprobs: int
    scores: PromptScores | None
    ends: frozenset[int]


class Intake:
    """The capacities of one engine, which requests are held against."""

    def __init__(
        self,
        limits: Limits,
        buckets: Buckets,
        grammars: bool,
        num_pages: int,
        pages_needed: Callable[[int, int, int], int],
        gamma: float | None = None,
    ):
        """Keep them.

        Args:
          limits, buckets, grammars, num_pages: as `Engine`.
          pages_needed: (tokens of the prompt, samples, max_tokens) -> pages it cannot do without.
          gamma: the value model's; None: there is none.
        """
        self._limits, self._buckets, self._grammars, self._gamma = limits, buckets, grammars, gamma
        self._num_pages, self._pages_needed = num_pages, pages_needed

    def accept(self, request: Request) -> Accepted:
        """Check a request.

        Raises:
          ValueError: names the argument, the value and what is allowed. TypeError: no such parameter.
        """
        params = dict(request.params)
        scored, most_scored = params.get("prompt_logprobs"), self._buckets.prompt_logprobs
        if scored is not None and most_scored < 0:
            raise ValueError(
                f"prompt_logprobs is {scored!r}, allowed is None: the engine was made without "
                "(buckets.prompt_logprobs is -1)"
            )
        if isinstance(scored, int | np.integer) and not 0 <= scored <= most_scored:
            raise ValueError(
                f"prompt_logprobs is {scored}, allowed are integers in [0, {most_scored}] (buckets)"
            )
        if request.grammar is not None and not self._grammars:
            raise ValueError("grammar is given, allowed is None: the engine was made with grammars=False")
        if params.get("seed") is None:
            params["seed"] = secrets.randbits(64)
        limits, most = self._limits, self._buckets.features[-1]
        prompt = _checked_prompt(request.prompt, limits)
        rows, stop = make_params(limits, prompt_length=len(prompt), **params)
        guidance = self._guidance(rows, request.guidance)
        needed = required_features(
            rows,
            stop,
            limits=limits,
            num_candidates=most.num_candidates,
            filter_order=most.filter_order,
            logprobs_mode=most.logprobs_mode,
            grammar=request.grammar is not None,
        )
        # A program computes as many top logprobs as any row wants, at most what it was built for.
        num_logprobs = int(rows.num_logprobs[0])
        level = self._buckets.level_of(dataclasses.replace(needed, num_logprobs=num_logprobs))
        num_samples, num_slots = len(stop.max_tokens), self._buckets.rows[-1]
        if num_samples > num_slots:
            raise ValueError(f"n is {num_samples}, allowed is at most {num_slots}, the engine's slots")
        num_pages = self._pages_needed(len(prompt), num_samples, int(stop.max_tokens[0]))
        if num_pages > self._num_pages:
            raise ValueError(
                f"prompt has {len(prompt)} tokens, max_tokens is {params.get('max_tokens')}, n is "
                f"{num_samples}: they need {num_pages} pages, allowed is at most {self._num_pages}"
            )
        return Accepted(
            request=dataclasses.replace(request, prompt=prompt, params=params),
            prompt=prompt,
            words=pack_rows((rows, stop, guidance)),
            level=level,
            num_logprobs=num_logprobs,
            scores=None if scored is None else PromptScores(prompt, int(scored), most_scored),
            ends=_ends(params),
        )

    def _guidance(self, rows: SamplingParams, words: Mapping[str, Any] | None) -> Guidance | tuple[()]:
        if words is not None and not isinstance(words, Mapping):
            raise ValueError(
                f"guidance is {words!r}, allowed are None and arguments of `make_guidance` by name"
            )
        if self._gamma is not None:
            return make_guidance(self._limits, rows, **({"gamma": self._gamma, **words} if words else {}))
        if words:
            raise ValueError(
                f"guidance is {words!r}, allowed is None: the engine was made without a value model"
            )
        return ()


def _ends(params: Mapping[str, Any]) -> frozenset[int]:
    eos = () if params.get("ignore_eos") else params.get("eos_token_ids", ())
    return frozenset((*eos, *params.get("stop_token_ids", ())))


def _checked_prompt(prompt: Sequence[int], limits: Limits) -> np.ndarray:
    tokens = np.asarray(prompt)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not 1 <= tokens.size <= limits.max_length:
        raise ValueError(
            f"prompt has shape {tokens.shape} and dtype {tokens.dtype}, allowed are "
            f"1 ... {limits.max_length} token ids"
        )
    outside = (tokens < 0) | (tokens >= limits.vocab_size)
    if outside.any():
        worst = tokens[outside][0]
        raise ValueError(f"prompt holds {worst}, allowed are token ids in [0, {limits.vocab_size})")
    return tokens.astype(np.int32)
