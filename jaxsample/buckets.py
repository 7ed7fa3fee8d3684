"""Which static shapes an engine's programs have, and compiling all of them ahead of time.

Knows nothing of what the programs do. Sizes are rounded up to the next bucket, so that a bounded number of
programs serves every batch and nothing is compiled later.
"""

import bisect
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxsample.params import TIERS, Features, Limits

MAX_PROGRAMS = 256
Name = tuple[Any, ...]  # what a program does, and its bucket
_logger = logging.getLogger("jaxsample")


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The sizes that programs are compiled for, each ascending; the last of each serves everything.

    Fields:
      rows: requests in a step; the last is the number of slots.
      lengths: cache slots of a row that a step or a prefill attends to, multiples of the page size.
      prefill: (prompts, tokens of each) of one prefill call, ascending in tokens.
      features: stages; each serves whatever the ones before it serve.
      updates: requests admitted, changed or ended in one write.
      prompt_logprobs: most top logprobs of prompt tokens that requests may ask for, at most
        Limits.num_logprobs; -1: none may ask, and nothing is compiled for it. Else each prefill has a second
        program, for chunks with such requests, in which the logits [p * N, V] exist.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]
    features: tuple[Features, ...]
    updates: tuple[int, ...]
    prompt_logprobs: int = -1

    def __post_init__(self):
        tokens = tuple(tokens for _, tokens in self.prefill)
        for name, sizes in (
            ("rows", self.rows),
            ("lengths", self.lengths),
            ("prefill", tokens),
            ("updates", self.updates),
        ):
            rising = all(a < b for a, b in itertools.pairwise(sizes))
            if not sizes or not rising or sizes[0] < 1:
                raise ValueError(f"{name} is {sizes}, allowed are rising sizes from 1, at least one")
        for prompts, _ in self.prefill:
            if not 1 <= prompts <= self.rows[-1]:
                raise ValueError(f"prefill has {prompts} prompts, allowed is 1 ... {self.rows[-1]} (rows)")
        if self.updates[-1] != self.rows[-1]:
            raise ValueError(f"updates end at {self.updates[-1]}, expected {self.rows[-1]}, as rows do")
        if not isinstance(self.prompt_logprobs, int) or self.prompt_logprobs < -1:
            raise ValueError(f"prompt_logprobs is {self.prompt_logprobs!r}, allowed are integers from -1")
        if not self.features:
            raise ValueError("features is empty, at least one is needed")
        for lesser, greater in itertools.pairwise(self.features):
            if not serves(greater, lesser):
                raise ValueError(f"features {greater} do not serve what {lesser} serve: order them rising")
        if self.num_programs > MAX_PROGRAMS:
            raise ValueError(f"the buckets make {self.num_programs} programs, allowed is {MAX_PROGRAMS}")

    @property
    def num_programs(self) -> int:
        """Programs with these buckets; with grammars each step of the last features counts three times.

        Those that a value model adds are not counted.
        """
        steps = len(self.rows) * len(self.lengths) * (len(self.features) + 2)
        prefills = len(self.prefill) * len(self.lengths) * (1 if self.prompt_logprobs < 0 else 2)
        return steps + prefills + len(self.updates) + 1

    def level_of(self, needed: Features) -> int:
        """Index of the first features that serve rows which need these.

        Raises:
          ValueError: none do.
        """
        for level, features in enumerate(self.features):
            if serves(features, needed):
                return level
        raise ValueError(f"the request needs {needed}, the engine's programs have {self.features[-1]}")


def serves(features: Features, needed: Features) -> bool:
    """Whether a program with `features` gives right results for rows that need `needed`."""
    same = ("filter_order", "logprobs_mode", "transforms")
    return (
        all(getattr(features, name) == getattr(needed, name) for name in same)
        and TIERS.index(features.tier) >= TIERS.index(needed.tier)
        and features.num_candidates >= needed.num_candidates
        and features.full_rows >= needed.full_rows
        and features.num_logprobs >= needed.num_logprobs
    )


def make_buckets(limits: Limits, num_slots: int, page_size: int, features: Sequence[Features]) -> Buckets:
    """Buckets for a start: batches in steps of 4, two lengths, three widths of prefill.

    Args:
      limits: capacities.
      num_slots: B. page_size: slots of a page.
      features: stages, rising.
    """
    longest = -(-limits.max_length // page_size) * page_size
    quarter = max(-(-limits.max_length // 4 // page_size), 1) * page_size
    widths = sorted({min(width, limits.max_length) for width in (16, 64, 256)})
    return Buckets(
        rows=tuple(sorted({*_steps(num_slots), num_slots})),
        lengths=tuple(sorted({quarter, longest})),
        prefill=tuple((max(min(num_slots, 256 // width), 1), width) for width in widths),
        features=tuple(features),
        updates=tuple(sorted({min(4, num_slots), num_slots})),
    )


def check_sizes(
    limits: Limits, buckets: Buckets, num_pages: int, page_size: int, max_waiting: int, width: int
) -> None:
    """Refuse sizes of an engine that do not fit together; width is the most tokens a step can emit."""
    if page_size < width:
        raise ValueError(f"page_size is {page_size}, allowed is at least the {width} tokens a step can emit")
    for length in buckets.lengths:
        if length % page_size:
            raise ValueError(
                f"buckets.lengths has {length}, allowed are multiples of page_size = {page_size}"
            )
    longest = buckets.lengths[-1]
    if longest < limits.max_length:
        raise ValueError(
            f"buckets.lengths end at {longest}, expected at least max_length = {limits.max_length}"
        )
    for name, value in (("num_pages", num_pages), ("max_waiting", max_waiting)):
        if value < 1:
            raise ValueError(f"{name} is {value}, allowed are integers from 1")
    if buckets.prompt_logprobs > limits.num_logprobs:
        raise ValueError(
            f"buckets.prompt_logprobs is {buckets.prompt_logprobs}, allowed is at most limits.num_logprobs = "
            f"{limits.num_logprobs}"
        )
    for features in buckets.features:
        if features.transforms:
            raise ValueError("buckets.features hold transforms, which an engine has no arguments for")
        if features.num_logprobs > limits.num_logprobs:
            raise ValueError(
                f"features compute {features.num_logprobs} logprobs, allowed are limits.num_logprobs = "
                f"{limits.num_logprobs}"
            )


def _steps(num_slots: int) -> list[int]:
    sizes = [1]
    while sizes[-1] * 4 < num_slots:
        sizes.append(sizes[-1] * 4)
    return sizes


def smallest(sizes: Sequence[int], needed: int) -> int:
    """Index of the first size that is at least `needed`."""
    return bisect.bisect_left(sizes, needed)


def compile_ahead(programs: Mapping[Name, Callable[[], Any]]) -> dict[Name, Any]:
    """Compile many programs side by side, with a line in the log ("jaxsample", INFO) for each.

    Args:
      programs: name -> function that lowers the program (a jitted function's `lower(...)`).

    Returns:
      name -> compiled program: it takes the shapes it was lowered for and refuses others.
    """
    started = time.perf_counter()

    def compiled(name, lowered):
        begun = time.perf_counter()
        program = lowered.compile()
        _logger.info("compiled %s in %.1f s", name, time.perf_counter() - begun)
        return program

    # Tracing holds the interpreter's lock, compiling does not.
    with ThreadPoolExecutor() as pool:
        jobs = {name: pool.submit(compiled, name, lower()) for name, lower in programs.items()}
        done = {name: job.result() for name, job in jobs.items()}
    _logger.info("%d programs in %.1f s", len(done), time.perf_counter() - started)
    return done
