"""Runs a list of requests through a model to the end, one batch after another, token ids in and out.

Prompts are prefilled in power-of-two chunks; each step's record is read after the next step is launched.
Knows nothing of text, files or command lines.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxsample import (
    PAD,
    RUNNING,
    Guidance,
    Limits,
    SamplingParams,
    StopRule,
    make_params,
    needs_guidance,
    neutral_guidance,
    neutral_params,
    required_features,
    stack_rows,
    unpack,
)
from models.decoder import DecoderConfig, Weights
from models.guiding import begin_guided, check_guide, guidance_of, guided_limits
from models.load_value import ValueModel
from models.placement import DATA, place_model
from models.programs import Programs, compile_programs, power_of_two
from models.speculation import Speculation

_SMALLEST_CACHE = 128  # slots
_OPEN_ENDED = 1024  # tokens that a request without max_tokens gets slots for
# Capacities above the defaults of Limits: words have several spellings.
LIST_CAPACITIES = {"num_bad_words": 32, "bad_word_length": 16}


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and what `jaxsample.make_params` takes by name; guidance: what `make_guidance` takes."""

    prompt: list[int]  # token ids, at least one
    params: dict[str, Any]
    guidance: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of one token, its rank (1 = likeliest), and the likeliest tokens there."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]  # (token id, logprob), best first


@dataclasses.dataclass
class Sample:
    """One continuation of a request; n of them where the request asks for n."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)  # one a token, if asked for
    status: int = RUNNING  # then as in jaxsample.requests


@dataclasses.dataclass
class Reply:
    """What came of one request."""

    samples: list[Sample]
    prompt_logprobs: list[TokenLogprobs | None]  # the first token has none; empty unless asked for


@dataclasses.dataclass
class Timing:
    """Seconds on the host's clock, over all batches."""

    compile: float = 0.0
    prefill: float = 0.0
    first_token: float = 0.0  # first batch: from the start of its prefill to its first token read
    decode: float = 0.0  # from the launch of the first step to the last record read
    num_tokens: int = 0
    num_windows: int = 0  # steps, summed over running rows
    num_drafted: int = 0
    accepted_at: list[int] = dataclasses.field(default_factory=list)  # by place in the draft
    drafted_at: list[int] = dataclasses.field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.decode if self.decode > 0 else 0.0


OnTokens = Callable[[int, int, list[int], int], None]  # (request, sample, token ids, status)


