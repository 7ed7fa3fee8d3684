"""Device time of a tensor-parallel decode step by how it samples: the "decode" part of `bench_sharded`.

Random weights, placed one tensor at a time; every row has a prefix of random keys and values. "replicated"
gathers the logits and samples all rows on every device, "batch-sharded" is the step with a mesh and an axis,
"exchange" the same with `sample_by_exchange`. All run the same model; their first step's tokens are compared.
Of P devices as many are along "tensor" as divide the heads, the others along "data".
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsample as js
from benchmarks import cases, measure
from benchmarks.bench_step import Batch
from models.decoder import DecoderConfig, decoder_functions
from models.placement import (
    DATA,
    TENSOR,
    cache_sharding,
    make_mesh,
    place_model,
    row_sharding,
    weight_shardings,
)
from models.presets import preset
from models.random_weights import random_weights

WAYS = ("replicated", "batch-sharded", "exchange")
DEFAULT = WAYS[:2]
MIX = "filtered"
NUM_SPARE = 8  # steps beside the timed ones: checked, and to warm up
# Sums of one model in two programs may be rounded differently: of some rows a near tie may fall otherwise.
MOST_DIFFERING = 0.05


def bench(name: str, num_devices: int, bandwidth: float, options, attempt: Callable) -> None:
    """Measure all batches and ways.

    Args:
      name: of the machine.
      num_devices: P.
      bandwidth: of a device's memory, bytes a second.
      options: model, layers, decode_batch, prefix, ways, calls.
      attempt: called as attempt(case, measure_row) for each of them.
    """
    config = dataclasses.replace(preset(options.model), joined_projections=True)
    if options.layers is not None:
        config = dataclasses.replace(config, num_layers=options.layers)
    run(config, options.model, name, num_devices, bandwidth, options, attempt)


def run(
    config: DecoderConfig, model: str, name: str, num_devices: int, bandwidth: float, options, attempt
) -> None:
    """`bench` of a model of any shape."""
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    num_tensor = math.gcd(config.num_heads, num_devices)
    mesh = make_mesh({DATA: num_devices // num_tensor, TENSOR: num_tensor})
    weights = random_weights(config, 0, dtype, weight_shardings(config, mesh))
    config, weights = place_model(config, weights, mesh)
    read = sum(_share(leaf) for leaf in jax.tree.leaves(weights))
    if not config.tied_embeddings:  # of the input embedding only B rows are read
        read -= _share(weights["embedding"]["weight"])
    layout = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    print(
        f"\n{model}, {config.num_layers} layers, {jnp.dtype(dtype).name}, {layout}: a device reads"
        f" {read / 1e9:.2f} GB of weights, in {read / bandwidth * 1e6:.0f} us at best",
        flush=True,
    )
    num_slots = -(-(options.prefix + 2 * options.calls + NUM_SPARE) // 128) * 128
    for num_rows in options.decode_batch:
        batch = Batch.of(MIX, num_rows, config, num_slots, dtype)
        make_state = functools.partial(_state, batch, options.prefix, mesh)
        prefix = 2 * config.num_layers * num_rows * options.prefix * config.num_kv_heads * config.head_size
        floor_us = (read + prefix * jnp.dtype(dtype).itemsize / num_devices) / bandwidth * 1e6
        first: dict[str, Any] = {}
        for way in options.ways:
            step = _step(way, batch, mesh)
            case = f"{name} {model} L={config.num_layers} B={num_rows} prefix={options.prefix} {MIX}, {way}"
            shared = {"what": f"decode step, {layout}", "floor_us": floor_us}
            given = (way, step, weights, make_state, batch, shared, first, options.calls)
            attempt(case, functools.partial(_bench_step, *given))


def _bench_step(way: str, step, weights, make_state, batch: Batch, shared, first, num_calls: int) -> dict:
    """The row of one way; `first` holds the first way's name, tokens and time."""
    state, num_rows = list(make_state()), len(batch.requests)
    compiled = step.lower(weights, *state).compile()
    state[0], state[1], record = compiled(weights, *state)
    tokens = js.unpack(np.asarray(record), batch.features).tokens[:, 0]

    def call(_):
        state[0], state[1], record = compiled(weights, *state)
        return state[0], state[1], record

    timing = measure.time_calls(call, num_calls)
    if (np.asarray(state[0].status) != js.RUNNING).any():
        raise SystemExit("error: rows ended during timing")
    if not first:
        first |= {"way": way, "tokens": tokens, "least_us": timing.least_us}
    row = {
        **shared,
        "clock": timing.clock,
        "time_us": timing.time_us,
        "spread": timing.spread_us,
        "least_us": timing.least_us,
        "span_us": timing.span_us,
        "host_us": timing.host_us,
        "peak_bytes": measure.peak_temporaries(compiled),
        "num_differing": int((tokens != first["tokens"]).sum()),
        "most_differing": math.ceil(MOST_DIFFERING * num_rows),
        "baselines": {},
    }
    print(
        f"  B={num_rows:<3} {way:13} {row['least_us']:9.1f} us ({row['time_us']:.1f} +- {row['spread']:.1f}"
        f" the longest, span {row['span_us']:.1f}; {row['clock']} clock; host {row['host_us']:.0f}), floor"
        f" {row['floor_us']:.0f}; {first['way']} takes {first['least_us'] / row['least_us']:.3f} times that;"
        f" temporaries {row['peak_bytes'] / 1e6:.1f} MB; tokens that differ from its:"
        f" {row['num_differing']} of {num_rows}",
        flush=True,
    )
    return row


