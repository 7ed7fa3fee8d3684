"""The gap that an engine leaves between its steps, and its copies back, from the device's own record.

    python -m benchmarks.bench_engine [--model qwen2.5-1.5b] [--batch 64] [--steps 48] [--length 1024]

Random weights of a real model's shapes; a full batch that neither grows nor ends while it is measured, with
top-k, top-p and logprobs. A gap runs from the end of a step's last kernel to the beginning of the next step's
first one. On a CPU there is no such record: then only host times are given, and the tokens are checked.
"""

import argparse
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxsample as js
from benchmarks import measure
from models.decoder import DecoderConfig, decoder_functions
from models.kernels import kernels_of
from models.presets import preset
from models.random_weights import random_weights

PAGE, NUM_PROMPT, NUM_CHECKED = 16, 64, 8
LIMIT_SHARE = 0.03  # of a step
# Kernels on a GPU add numbers in an order that depends on shapes: a near tie may then fall the other way.
LEAST_EQUAL = {"cpu": 1.0, "gpu": 0.9}


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    config = preset(options.model)
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    weights = random_weights(config, 0, dtype)
    limits = js.Limits(config.vocab_size, max_length=options.length, num_logprobs=5)
    features = js.Features(tier="filtered", full_rows=False, num_logprobs=5)
    buckets = js.Buckets(
        rows=(options.batch,),
        lengths=(options.length,),
        prefill=((min(options.batch, 8), NUM_PROMPT),),
        features=(features,),
        updates=(options.batch,),
    )
    forward, unembed = decoder_functions(config, kernels=kernels_of())

    def new_cache(num_pages, page_size, table):
        shape = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_size)
        return js.init_paged_cache(*shape, dtype, table)

    bandwidth = measure.copy_bandwidth()
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    floor_us = weight_bytes / bandwidth * 1e6
    print(
        f"{measure.device_name()}: weights of {options.model} are read in {floor_us:.0f} us; "
        f"a gap may be {LIMIT_SHARE:.0%} of a step"
    )
    begun = time.perf_counter()
    engine = js.Engine(
        forward,
        unembed,
        weights,
        new_cache,
        limits=limits,
        buckets=buckets,
        num_pages=options.batch * (options.length // PAGE),
        page_size=PAGE,
    )
    print(f"compiled in {time.perf_counter() - begun:.1f} s")
    requests = _requests(config, options)
    streams = [engine.submit(request) for request in requests]
    while min(len(stream.samples[0].tokens().token_ids) for stream in streams) < NUM_CHECKED:
        engine.step()
    _check(streams, _plain(config, weights, limits, features, requests, dtype))

    row = {"case": f"{options.model} B={options.batch} S={options.length}", "what": "engine step"}
    row |= _host_times(engine, options.steps) | {"floor_us": floor_us}
    print(
        f"host: {row['host_us']:.0f} us between steps' returns; {row['period_us']:.0f} us a step in the mean"
    )
    if jax.default_backend() == "gpu":
        row |= _device_gaps(engine, options.steps)
        print(
            f"step {row['time_us']:.0f} us, gap {row['gap_us']:.1f} us (mean {row['mean_gap_us']:.1f}), "
            f"{row['gap_share']:.2%} of a step; {row['copies_back']:.2f} copies back a step"
        )
    assert not any(stream.done for stream in streams), "the batch was not full to the end"
    measure.write("engine", [row], options)


def _requests(config: DecoderConfig, options) -> list[js.Request]:
    generator = np.random.default_rng(0)
    params = {"top_k": 40, "top_p": 0.95, "logprobs": 5, "max_tokens": options.length - NUM_PROMPT}
    return [
        js.Request(generator.integers(0, config.vocab_size, NUM_PROMPT).tolist(), {"seed": seed, **params})
        for seed in range(options.batch)
    ]


def _plain(config: DecoderConfig, weights, limits, features, requests, dtype) -> np.ndarray:
    """The first tokens by the plain step on a contiguous cache: i32[B, NUM_CHECKED]."""
    forward, unembed = decoder_functions(config, kernels=kernels_of())
    num_rows = len(requests)
    rows = [js.make_params(limits, **request.params) for request in requests]
    prompts = np.asarray([request.prompt for request in requests], np.int32)
    lengths = np.full(num_rows, NUM_PROMPT, np.int32)
    slots = np.arange(num_rows, dtype=np.int32)
    empty = js.empty_requests(limits, num_rows)
    state = js.admit(empty, slots, *js.stack_rows(rows), prompts, lengths, limits=limits)
    shape = (config.num_layers, num_rows, limits.max_length, config.num_kv_heads, config.head_size)
    cache = js.make_prefill(forward, limits)(
        weights, js.init_cache(*shape, dtype), prompts[:, :-1], np.zeros(num_rows, np.int32), lengths - 1
    )
    step = js.make_decode_step(forward, unembed, limits=limits, features=features)
    tokens = []
    for _ in range(NUM_CHECKED):
        state, cache, record = step(weights, state, cache)
        tokens.append(js.unpack(record, features).tokens[:, 0])
    return np.stack(tokens, axis=1)


def _check(streams, expected: np.ndarray) -> None:
    got = np.stack([stream.samples[0].tokens().token_ids[:NUM_CHECKED] for stream in streams])
    # A row that parted once goes on differently: the first token that differs is what counts.
    differs = got != expected
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), NUM_CHECKED)
    equal = first.sum() / (first + differs.any(axis=1)).sum()
    least = LEAST_EQUAL["gpu" if jax.default_backend() == "gpu" else "cpu"]
    print(f"checked: {equal:.2%} of tokens are those of the plain step (at least {least:.0%})")
    assert equal >= least


