"""Device time of sampling and of verification behind an LM head split over the vocabulary, on P devices.

    python -m benchmarks.bench_sharded [--devices P] [--batch 256 64] [--only sample verify decode]
    python -m benchmarks.bench_sharded --devices 4 --batch 8 --proposals 0 3 --vocab 1000 --width 64 \
        --calls 3 --only sample verify --no-write                                     # small, for a CPU

From hidden states that every device holds to tokens that every device holds, in these ways: "all-gather" of
the logits and the same work on every device, the baseline; "all-to-all", whole rows of some requests on each
device; "candidates" or "winners", what `sample_by_exchange` sends of rows with and without filters. No
verifier works from an exchange, so K > 0 has the first two ways. The head is timed alone too, and what is
left of a way's time is its sampling. Each way's results are held against one device's on gathered logits.

A device that starts a call early waits within its first collective for the last to start. So the time of the
device that waited least is told apart from the longest, and sampling is a part of the former. "decode" is in
`benchmarks.sharded_decode`.
"""

import argparse
import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxsample as js
from benchmarks import cases, measure, sharded_decode
from benchmarks.bench_sharding import wire_bytes
from benchmarks.collective_bytes import received_bytes
from jaxsample.law import Law
from jaxsample.nodes import node_target
from jaxsample.params import TILE
from jaxsample.truncation import Cut
from models.placement import TENSOR, make_mesh
from models.presets import PRESETS
from models.projection import project_by_dot

