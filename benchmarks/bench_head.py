"""Time and memory of sampling and scoring from hidden states, with no logits, against the LM head alone.

    python -m benchmarks.bench_head [--batch 64 256] [--positions 8192] [--vocab 151936] [--width 4096]
        [--chunk 4096 8192] [--lanes 512] [--depth 4] [--mixes greedy plain filtered top_p]
        [--kernel never always] [--kernel-blocks 64,64,4,3 128,64,8,3]

First the ceilings: one read of the head's rows at the bandwidth of a pass over an array, and its products at
the speed of a large product of the same dtype. Then for every case: hold the result against the two-step
path, time both in the same run, and the bare product. Ratios to the bare product are the result.
"""

import argparse
import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxsample as js
from benchmarks import cases, measure
from jaxsample.candidates import first_tokens, tidy
from jaxsample.head import KernelBlocks

POSITION = 96
NUM_TOP, NUM_RAISED = 20, 16
# Two products of the same factors may round apart (logits); only clear decisions are compared.
CLOSE = {"float32": 1e-4, "bfloat16": 1e-3}
# As "filtered" of the other benchmarks, without min-p: the case that the memory and time targets name.
MIXES = {**cases.MIXES, "top_k_p": {"temperature": 1.0, "top_k": 50, "top_p": 0.95}}


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    dtype = jnp.dtype(options.dtype)
    bandwidth, speed = measure.copy_bandwidth(), _product_speed(dtype, options)
    print(
        f"device {measure.device_name()}: {bandwidth / 1e9:.1f} GB/s, {speed / 1e12:.2f} TFLOP/s in {dtype}"
    )
    rows = []
    weight = _weight(options.vocab, options.width, dtype)
    for num_rows in options.batch:
        bench = Bench.of("sample", num_rows, weight, bandwidth, speed, options)
        for mix in options.mixes:
            for head in _heads(mix, options):
                rows.append(_bench_sample(bench, mix, head, options.candidates))
                _print_row(rows[-1])
                measure.keep("head", rows, options)
    for num_rows in options.positions:
        bench = Bench.of("score", num_rows, weight, bandwidth, speed, options)
        for head in _heads("score", options):
            rows.append(_bench_score(bench, head, options))
            _print_row(rows[-1])
            measure.keep("head", rows, options)
    measure.write("head", rows, options)


@dataclasses.dataclass(frozen=True)
class Bench:
    """Hidden states, the head, and the bare product's time."""

    hidden: list[jax.Array]
    weight: jax.Array
    bare: measure.Timing
    floor_us: float
    num_calls: int
    baselines: dict[str, float]  # of two-step programs, measured once

    @classmethod
    def of(cls, what: str, num_rows: int, weight, bandwidth: float, speed: float, options) -> "Bench":
        vocab_size, width = weight.shape
        # The head itself exceeds every cache, so that two inputs are enough.
        hidden = [_hidden(weight, num_rows, seed) for seed in range(2)]
        read_us = weight.nbytes / bandwidth * 1e6
        product_us = 2 * num_rows * vocab_size * width / speed * 1e6
        bare = measure.time_calls(lambda i: _bare(hidden[i % 2], weight), options.calls)
        print(
            f"\n{what} B={num_rows} V={vocab_size} W={width} {weight.dtype}: bare product "
            f"{bare.time_us:.1f} us ({bare.clock} clock); floors: read {read_us:.1f} us, product "
            f"{product_us:.1f} us"
        )
        floor_us = max(read_us, product_us)
        return cls(hidden, weight, bare, floor_us, options.calls, {})

    def case(self, what: str, head: js.Head) -> str:
        (num_rows, width), vocab_size = self.hidden[0].shape, self.weight.shape[0]
        portions = f"chunk={head.chunk} lanes={head.num_lanes}x{head.depth}"
        if head.kernel:
            blocks = head.kernel if isinstance(head.kernel, KernelBlocks) else ("default",)
            portions = f"kernel={','.join(map(str, blocks))} depth={head.depth}"
        return f"B={num_rows} V={vocab_size} W={width} {self.weight.dtype} {portions} {what}"

    def row(self, what: str, head: js.Head, compiled, arguments, num_checked: int) -> dict:
        timing = measure.time_calls(lambda i: compiled(*arguments[i % 2]), self.num_calls)
        return {
            "case": self.case(what, head),
            "what": what,
            "clock": timing.clock,
            "time_us": timing.time_us,
            "spread": timing.spread_us,
            "span_us": timing.span_us,
            "host_us": timing.host_us,
            "floor_us": self.floor_us,
            "bare_us": self.bare.time_us,
            "peak_bytes": measure.peak_temporaries(compiled),
            "logits_bytes": self.hidden[0].shape[0] * self.weight.shape[0] * 4,
            "rows_checked": num_checked,
            "baselines": dict(self.baselines),
        }


