"""What drafts are worth on prompts new to the head: tokens a step, tokens a second, and that text stays.

All is told in figures for JSON. Knows nothing of files or of text.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample.requests import RUNNING
from models.decoder import DecoderConfig, Weights
from models.draft_head import DraftHead, join_base, narrow_logits
from models.draft_training import hidden_states
from models.generation import Request, generate
from models.speculation import Speculation

_SLOTS = 128  # a cache has a multiple of so many
PLAIN, NGRAM, HEAD = DRAFTERS = ("plain", "ngram", "head")
CHAIN_VERIFIERS = ("match", "rejection", "block")


@dataclasses.dataclass(frozen=True)
class DraftAims:
    """What is measured.

    Fields:
      num_drafts: K, proposals a step.
      max_tokens: where every reply is cut off.
      temperatures: of the replies.
      rows: the batch at which tokens a step are counted, and a clock is read.
      alone: prompts that are replied to one by one too, for the clock at B = 1; 0: none.
      seed: of the first reply.
    """

    num_drafts: int = 4
    max_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    rows: int = 16
    alone: int = 8
    seed: int = 2_000_000


def measure_drafts(
    config: DecoderConfig,
    weights: Weights,
    head: DraftHead,
    prompts: Sequence[list[int]],
    eos_token_ids: Sequence[int],
    aims: DraftAims,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Replies to all prompts, plainly and with each drafter under each verifier of chains.

    Args:
      config, weights: the model.
      head: its draft head.
      prompts: token ids, more than aims.rows of them: the first batch warms up and is not timed.
      eos_token_ids: what ends a reply.
      aims: what is measured.
      say: told what has been done.

    Returns:
      "facts", and "cases", a list with for each drafter, verifier (None: plain), temperature and number of
      rows: "tokens"; "steps", summed over replies; "tokens_a_step"; "tokens_a_second", from a batch's first
      record to its last, the median of the batches behind the first; "same", the replies equal to those of
      plain decoding with the same seeds, token for token, of "replies". By contract all are at temperature
      0, under `match` at any, but for logits that round otherwise in a wider step: "gap", at temperature 0,
      is the largest difference of logits (`logit_gaps`) of two tokens at which replies part, 0 where none do.

    Raises:
      ValueError: too few prompts, or what `generate` refuses.
    """
    if len(prompts) <= aims.rows:
        raise ValueError(f"prompts are {len(prompts)}, allowed is above {aims.rows}, the rows of a batch")
    joined = head.config, join_base(head, weights)
    ways: list[tuple[str, str | None]] = [(PLAIN, None)]
    ways += [(drafter, verify) for drafter in (NGRAM, HEAD) for verify in CHAIN_VERIFIERS]
    cases: list[dict[str, Any]] = []
    texts: dict[tuple[float, int], list[list[int]]] = {}
    batches = [(aims.rows, len(prompts), ways)]
    if aims.alone:
        first = [way for way in ways if way[1] in (None, CHAIN_VERIFIERS[0], CHAIN_VERIFIERS[-1])]
        batches.append((1, min(aims.alone + 1, len(prompts)), first))
    for rows, number, chosen in batches:
        for drafter, verify in chosen:
            speculation = None
            if verify is not None:
                speculation = Speculation(aims.num_drafts, verify, head=joined if drafter == HEAD else None)
            for temperature in aims.temperatures:
                run = _Run(config, weights, prompts[:number], eos_token_ids, aims, rows, temperature)
                figures = run.figures(speculation)
                expected = texts.setdefault((temperature, rows), run.texts)
                same = sum(ours == theirs for ours, theirs in zip(run.texts, expected, strict=True))
                if temperature == 0:
                    gaps = logit_gaps(config, weights, prompts[:number], expected, run.texts)
                    figures["gap"] = max(gaps, default=0.0)
                case = {"drafter": drafter, "verify": verify, "temperature": temperature, "rows": rows}
                cases.append({**case, **figures, "same": same, "replies": number})
                say(
                    f"{drafter} {verify or ''} T={temperature:g} B={rows}: "
                    f"{figures['tokens_a_step']:.3f} tokens a step, {figures['tokens_a_second']:.1f} a "
                    f"second, {same} of {number} replies those of plain decoding"
                )
    facts = {**dataclasses.asdict(aims), "num_prompts": len(prompts), "device": jax.devices()[0].device_kind}
    facts |= {"platform": jax.default_backend(), "jax": jax.__version__}
    facts["dtype"] = str(weights["embedding"]["weight"].dtype)
    return {"facts": facts, "cases": cases}


