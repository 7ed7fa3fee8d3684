"""Host time of one step of an engine with a full batch: planning it and taking it in, the launch left out.

    python -m benchmarks.bench_host [--slots 256] [--steps 600] [--pages 8192]

An engine on the lookup model is run with every feature in its mix (penalties, bias, bans, filters, stop
sequences, logprobs) and a queue that never empties. What its device told is then played again to a scheduler
alone, and that is timed: growing pages, seating, ending, counting, and writing every token and logprob where
its stream reads it. The baseline takes in the same records request by request in plain Python, as a loop
without a batched update does. Both must end with the same tokens, logprobs and statuses before any time is
printed. The baseline seats nobody and plans no prefill; in steps without newcomers both do the same work, so
these are compared by themselves too. Reading every stream once a step is timed by itself: who reads, and
when, is the caller's choice.
"""

import argparse
import dataclasses
import gc
import time

import jax.numpy as jnp
import numpy as np

import jaxsample as js
from benchmarks import measure
from jaxsample.intake import Intake
from jaxsample.schedule import Scheduler
from jaxsample.seats import Ticket
from models.lookup import lookup_functions

V, MAX_LENGTH, PAGE, NUM_TOP = 1000, 512, 16, 5
LIMIT_US, LIMIT_RATIO = 150.0, 50.0
_LOOP, _READ = "request by request", "reading all streams"
_WHOLE, _SAME = "one step of the host", "a step without newcomers"
LIMITS = js.Limits(V, max_length=MAX_LENGTH, num_logprobs=NUM_TOP)
FEATURES = js.Features(num_candidates=64, num_logprobs=NUM_TOP)
EOS = (7,)


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    buckets = js.Buckets(
        rows=(options.slots,),
        lengths=(MAX_LENGTH,),
        prefill=((32, 64),),
        features=(FEATURES,),
        updates=(8, options.slots),
    )
    asked = _requests(options.slots, options.steps)
    print(f"{options.slots} slots, {options.steps} steps, {options.pages} pages; limit {LIMIT_US:.0f} us")
    records = _run(options, buckets, asked)
    _check(_replay(options, buckets, asked, records, loop=True))

    times: dict[str, list[float]] = {name: [] for name in ("plan", "take in", _LOOP, _READ)}
    medians: list[float] = []  # of each repetition
    quiet: list[bool] = []
    for _ in range(options.repeats):
        # One at a time, so that none finds its data pushed out of the processor's cache by another.
        for chosen in ({}, {"loop": True}, {"read": True}):
            replay = _replay(options, buckets, asked, records, **chosen)
            for name in ("plan", "take in") if not chosen else (_LOOP,) if "loop" in chosen else (_READ,):
                # The first steps seat everybody: the rest is what a server lives in.
                times[name] += replay.times[name][len(replay.times[name]) // 10 :]
            if not chosen:
                quiet += replay.quiet[len(replay.quiet) // 10 :]
                first = len(quiet) * len(medians) // (len(medians) + 1)
                medians.append(float(np.median(np.add(times["plan"][first:], times["take in"][first:]))))
    whole = np.add(times["plan"], times["take in"])
    same = whole[quiet].tolist()
    rows = []
    for what, values in ((_WHOLE, whole.tolist()), *times.items(), (_SAME, same)):
        median, spread = measure.median_and_spread(values)
        mean, p99 = float(np.mean(values)), float(np.quantile(values, 0.99))
        rows.append(
            {"case": f"B={options.slots} all features", "what": what, "time_us": median, "spread": spread}
        )
        rows[-1] |= {"mean_us": mean, "p99_us": p99, "floor_us": LIMIT_US}
        print(f"{what:22s} median {median:8.1f} us   mean {mean:8.1f}   p99 {p99:8.1f}")
    rows[0] |= {"smallest_us": min(medians)}
    print(f"smallest median of {options.repeats} repetitions: {min(medians):.1f} us")
    for row, loop in ((rows[0], times[_LOOP]), (rows[-1], np.asarray(times[_LOOP])[quiet])):
        slow = float(np.median(loop))
        row |= {"baselines": {_LOOP: slow}, "ratio": slow / row["time_us"]}
        print(f"{row['what']}: request by request takes {row['ratio']:.1f} times as long")
    print(f"asked are {LIMIT_RATIO:.0f}")
    measure.write("host", rows, options)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """One request, its arrival by step, and what the baseline must know of it."""

    request: js.Request
    step: int
    eos: frozenset[int]
    stop_ids: frozenset[int]
    sequences: tuple[tuple[int, ...], ...]
    min_tokens: int
    max_tokens: int
    num_logprobs: int


def _requests(num_slots: int, num_steps: int) -> list[_Asked]:
    """Enough requests of 100 ... 300 tokens that the queue never empties."""
    generator = np.random.default_rng(0)
    result = []
    for index in range(num_slots + num_steps * num_slots // 150):
        params = {
            "seed": index,
            "temperature": float(generator.choice([0.0, 0.8, 1.2])),
            "top_k": int(generator.integers(1, 60)),
            "top_p": 0.95,
            "min_p": 0.01,
            "repetition_penalty": 1.1,
            "frequency_penalty": 0.1,
            "presence_penalty": 0.1,
            "logit_bias": {3: 1.0, 4: -1.0},
            "bad_words_ids": [[1, 2]],
            "logprobs": NUM_TOP if index % 2 else 1,
            "eos_token_ids": list(EOS),
            "stop_token_ids": [8],
            "stop_sequences": [[11, 12], [13, 14, 15]],
            "min_tokens": 100,
            "max_tokens": int(generator.integers(100, 300)),
        }
        prompt = generator.integers(0, V, int(generator.integers(1, 100))).tolist()
        result.append(
            _Asked(
                request=js.Request(prompt, params),
                step=max(index - num_slots, 0) * 150 // (2 * num_slots),
                eos=frozenset(EOS),
                stop_ids=frozenset([8]),
                sequences=((11, 12), (13, 14, 15)),
                min_tokens=100,
                max_tokens=params["max_tokens"],
                num_logprobs=params["logprobs"],
            )
        )
    return result


def _run(options, buckets, asked: list[_Asked]) -> list[np.ndarray | None]:
    """The records that the device gives, by step; None for a step that was not launched."""
    forward, unembed = lookup_functions(V)

    def new_cache(num_pages, page_size, table):
        return js.init_paged_cache(1, num_pages, page_size, 1, 1, jnp.float32, table)

    engine = js.Engine(
        forward,
        unembed,
        jnp.asarray([1, 2], jnp.uint32),
        new_cache,
        limits=LIMITS,
        buckets=buckets,
        num_pages=options.pages,
        page_size=PAGE,
        max_waiting=len(asked),
    )
    records: list[np.ndarray | None] = []
    launch = engine._launch

    def kept(plan):
        launched = launch(plan)
        records.append(np.asarray(engine._in_flight[-1][1]) if launched else None)
        return launched

    engine._launch = kept
    waiting = asked[::-1]
    for step in range(options.steps):
        while waiting and waiting[-1].step <= step:
            engine.submit(waiting.pop().request)
        engine.step()
    return records


@dataclasses.dataclass
class _Replay:
    """One run of the host's work on given records.

    Fields:
      samples: of the scheduler. loops: of the baseline. times: microseconds of each step, by part.
      quiet: of each step, whether nobody was seated or prefilled.
    """

    samples: list[js.Sample]
    loops: list["_Loop"]
    times: dict[str, list[float]]
    quiet: list[bool]


def _replay(options, buckets, asked: list[_Asked], records, *, loop: bool = False, read: bool = False):
    """Play the records again: the scheduler, the baseline too if `loop`, all readers too if `read`."""
    scheduler = Scheduler(LIMITS, buckets, options.pages, PAGE, 1)
    intake = Intake(LIMITS, buckets, False, options.pages, scheduler.pages_needed)
    samples, tickets = [], []
    for arrival, one in enumerate(asked):
        accepted = intake.accept(one.request)
        samples.append(js.Sample(0, accepted.num_logprobs))
        words, prompt = accepted.words, accepted.prompt
        tickets.append(Ticket(samples[-1:], words, accepted.level, prompt, len(prompt), arrival))
    replay = _Replay(samples, [_Loop(one) for one in asked], {}, [])
    loop_of = {id(sample): loop for sample, loop in zip(samples, replay.loops, strict=True)}
    times = {name: [] for name in ("plan", "take in", _LOOP, _READ)}
    seats, before, arrived = scheduler.seats, None, 0
    gc.collect()
    gc.disable()  # its pauses belong to the garbage of the baseline
    for step, record in enumerate(records):
        while arrived < len(asked) and asked[arrived].step <= step:
            scheduler.add(tickets[arrived])
            arrived += 1
        clock = [time.perf_counter()]
        plan = scheduler.plan()
        clock.append(time.perf_counter())
        if before is not None:
            old, told = before
            slots = old.record[:, 0].tolist() if loop else ()
            same = [slot >= 0 and seats.generation[slot] == old.generations[slot] for slot in slots]
            owners = zip(slots, same, strict=True)
            loops = [loop_of[id(seats.sample_at(slot))] if ok else None for slot, ok in owners]
            clock.append(time.perf_counter())
            scheduler.deliver(old, told)
            clock.append(time.perf_counter())
            if loop:
                _one_by_one(loops, told)
            clock.append(time.perf_counter())
            for sample in seats.sample if read else ():
                if sample is not None:
                    sample.read()
            clock.append(time.perf_counter())
            replay.quiet.append(plan.updates is None and plan.prefill is None)
            part = np.diff(clock) * 1e6
            for name, value in zip(times, (part[0], *part[2:]), strict=True):
                times[name].append(float(value))
        before = None if record is None else (plan, record)
    gc.enable()
    return dataclasses.replace(replay, times=times)


class _Loop:
    """One request as a per-request loop keeps it."""

    def __init__(self, asked: _Asked):
        self.asked = asked
        self.num_prompt = len(asked.request.prompt)
        self.tokens: list[int] = []
        self.logprobs: list[tuple[float, int, list[tuple[int, float]]]] = []
        self.stream: list[int] = []
        self.counts: dict[int, int] = {}
        self.pages = list(range(-(-self.num_prompt // PAGE)))
        self.status = js.RUNNING


def _one_by_one(loops: list[_Loop | None], record: np.ndarray) -> None:
    """The same step, request by request: append, count, keep logprobs, judge the end, add pages."""
    told = js.unpack(record, FEATURES)
    for row, loop in enumerate(loops):
        if loop is None or loop.status != js.RUNNING:
            continue
        asked = loop.asked
        for column in range(int(told.count[row])):
            token = int(told.tokens[row, column])
            loop.tokens.append(token)
            loop.stream.append(token)
            loop.counts[token] = loop.counts.get(token, 0) + 1
            ids = told.top_ids[row, column, : asked.num_logprobs].tolist()
            values = told.top_logprobs[row, column, : asked.num_logprobs].tolist()
            entry = float(told.logprobs[row, column]), int(told.ranks[row, column]), list(zip(ids, values))
            loop.logprobs.append(entry)
            num_tokens = len(loop.tokens)
            if token in asked.eos:
                loop.status = js.STOP_EOS
            elif token in asked.stop_ids:
                loop.status = js.STOP_TOKEN
            elif num_tokens >= asked.min_tokens and any(
                tuple(loop.tokens[-len(sequence) :]) == sequence for sequence in asked.sequences
            ):
                loop.status = js.STOP_SEQUENCE
            elif num_tokens >= asked.max_tokens or loop.num_prompt + num_tokens > MAX_LENGTH:
                loop.status = js.LENGTH
            if loop.status != js.RUNNING:
                break
            if loop.num_prompt + num_tokens + 1 > len(loop.pages) * PAGE:
                loop.pages.append(len(loop.pages))


def _check(replay: _Replay) -> None:
    """Both must agree on every token, logprob and end."""
    num_ended = 0
    for sample, loop in zip(replay.samples, replay.loops, strict=True):
        tokens = sample.tokens()
        num_ended += sample.done
        assert tokens.token_ids.tolist() == loop.tokens
        assert (sample.status if sample.done else js.RUNNING) == loop.status
        assert tokens.logprobs is not None
        assert tokens.top_ids is not None
        assert tokens.logprobs.tolist() == [entry[0] for entry in loop.logprobs]
        assert tokens.top_ids.tolist() == [[pair[0] for pair in entry[2]] for entry in loop.logprobs]
    print(f"checked: {num_ended} requests ended alike, {len(replay.samples)} asked")


def _options(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--slots", type=int, default=256, help="B")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--pages", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    measure.add_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