def _bench_sample(bench: Bench, mix: str, head: js.Head, candidates: int) -> dict:
    num_rows, vocab_size = bench.hidden[0].shape[0], bench.weight.shape[0]
    limits = js.Limits(vocab_size=vocab_size)
    requests = [{**MIXES[mix], "seed": row} for row in range(num_rows)]
    params, stop = js.stack_rows([js.make_params(limits, **request) for request in requests])
    features = js.required_features(params, stop, limits=limits, num_candidates=candidates)
    history = None
    if features.shapes:
        prompts, _ = cases.histories(num_rows, vocab_size, POSITION, 1)
        history = js.start(limits, prompts, np.full(num_rows, POSITION, np.int32))
    options = dict(limits=limits, features=features)

    def fused(hidden, weight, params, stop, history, position):
        stop = None if history is None else stop
        return js.sample_head(
            hidden, weight, params, position, stop=stop, history=history, head=head, **options
        ).tokens

    def two_step(hidden, weight, params, stop, history, position):
        stop = None if history is None else stop
        logits = js.head_logits(hidden, weight, head)
        return js.sample(logits, params, position, stop=stop, history=history, **options).tokens

    position = jnp.full((num_rows,), POSITION, jnp.int32)
    state = jax.device_put((params, stop, history))
    arguments = [(hidden, bench.weight, *state, position + i) for i, hidden in enumerate(bench.hidden)]
    compiled = jax.jit(fused).lower(*arguments[0]).compile()
    tokens = np.asarray(compiled(*arguments[0]))
    name = f"product, then sample {mix}"
    whole = jax.jit(two_step)
    expected = np.asarray(whole(*arguments[0]))
    num_checked = _check_tokens(bench, tokens, expected)
    if name not in bench.baselines:
        timing = measure.time_calls(lambda i: whole(*arguments[i % 2]), bench.num_calls)
        bench.baselines.clear()
        bench.baselines[name] = timing.time_us
    return bench.row(f"sample {mix}", head, compiled, arguments, num_checked)


def _check_tokens(bench: Bench, tokens, expected) -> int:
    """Tokens of both paths are equal but for rows in which two products round apart; how many are equal."""
    num_equal = int((tokens == expected).sum())
    # A product of another shape may sum in another order: a near tie then falls the other way.
    allowed = (
        0 if bench.weight.dtype == jnp.float32 and jax.default_backend() == "cpu" else len(tokens) // 16 + 1
    )
    if num_equal < len(tokens) - allowed or (tokens < 0).any():
        raise SystemExit(
            f"error: {len(tokens) - num_equal} of {len(tokens)} tokens differ from the two-step path's"
        )
    return num_equal


