"""Time of a decode step, of its sampling tail alone, and whether a step ever waits for the host.

    python -m benchmarks.bench_step [--model PATH | --random] [--batch 1] [--mixes greedy plain filtered full]

The tail is the same step with a model that hands over given logits, hidden states and staged rows, so it
holds shaping, drawing, finishing and the commit to a cache of the real size. Its tokens are held against
`sample` before anything is timed. On a GPU the step is also run behind a forward of many milliseconds: a call
that only returns when that is done had a predicate for the host in it.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsample as js
from benchmarks import cases, measure
from models.decoder import DecoderConfig, decoder_functions
from models.presets import preset
from models.random_weights import random_weights

SMOLLM2 = preset("smollm2-135m")  # for --random: the shapes of the default model without its weights
NUM_PROMPT = 33
# A call that waits for the device returns after the forward; one that does not, in well under half of it.
RETURN_SHARE = 0.5


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    name, config, weights = _model(options, dtype)
    bandwidth = measure.copy_bandwidth()
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    print(
        f"device {measure.device_name()}: {bandwidth / 1e9:.1f} GB/s; {name} in {jnp.dtype(dtype).name}:"
        f" {weight_bytes / 1e6:.0f} MB of weights, read in {weight_bytes / bandwidth * 1e3:.2f} ms at best"
    )
    if jax.default_backend() == "gpu":
        _check_return(config)
    rows = []
    for num_rows in options.batch:
        for mix in options.mixes:
            batch = Batch.of(mix, num_rows, config, options.slots, dtype)
            row = {
                "case": f"{name} {jnp.dtype(dtype).name} B={num_rows} S={options.slots} {mix}",
                "floor_us": weight_bytes / bandwidth * 1e6,
            }
            rows.append(row | _bench(batch, decoder_functions(config), weights, options.calls))
            _print_row(rows[-1])
            measure.keep("step", rows, options)
    measure.write("step", rows, options)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The requests of one mix, what their programs are built from, and fresh arrays to donate."""

    limits: js.Limits
    features: js.Features
    requests: list[dict]
    config: DecoderConfig
    dtype: Any

    @classmethod
    def of(cls, mix: str, num_rows: int, config: DecoderConfig, num_slots: int, dtype) -> "Batch":
        limits = js.Limits(vocab_size=config.vocab_size, max_length=num_slots)
        requests = cases.requests(mix, num_rows)
        for request in requests:  # rows that end would make later steps cheaper
            request |= {"eos_token_ids": (), "stop_token_ids": (), "min_tokens": 0}
        batch = cls(limits, js.Features(), requests, config, dtype)
        return dataclasses.replace(batch, features=js.required_features(*batch.params(), limits=limits))

    def params(self):
        return js.stack_rows([js.make_params(self.limits, **request) for request in self.requests])

    def state(self) -> tuple[js.Requests, js.KVCache]:
        num_rows = len(self.requests)
        prompts, _ = cases.histories(num_rows, self.config.vocab_size, NUM_PROMPT, 0)
        lengths = np.full(num_rows, NUM_PROMPT, np.int32)
        requests = js.empty_requests(self.limits, num_rows)
        slots = np.arange(num_rows, dtype=np.int32)
        requests = js.admit(requests, slots, *self.params(), prompts, lengths, limits=self.limits)
        cache = js.init_cache(
            self.config.num_layers,
            num_rows,
            self.limits.max_length,
            self.config.num_kv_heads,
            self.config.head_size,
            self.dtype,
        )
        return requests, cache


def _bench(batch: Batch, model: tuple[Callable, Callable], weights, num_calls: int) -> dict:
    num_rows = len(batch.requests)
    forward, unembed = model
    step = js.make_decode_step(forward, unembed, limits=batch.limits, features=batch.features)
    tail = js.make_decode_step(*_given_model(), limits=batch.limits, features=batch.features)
    given = _given(num_rows, batch)
    _check(tail, given, batch)

    requests, cache = batch.state()
    prefill = js.make_prefill(forward, batch.limits)
    prompts = np.asarray(requests.history.tokens)[:, : NUM_PROMPT - 1]
    none, all_but_root = np.zeros(num_rows, np.int32), np.full(num_rows, NUM_PROMPT - 1, np.int32)
    cache = prefill(weights, cache, prompts, none, all_but_root)
    peak_bytes = measure.peak_temporaries(step.lower(weights, requests, cache).compile())
    whole = time_step(step, weights, requests, cache, num_calls)
    alone = time_step(tail, given, *batch.state(), num_calls)
    logits = given["logits"][:, 0]
    read = jax.jit(lambda x: x.max(-1))
    r1 = measure.time_calls(lambda _: read(logits), num_calls)
    return {
        "what": f"decode step, tier {batch.features.tier}{', full rows' if batch.features.full_rows else ''}",
        "clock": whole.clock,
        "time_us": whole.time_us,
        "spread": whole.spread_us,
        "span_us": whole.span_us,
        "host_us": whole.host_us,
        "return_us": whole.return_us,
        "tail_us": alone.time_us,
        "tail_spread": alone.spread_us,
        "tail_percent": 100 * alone.time_us / whole.time_us,
        "r1_us": r1.time_us,
        "peak_bytes": peak_bytes,
        "baselines": {},
    }


