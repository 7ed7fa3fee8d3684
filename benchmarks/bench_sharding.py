"""Memory and traffic of sampling on a mesh: temporaries of a verification, bytes on the wire.

Programs are compiled for P devices and their plans read; nothing of this size is run, and nothing is timed. A
CPU acts as the devices.
"""

import argparse
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxsample as js
from benchmarks import measure
from jaxsample.law import Law
from jaxsample.nodes import node_target
from jaxsample.truncation import Cut


def main(arguments=None) -> None:
    options = _options(arguments)
    jax.config.update("jax_num_cpu_devices", max(options.shards))
    limits = js.Limits(options.vocab_size, max_length=1024, num_logprobs=0)
    features = js.Features("filtered", full_rows=options.full_rows)
    _check_small(max(options.shards))
    num_nodes = options.proposals + 1
    rows = []
    whole = options.rows * num_nodes * limits.vocab_size * 4
    print(
        f"logits of {options.rows} requests x {num_nodes} nodes x {limits.vocab_size}: {whole / 1e9:.2f} GB"
    )
    for num_shards in options.shards:
        compiled = _compile(options, limits, features, num_shards)
        peak = measure.peak_temporaries(compiled)
        sizes = f"B={options.rows} K={options.proposals} V={options.vocab_size} P={num_shards}"
        row = {
            "case": f"verify_block {sizes}",
            "what": "temporaries of one device; bytes one device receives a step",
            "peak_bytes": peak,
            "logits_bytes": whole // num_shards,
            "wire_bytes": wire_bytes(
                options.rows * num_nodes, limits.vocab_size, features.num_candidates, num_shards
            ),
            "baselines": {},
        }
        rows.append(row)
        wire = "   ".join(f"{name} {size / 1e6:.3f} MB" for name, size in row["wire_bytes"].items())
        print(f"P={num_shards}  temporaries {peak / 1e9:.3f} GB   received: {wire}", flush=True)
    measure.write("sharding", rows, options)


def wire_bytes(num_rows: int, vocab_size: int, num_candidates: int, num_shards: int) -> dict[str, float]:
    """Bytes of float32 logits, or of what stands for them, that each of P devices receives for R rows."""
    others, tiles = (num_shards - 1) / num_shards, -(-vocab_size // 128)
    highest = 2 * others * num_rows * 2 * 4  # an all-reduce of two numbers a row
    return {
        "all-gather": others * num_rows * vocab_size * 4,
        "all-to-all": others * num_rows / num_shards * vocab_size * 4,
        "candidates": others * num_rows * (2 * num_candidates + 2 + tiles / num_shards) * 4 + highest,
        "winners": others * num_rows * 2 * 4 + highest,
    }


def _compile(options, limits, features, num_shards):
    """The judging part of a step, logits split over the vocabulary and the draft's law over rows."""
    mesh = Mesh(np.array(jax.devices()[:num_shards]), ("shard",))
    tree = js.chain(options.proposals)
    params, stop = js.neutral_params(limits, options.rows)

    def judge(logits, law, params, stop, history, position, tokens, num_live):
        arguments = (logits, params, stop, history, position, tokens, tree)
        target = node_target(*arguments, limits=limits, features=features, law=True)
        return js.verify_block(target, js.Draft(tokens, num_live, law), tree), ()

    def array(dtype, *shape, spec=("shard",)):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    num_rows, inner, width = options.rows, options.proposals, -(-limits.vocab_size // 128) * 128
    logits = array(jnp.float32, num_rows, inner + 1, limits.vocab_size, spec=(None, None, "shard"))
    numbers = functools.partial(array, jnp.float32, num_rows, inner)
    law = Law(numbers(width), numbers(), Cut(numbers(), array(jnp.int32, num_rows, inner), numbers()))
    integers = functools.partial(array, jnp.int32, num_rows)
    history = jax.eval_shape(
        lambda: js.start(limits, jnp.zeros((num_rows, 1), jnp.int32), jnp.zeros(num_rows, jnp.int32))
    )
    by_row = lambda tree: jax.tree.map(lambda leaf: array(leaf.dtype, *leaf.shape), tree)
    mapped = jax.jit(js.map_rows(judge, mesh, "shard"))
    return mapped.lower(
        logits, law, *by_row((params, stop, history)), integers(), integers(inner + 1), integers()
    ).compile()


def _check_small(num_shards: int) -> None:
    """A small batch on the mesh has the tokens of one device."""
    limits, num_rows = js.Limits(1000), 8
    params = js.stack_rows([js.make_params(limits, seed=row, top_k=20)[0] for row in range(num_rows)])
    logits = np.random.default_rng(0).normal(0, 3, (num_rows, 1024)).astype(np.float32)
    features = js.Features("filtered", full_rows=False)
    given, options = (
        (logits, params, np.arange(num_rows, dtype=np.int32)),
        dict(limits=limits, features=features),
    )
    placed = dict(mesh=Mesh(np.array(jax.devices()[:num_shards]), ("shard",)), axis="shard")
    alone = jax.jit(functools.partial(js.sample, **options))(*given).tokens
    for sample in (js.sample, js.sample_by_exchange):
        if not np.array_equal(jax.jit(functools.partial(sample, **options, **placed))(*given).tokens, alone):
            raise SystemExit(
                f"error: {sample.__name__} on {num_shards} devices draws other tokens than on one"
            )


def _options(arguments):
    parser = argparse.ArgumentParser(prog="bench_sharding", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256, metavar="B")
    parser.add_argument("--proposals", type=int, default=7, metavar="K")
    parser.add_argument("--vocab-size", type=int, default=151936, metavar="V")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4, 8], metavar="P")
    parser.add_argument("--full-rows", action="store_true", help="with the counting path")
    measure.add_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
