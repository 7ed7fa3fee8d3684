"""Time of `sample` on [B, V] logits against what anyone would write, and the memory it needs.

    python -m benchmarks.bench_sample [--batch 1 8 64 256] [--vocab 151936] [--mixes plain filtered full]

First the ceiling (bandwidth, one read of the logits), then for every case: hold some rows against the float64
reference, then time. Ratios to R1 = `x.max(-1)` on the same array are the result.
"""

import argparse
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxsample as js
from benchmarks import cases, measure
from jaxsample import rng
from tests import reference

NUM_PROMPT, NUM_OUTPUT = 64, 32
# Decisions closer than this (logits, mass) may fall either way between float32 and the float64 reference.
CLOSE = 1e-4


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    bandwidth = measure.copy_bandwidth()
    print(
        f"device {measure.device_name()}: {bandwidth / 1e9:.1f} GB/s read and written by a pass over an array"
    )
    rows = []
    for num_rows in options.batch:
        programs = [Program.of(mix, num_rows, options.vocab) for mix in options.mixes]
        for kind in options.kinds:
            logits = _rotated_logits(kind, num_rows, options.vocab)
            r1 = _time(jax.jit(lambda x: x.max(-1)), [(x,) for x in logits], options.calls)
            print(f"\nB={num_rows} V={options.vocab} {kind}: R1 {r1.time_us:.1f} us ({r1.clock} clock)")
            for program in programs:
                rows.append(_bench(program, kind, logits, r1, bandwidth, options.calls))
                _print_row(rows[-1])
                measure.keep("sample", rows, options)
    measure.write("sample", rows, options)


@dataclasses.dataclass(frozen=True)
class Program:
    """`sample` compiled for one mix and batch size, with everything but logits and position."""

    mix: str
    features: js.Features
    compiled: Callable
    state: tuple  # (SamplingParams, StopRule, History or None) on the device
    requests: list[dict]
    prompts: np.ndarray
    outputs: np.ndarray

    @classmethod
    def of(cls, mix: str, num_rows: int, vocab_size: int) -> "Program":
        limits = js.Limits(vocab_size=vocab_size)
        requests = cases.requests(mix, num_rows)
        params, stop = js.stack_rows([js.make_params(limits, **request) for request in requests])
        features = js.required_features(params, stop, limits=limits)
        prompts, outputs = cases.histories(num_rows, vocab_size, NUM_PROMPT, NUM_OUTPUT)
        history = None
        if features.tier == "full":
            history = js.start(limits, prompts, np.full(num_rows, NUM_PROMPT, np.int32))
            history = js.append(history, outputs, np.full(num_rows, NUM_OUTPUT, np.int32))

        def sample(logits, params, stop, history, position):
            stop = None if history is None else stop
            sampled = js.sample(
                logits, params, position, stop=stop, history=history, limits=limits, features=features
            )
            return sampled.tokens, sampled.valid

        state = jax.device_put((params, stop, history))
        logits = jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.float32)
        position = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
        compiled = jax.jit(sample).lower(logits, *state, position).compile()
        return cls(mix, features, compiled, state, requests, prompts, outputs)


def _bench(program: Program, kind, logits, r1, bandwidth, num_calls) -> dict:
    num_rows, vocab_size = logits[0].shape
    position = jnp.full((num_rows,), NUM_PROMPT + NUM_OUTPUT, jnp.int32)
    num_checked = _check(program, logits[0], position)
    inputs = [(x, *program.state, position + i) for i, x in enumerate(logits)]
    timing = _time(program.compiled, inputs, num_calls)
    params, _, history = program.state
    read = logits[0].nbytes + (0 if history is None else history.output_counts.nbytes)
    features = program.features
    return {
        "case": f"B={num_rows} V={vocab_size} {kind} {program.mix}",
        "what": f"sample, tier {features.tier}{', full rows' if features.full_rows else ''}",
        "clock": timing.clock,
        "time_us": timing.time_us,
        "spread": timing.spread_us,
        "span_us": timing.span_us,
        "host_us": timing.host_us,
        # The pass behind the bandwidth reads and writes; a summary only reads.
        "floor_us": read / bandwidth * 1e6,
        "r1_us": r1.time_us,
        "peak_bytes": measure.peak_temporaries(program.compiled),
        "logits_bytes": logits[0].nbytes,
        "rows_checked": num_checked,
        "baselines": _time_baselines(program.mix, logits, params, num_calls),
    }