def time_step(step, weights, requests, cache, num_calls) -> measure.Timing:
    state = [requests, cache]

    def call(_):
        state[0], state[1], record = step(weights, *state)
        return state[0], state[1], record

    timing = measure.time_calls(call, num_calls)
    status = np.asarray(state[0].status)
    if (status != js.RUNNING).any():
        raise SystemExit(f"error: rows ended during timing, statuses {sorted(set(status.tolist()))}")
    return timing


def _given_model() -> tuple[Callable, Callable]:
    """A model whose weights are its results: hidden states, staged keys and values, logits."""

    def forward(given, tokens, positions, cache, mask):
        return given["hidden"], given["staged"]

    def unembed(given, hidden):
        return given["logits"]

    return forward, unembed


def _given(num_rows: int, batch: Batch) -> dict:
    config = batch.config
    shape = (config.num_layers, num_rows, 1, config.num_kv_heads, config.head_size)
    return {
        "hidden": jnp.zeros((num_rows, 1, 1), batch.dtype),
        "staged": js.Staged(jnp.ones(shape, batch.dtype), jnp.ones(shape, batch.dtype)),
        "logits": jax.device_put(cases.lm_like(num_rows, config.vocab_size)[:, None]),
    }


def _check(tail, given, batch: Batch) -> None:
    """A step's tokens are those of `sample` on the same logits, exactly."""
    requests, cache = batch.state()
    sampled = js.sample(
        given["logits"][:, 0],
        requests.params,
        requests.length + 1,
        stop=requests.stop,
        history=requests.history,
        limits=batch.limits,
        features=batch.features,
    )
    expected = np.asarray(sampled.tokens)
    _, _, record = tail(given, requests, cache)
    tokens = js.unpack(np.asarray(record), batch.features).tokens[:, 0]
    if not np.array_equal(tokens, expected):
        raise SystemExit(f"error: the step drew {tokens.tolist()}, sample {expected.tolist()}")


def _check_return(config: DecoderConfig) -> None:
    """Put every stage behind a forward of many milliseconds and see when the call returns."""
    batch = Batch.of("full", 8, config, 256, jnp.bfloat16)
    features = js.Features(num_logprobs=5)
    _, unembed = _given_model()

    def forward(given, tokens, positions, cache, mask):
        x = given["matrix"]
        for _ in range(8):
            x = x @ given["matrix"]
        return given["hidden"] + x.max(), given["staged"]

    def unembed_after(given, hidden):
        return unembed(given, hidden) + hidden.astype(jnp.float32)

    step = js.make_decode_step(forward, unembed_after, limits=batch.limits, features=features)
    weights = {**_given(8, batch), "matrix": jnp.zeros((8192, 8192), jnp.bfloat16)}
    timing = time_step(step, weights, *batch.state(), 20)
    print(
        f"every stage behind a long forward: the call returns after {timing.return_us:.0f} us,"
        f" the device takes {timing.span_us:.0f} us"
    )
    if timing.return_us > RETURN_SHARE * timing.span_us:
        raise SystemExit(
            "error: the call waits for the device: something in the step is a predicate for the host"
        )


def _model(options, dtype) -> tuple[str, DecoderConfig, Any]:
    if options.random:
        return "SmolLM2-135M (random weights)", SMOLLM2, random_weights(SMOLLM2, 0, dtype)
    # Here, since random weights need none of the packages that read checkpoints.
    from models.fetch import fetch_smollm2
    from models.load import load

    path = fetch_smollm2() if options.model is None else options.model
    model = load(path, dtype)
    return path.stem, model.config, model.weights


def _print_row(row) -> None:
    print(
        f"{row['case']}\n"
        f"  step {row['time_us']:.0f} us +- {row['spread']:.0f} ({row['clock']} clock;"
        f" host {row['host_us']:.0f} us, returns after {row['return_us']:.0f} us)\n"
        f"  tail {row['tail_us']:.0f} us +- {row['tail_spread']:.0f}: {row['tail_percent']:.1f} % of the step"
        f"   R1 {row['r1_us']:.0f} us   temporaries {row['peak_bytes'] / 1e6:.1f} MB"
    )
    sys.stdout.flush()


def _options(arguments):
    parser = argparse.ArgumentParser(prog="bench_step", description=__doc__.splitlines()[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model", type=Path, metavar="PATH", help="a model folder or GGUF file (default: SmolLM2)"
    )
    model.add_argument("--random", action="store_true", help="SmolLM2's shapes with random weights")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], metavar="B")
    parser.add_argument("--slots", type=int, default=512, metavar="S", help="cache slots of a request")
    parser.add_argument(
        "--mixes", nargs="+", default=["plain", "filtered", "full", "top_p"], choices=list(cases.MIXES)
    )
    parser.add_argument("--calls", type=int, default=30, help="timed calls of each case")
    measure.add_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