def _step(way: str, batch: Batch, mesh):
    """The jitted step: state is donated, and lies after it as before."""
    forward, unembed = decoder_functions(batch.config)
    given: dict[str, Any] = dict(limits=batch.limits, features=batch.features)

    def gathered(weights, hidden):
        return jax.lax.with_sharding_constraint(unembed(weights, hidden), row_sharding(mesh))

    if way == "replicated":
        step = js.make_decode_step(forward, gathered, **given)
    else:
        given |= dict(mesh=mesh, axis=TENSOR, batch_axis=DATA)
        draw = js.sample_by_exchange if way == "exchange" else None
        step = js.make_decode_step(forward, unembed, **given, draw=draw)
    out = row_sharding(mesh), cache_sharding(batch.config, len(batch.requests), mesh), row_sharding(mesh)
    return jax.jit(lambda weights, *state: step(weights, *state), donate_argnums=(1, 2), out_shardings=out)


def _state(batch: Batch, num_prefix: int, mesh):
    """Requests whose prompts are one token longer than the prefix, and a cache made where it lies."""
    config, num_rows = batch.config, len(batch.requests)
    prompts, _ = cases.histories(num_rows, config.vocab_size, num_prefix + 1, 0)
    slots, lengths = np.arange(num_rows, dtype=np.int32), np.full(num_rows, num_prefix + 1, np.int32)
    empty = js.empty_requests(batch.limits, num_rows)
    params, stop = batch.params()
    requests = js.admit(empty, slots, params, stop, prompts, lengths, limits=batch.limits)
    sizes = config.num_layers, num_rows, batch.limits.max_length, config.num_kv_heads, config.head_size
    shardings = cache_sharding(config, num_rows, mesh)

    def make(keys):
        cache = jax.eval_shape(lambda: js.init_cache(*sizes, batch.dtype))
        keys, values = (jax.random.normal(key, sizes, batch.dtype) for key in keys)
        return dataclasses.replace(cache, keys=keys, values=values)

    cache = jax.jit(make, out_shardings=shardings)(jax.random.split(jax.random.key(1)))
    return jax.device_put(requests, row_sharding(mesh)), cache


def _share(leaf) -> int:
    """Bytes of an array that one device holds."""
    return leaf.addressable_shards[0].data.nbytes
