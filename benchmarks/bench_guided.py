"""Device time of a guided decode step against the plain one, by stage, and against the floor of both models.

    python -m benchmarks.bench_guided [--model qwen2.5-7b] [--value-model qwen2.5-1.5b] [--batch 1 16 64]

Random weights, bfloat16 on a GPU; every row is guided over G candidates behind a prefix of 512 tokens. In the
same run: the plain step; the guided program on rows that are all OFF, whose tokens must be the plain step's
before anything is timed; and the guided program with a chunk while one row has a prompt to catch up. A batch
without guided rows takes the plain program, so that it costs what that costs.

The floor of a step is for each model the longer of reading its weights and caches once, at the bandwidth of a
copy, and multiplying its tokens, at the speed of a large product; both are measured here.
"""

import argparse
import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxsample as js
from benchmarks import cases, measure
from benchmarks.stage_times import stage_times
from models.decoder import DecoderConfig, decoder_functions
from models.joining import join_projections
from models.kernels import kernels_of
from models.presets import PRESETS, preset
from models.random_weights import random_weights
from models.value_head import random_value_weights, value_functions

PLAIN_STAGES = ("forward", "unembed", "sample", "finish", "update")
STAGES = ("catch_up", "forward", "unembed", "sample", "value", "guide", "finish", "update")
LIMITS = {1: 1.35, 16: 1.35, 64: 1.6}  # guided over plain, by rows
NUM_PROFILED = 8
LEAST_SAME = 0.9  # share of tokens that another program must draw alike: its products may round otherwise


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    config, value_config = preset(options.model), preset(options.value_model)
    if options.layers is not None:
        config = dataclasses.replace(config, num_layers=options.layers)
        value_config = dataclasses.replace(value_config, num_layers=options.layers)
    config, weights = join_projections(config, random_weights(config, 0, dtype))
    value_weights = random_value_weights(value_config, 1, dtype)
    value_config, value_weights["trunk"] = join_projections(value_config, value_weights["trunk"])
    bandwidth, speed = measure.copy_bandwidth(), _product_speed(dtype)
    print(f"device {measure.device_name()}: {bandwidth / 1e9:.1f} GB/s, {speed / 1e12:.1f} TFLOP/s")
    rows = []
    for num_rows in options.batch:
        case = Case(options, config, value_config, weights, value_weights, num_rows, dtype)
        rows += _bench(case, bandwidth, speed)
        measure.keep("guided", rows, options)
    measure.write("guided", rows, options)
    limited = [row for row in rows if "limit" in row and row["clock"] == "device"]
    over = [row["case"] for row in limited if row["over_plain"] > row["limit"]]
    if over:
        raise SystemExit(f"error: over the limit: {', '.join(over)}")


