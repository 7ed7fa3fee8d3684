"""What a mesh costs where it buys nothing: a decode step on a mesh of one device against the plain step.

    python -m benchmarks.bench_mesh_step [--batch 1 64] [--mixes plain filtered full] [--layers L]

Both run in one process, in turns, on the same random weights; their records are held against each other, to
the bit, before anything is timed. Where the device's own clock is there, more than LIMIT_PERCENT is an error.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxsample as js
from benchmarks import cases, measure
from benchmarks.bench_step import NUM_PROMPT, SMOLLM2, Batch, time_step
from models.decoder import decoder_functions
from models.placement import DATA, TENSOR, make_mesh, place_model
from models.random_weights import random_weights

LIMIT_PERCENT = 3.0
NUM_CHECKED = 4  # steps whose records are compared
NUM_TURNS = 3  # of each, so that a device that warms up or slows down does so under both


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    config = dataclasses.replace(SMOLLM2, num_layers=options.layers or SMOLLM2.num_layers)
    weights = random_weights(config, 0, dtype)
    mesh = make_mesh({DATA: 1, TENSOR: 1})
    name = f"SMOLLM2 shapes, {config.num_layers} layers, {jnp.dtype(dtype).name}"
    bandwidth = measure.copy_bandwidth()
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    floor_us = weight_bytes / bandwidth * 1e6
    print(
        f"device {measure.device_name()}: {bandwidth / 1e9:.1f} GB/s; {name}:"
        f" {weight_bytes / 1e6:.0f} MB of weights, read in {floor_us / 1e3:.2f} ms at best"
    )
    rows = []
    for num_rows in options.batch:
        for mix in options.mixes:
            batch = Batch.of(mix, num_rows, config, options.slots, dtype)
            row = {"case": f"{name} B={num_rows} S={options.slots} {mix}", "floor_us": floor_us}
            rows.append(row | _bench(batch, weights, mesh, options.calls))
            _print_row(rows[-1])
            measure.keep("mesh_step", rows, options)
    measure.write("mesh_step", rows, options)
    over = [row for row in rows if row["clock"] == "device" and row["over_percent"] > LIMIT_PERCENT]
    if over:
        cases_over = ", ".join(f"{row['case']} {row['over_percent']:.1f} %" for row in over)
        raise SystemExit(f"error: a mesh of one device costs more than {LIMIT_PERCENT} %: {cases_over}")


def _bench(batch: Batch, weights, mesh, num_calls: int) -> dict:
    config, placed = place_model(batch.config, weights, mesh)
    options = dict(limits=batch.limits, features=batch.features)
    on_mesh = dict(mesh=mesh, axis=TENSOR, batch_axis=DATA)
    forward, unembed = decoder_functions(config)
    prefill = js.make_prefill(forward, batch.limits)
    rows, layers = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((DATA,), (None, DATA)))

    def state():
        requests, cache = batch.state()
        prompts = np.asarray(requests.history.tokens)[:, : NUM_PROMPT - 1]
        lengths = np.zeros(len(prompts), np.int32)
        return requests, prefill(weights, cache, prompts, lengths, lengths + NUM_PROMPT - 1)

    def mesh_state():
        return jax.device_put(state(), (rows, layers))

    ways = {
        "plain": (js.make_decode_step(forward, unembed, **options), weights, state),
        "mesh": (js.make_decode_step(forward, unembed, **options, **on_mesh), placed, mesh_state),
    }
    _check(ways)
    turns: dict[str, list[measure.Timing]] = {"plain": [], "mesh": []}
    for _ in range(NUM_TURNS):
        for way, (step, given, new_state) in ways.items():
            turns[way].append(time_step(step, given, *new_state(), num_calls))
    by_time = lambda timing: timing.time_us
    middle = {way: sorted(times, key=by_time)[NUM_TURNS // 2] for way, times in turns.items()}
    mesh_time, plain = middle["mesh"], middle["plain"]
    logits = jax.device_put(cases.lm_like(len(batch.requests), config.vocab_size))
    read = jax.jit(lambda x: x.max(-1))
    step, given, new_state = ways["mesh"]
    return {
        "what": f"decode step on a mesh of one device, tier {batch.features.tier}",
        "clock": mesh_time.clock,
        "time_us": mesh_time.time_us,
        "spread": mesh_time.spread_us,
        "host_us": mesh_time.host_us,
        "return_us": mesh_time.return_us,
        "over_percent": 100 * (mesh_time.time_us / plain.time_us - 1),
        "plain_spread": plain.spread_us,
        "plain_host_us": plain.host_us,
        "plain_return_us": plain.return_us,
        "r1_us": measure.time_calls(lambda _: read(logits), num_calls).time_us,
        "peak_bytes": measure.peak_temporaries(step.lower(given, *new_state()).compile()),
        "baselines": {"plain": plain.time_us},
    }


def _check(ways) -> None:
    """A few steps of each leave the same records."""
    records: dict[str, list[np.ndarray]] = {}
    for way, (step, given, new_state) in ways.items():
        requests, cache = new_state()
        records[way] = []
        for _ in range(NUM_CHECKED):
            requests, cache, record = step(given, requests, cache)
            records[way].append(np.asarray(record))
    if not np.array_equal(records["plain"], records["mesh"]):
        raise SystemExit("error: on a mesh of one device the step tells the host something else than without")


def _print_row(row) -> None:
    print(
        f"{row['case']}\n"
        f"  mesh {row['time_us']:.0f} us +- {row['spread']:.0f}, plain {row['baselines']['plain']:.0f} us"
        f" +- {row['plain_spread']:.0f} ({row['clock']} clock): {row['over_percent']:+.1f} %,"
        f" limit {LIMIT_PERCENT:.0f} %\n"
        f"  the call returns after {row['return_us']:.0f} us, plain {row['plain_return_us']:.0f} us"
        f"   R1 {row['r1_us']:.0f} us   temporaries {row['peak_bytes'] / 1e6:.1f} MB"
    )
    sys.stdout.flush()


def _options(arguments):
    parser = argparse.ArgumentParser(prog="bench_mesh_step", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64], metavar="B")
    parser.add_argument("--slots", type=int, default=512, metavar="S", help="cache slots of a request")
    parser.add_argument("--layers", type=int, metavar="L", help="fewer than the model has, for a quick look")
    parser.add_argument(
        "--mixes", nargs="+", default=["plain", "filtered", "full"], choices=list(cases.MIXES)
    )
    parser.add_argument("--calls", type=int, default=30, help="timed calls of each case and turn")
    measure.add_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