def _host_times(engine: js.Engine, num_steps: int) -> dict:
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - start) * 1e6)
    median, spread = measure.median_and_spread(times)
    return {"host_us": median, "spread": spread, "time_us": median, "period_us": float(np.mean(times))}


def _device_gaps(engine: js.Engine, num_steps: int) -> dict:
    """Gaps between the kernels of one step and the next, and copies to the host, of num_steps steps."""
    # The device's record alone: one of every Python call would slow the host, and make the gaps it measures.
    only_device = jax.profiler.ProfileOptions()
    only_device.python_tracer_level = only_device.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=only_device):
            for _ in range(num_steps):
                engine.step()
        files = sorted(Path(folder).glob("**/*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(files[-1]))
        events = sorted(
            (event.start_ns, event.duration_ns, event.name)
            for plane in data.planes
            if "GPU" in plane.name
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        )
    kernels = [event for event in events if not event[2].startswith(("Memcpy", "Memset"))]
    copies = sum("D2H" in name or "DtoH" in name for _, _, name in events)
    # The step that was in flight when the trace began is not whole: count by the steps launched inside.
    size = len(kernels) // num_steps
    if not size or len(kernels) % num_steps:
        raise RuntimeError(f"the profiler saw {len(kernels)} kernels in {num_steps} equal steps")
    steps = [kernels[i : i + size] for i in range(0, len(kernels), size)]
    start = np.asarray([step[0][0] for step in steps])
    end = np.asarray([max(begun + lasts for begun, lasts, _ in step) for step in steps])
    gaps, whole = (start[1:] - end[:-1]) / 1e3, np.diff(start) / 1e3
    return {
        "time_us": float(np.median(whole)),
        "busy_us": float(np.median([sum(lasts for _, lasts, _ in step) for step in steps])) / 1e3,
        "num_kernels": size,
        "spread": measure.median_and_spread(whole.tolist())[1],
        "gap_us": float(np.median(gaps)),
        "mean_gap_us": float(gaps.mean()),
        "gap_share": float(gaps.sum() / whole.sum()),
        "copies_back": copies / num_steps,
    }


def _options(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen2.5-1.5b", help="a preset of models/presets.py")
    parser.add_argument("--batch", type=int, default=64, help="B")
    parser.add_argument("--length", type=int, default=1024, help="S, a multiple of 16")
    parser.add_argument("--steps", type=int, default=48)
    measure.add_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