@dataclasses.dataclass(frozen=True)
class Case:
    """Both models, and the inputs of steps of B rows."""

    options: argparse.Namespace
    config: DecoderConfig
    value_config: DecoderConfig
    weights: dict
    value_weights: dict
    num_rows: int
    dtype: jnp.dtype

    @property
    def limits(self) -> js.Limits:
        options = self.options
        return js.Limits(self.config.vocab_size, max_length=options.slots, num_guided=options.candidates)

    @property
    def features(self) -> js.Features:
        return js.Features(tier="filtered", full_rows=False)

    def cache(self, config: DecoderConfig) -> js.KVCache:
        shape = (config.num_layers, self.num_rows, self.options.slots, config.num_kv_heads, config.head_size)
        cache = jax.eval_shape(lambda: js.init_cache(*shape, self.dtype))
        make = jax.jit(lambda key: jax.random.normal(key, shape, self.dtype))
        keys = jax.random.split(jax.random.key(1, impl="rbg"), 2)
        return dataclasses.replace(cache, keys=make(keys[0]), values=make(keys[1]))

    def state(self):
        """(requests, the model's cache), every row with its prefix."""
        size = self.options.prefix + 1  # the last token of the prompt is the root of the first step
        asked = dict(temperature=1.0, top_k=self.options.candidates)
        params = js.stack_rows([js.make_params(self.limits, seed=i, **asked) for i in range(self.num_rows)])
        prompts, _ = cases.histories(self.num_rows, self.config.vocab_size, size, 1)
        slots, lengths = np.arange(self.num_rows, dtype=np.int32), np.full(self.num_rows, size, np.int32)
        empty = js.empty_requests(self.limits, self.num_rows)
        requests = js.admit(empty, slots, *params, prompts, lengths, limits=self.limits)
        return requests, self.cache(self.config)

    def guided_state(self, is_guided: bool, num_behind: int = 0):
        """What a guided step keeps: prompts are in the cache but for `num_behind` rows."""
        params, _ = js.make_params(self.limits, top_k=self.options.candidates)
        how = dict(mode="centered_exp", scale=-2.0) if is_guided else {}
        row = js.make_guidance(self.limits, params, **how)
        guidance = jax.tree.map(lambda x: jnp.asarray(np.repeat(x, self.num_rows, axis=0)), row)
        length = np.full(self.num_rows, self.options.prefix + 1, np.int32)
        length[:num_behind] = 0
        return js.GuidedState(guidance, self.cache(self.value_config), jnp.asarray(length))

    def floor_us(
        self, config: DecoderConfig, weights, num_tokens: int, bandwidth: float, speed: float
    ) -> float:
        """The longer of reading and multiplying, for num_tokens new tokens of all rows together."""
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        trunk = weights.get("trunk", weights)
        embedding = trunk["embedding"]["weight"]
        if not config.tied_embeddings or weights is not trunk:  # of the input embedding a few rows are read
            total -= embedding.nbytes
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_size
        cached = per_token * self.num_rows * self.options.prefix * jnp.dtype(self.dtype).itemsize
        numbers = total / jnp.dtype(self.dtype).itemsize
        return max((total + cached) / bandwidth, 2 * numbers * num_tokens / speed) * 1e6


def _bench(case: Case, bandwidth: float, speed: float) -> list[dict]:
    options, num_rows = case.options, case.num_rows
    model = decoder_functions(case.config, kernels=kernels_of())
    value_model = value_functions(case.value_config, kernels=kernels_of())
    settings = dict(limits=case.limits, features=case.features)
    plain = js.make_decode_step(*model, **settings)
    guided = js.make_guided_step(*model, *value_model, **settings)
    chunk = js.CatchUp(1, options.chunk)
    with_chunk = js.make_guided_step(*model, *value_model, **settings, catch_up=chunk)

    same = _same_tokens(case, plain, guided)
    if not same >= LEAST_SAME:
        raise SystemExit(f"error: rows that are OFF draw {same:.1%} of the plain step's tokens")
    base = case.floor_us(case.config, case.weights, num_rows, bandwidth, speed)
    scored = num_rows * options.candidates
    value = case.floor_us(case.value_config, case.value_weights, scored, bandwidth, speed)
    models = f"{options.model}+{options.value_model} {jnp.dtype(case.dtype).name}"
    name = f"{models} B={num_rows} G={options.candidates} prefix={options.prefix}"
    rows = [
        _time(f"{name} plain", plain, case, None, base, PLAIN_STAGES),
        _time(f"{name} guided", guided, case, case.guided_state(True), base + value, STAGES),
    ]
    if options.behind:
        behind = case.guided_state(True, 1)
        rows.append(_time(f"{name} guided, one row behind", with_chunk, case, behind, base + value, STAGES))
    for row in rows[1:]:
        row["over_plain"] = row["time_us"] / rows[0]["time_us"]
        row["floor_over_plain_floor"] = (base + value) / base
    rows[1]["limit"] = LIMITS.get(num_rows, 1.6)
    for row in rows:
        _print_row(row)
    return rows


