"""Device time of a decode step of a real model's shapes against the time to read its weights and cache once.

    python -m benchmarks.bench_decode [--model qwen2.5-7b] [--batch 1 16 64] [--variants separate joined ...]

Weights are random bfloat16 on a GPU, every row has a prefix of 512 tokens. A variant is a way to compute the
same step: projections separate or joined, as matrix products or as sums, attention and norms by XLA or in
kernels (of a GPU). Each variant's hidden states are held against the first one's before it is timed. The
stages are told apart by the named scopes of the step, and the kernels that took longest are printed.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsample as js
from benchmarks import cases, measure
from benchmarks.stage_times import stage_times
from models.decoder import DecoderConfig, decoder_functions
from models.joining import join_projections
from models.kernels import Kernels
from models.presets import PRESETS, preset
from models.projection import project_by_dot, project_by_reduction
from models.random_weights import random_weights

STAGES = ("forward", "unembed", "sample", "update")
NUM_PROFILED = 8  # steps in the profile that is split into stages
# Root-mean-square difference of two variants' hidden states, relative: bfloat16 over some tens of layers.
LARGEST_DIFFERENCE = 0.1


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to compute the step."""

    joined: bool
    project: Callable = project_by_dot
    kernels: Kernels | None = None


VARIANTS = {
    "separate": Variant(False),
    "separate-kernels": Variant(False, kernels=Kernels()),
    "joined": Variant(True),
    "joined-sums": Variant(True, project_by_reduction),
    "joined-kernels": Variant(True, kernels=Kernels()),
}


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    config = preset(options.model)
    if options.layers is not None:
        config = dataclasses.replace(config, num_layers=options.layers)
    weights = random_weights(config, 0, dtype)
    bandwidth = measure.copy_bandwidth()
    print(f"device {measure.device_name()}: {bandwidth / 1e9:.1f} GB/s")
    rows, hidden = [], {}
    # Joining uses the separate weights up, so all variants of those come first.
    for name in sorted(options.variants, key=lambda name: VARIANTS[name].joined):
        variant = VARIANTS[name]
        if variant.joined:
            config, weights = join_projections(config, weights)
        for num_rows in options.batch:
            case = Case(config, variant, num_rows, options.prefix, options.slots, options.mix, dtype)
            error = _check(case, weights, hidden)
            row = {
                "case": f"{options.model} {jnp.dtype(dtype).name} B={num_rows} prefix={options.prefix}"
                f" S={options.slots} {name}",
                "what": f"decode step, {options.mix}",
                "difference": error,  # of the hidden states from the first variant's
                "floor_us": case.floor_bytes(weights) / bandwidth * 1e6,
            }
            rows.append(row | _bench(case, weights, options))
            _print_row(rows[-1])
            measure.keep("decode", rows, options)
    measure.write("decode", rows, options)


@dataclasses.dataclass(frozen=True)
class Case:
    """One program and its inputs."""

    config: DecoderConfig
    variant: Variant
    num_rows: int
    num_prefix: int
    num_slots: int
    mix: str
    dtype: Any

    def model(self) -> tuple[Callable, Callable]:
        return decoder_functions(self.config, project=self.variant.project, kernels=self.variant.kernels)

    def floor_bytes(self, weights) -> int:
        """Bytes that any step must read: each weight once, and the keys and values of the prefixes."""
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        if not self.config.tied_embeddings:  # of the input embedding only B rows are read
            total -= weights["embedding"]["weight"].nbytes
        per_token = 2 * self.config.num_layers * self.config.num_kv_heads * self.config.head_size
        return total + per_token * self.num_rows * self.num_prefix * jnp.dtype(self.dtype).itemsize

    def cache(self) -> js.KVCache:
        config = self.config
        shape = (config.num_layers, self.num_rows, self.num_slots, config.num_kv_heads, config.head_size)
        cache = jax.eval_shape(lambda: js.init_cache(*shape, self.dtype))
        make = jax.jit(lambda key: jax.random.normal(key, shape, self.dtype))
        keys = jax.random.split(jax.random.key(1, impl="rbg"), 2)
        return dataclasses.replace(cache, keys=make(keys[0]), values=make(keys[1]))

    def programs(self):
        """The jitted step, and a function that makes its donated inputs."""
        limits = js.Limits(vocab_size=self.config.vocab_size, max_length=self.num_slots)
        wishes = cases.requests(self.mix, self.num_rows)
        for wish in wishes:  # rows that end would make later steps cheaper
            wish |= {"eos_token_ids": (), "stop_token_ids": (), "min_tokens": 0}
        params = js.stack_rows([js.make_params(limits, **wish) for wish in wishes])
        features = js.required_features(*params, limits=limits)
        length = self.num_prefix + 1  # the prompt's last token is the root of the first step

        def state():
            prompts, _ = cases.histories(self.num_rows, self.config.vocab_size, length, 1)
            slots = np.arange(self.num_rows, dtype=np.int32)
            lengths = np.full(self.num_rows, length, np.int32)
            empty = js.empty_requests(limits, self.num_rows)
            return js.admit(empty, slots, *params, prompts, lengths, limits=limits), self.cache()

        return js.make_decode_step(*self.model(), limits=limits, features=features), state


