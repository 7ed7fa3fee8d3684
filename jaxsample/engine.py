"""The host side of a serving loop: requests in, streams of token ids out, one plain object.

    engine = Engine(forward, unembed, weights, new_cache, limits=limits, buckets=buckets, num_pages=512)
    stream = engine.submit(Request([1, 2, 3], {"temperature": 0.7, "max_tokens": 100}))
    for sample, tokens in stream: ...

A step is launched before the one before it is read, so the device never waits for the host. Knows nothing of
text or networks. Any thread may call any method; two that step take turns.
"""

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample import slots
from jaxsample.buckets import Buckets, check_sizes, compile_ahead
from jaxsample.counts import EngineStats
from jaxsample.draft import ROOT, Tree
from jaxsample.grammar import fill_masks
from jaxsample.guided import Scorer, init_guided
from jaxsample.intake import Intake, Request
from jaxsample.lowering import lower_programs
from jaxsample.params import Limits
from jaxsample.propose import Proposer
from jaxsample.requests import empty_requests
from jaxsample.sample import Sampled
from jaxsample.schedule import Plan, Scheduler
from jaxsample.seats import Ticket
from jaxsample.sharding import Axis, auto_mesh, check_rows, on_mesh
from jaxsample.streams import Sample, Stream
from jaxsample.verify import Verdict, verify_match


class QueueFull(RuntimeError):
    """No more requests are taken before some have begun."""