def _same_tokens(case: Case, plain, guided) -> float:
    """Share of first tokens that the guided program draws as the plain one where no row is guided."""
    requests, cache = case.state()
    *_, record = plain(case.weights, requests, cache)
    requests, cache = case.state()
    *_, other = guided(case.weights, case.value_weights, requests, cache, case.guided_state(False))
    tokens = [js.unpack(x, case.features).tokens for x in (record, other)]
    return float((tokens[0] == tokens[1]).mean())


def _time(name: str, step, case: Case, values, floor_us: float, stages) -> dict:
    requests, cache = case.state()
    state = [requests, cache] if values is None else [requests, cache, values]
    given = (case.weights,) if values is None else (case.weights, case.value_weights)
    compiled = step.lower(*given, *state).compile()

    def call(_):
        *state[:], record = compiled(*given, *state)
        return record

    timing = measure.time_calls(call, case.options.calls)
    times, kernels = stage_times(call, compiled.as_text(), stages, NUM_PROFILED)
    if (np.asarray(state[0].status) != js.RUNNING).any():
        raise SystemExit("error: rows ended during timing, give more --slots")
    return {
        "case": name,
        "what": "decode step",
        "floor_us": floor_us,
        "clock": timing.clock,
        "time_us": timing.time_us,
        "spread": timing.spread_us,
        "span_us": timing.span_us,
        "host_us": timing.host_us,
        "stages_us": times,
        "num_kernels": sum(count for _, count, _ in kernels),
        "longest_kernels": [
            {"kernel": kernel, "calls": count, "time_us": time_us}
            for kernel, count, time_us in kernels[: case.options.top]
        ],
        "peak_bytes": measure.peak_temporaries(compiled),
        "baselines": {},
    }


def _product_speed(dtype) -> float:
    """Floating-point operations a second of a large product."""
    size = 8192 if jax.default_backend() == "gpu" else 1024
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a, b: a @ b)
    return 2 * size**3 / (measure.time_calls(lambda _: product(a, a), num_calls=10).time_us * 1e-6)


def _print_row(row) -> None:
    over = f", {row['over_plain']:.3f} times plain" if "over_plain" in row else ""
    over += f" (floors {row['floor_over_plain_floor']:.3f})" if over else ""
    stages = ", ".join(f"{name} {time:.0f}" for name, time in row["stages_us"].items())
    print(
        f"{row['case']}\n"
        f"  {row['time_us']:.0f} us +- {row['spread']:.0f} ({row['clock']} clock; floor"
        f" {row['floor_us']:.0f} us: {row['time_us'] / row['floor_us']:.3f} times){over}\n"
        f"  {row['num_kernels']:.0f} kernels; us by stage: {stages}"
    )
    sys.stdout.flush()


def _options(arguments):
    parser = argparse.ArgumentParser(prog="bench_guided", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-7b", choices=list(PRESETS), help="default %(default)s")
    parser.add_argument("--value-model", default="qwen2.5-1.5b", choices=list(PRESETS))
    parser.add_argument("--layers", type=int, metavar="L", help="of both, where not the models' own numbers")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64], metavar="B")
    parser.add_argument("--candidates", type=int, default=5, metavar="G")
    parser.add_argument("--prefix", type=int, default=512, metavar="P", help="committed tokens of each row")
    parser.add_argument("--slots", type=int, default=640, metavar="S", help="cache slots of a row")
    parser.add_argument("--chunk", type=int, default=128, metavar="T", help="tokens of the catch-up chunk")
    parser.add_argument(
        "--behind",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also a row that catches up",
    )
    parser.add_argument("--calls", type=int, default=20, help="timed calls of each case")
    parser.add_argument("--top", type=int, default=8, help="kernels to list")
    measure.add_options(parser)
    options = parser.parse_args(arguments)
    # Warm-up, calls on both clocks and the profile each take one slot a row.
    if options.slots < options.prefix + 2 * options.calls + NUM_PROFILED + 4:
        parser.error("--slots must hold the prefix and every timed step")
    return options


if __name__ == "__main__":
    main()