def logit_gaps(
    config: DecoderConfig,
    weights: Weights,
    prompts: Sequence[list[int]],
    texts: Sequence[list[int]],
    others: Sequence[list[int]],
) -> list[float]:
    """How far apart the model holds two tokens at which replies to a prompt part: of each pair that does.

    The logits are those of one pass over prompt and reply. Where one reply begins the other, none is told.

    Args:
      config, weights: the model.
      prompts, texts, others: token ids.
    """
    parted = []
    for prompt, text, other in zip(prompts, texts, others, strict=True):
        places = [place for place, (one, two) in enumerate(zip(text, other)) if one != two]
        if places:
            parted.append((prompt + text[: places[0]], text[places[0]], other[places[0]]))
    if not parted:
        return []
    width = -(-max(len(tokens) for tokens, _, _ in parted) // _SLOTS) * _SLOTS
    hidden_of, head = _last_hidden(config), weights.get("head", weights["embedding"])["weight"]
    gaps = []
    for tokens, one, two in parted:
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(tokens)] = tokens
        hidden = hidden_of(weights, padded, np.int32(len(tokens) - 1))
        logits = np.asarray(narrow_logits(config, head[jnp.asarray([one, two])], hidden)[0, 0], np.float64)
        gaps.append(float(abs(logits[0] - logits[1])))
    return gaps


@functools.cache
def _last_hidden(config: DecoderConfig):
    hidden_of = hidden_states(config)
    return jax.jit(
        lambda weights, tokens, at: jax.lax.dynamic_slice_in_dim(hidden_of(weights, tokens), at, 1, 1)
    )


class _Run:
    """Replies to prompts in batches of so many rows, heard step by step."""

    def __init__(
        self, config, weights, prompts, eos_token_ids, aims: DraftAims, rows: int, temperature: float
    ):
        self._config, self._weights, self._rows = config, weights, rows
        common: dict[str, Any] = {"max_tokens": aims.max_tokens, "temperature": temperature}
        common["eos_token_ids"] = tuple(eos_token_ids)
        self._requests = [
            Request(prompt, {**common, "seed": aims.seed + index}) for index, prompt in enumerate(prompts)
        ]
        longest = max(map(len, prompts)) + aims.max_tokens
        self._num_slots = min(-(-longest // _SLOTS) * _SLOTS, config.max_length)
        self.texts: list[list[int]] = [[] for _ in prompts]
        self._heard: list[tuple[int, float, int]] = []  # request, when, tokens

    def figures(self, speculation: Speculation | None) -> dict[str, float]:
        generate(
            self._config,
            self._weights,
            self._requests,
            on_tokens=self._hear,
            num_slots=self._num_slots,
            max_rows=self._rows,
            speculation=speculation,
        )
        tokens, steps = sum(map(len, self.texts)), len(self._heard)
        rates = []
        for batch in range(1, -(-len(self._requests) // self._rows)):
            heard = [(when, count) for request, when, count in self._heard if request // self._rows == batch]
            first = min(when for when, _ in heard)
            # Records of one step are heard within a moment; the clock starts when the first step is read.
            begun = {request for request, _, _ in self._heard if request // self._rows == batch}
            later = heard[len(begun) :]
            seconds = max(when for when, _ in heard) - first
            rates += [sum(count for _, count in later) / seconds] if later else []
        return {
            "tokens": tokens,
            "steps": steps,
            "tokens_a_step": tokens / max(steps, 1),
            "tokens_a_second": statistics.median(rates) if rates else 0.0,
        }

    def _hear(self, request: int, sample: int, token_ids: list[int], status: int) -> None:
        del sample
        if token_ids or status == RUNNING:
            self._heard.append((request, time.perf_counter(), len(token_ids)))
        self.texts[request] += token_ids