MIXES = {  # what the rows of a batch ask for in turn; greedy rows and drawn ones run one program
    "filtered": ({**cases.MIXES["filtered"], "temperature": 0.7},),
    "unfiltered": (cases.MIXES["plain"], cases.MIXES["greedy"]),
}
VERIFIERS = {"points": js.verify_rejection, "law": js.verify_block}  # by what a draft says of its proposals
PARTS = ("sample", "verify", "decode")
NUM_CHECKED = 64  # rows that the one device is given at a time
NUM_RAISED = 8  # tokens of a row raised by 4 ... 14 above a bulk of normal(0, 2), as in `cases.lm_like`


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices, and what they were seen to move: bytes a second from memory, and received by each."""

    mesh: Any
    name: str
    bandwidth: float
    wire: float

    @property
    def num_devices(self) -> int:
        return self.mesh.size

    def place(self, tree: Any, *spec: Any) -> Any:
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec(*spec)))

    def make(self, function: Callable[..., Any], *spec: Any) -> Callable[..., Any]:
        """The function jitted, its result split as PartitionSpec(*spec) says."""
        return jax.jit(function, out_shardings=NamedSharding(self.mesh, PartitionSpec(*spec)))


@dataclasses.dataclass(frozen=True)
class Case:
    """A job on logits [B, N, Vp]: on one device, and its ways on a mesh.

    Fields:
      name: the mix, or the draft and its verifier.
      judge: (logits, *by_row) -> (results, ()), of whole rows.
      by_row: its other arguments, B rows in each array.
      law: which of them is a draft's law or None; it lies with its rows where rows are split.
      others: ways beside "all-gather" and "all-to-all", (logits, *by_row) -> results.
    """

    name: str
    judge: Callable[..., Any]
    by_row: tuple
    law: int | None = None
    others: dict[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    machine = _machine(options)
    print(
        f"{machine.name}: {machine.bandwidth / 1e9:.1f} GB/s in memory, "
        f"{machine.wire / 1e9:.1f} GB/s received by each device in an all-gather",
        flush=True,
    )
    rows: list[dict] = []
    failed: list[str] = []

    def attempt(case: str, measure_row: Callable[[], dict]) -> None:
        """Keep what measure_row() gives; an error of the device or the profiler leaves the other cases."""
        try:
            rows.append({"case": case, **measure_row()})
        except RuntimeError as error:
            print(f"  error: {case}: {error}", flush=True)
            failed.append(case)
            return
        measure.keep("sharded", rows, options)
        if rows[-1]["num_differing"] > rows[-1]["most_differing"]:
            failed.append(f"{case}: results differ from one device's")

    stages = [(K, part) for K in options.proposals for part in [PARTS[min(K, 1)]] if part in options.only]
    if any(part == "verify" for _, part in stages):
        print("verification (K > 0): all-gather and all-to-all; no verifier works from an exchange")
    for num_drafts, _ in stages:
        for num_rows in options.batch:
            _bench_rows(machine, num_rows, num_drafts, options, attempt)
    if "decode" in options.only:
        sharded_decode.bench(machine.name, machine.num_devices, machine.bandwidth, options, attempt)
    measure.write("sharded", rows, options)
    if failed:
        raise SystemExit(f"error: {'; '.join(failed)}")


def _bench_rows(machine: Machine, num_rows: int, num_drafts: int, options, attempt) -> None:
    """All cases of one B and K."""
    hidden, weight = _hidden_and_head(machine, num_rows, num_drafts + 1, options)
    head = jax.jit(functools.partial(_head, machine.mesh))
    logits = head(hidden, weight)
    share = logits.nbytes / machine.num_devices
    head_us = measure.time_calls(lambda _: head(hidden, weight), options.calls).least_us
    read = jax.jit(_by_shard(machine.mesh, lambda x: x.max(-1)[..., None]))
    shared = {  # figures that all cases share
        "what": "hidden states to tokens, head split over the vocabulary",
        "head_us": head_us,
        "floor_us": head_us + share / machine.bandwidth * 1e6,
        "r1_us": measure.time_calls(lambda _: read(logits), options.calls).least_us,
        "logits_bytes": share,
    }
    sizes = f"B={num_rows} K={num_drafts} V={options.vocab}"
    print(
        f"\n{sizes} D={options.width}: head {head_us:.1f} us; logits of {share / 1e6:.1f} MB a device, read"
        f" in {share / machine.bandwidth * 1e6:.1f} us at best, by XLA's max in {shared['r1_us']:.1f} us",
        flush=True,
    )
    whole = machine.make(lambda x: x)(logits).addressable_data(0)
    if num_drafts:
        todo = (_verify_case(name, machine, logits, options.vocab) for name in options.drafts)
    else:
        todo = (_sample_case(mix, machine, num_rows, options.vocab) for mix in options.mixes)
    for case in todo:
        expected = _on_one_device(case, whole)
        gather: dict[str, float] = {}
        for way, run in _ways(case, machine).items():
            name = f"{machine.name} {sizes} {case.name}, {way}"
            given = (hidden, weight, *_placed(case, way, num_rows, machine))
            held = (case, way, run, given, expected, machine, shared, gather, options.calls)
            attempt(name, functools.partial(_bench_way, *held))


def _bench_way(case: Case, way: str, run, given, expected, machine: Machine, shared, gather, num_calls: int):
    """The row of one way; `gather` holds the time of the all-gather's sampling once that is known."""
    compiled = jax.jit(functools.partial(_from_hidden, machine.mesh, run)).lower(*given).compile()
    found = jax.tree.map(np.asarray, compiled(*given))
    timing = measure.time_calls(lambda _: compiled(*given), num_calls)
    sampling_us = timing.least_us - shared["head_us"]
    if way == "all-gather":
        gather["sampling_us"] = sampling_us
    received = received_bytes(compiled.as_text() or "", machine.num_devices)
    num_rows, num_nodes, width = len(given[0]), given[0].shape[1], len(given[1])
    traffic = wire_bytes(num_rows * num_nodes, width, js.Features().num_candidates, machine.num_devices)
    row = {
        **shared,
        "clock": timing.clock,
        "time_us": timing.time_us,
        "spread": timing.spread_us,
        "least_us": timing.least_us,
        "span_us": timing.span_us,
        "host_us": timing.host_us,
        "sampling_us": sampling_us,
        "wire_us": received / machine.wire * 1e6,
        "received_bytes": received,
        "expected_bytes": traffic[way],  # without the small results that every device gets
        "peak_bytes": measure.peak_temporaries(compiled),
        "num_differing": _num_differing(found, expected),
        "most_differing": 0,
        "baselines": {},
    }
    if gather:
        row["gather_ratio"] = gather["sampling_us"] / max(sampling_us, 0.1)
    _print_row(case, way, row)
    return row


def _placed(case: Case, way: str, num_rows: int, machine: Machine) -> tuple:
    """The case's arguments, whole on every device; a draft's law lies with its rows where those are split."""
    splits = way != "all-gather" and num_rows % machine.num_devices == 0
    return tuple(
        machine.place(tree, *[TENSOR] * (splits and index == case.law))
        for index, tree in enumerate(case.by_row)
    )


def _sample_case(mix: str, machine: Machine, num_rows: int, vocab_size: int) -> Case:
    limits = js.Limits(vocab_size)
    params, _, features = _params(limits, mix, num_rows)

    def judge(logits, params, position):
        return js.sample(logits[:, 0], params, position, limits=limits, features=features).tokens, ()

    def exchange(logits, params, position):
        placed = dict(mesh=machine.mesh, axis=TENSOR, limits=limits, features=features)
        return js.sample_by_exchange(logits[:, 0], params, position, **placed).tokens

    others = {"candidates" if features.filters else "winners": exchange}
    return Case(mix, judge, (params, np.full(num_rows, 100, np.int32)), others=others)