def _bench_score(bench: Bench, head: js.Head, options) -> dict:
    num_rows, vocab_size = bench.hidden[0].shape[0], bench.weight.shape[0]
    ids = jnp.asarray(np.random.default_rng(3).integers(vocab_size, size=num_rows), jnp.int32)
    # As in a text: most tokens are likely ones.
    likely = _first_ids(bench.hidden[0], bench.weight, options.rows_at_once)
    ids = jnp.where(jnp.arange(num_rows, dtype=jnp.int32) % options.rare == 0, ids, likely)

    def fused(hidden, weight, ids):
        return js.score_head(hidden, weight, ids, NUM_TOP, head=head, rows_at_once=options.rows_at_once)

    def two_step(hidden, weight, ids):
        return js.score(js.head_logits(hidden, weight, head), ids, NUM_TOP)

    arguments = [(hidden, bench.weight, ids) for hidden in bench.hidden]
    compiled = jax.jit(fused).lower(*arguments[0]).compile()
    found = jax.device_get(compiled(*arguments[0]))
    whole, sample = jax.jit(two_step), slice(0, min(num_rows, 256))
    expected = jax.device_get(whole(bench.hidden[0][sample], bench.weight, ids[sample]))
    close = CLOSE[str(bench.weight.dtype)]
    far = np.abs(found.token[sample] - expected.token).max()
    apart = np.abs(found.top[sample] - expected.top).max()
    if far > close or apart > close:
        raise SystemExit(f"error: log-probabilities are {max(far, apart):.2g} off, allowed is {close}")
    num_checked = int((found.rank[sample] == expected.rank).sum())
    if num_checked < 0.9 * len(expected.rank):
        raise SystemExit(f"error: only {num_checked} of {len(expected.rank)} ranks are the two-step path's")
    bench.baselines.clear()
    if num_rows * vocab_size * 4 <= options.largest_logits * 1e9:
        timing = measure.time_calls(lambda i: whole(*arguments[i % 2]), bench.num_calls)
        bench.baselines["product, then score"] = timing.time_us
    return bench.row(f"score top {NUM_TOP}", head, compiled, arguments, num_checked)


def _heads(mix: str, options) -> list[js.Head]:
    """The portions to try; only rows without filters need the noise of every token."""
    unfiltered = mix == "plain"
    kernels = () if mix in ("score", "full") else _kernels(options)
    with_kernel = [
        js.Head(depth=depth, unfiltered=unfiltered, num_recomputed=options.recomputed, kernel=kernel)
        for kernel in kernels
        for depth in options.depth
    ]
    if "never" not in options.kernel and kernels:
        return with_kernel
    return with_kernel + [
        js.Head(
            chunk=chunk,
            num_lanes=lanes,
            depth=depth,
            unfiltered=unfiltered,
            num_recomputed=options.recomputed,
            kernel=False,
        )
        for chunk in options.chunk
        for lanes in options.lanes
        for depth in options.depth
    ]


def _kernels(options) -> list[bool | KernelBlocks]:
    if "always" not in options.kernel:
        return []
    return [KernelBlocks(*blocks) for blocks in options.kernel_blocks] or [True]


def _blocks(text: str) -> tuple[int, ...]:
    blocks = tuple(int(number) for number in text.split(","))
    if len(blocks) != len(KernelBlocks._fields):
        raise ValueError(text)
    return blocks


@jax.jit
def _bare(hidden, weight):
    return js.head_logits(hidden, weight, js.Head())


@functools.partial(jax.jit, static_argnums=2)
def _first_ids(hidden, weight, at_once: int):
    """The likeliest token of each position but one place off in every fourth: i32[T]."""
    num_rows = hidden.shape[0]
    blocks = jnp.pad(hidden, ((0, -num_rows % at_once), (0, 0))).reshape(-1, at_once, hidden.shape[1])
    first = lambda rows: first_tokens(tidy(js.head_logits(rows, weight, js.Head())), 2)[1]
    ids = jax.lax.map(first, blocks).reshape(-1, 2)[:num_rows]
    return jnp.where(jnp.arange(num_rows, dtype=jnp.int32) % 4 == 0, ids[:, 1], ids[:, 0])