def generate(
    config: DecoderConfig,
    weights: Weights,
    requests: Sequence[Request],
    *,
    on_tokens: OnTokens = lambda request, sample, token_ids, status: None,
    filter_order: str = "vllm",
    logprobs_mode: str = "raw",
    num_slots: int | None = None,
    max_rows: int = 64,
    speculation: Speculation | None = None,
    guide: ValueModel | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[list[Reply], Timing]:
    """Runs all requests, up to max_rows rows a batch; all batches use the same compiled programs.

    Args:
      config, weights: the model.
      requests: at least one.
      on_tokens: called as tokens arrive, at most once a row and step.
      filter_order, logprobs_mode: as in jaxsample.Features.
      num_slots: cache slots a row; None: the power of two that holds every prompt and its max_tokens, at most
        what the model was made for.
      max_rows: most rows in a batch; a request with n > 1 has n.
      speculation: how to draft and verify; None decodes plainly.
      guide: the value model of guided requests, over the model's vocabulary (`guiding.fit_vocabulary`); a
        batch without such requests does not use it. Not on a mesh.
      mesh: with the axes "data" and "tensor", see `models.placement`; None: one device.

    Returns:
      One Reply a request, and the times.

    Raises:
      ValueError: an empty prompt, one longer than the cache or with ids outside the vocabulary, what
        make_params and make_guidance refuse, a value model of another vocabulary or on a mesh, or a mesh that
        does not fit the model.
    """
    if guide is not None:
        check_guide(guide, config, mesh)
    limits = _limits(config, requests, num_slots)
    rows = [
        _admissible(index, request, limits, guide, len(requests)) for index, request in enumerate(requests)
    ]
    params, stop, _ = stack_rows(rows)
    features = required_features(
        params, stop, limits=limits, filter_order=filter_order, logprobs_mode=logprobs_mode
    )
    limits = guided_limits(limits, [(params, guidance) for params, _, guidance in rows])
    batches = _batches([len(stop.max_tokens) for _, stop, _ in rows], max_rows)
    guided = [any(needs_guidance(rows[index][2]) for index in batch) for batch in batches]
    scored = [_wanted(request.params, "prompt_logprobs") for request in requests]
    num_rows = power_of_two(max(sum(len(rows[index][1].max_tokens) for index in batch) for batch in batches))
    if mesh is not None:
        config, weights = place_model(config, weights, mesh)
        num_rows = -(-num_rows // mesh.shape[DATA]) * mesh.shape[DATA]
    programs = compile_programs(
        config,
        weights,
        limits=limits,
        features=features,
        num_rows=num_rows,
        longest_prompt=max(len(request.prompt) for request in requests),
        num_scored=max(scored),
        speculation=speculation,
        guide=guide if any(guided) else None,
        some_plain=not all(guided),
        mesh=mesh,
    )
    timing = Timing(compile=programs.compile_seconds)
    replies = [Reply([Sample() for _ in stop.max_tokens], []) for _, stop, _ in rows]
    for batch in batches:
        jobs = [Job(index, requests[index], *rows[index], replies[index]) for index in batch]
        run_batch(programs, weights, jobs, on_tokens, timing)
    return replies, timing


@dataclasses.dataclass(frozen=True)
class Job:
    """A request in a batch, its place among the requests, its rows, and where its reply is put together."""

    index: int
    request: Request
    params: SamplingParams
    stop: StopRule
    guidance: Guidance
    reply: Reply


def run_batch(
    programs: Programs, weights: Weights, jobs: Sequence[Job], on_tokens: OnTokens, timing: Timing
) -> None:
    """Runs a batch of at most `programs.num_rows` samples to its longest end; replies and timing grow."""
    limits, num_rows = programs.limits, programs.num_rows
    owners = [(job, child) for job in jobs for child in range(len(job.reply.samples))]  # by row
    prompts = np.full((num_rows, programs.prompt_width), PAD, np.int32)
    lengths = np.zeros(num_rows, np.int32)
    for row, (job, _) in enumerate(owners):
        lengths[row] = len(job.request.prompt)
        prompts[row, : lengths[row]] = job.request.prompt
    num_spare = num_rows - len(owners)
    spare = [(*neutral_params(limits, num_spare), neutral_guidance(num_spare))] if num_spare else []
    params, stop, guidance = stack_rows([(job.params, job.stop, job.guidance) for job in jobs] + spare)

    started = time.perf_counter()
    requests = programs.begin(params, stop, prompts, lengths)
    cache: Any = _prefill(programs, weights, prompts, lengths, owners, params.seed)
    all_weights: Any = weights if programs.drafting is None else (weights, programs.drafting.weights)
    step = programs.step
    if programs.guided is not None and needs_guidance(guidance):
        step, all_weights = programs.guided.step, (all_weights, programs.guided.weights)
        cache = cache, begin_guided(programs.guided, guidance, prompts, lengths)
    assert step is not None, "compiled for guided batches only"
    jax.block_until_ready(cache)
    begun = time.perf_counter()

    # The host knows no more of the end than max_tokens and the cache: past that no step is launched.
    most = max(
        min(int(job.stop.max_tokens[0]), limits.max_length + 1 - len(job.request.prompt)) for job in jobs
    )
    waiting, num_launched, seen_first = None, 0, False
    while True:
        launched = None
        if num_launched < most:
            requests, cache, launched = step(all_weights, requests, cache)
            launched.copy_to_host_async()
            num_launched += 1
        if waiting is not None:
            _deliver(programs, waiting, owners, on_tokens, timing)
            if not seen_first and timing.first_token == 0.0:
                timing.first_token = time.perf_counter() - started
            seen_first = True
            if all(job.reply.samples[child].status != RUNNING for job, child in owners):
                break
        if launched is None and waiting is None:
            break
        waiting = launched
    timing.prefill += begun - started
    timing.decode += time.perf_counter() - begun


def _prefill(programs: Programs, weights: Weights, prompts, lengths, owners, seeds):
    cache, state, drafting = programs.new_cache(), None, programs.drafting
    if drafting is not None:
        cache, state = cache
    done = np.zeros_like(lengths)
    total = np.maximum(lengths - 1, 0)
    for width in programs.chunks:
        start = int(done.max())
        counts = np.clip(total - start, 0, width).astype(np.int32)
        if not counts.any():
            break
        window = np.full((len(lengths), width + 1), PAD, np.int32)
        held = prompts[:, start : start + width + 1]
        window[:, : held.shape[1]] = held
        tokens, successors = (np.ascontiguousarray(part) for part in (window[:, :-1], window[:, 1:]))
        scored, prefill = None, programs.prefill[width]
        if drafting is not None and drafting.observe is not None:
            both = (weights, drafting.weights), (cache, state)
            (cache, state), scored = prefill(*both, tokens, successors, done, counts, seeds)
        elif programs.num_scored < 0:
            cache = prefill(weights, cache, tokens, done, counts)
        else:
            cache, scored = prefill(weights, cache, tokens, successors, done, counts)
        if programs.num_scored >= 0:
            _keep_scores(jax.device_get(scored), successors, counts, owners)
        if drafting is not None and width in programs.draft_prefill:
            state = programs.draft_prefill[width](drafting.weights, state, tokens, done, counts)
        done = done + counts
    if programs.num_scored >= 0:
        for job, child in owners:
            if child == 0 and _wanted(job.request.params, "prompt_logprobs") >= 0:
                job.reply.prompt_logprobs.insert(0, None)
    return cache if drafting is None else (cache, state)


def _keep_scores(scored, successors, counts, owners) -> None:
    for row, (job, child) in enumerate(owners):
        num_top = _wanted(job.request.params, "prompt_logprobs")
        if child != 0 or num_top < 0:
            continue
        for column in range(counts[row]):
            at = (row, column)
            job.reply.prompt_logprobs.append(
                token_logprobs(
                    successors[at],
                    scored.token[at],
                    scored.rank[at],
                    scored.top_ids[at],
                    scored.top[at],
                    num_top,
                )
            )


def _deliver(programs: Programs, record, owners, on_tokens: OnTokens, timing: Timing) -> None:
    output = unpack(record, programs.features)
    for row, (job, child) in enumerate(owners):
        sample = job.reply.samples[child]
        if sample.status != RUNNING:
            continue
        count = int(output.count[row])
        _count_drafts(timing, int(output.drafted[row]), int(output.accepted[row]))
        tokens = output.tokens[row, :count].tolist()
        sample.token_ids += tokens
        sample.status = int(output.status[row])
        num_top = int(job.params.num_logprobs[child])
        if num_top >= 0:
            sample.logprobs += [
                token_logprobs(
                    token,
                    output.logprobs[row, column],
                    output.ranks[row, column],
                    output.top_ids[row, column],
                    output.top_logprobs[row, column],
                    num_top,
                )
                for column, token in enumerate(tokens)
            ]
        timing.num_tokens += count
        on_tokens(job.index, child, tokens, sample.status)


def _count_drafts(timing: Timing, drafted: int, accepted: int) -> None:
    timing.num_windows += 1
    timing.num_drafted += drafted
    missing = drafted - len(timing.drafted_at)
    timing.drafted_at += [0] * missing
    timing.accepted_at += [0] * missing
    for place in range(drafted):
        timing.drafted_at[place] += 1
        timing.accepted_at[place] += place < accepted


def token_logprobs(token, logprob, rank, top_ids, top, num_top: int) -> TokenLogprobs:
    """One token's numbers, of a step's record or of `score`, with at most num_top likeliest tokens."""
    pairs = [(int(i), float(p)) for i, p in zip(top_ids[:num_top], top[:num_top]) if i != PAD]
    return TokenLogprobs(int(token), float(logprob), int(rank), pairs)


def _limits(config: DecoderConfig, requests: Sequence[Request], num_slots: int | None) -> Limits:
    if num_slots is None:
        longest = max(
            len(request.prompt) + (max_tokens if isinstance(max_tokens, int) else _OPEN_ENDED)
            for request in requests
            for max_tokens in [request.params.get("max_tokens")]
        )
        num_slots = min(power_of_two(max(longest - 1, _SMALLEST_CACHE)), config.max_length)
    num_top = max(
        _wanted(request.params, name) for request in requests for name in ("logprobs", "prompt_logprobs")
    )
    defaults = Limits(vocab_size=config.vocab_size)
    num_logprobs = min(max(num_top, 0), defaults.num_logprobs)
    return dataclasses.replace(defaults, max_length=num_slots, num_logprobs=num_logprobs, **LIST_CAPACITIES)


def _wanted(params: dict[str, Any], name: str) -> int:
    number = params.get(name)
    return number if isinstance(number, int) else -1


def _admissible(
    index: int, request: Request, limits: Limits, guide: ValueModel | None, num_requests: int
) -> tuple[SamplingParams, StopRule, Guidance]:
    try:
        num_tokens = len(request.prompt)
        if num_tokens == 0:
            raise ValueError("the prompt is empty, at least one token is needed")
        if num_tokens > limits.max_length:
            raise ValueError(f"the prompt has {num_tokens} tokens, the cache holds {limits.max_length}")
        outside = [token for token in request.prompt if not 0 <= token < limits.vocab_size]
        if outside:
            raise ValueError(f"the prompt holds {outside[0]}, allowed are ids in [0, {limits.vocab_size})")
        params, stop = make_params(limits, prompt_length=num_tokens, **request.params)
        if guide is None and request.guidance:
            raise ValueError(f"guidance is {request.guidance!r}, allowed is none without a value model")
        gamma = None if guide is None else guide.gamma
        return params, stop, guidance_of(limits, params, request.guidance, gamma)
    except (ValueError, TypeError) as error:
        raise ValueError(f"request {index}: {error}" if num_requests > 1 else str(error)) from None


def _batches(sizes: Sequence[int], max_rows: int) -> list[list[int]]:
    batches: list[list[int]] = [[]]
    filled = 0
    for index, size in enumerate(sizes):
        if size > max_rows:
            raise ValueError(f"n is {size}, allowed is at most {max_rows} rows in a batch")
        if filled + size > max_rows:
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += size
    return batches