def _verify_case(name: str, machine: Machine, logits, vocab_size: int) -> Case:
    """Chains of K drafts: each node's first token, every fifth another one; as points or out of a law."""
    num_rows, num_nodes, _ = logits.shape
    width = -(-vocab_size // TILE) * TILE  # of a law, whatever the devices make of the head
    limits, tree = js.Limits(vocab_size, max_length=128), js.chain(num_nodes - 1)
    params, stop, features = _params(limits, "filtered", num_rows)

    def judge(logits, law, params, stop, history, position, tokens, num_live):
        arguments = (logits, params, stop, history, position, tokens, tree)
        target = node_target(*arguments, limits=limits, features=features, law=True)
        return VERIFIERS[name](target, js.Draft(tokens, num_live, law), tree), ()

    def drafted(logits):
        """A drafter that is the target at a higher temperature."""
        real = jnp.arange(width, dtype=jnp.int32) < vocab_size
        z = jnp.where(real[None, None], logits[:, :-1, :width] * 0.8, -jnp.inf)
        highest = z.max(-1)
        log_mass = jnp.log(jnp.exp(z - highest[..., None]).sum(-1))
        every = jnp.full(highest.shape, vocab_size, jnp.int32)
        return Law(z, highest, Cut(jnp.full_like(highest, -jnp.inf), every, log_mass)), z.argmax(-1)

    law, first = jax.tree.map(lambda leaf: leaf.addressable_data(0), machine.make(drafted)(logits))
    tokens = np.zeros((num_rows, num_nodes), np.int32)
    tokens[:, 1:] = first
    row, node = np.indices(tokens.shape)
    tokens = np.where((row + node) % 5 == 0, (row * 7 + node) % vocab_size, tokens).astype(np.int32)
    history = js.start(limits, np.zeros((num_rows, 1), np.int32), np.zeros(num_rows, np.int32))
    position, num_live = np.full(num_rows, 100, np.int32), np.full(num_rows, num_nodes - 1, np.int32)
    law = law if name == "law" else None
    return Case(
        f"{name}, {VERIFIERS[name].__name__}",
        judge,
        (law, params, stop, history, position, tokens, num_live),
        law=0,
    )


def _params(limits: js.Limits, mix: str, num_rows: int):
    asked = MIXES[mix]
    wishes = [{**asked[row % len(asked)], "seed": row} for row in range(num_rows)]
    params, stop = js.stack_rows([js.make_params(limits, **wish) for wish in wishes])
    return params, stop, js.required_features(params, stop, limits=limits)


def _ways(case: Case, machine: Machine) -> dict[str, Callable[..., Any]]:
    def all_gather(logits, *by_row):
        def body(logits, *by_row):
            gathered = jax.lax.all_gather(logits, TENSOR, axis=logits.ndim - 1, tiled=True)
            return case.judge(gathered, *by_row)[0]

        specs = (PartitionSpec(None, None, TENSOR), *[PartitionSpec()] * len(by_row))
        placed = dict(mesh=machine.mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
        return jax.shard_map(body, **placed)(logits, *by_row)

    mapped = js.map_rows(case.judge, machine.mesh, TENSOR)
    return {"all-gather": all_gather, "all-to-all": lambda *given: mapped(*given)[0], **case.others}


def _from_hidden(mesh, run, hidden, weight, *by_row):
    # Nothing is fused into the product, so that every way's logits have the bits of the head alone.
    return run(jax.lax.optimization_barrier(_head(mesh, hidden, weight)), *by_row)


def _head(mesh, hidden, weight):
    """f32[B, N, Vp] split over the vocabulary, of hidden [B, N, D] and weight [Vp, D] split over its rows."""
    specs = (PartitionSpec(), PartitionSpec(TENSOR)), PartitionSpec(None, None, TENSOR)
    product = functools.partial(project_by_dot, dtype=jnp.float32)
    return jax.shard_map(product, mesh=mesh, in_specs=specs[0], out_specs=specs[1])(hidden, weight)


def _by_shard(mesh, function):
    spec = PartitionSpec(None, None, TENSOR)
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)


def _hidden_and_head(machine: Machine, num_rows: int, num_nodes: int, options):
    """bf16 [B, N, D] on every device, and [Vp, D] with zeros from V on, made where it lies."""
    step, D, V = TILE * machine.num_devices, options.width, options.vocab
    padded = -(-V // step) * step

    def make_head(key):
        real = jnp.arange(padded, dtype=jnp.int32)[:, None] < V
        return jnp.where(real, jax.random.normal(key, (padded, D), jnp.bfloat16) * (2 / math.sqrt(D)), 0)

    generator = np.random.default_rng(0)
    ids = generator.integers(V, size=(num_rows, num_nodes, NUM_RAISED), dtype=np.int32)
    raised = generator.uniform(4, 14, ids.shape).astype(np.float32) / 4  # a row of the head has length 2

    def make_hidden(key, weight):
        rows = jnp.einsum("bnkd,bnk->bnd", weight[ids].astype(jnp.float32), raised)
        return (jax.random.normal(key, rows.shape) + rows).astype(jnp.bfloat16)

    weight = machine.make(make_head, TENSOR)(jax.random.key(0))
    return machine.make(make_hidden)(jax.random.key(1), weight), weight


def _on_one_device(case: Case, logits):
    """The case's results, some rows at a time: what a row gives depends on that row alone."""
    count = math.gcd(len(logits), NUM_CHECKED)
    run = jax.jit(lambda *given: case.judge(*given)[0])
    parts = []
    for start in range(0, len(logits), count):
        given = jax.tree.map(lambda leaf: leaf[start : start + count], (logits, *case.by_row))  # noqa: B023
        parts.append(jax.tree.map(np.asarray, run(*given)))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _num_differing(found, expected) -> int:
    """Rows in which two trees of arrays with B rows differ."""
    by_row = lambda leaf: leaf.reshape(len(leaf), -1)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return int(np.any([(by_row(one) != by_row(other)).any(axis=1) for one, other in pairs], axis=0).sum())


def _print_row(case: Case, way: str, row) -> None:
    ratio = row.get("gather_ratio", math.nan)
    print(
        f"  {case.name:24} {way:10} {row['least_us']:8.1f} us ({row['time_us']:.1f} +- {row['spread']:.1f}"
        f" the longest, span {row['span_us']:.1f}; {row['clock']} clock; host {row['host_us']:.0f}):"
        f" sampling {row['sampling_us']:8.1f} us, all-gather {ratio:.2f} times that\n"
        f"    received {row['received_bytes'] / 1e6:.3f} MB (expected {row['expected_bytes'] / 1e6:.3f}),"
        f" {row['wire_us']:.1f} us at best; temporaries {row['peak_bytes'] / 1e6:.1f} MB; rows that differ"
        f" from one device's: {row['num_differing']}",
        flush=True,
    )


def _machine(options) -> Machine:
    if options.devices and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", options.devices)  # of a CPU alone
    mesh = make_mesh({TENSOR: options.devices or len(jax.devices())})
    name = f"{mesh.size} x {measure.device_name()}"
    unmeasured = Machine(mesh, name, measure.copy_bandwidth(), math.inf)
    if mesh.size == 1:
        return unmeasured
    num_bytes = 2**29 if jax.default_backend() == "gpu" else 2**22
    array = unmeasured.make(lambda: jnp.zeros(num_bytes // 4 // mesh.size * mesh.size, jnp.float32), TENSOR)()
    gather = unmeasured.make(lambda x: x)
    time_us = measure.time_calls(lambda _: gather(array), num_calls=10).least_us
    return dataclasses.replace(unmeasured, wire=array.nbytes * (1 - 1 / mesh.size) / (time_us * 1e-6))


def _options(arguments):
    parser = argparse.ArgumentParser(prog="bench_sharded", description=str(__doc__).splitlines()[0])
    parser.add_argument("--devices", type=int, metavar="P", help="default: all; a CPU acts as so many")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 64], metavar="B")
    parser.add_argument("--proposals", type=int, nargs="+", default=[0, 7], metavar="K")
    parser.add_argument("--vocab", type=int, default=cases.VOCAB_SIZE, metavar="V")
    parser.add_argument("--width", type=int, default=4096, metavar="D", help="of hidden states")
    parser.add_argument("--mixes", nargs="+", default=list(MIXES), choices=list(MIXES), help="of K = 0")
    parser.add_argument(
        "--drafts", nargs="+", default=list(VERIFIERS), choices=list(VERIFIERS), help="of K > 0"
    )
    parser.add_argument("--calls", type=int, default=20, help="timed calls of each case")
    decode = parser.add_argument_group("decode")
    decode.add_argument("--model", default="qwen2.5-7b", choices=list(PRESETS), help="default %(default)s")
    decode.add_argument("--layers", type=int, metavar="L", help="layers, where not the model's own number")
    decode.add_argument("--decode-batch", type=int, nargs="+", default=[64, 16], metavar="B")
    decode.add_argument("--prefix", type=int, default=512, metavar="S", help="committed tokens of each row")
    decode.add_argument(
        "--ways", nargs="+", default=list(sharded_decode.DEFAULT), choices=sharded_decode.WAYS
    )
    measure.add_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