def _check(case: Case, weights, first: dict[int, np.ndarray]) -> float:
    """Relative difference of this variant's hidden states from the first variant's of the same batch."""
    forward, _ = case.model()

    @jax.jit
    def hidden(weights, cache):
        tokens = jnp.arange(case.num_rows, dtype=jnp.int32)[:, None]
        lengths = jnp.full((case.num_rows,), case.num_prefix, jnp.int32)
        mask = js.attention_mask(lengths, js.ROOT, case.num_slots)
        return forward(weights, tokens, lengths[:, None], cache, mask)[0]

    values = np.asarray(hidden(weights, case.cache())).astype(np.float64)
    wanted = first.setdefault(case.num_rows, values)
    error = float(np.sqrt(((values - wanted) ** 2).mean() / (wanted**2).mean()))
    if not error <= LARGEST_DIFFERENCE:
        raise SystemExit(f"error: hidden states differ from the first variant's by {error}")
    return error


def _bench(case: Case, weights, options) -> dict:
    step, make_state = case.programs()
    state = list(make_state())
    compiled = step.lower(weights, *state).compile()

    def call(_):
        state[0], state[1], record = compiled(weights, *state)
        return state[0], state[1], record

    timing = measure.time_calls(call, options.calls)
    stages, kernels = stage_times(call, compiled.as_text(), STAGES, NUM_PROFILED)
    if (np.asarray(state[0].status) != js.RUNNING).any():
        raise SystemExit("error: rows ended during timing, give more --slots")
    return {
        "clock": timing.clock,
        "time_us": timing.time_us,
        "spread": timing.spread_us,
        "span_us": timing.span_us,
        "host_us": timing.host_us,
        "return_us": timing.return_us,
        "stages_us": stages,
        "num_kernels": sum(count for _, count, _ in kernels),
        "longest_kernels": [
            {"kernel": name, "calls": count, "time_us": time_us}
            for name, count, time_us in kernels[: options.top]
        ],
        "peak_bytes": measure.peak_temporaries(compiled),
        "baselines": {},
    }


def _print_row(row) -> None:
    ratio, span = row["time_us"] / row["floor_us"], row["span_us"] / row["floor_us"]
    stages = ", ".join(f"{name} {time:.0f}" for name, time in row["stages_us"].items())
    print(
        f"{row['case']}\n"
        f"  step {row['time_us']:.0f} us +- {row['spread']:.0f} ({row['clock']} clock; floor"
        f" {row['floor_us']:.0f} us: {ratio:.3f} times, {span:.3f} with gaps; host {row['host_us']:.0f} us)\n"
        f"  {row['num_kernels']:.0f} kernels; us by stage: {stages};"
        f" temporaries {row['peak_bytes'] / 1e6:.1f} MB"
    )
    for kernel in row["longest_kernels"]:
        print(f"    {kernel['time_us']:9.1f} us in {kernel['calls']:5.1f} of {kernel['kernel'][:90]}")
    sys.stdout.flush()


def _options(arguments):
    parser = argparse.ArgumentParser(prog="bench_decode", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-7b", choices=list(PRESETS), help="default %(default)s")
    parser.add_argument("--layers", type=int, metavar="L", help="layers, where not the model's own number")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64], metavar="B")
    parser.add_argument("--prefix", type=int, default=512, metavar="P", help="committed tokens of each row")
    parser.add_argument("--slots", type=int, default=640, metavar="S", help="cache slots of a row")
    parser.add_argument("--mix", default="plain", choices=list(cases.MIXES), help="default %(default)s")
    parser.add_argument("--variants", nargs="+", default=["joined", "joined-kernels"], choices=list(VARIANTS))
    parser.add_argument("--calls", type=int, default=20, help="timed calls of each case")
    parser.add_argument("--top", type=int, default=10, help="kernels to list")
    measure.add_options(parser)
    options = parser.parse_args(arguments)
    # Warm-up, calls on both clocks and the profile each take one slot a row.
    if options.slots < options.prefix + 2 * options.calls + NUM_PROFILED + 4:
        parser.error("--slots must hold the prefix and every timed step")
    return options


if __name__ == "__main__":
    main()