class Engine:
    """Slots, pages, a queue and the compiled programs of one model.

    Attributes:
      limits, buckets: as given.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        unembed: Callable[..., Any],
        weights: Any,
        new_cache: Callable[[int, int, Any], Any],
        *,
        limits: Limits,
        buckets: Buckets,
        num_pages: int,
        page_size: int = 16,
        max_waiting: int = 1024,
        grammars: bool = False,
        proposer: Proposer | None = None,
        verify: Callable[..., Verdict] = verify_match,
        draft_weights: Any = (),
        new_drafts: Callable[[int], Any] | None = None,
        draft_forward: Callable[..., Any] | None = None,
        scorer: Scorer | None = None,
        mesh: Any = None,
        axis: Axis | None = None,
        batch_axis: Axis = (),
        draw: Callable[..., Sampled] | None = None,
    ):
        """Compile all programs; nothing is compiled later.

        Args:
          forward, unembed, weights: the model, see `decode`.
          new_cache: (num_pages, page_size, page_table i32[B, P]) -> PagedKVCache, of `init_paged_cache`.
          limits: capacities of a request.
          buckets: shapes and stages, of `make_buckets`; rows end at the number of slots, lengths at
            max_length or above.
          num_pages: pages of all requests together. page_size: slots of a page, at least what a step emits.
          max_waiting: requests in the queue, at least 1; `submit` refuses more.
          grammars: whether requests may have one: steps with such rows run as two programs, masks being
            made while the model runs.
          proposer, verify: speculation, as in `make_decode_step`.
          draft_weights: the proposer's weights.
          new_drafts: (B) -> the proposer's state: arrays with B rows, or for a draft model's cache a
            PagedKVCache of the same pages with any page table. None for a proposer without state.
          draft_forward: the draft model's function, where new_drafts gives its cache.
          scorer: the value model of requests with `guidance`, whose top_k is at most limits.num_guided;
            the last features must have filters. Steps without such requests do not use it. Not on a mesh.
          mesh, axis, batch_axis: as in `make_decode_step`; batch_axis must divide buckets.rows. Weights and
            caches given on the mesh stay as they are split there (pages themselves must not be); everything
            else is whole on each of its devices.
          draw: as in `make_decode_step`, for the steps whose features it serves; others go without.

        Raises:
          ValueError: sizes that do not fit together.
        """
        width = 1 if proposer is None else proposer.tree.max_depth + 1
        check_sizes(limits, buckets, num_pages, page_size, max_waiting, width)
        self.limits, self.buckets = limits, buckets
        self._max_waiting = max_waiting
        self._tree: Tree = ROOT if proposer is None else proposer.tree
        self._weights = weights if proposer is None else (weights, draft_weights)
        self._value_weights = None if scorer is None else scorer.weights
        if scorer is not None and mesh is not None:
            raise ValueError(
                "scorer and mesh are given, allowed is one of them: guided steps are on one device"
            )
        if mesh is None and axis is not None:
            raise ValueError(f"axis is {axis!r}, but there is no mesh: an engine makes programs of its own")
        if mesh is not None:
            for size in buckets.rows:
                check_rows(mesh, size, batch_axis)
            mesh = auto_mesh(mesh)
        self._scheduler = Scheduler(limits, buckets, num_pages, page_size, width, scorer is not None)
        gamma = None if scorer is None else scorer.gamma
        self._intake = Intake(limits, buckets, grammars, num_pages, self._scheduler.pages_needed, gamma)
        num_slots = buckets.rows[-1]
        table = jnp.full((num_slots, buckets.lengths[-1] // page_size), -1, jnp.int32)
        self._state = slots.EngineState(
            requests=empty_requests(limits, num_slots),
            cache=new_cache(num_pages, page_size, table),
            drafts=() if new_drafts is None else new_drafts(num_slots),
            values=() if scorer is None else init_guided(scorer.new_cache(num_pages, page_size, table)),
        )
        if mesh is not None:
            self._weights, self._state = on_mesh((self._weights, self._state), mesh)
        # In its context, functions made for a mesh of Explicit axes see the Auto ones of these programs.
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            self._programs = compile_ahead(
                lower_programs(
                    forward,
                    unembed,
                    self._weights,
                    self._state,
                    limits=limits,
                    buckets=buckets,
                    page_size=page_size,
                    grammars=grammars,
                    proposer=proposer,
                    verify=verify,
                    draft_forward=draft_forward,
                    scorer=scorer,
                    mesh=mesh,
                    axis=axis,
                    batch_axis=batch_axis,
                    draw=draw,
                )
            )
        # (plan, record, scores of prompts): launched, not taken in; and a step whose masks are to be made.
        self._in_flight: collections.deque[tuple[Plan, Any, Any]] = collections.deque()
        self._begun: tuple[Plan, Any, Any] | None = None
        self._reading = False
        self._failure: str | None = None
        self._inbox: collections.deque[Callable[[], None]] = collections.deque()
        self._submitting, self._stepping = threading.Lock(), threading.Lock()
        self._num_submitted = 0  # written by who submits
        self._num_queued = 0  # of these, those that the scheduler has been given; written by who steps

    # --- callers --------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many more requests `submit` takes now."""
        return max(self._max_waiting - self._num_waiting, 0)

    @property
    def _num_waiting(self) -> int:
        return self._num_submitted - self._num_queued + self._scheduler.num_waiting

    @property
    def stats(self) -> EngineStats:
        return self._scheduler.stats(self._num_waiting)

    def submit(self, request: Request) -> Stream:
        """Queue a request.

        Raises:
          ValueError: what `make_params` refuses; an empty prompt, ids outside the vocabulary, a request that
            needs more slots, pages or stages than the engine has. Nothing has changed then.
          TypeError: a parameter that does not exist.
          QueueFull: `max_waiting` requests wait; step and try again.
          RuntimeError: the engine has failed, see `step`.
        """
        self._check_alive()
        accepted = self._intake.accept(request)
        matchers = [None if request.grammar is None else request.grammar() for _ in accepted.words]
        samples = [
            Sample(index, accepted.num_logprobs, matcher, accepted.ends, owner=self)
            for index, matcher in enumerate(matchers)
        ]
        prompt, scores = accepted.prompt, accepted.scores
        stream = Stream(accepted.request, tuple(samples), self.step, scores)
        with self._submitting:
            if self.room == 0:
                raise QueueFull(f"{self._max_waiting} requests wait already (max_waiting)")
            order = self._num_submitted
            ticket = Ticket(samples, accepted.words, accepted.level, prompt, len(prompt), order, scores)
            self._num_submitted += 1
            self._inbox.append(functools.partial(self._queue, ticket))
        return stream

    def cancel(self, target: Stream | Sample) -> None:
        """End a request or one of its samples with status CANCELLED, at the next step; what is done stays.

        Raises:
          ValueError: a target that is not this engine's.
        """
        for sample in self._samples_of(target):
            self._inbox.append(functools.partial(self._scheduler.cancel, sample))

    def change(self, stream: Stream, **params: Any) -> None:
        """Give a request other parameters, from the next step that is launched.

        Args:
          stream: of `submit`.
          params: the arguments of `make_params` that change; the others, the seed and the guidance stay. n
            cannot change. A greedy request is not guided; one that is guided from then on is prefilled anew.

        Raises:
          ValueError, TypeError: as `submit`, or a stream of another engine; nothing has changed then.
        """
        if not isinstance(stream, Stream):
            raise ValueError(f"stream is {stream!r}, allowed is a Stream of this engine")
        self._samples_of(stream)
        old = stream.request
        if params.get("n", len(stream.samples)) != len(stream.samples):
            raise ValueError(f"n is {params['n']}, allowed is {len(stream.samples)}: it cannot change")
        seed = {"seed": old.params["seed"]} if params.get("seed", 0) is None else {}
        accepted = self._intake.accept(dataclasses.replace(old, params={**old.params, **params, **seed}))
        for name in ("logprobs", "prompt_logprobs"):
            asked = old.params.get(name)
            if params.get(name, asked) != asked:
                raise ValueError(f"{name} is {params[name]}, allowed is {asked}: it cannot change")
        stream.request = accepted.request
        for sample, words in zip(stream.samples, accepted.words, strict=True):
            self._inbox.append(functools.partial(self._change, sample, words, accepted.level, accepted.ends))

    def step(self) -> bool:
        """Launch the next step and take in the last one; whether there is more to do.

        Raises:
          RuntimeError: an earlier step failed. What interrupts a step while it waits for the device, as
            Ctrl-C does, loses nothing: the next call goes on. After any other error the device's state is
            unknown; all requests then end with status ERROR, and the engine takes no more.
        """
        with self._stepping:
            self._check_alive()
            try:
                self._step()
            except BaseException as error:
                if isinstance(error, Exception) or not self._reading:
                    self._fail(f"{type(error).__name__}: {error}")
                raise
            finally:
                self._reading = False
            return bool(self._inbox or self._in_flight or self._begun) or self._scheduler.has_work

    def run(self) -> None:
        """Step until all is done."""
        while self.step():
            pass

    def _samples_of(self, target: Stream | Sample) -> tuple[Sample, ...]:
        samples = target.samples if isinstance(target, Stream) else (target,)
        if not all(isinstance(sample, Sample) and sample.owner is self for sample in samples):
            raise ValueError(f"target is {target!r}, allowed are a Stream and a Sample of this engine")
        return samples

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine has failed ({self._failure}): make a new one")

    # --- a step ---------------------------------------------------------------------------------------------

    def _queue(self, ticket: Ticket) -> None:
        self._scheduler.add(ticket)
        self._num_queued += 1

    def _change(self, sample: Sample, words: np.ndarray, level: int, ends: frozenset[int]) -> None:
        sample.ends = ends
        self._scheduler.change(sample, words, level)

    def _step(self) -> None:
        # An interrupted step has left two records, or one whose masks are to be made: these come first.
        launched = self._begun is not None or len(self._in_flight) > 1
        if not launched:
            while self._inbox:
                self._inbox.popleft()()
            launched = self._launch(self._scheduler.plan())
        while len(self._in_flight) > (1 if launched and self._begun is None else 0):
            self._take_in()
        if self._begun is not None:
            self._complete(*self._begun)
            self._begun = None

    def _launch(self, plan: Plan) -> bool:
        """Start the plan's programs; whether something is to be read of them."""
        programs, weights, scores = self._programs, self._weights, None
        if plan.updates is not None:
            self._state = programs["update", len(plan.updates)](self._state, plan.updates)
        if plan.prefill is not None:
            record, length, scored = plan.prefill
            if scored:
                program = programs["prefill scored", *record.shape, length]
                self._state, scores = program(weights, self._state, record)
                scores.copy_to_host_async()
            else:
                self._state = programs["prefill", *record.shape, length](weights, self._state, record)
        if plan.prefill_values is not None:
            record, length, _ = plan.prefill_values
            program = programs["prefill values", *record.shape, length]
            self._state = program(self._value_weights, self._state, record)
        if plan.copies is not None:
            self._state = programs[("copy pages",)](self._state, plan.copies)
        if not plan.num_rows:
            self._in_flight.extend([(plan, None, scores)] if scores is not None else [])
            return scores is not None
        shape = len(plan.record), plan.length
        if plan.masked:
            self._begun = plan, programs["look ahead", *shape](weights, self._state, plan.record), scores
            return True
        if plan.guided:
            both = weights, self._value_weights
            self._state, record = programs["guided step", *shape](both, self._state, plan.record)
        else:
            self._state, record = programs["step", *shape, plan.level](weights, self._state, plan.record)
        record.copy_to_host_async()
        self._in_flight.append((plan, record, scores))
        return True

    def _complete(self, plan: Plan, launched, scores) -> None:
        drafted, ahead = launched
        name = "guided complete" if plan.guided else "complete"
        program = self._programs[name, len(plan.record), plan.length]
        weights = (self._weights, self._value_weights) if plan.guided else self._weights
        masks = self._masks(plan, drafted)
        self._state, record = program(weights, self._state, plan.record, drafted, ahead, masks)
        record.copy_to_host_async()
        self._in_flight.append((plan, record, scores))

    def _take_in(self) -> None:
        plan, *told = self._in_flight[0]
        self._reading = True
        record, scores = (None if x is None else np.asarray(x) for x in told)  # waits for the device
        self._reading = False
        self._in_flight.popleft()
        if scores is not None:  # before the first token of any that were scored
            self._scheduler.deliver_scores(plan, scores)
        if record is not None:
            self._scheduler.deliver(plan, record)
        if plan.masked:
            for _, sample in self._scheduler.with_grammar(plan):
                self._attempt(sample, self._follow, sample)

    def _fail(self, error: str) -> None:
        """End all requests: nobody knows what the device's state is."""
        self._failure = error
        while self._inbox:
            act = self._inbox.popleft()
            if getattr(act, "func", None) == self._queue:
                act()
        self._in_flight.clear()
        self._begun = None
        self._scheduler.fail_all(f"the engine has failed: {error}")

    def _follow(self, sample: Sample) -> None:
        """Tell a sample's matcher what it emitted."""
        for token in sample.tokens(sample.num_matched).token_ids.tolist():
            if not sample.matcher.accept(token):
                raise ValueError(f"the grammar does not accept token {token}")
            sample.num_matched += 1

    def _masks(self, plan: Plan, drafted) -> np.ndarray:
        """u32[b, W], or u32[b, N, W] with proposals: the tokens each row's grammar allows."""
        shape = len(plan.record), self._tree.num_nodes, self.limits.num_words
        masks = np.full(shape, 0xFFFFFFFF, np.uint32)
        rows = self._scheduler.with_grammar(plan)
        # Without proposals nothing of the draft is needed here, and nothing waits for the device.
        drafts = np.asarray(drafted[0].tokens) if self._tree.num_nodes > 1 else np.zeros(shape[:2], np.int32)
        for row, sample in rows:
            mask = np.zeros(shape[1:], np.uint32)
            if self._attempt(sample, fill_masks, sample.matcher, self._tree, drafts[row], sample.ends, mask):
                masks[row] = mask
        return masks if self._tree.num_nodes > 1 else masks[:, 0]

    def _attempt(self, sample: Sample, function: Callable[..., None], *arguments: Any) -> bool:
        """Call what belongs to one request alone: where it fails, that request fails and no other."""
        try:
            function(*arguments)
        except Exception as error:  # a matcher is foreign code and may raise anything
            self._scheduler.fail(sample, f"{type(error).__name__}: {error}")
            return False
        return True
