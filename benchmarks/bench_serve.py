"""Serving requests that come at random times: the engine, one request at a time, and static batches.

    python -m benchmarks.bench_serve [--preset small] [--slots 8] [--rate 4 8] [--requests 128]

Arrivals are Poisson with a fixed seed. Prompts and replies have 4 ... 128 tokens each, geometric with a mean
of 40 before they are cut to that range; no EOS ends a reply earlier. Every second request is greedy, the
others are drawn at temperature 0.8. "One at a time" is the engine with one slot. A static batch begins when
it is full or its oldest request has waited for --patience, and runs to its longest end. All three serve the
same requests at the same times; first they must give the same tokens.

Time to first token counts from the arrival. Time per token is a request's own mean after its first token.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxsample as js
from benchmarks import measure
from jaxsample.engine import Engine, Request
from models import generation
from models.decoder import DecoderConfig
from models.engines import Sizes, build_engine
from models.presets import PRESETS, preset
from models.programs import compile_programs
from models.random_weights import random_weights

SMALL = DecoderConfig(
    vocab_size=8192,
    width=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    mlp_width=768,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    tied_embeddings=True,
)
LEAST, MEAN, MOST = 4, 40, 128  # tokens of prompts and of replies
LOADS = (0.35, 0.7)  # of what the engine can do, where no rate is given


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    config = SMALL if options.preset == "small" else preset(options.preset)
    weights = jax.block_until_ready(random_weights(config, 0, jnp.dtype(options.dtype)))
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    bandwidth = measure.copy_bandwidth()
    print(
        f"device {measure.device_name()}: {bandwidth / 1e9:.1f} GB/s; {options.preset} in {options.dtype}:"
        f" {num_bytes / 1e6:.0f} MB of weights, read in {num_bytes / bandwidth * 1e3:.2f} ms at best,"
        f" once a step of at most {options.slots} tokens"
    )
    requests = _requests(config.vocab_size, options.requests, options.seed)
    ways = _ways(config, weights, requests, options)
    capacity = _check(ways, requests, options.dtype)
    rows = []
    for rate in options.rate or [load * capacity for load in LOADS]:
        arrivals = _arrivals(rate, len(requests), options.seed)
        rows += _compare(ways, arrivals, rate, options, num_bytes / bandwidth)
    measure.write("serve", rows, options)


@dataclasses.dataclass
class Served:
    """Seconds from the beginning at which each request got its first and its last token, and the tokens."""

    first: np.ndarray
    last: np.ndarray
    tokens: list[list[int]]

    @classmethod
    def of(cls, num_requests: int) -> "Served":
        nothing = np.full(num_requests, np.nan)
        return cls(nothing, nothing.copy(), [[] for _ in range(num_requests)])

    def add(self, index: int, tokens: list[int], now: float) -> None:
        if tokens:
            if not self.tokens[index]:
                self.first[index] = now
            self.last[index] = now
            self.tokens[index] += tokens


Way = Callable[[np.ndarray], Served]  # serves all requests, given when each arrives


def _ways(config: DecoderConfig, weights, requests: list[Request], options) -> dict[str, Way]:
    def engine(slots: int) -> Engine:
        sizes = Sizes(slots=slots, max_length=2 * MOST, max_waiting=len(requests))
        return build_engine(config, weights, sizes)

    many, one = engine(options.slots), engine(1)
    programs = compile_programs(
        config,
        weights,
        limits=many.limits,
        features=many.buckets.features[0],
        num_rows=options.slots,
        longest_prompt=max(len(request.prompt) for request in requests),
    )
    return {
        "engine": lambda arrivals: _through(many, requests, arrivals),
        "one at a time": lambda arrivals: _through(one, requests, arrivals),
        "static batches": lambda arrivals: _in_batches(
            programs, weights, requests, arrivals, options.patience
        ),
    }


def _through(engine: Engine, requests: list[Request], arrivals: np.ndarray) -> Served:
    served, running, num_come, more = Served.of(len(requests)), {}, 0, False
    started = time.perf_counter()
    while more or num_come < len(requests):
        if not more:
            _sleep_until(started + arrivals[num_come])
        while num_come < len(requests) and arrivals[num_come] <= time.perf_counter() - started:
            running[num_come] = engine.submit(requests[num_come]).samples[0]
            num_come += 1
        more = engine.step()
        now = time.perf_counter() - started
        for index, sample in list(running.items()):
            done = sample.done
            served.add(index, sample.read().token_ids.tolist(), now)
            if done:
                del running[index]
    return served


def _in_batches(programs, weights, requests: list[Request], arrivals: np.ndarray, patience: float) -> Served:
    served, start = Served.of(len(requests)), 0
    rows = [js.make_params(programs.limits, **request.params) for request in requests]
    started = time.perf_counter()

    def take(index: int, _, tokens: list[int], status: int) -> None:
        served.add(index, tokens, time.perf_counter() - started)

    while start < len(requests):
        full = min(start + programs.num_rows, len(requests))
        _sleep_until(started + min(arrivals[full - 1], arrivals[start] + patience))
        come = int(np.searchsorted(arrivals, time.perf_counter() - started, side="right"))
        chosen = range(start, max(min(come, full), start + 1))
        jobs = [
            generation.Job(
                index,
                generation.Request(list(requests[index].prompt), dict(requests[index].params)),
                *rows[index],
                js.neutral_guidance(1),
                generation.Reply([generation.Sample()], []),
            )
            for index in chosen
        ]
        generation.run_batch(programs, weights, jobs, take, generation.Timing())
        start = chosen.stop
    return served


def _check(ways: dict[str, Way], requests: list[Request], dtype: str) -> float:
    """All ways give the same tokens; how many requests the engine serves a second when all are there.

    Float32 alone is fine enough for that: in bfloat16 the shape of a batch rounds the logits otherwise, and
    then the numbers of tokens must be the same.
    """
    at_once = np.zeros(len(requests))
    results = {name: way(at_once) for name, way in ways.items()}
    expected = results["engine"]
    for name, served in results.items():
        for index, (ours, theirs) in enumerate(zip(expected.tokens, served.tokens, strict=True)):
            if len(ours) != requests[index].params["max_tokens"] or len(ours) != len(theirs):
                raise SystemExit(f"error: request {index} got {len(theirs)} tokens from {name}")
            if dtype == "float32" and ours != theirs:
                raise SystemExit(f"error: request {index} got other tokens from {name} than from the engine")
    same = np.mean([len({tuple(x) for x in one}) == 1 for one in zip(*(r.tokens for r in results.values()))])
    print(f"{same:.0%} of {len(requests)} requests get the same tokens in all ways")
    num_tokens = sum(len(tokens) for tokens in expected.tokens)
    seconds = {name: way(at_once).last.max() for name, way in ways.items()}  # the first calls were slower
    for name in ways:
        print(f"  all there at once, {name}: {num_tokens / seconds[name]:.0f} tokens/s", flush=True)
    return len(requests) / seconds["engine"]


def _compare(
    ways: dict[str, Way], arrivals: np.ndarray, rate: float, options, floor_seconds: float
) -> list[dict]:
    rows, case = [], f"{options.preset} {options.dtype} B={options.slots} {rate:.2f} requests/s"
    print(case)
    for name, way in ways.items():
        served = way(arrivals)
        counts = np.array([len(tokens) for tokens in served.tokens])
        first = (served.first - arrivals) * 1e6
        each = (served.last - served.first)[counts > 1] / (counts[counts > 1] - 1) * 1e6
        median, spread = measure.median_and_spread(each.tolist())
        rows.append(
            {
                "case": f"{case} {len(arrivals)} requests",
                "what": f"time per token, {name}",
                "clock": "host",
                "time_us": median,
                "spread": spread,
                "token_p99_us": float(np.quantile(each, 0.99)),
                "first_token_p50_us": float(np.quantile(first, 0.5)),
                "first_token_p99_us": float(np.quantile(first, 0.99)),
                "tokens_per_s": float(counts.sum() / (served.last.max() - arrivals[0])),
                "floor_us": floor_seconds * 1e6,
                "baselines": {},
            }
        )
        row = rows[-1]
        print(
            f"  {name:>14}: first token {row['first_token_p50_us'] / 1e3:.0f} ms"
            f" (p99 {row['first_token_p99_us'] / 1e3:.0f}), a token {median / 1e3:.2f} ms"
            f" (p99 {row['token_p99_us'] / 1e3:.2f}), {row['tokens_per_s']:.0f} tokens/s",
            flush=True,
        )
    rows[0]["baselines"] = {name: row["time_us"] for name, row in list(zip(ways, rows))[1:]}
    return rows


def _requests(vocab_size: int, num_requests: int, seed: int) -> list[Request]:
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.geometric(1 / MEAN, (num_requests, 2)), LEAST, MOST)
    return [
        Request(
            generator.integers(vocab_size, size=num_prompt).tolist(),
            {"temperature": 0.8 * (index % 2), "seed": index, "max_tokens": int(num_tokens)},
        )
        for index, (num_prompt, num_tokens) in enumerate(lengths)
    ]


def _arrivals(rate: float, num_requests: int, seed: int) -> np.ndarray:
    """Seconds, rising from 0."""
    gaps = np.random.default_rng(seed + 1).exponential(1 / rate, num_requests)
    return np.cumsum(gaps) - gaps[0]


def _sleep_until(moment: float) -> None:
    time.sleep(max(moment - time.perf_counter(), 0))


def _options(arguments):
    parser = argparse.ArgumentParser(prog="bench_serve", description=__doc__.splitlines()[0])
    on_cpu = jax.default_backend() == "cpu"
    parser.add_argument("--preset", default="small", choices=("small", *PRESETS), help="shapes of the model")
    parser.add_argument(
        "--dtype", default="float32" if on_cpu else "bfloat16", choices=("float32", "bfloat16")
    )
    parser.add_argument("--slots", type=int, default=8 if on_cpu else 64, metavar="B")
    parser.add_argument("--requests", type=int, default=128, metavar="N")
    parser.add_argument(
        "--rate",
        type=float,
        nargs="+",
        metavar="R",
        help="requests a second (default: two shares of the engine's most)",
    )
    parser.add_argument(
        "--patience", type=float, default=0.5, metavar="S", help="seconds a static batch waits"
    )
    parser.add_argument("--seed", type=int, default=0)
    measure.add_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