def _check(program: Program, logits, position) -> int:
    """Hold a few rows against the float64 reference, exactly; returns how many had a clear decision."""
    tokens, valid = map(np.asarray, program.compiled(logits, *program.state, position))
    num_rows, vocab_size = logits.shape
    if not valid.all():
        raise SystemExit("error: valid rows were flagged as invalid")
    num_checked = 0
    for row in sorted({0, num_rows // 3, num_rows // 2, num_rows - 1}):
        request = {key: value for key, value in program.requests[row].items() if key != "seed"}
        seed = np.array([[program.requests[row]["seed"], 0]], np.uint32)
        noise = rng.gumbel_range(seed, position[row : row + 1], rng.TARGET, vocab_size)[0]
        expected = reference.sample(
            np.asarray(logits[row]),
            request,
            vocab_size=vocab_size,
            noise=np.asarray(noise),
            prompt=program.prompts[row].tolist(),
            output=program.outputs[row].tolist(),
        )
        if expected["margin"] < CLOSE:
            continue
        num_checked += 1
        if tokens[row] != expected["token"]:
            raise SystemExit(f"error: row {row} drew {tokens[row]}, the reference {expected['token']}")
    return num_checked


def _time_baselines(mix, logits, params, num_calls) -> dict[str, float]:
    """Microseconds of the samplers that the filters of this mix could be written as in plain jax.numpy."""
    numbers = (params.temperature, params.top_k, params.top_p, params.min_p)
    keys = jax.random.split(jax.random.key(0), len(logits))
    times = {}
    for name, function in _baselines(mix).items():
        inputs = [(x, key, *numbers) for x, key in zip(logits, keys)]
        times[name] = _time(function, inputs, num_calls).time_us
    return times


@functools.cache
def _baselines(mix: str) -> dict[str, Callable]:
    """The baselines of a mix, jitted once: shapes repeat from kind to kind."""
    if mix == "greedy":
        return {"argmax": jax.jit(lambda logits, *_: jnp.argmax(logits, axis=-1))}
    if mix == "plain":
        return {"jax.random.categorical": jax.jit(_draw_unfiltered)}
    samplers = {"jnp.sort": _draw_from_sorted}
    if mix != "top_p":
        samplers["lax.top_k 64"] = functools.partial(_draw_from_top_k, jax.lax.top_k)
        if "is_stable" in inspect.signature(jax.lax.top_k).parameters:
            unstable = functools.partial(jax.lax.top_k, is_stable=False)
            samplers["lax.top_k 64 unstable"] = functools.partial(_draw_from_top_k, unstable)
    return {name: jax.jit(function) for name, function in samplers.items()}


def _draw_unfiltered(logits, key, temperature, *_):
    return jax.random.categorical(key, logits / temperature[:, None])


def _draw_from_sorted(logits, key, temperature, top_k, top_p, min_p):
    ids = jnp.argsort(-logits, axis=-1)
    values = jnp.take_along_axis(logits, ids, axis=-1) / temperature[:, None]
    return _draw_filtered(values, ids, key, top_k, top_p, min_p)


def _draw_from_top_k(top_k_function, logits, key, temperature, top_k, top_p, min_p):
    values, ids = top_k_function(logits, 64)
    return _draw_filtered(values / temperature[:, None], ids, key, top_k, top_p, min_p)


def _draw_filtered(values, ids, key, top_k, top_p, min_p):
    """min-p, top-k, top-p on values in descending order, then a categorical draw: i32[B]."""
    kept = jnp.arange(values.shape[1])[None, :] < jnp.where(top_k > 0, top_k, values.shape[1])[:, None]
    kept &= values >= values[:, :1] + jnp.log(min_p)[:, None]
    probabilities = jax.nn.softmax(jnp.where(kept, values, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept &= before < top_p[:, None]
    drawn = jax.random.categorical(key, jnp.where(kept, values, -jnp.inf))
    return jnp.take_along_axis(ids, drawn[:, None], axis=-1)[:, 0]


def _rotated_logits(kind, num_rows, vocab_size) -> list[jax.Array]:
    num_inputs = measure.num_rotated(num_rows * vocab_size * 4)
    return [jax.device_put(cases.KINDS[kind](num_rows, vocab_size, seed=i)) for i in range(num_inputs)]


def _time(function, inputs, num_calls) -> measure.Timing:
    num_calls = max(num_calls, len(inputs)) if jax.default_backend() == "gpu" else num_calls
    return measure.time_calls(lambda i: function(*inputs[i % len(inputs)]), num_calls)


def _print_row(row) -> None:
    print(
        f"  {row['case'].split()[-1]:9} {row['time_us']:9.1f} us +- {row['spread']:.1f}"
        f"  {row['time_us'] / row['r1_us']:6.2f} x R1  {row['time_us'] / row['floor_us']:7.2f} x floor"
        f"  peak {row['peak_bytes'] / row['logits_bytes']:.2f} x logits  host {row['host_us']:.1f} us"
    )
    for name, time_us in row["baselines"].items():
        print(f"    {name:24} {time_us:9.1f} us  {time_us / row['time_us']:6.2f} x sample")
    sys.stdout.flush()


def _options(arguments):
    parser = argparse.ArgumentParser(prog="bench_sample", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256], metavar="B")
    parser.add_argument("--vocab", type=int, default=cases.VOCAB_SIZE, metavar="V")
    parser.add_argument("--kinds", nargs="+", default=["lm", "flat"], choices=list(cases.KINDS))
    parser.add_argument(
        "--mixes", nargs="+", default=["plain", "filtered", "full", "top_p"], choices=list(cases.MIXES)
    )
    parser.add_argument("--calls", type=int, default=20, help="timed calls of each case")
    measure.add_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