def _product_speed(dtype, options) -> float:
    """FLOP/s of a square product."""
    size = 8192 if jax.default_backend() == "gpu" else 512
    one = jnp.ones((size, size), dtype)
    product = jax.jit(lambda x, y: js.head_logits(x, y, js.Head()))
    return 2 * size**3 / (measure.time_calls(lambda _: product(one, one), 10).time_us * 1e-6)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _hidden(weight, num_rows: int, seed: int):
    """Hidden states whose logits are normal(0, 2), but for some 16 tokens raised by 6 ... 16: [B, W]."""
    vocab_size, width = weight.shape
    keys = jax.random.split(jax.random.key(seed), 3)
    ids = jax.random.randint(keys[0], (num_rows, NUM_RAISED), 0, vocab_size)
    raised = jax.random.uniform(keys[1], ids.shape, jnp.float32, 6, 16)

    def row(given):
        ids, raised = given
        # Rows have norm 2, so that one of them times c / 4 raises its own logit by c.
        return jnp.einsum("r,rw->w", raised / 4, weight[ids].astype(jnp.float32))

    added = jax.lax.map(row, (ids, raised), batch_size=64)
    return (jax.random.normal(keys[2], (num_rows, width), jnp.float32) + added).astype(weight.dtype)


def _weight(vocab_size: int, width: int, dtype):
    make = lambda: (
        jax.random.normal(jax.random.key(7), (vocab_size, width), dtype) * dtype.type(2 / width**0.5)
    )
    return jax.jit(make)()


def _print_row(row) -> None:
    print(
        f"  {row['case'].split(' ', 3)[3]:52} {row['time_us']:9.1f} us +- {row['spread']:.1f}"
        f"  {row['time_us'] / row['bare_us']:6.3f} x product  {row['time_us'] / row['floor_us']:6.2f} x floor"
        f"  peak {row['peak_bytes'] / row['logits_bytes']:.4f} x logits  equal {row['rows_checked']}"
    )
    for name, time_us in row["baselines"].items():
        print(f"    {name:40} {time_us:9.1f} us  {time_us / row['time_us']:6.2f} x fused")
    sys.stdout.flush()


def _options(arguments):
    parser = argparse.ArgumentParser(prog="bench_head", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256], metavar="B")
    parser.add_argument("--positions", type=int, nargs="*", default=[8192], metavar="T")
    parser.add_argument("--vocab", type=int, default=cases.VOCAB_SIZE, metavar="V")
    parser.add_argument("--width", type=int, default=4096, metavar="W")
    parser.add_argument("--dtype", default="bfloat16", choices=list(CLOSE))
    parser.add_argument("--chunk", type=int, nargs="+", default=[4096], help="columns at a time")
    parser.add_argument("--lanes", type=int, nargs="+", default=[512], help="lanes, a divisor of chunk")
    parser.add_argument("--depth", type=int, nargs="+", default=[4], help="tokens a lane keeps")
    parser.add_argument(
        "--kernel",
        nargs="+",
        default=["never", "always"] if jax.default_backend() == "gpu" else ["never"],
        choices=["never", "always"],
        help="chunks, the kernel, or both; interpreted, that is slowly, where there is no GPU (default: both "
        "on a GPU, else chunks)",
    )
    parser.add_argument(
        "--kernel-blocks",
        type=_blocks,
        nargs="+",
        default=[],
        metavar="ROWS,INPUTS,WARPS,STAGES",
        help="portions of the kernel (default: its own)",
    )
    parser.add_argument("--candidates", type=int, default=64, help="candidates a row, at least its top_k")
    parser.add_argument("--rows-at-once", type=int, default=1024, help="positions at a time")
    parser.add_argument("--recomputed", type=int, help="rows computed whole at a time (default: Head's)")
    parser.add_argument("--rare", type=int, default=64, help="one position in so many has a random token")
    parser.add_argument(
        "--largest-logits", type=float, default=20, help="GB of logits that a baseline may have"
    )
    parser.add_argument(
        "--mixes", nargs="+", default=["greedy", "plain", "top_k_p", "top_p"], choices=list(MIXES)
    )
    parser.add_argument("--calls", type=int, default=20, help="timed calls of each case")
    measure.add_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
