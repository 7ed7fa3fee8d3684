"""One of several processes of a mesh: python tests/process_worker.py ADDRESS NUM_PROCESSES INDEX MODE.

MODE "sample" draws for its own rows on two meshes and prints the tokens as JSON; "loop" prints a line and goes
on drawing until it is stopped. With one process it is what the others are compared with.
"""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxsample as js

V, B = 500, 8
LIMITS = js.Limits(V, max_length=8, num_logprobs=2)
FEATURES = js.Features("filtered", full_rows=False, num_candidates=16, num_logprobs=2)


def main(address, num_processes, index, mode):
    num_processes, index = int(num_processes), int(index)
    jax.config.update("jax_num_cpu_devices", 8 // num_processes)
    if num_processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, num_processes, index, heartbeat_timeout_seconds=10)
    run = jax.jit(js.sample, static_argnames=("limits", "features", "mesh", "axis", "batch_axis"))
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 3, (B, 512)).astype(np.float32)
    params = [js.make_params(LIMITS, seed=row, top_k=9, top_p=0.8, logprobs=2)[0] for row in range(B)]
    params = js.stack_rows(params)
    devices = np.array(jax.devices())
    printed = {}
    for name, mesh, batch_axis in (
        # Every process feeds its own rows of the first; the second exchanges logits between processes.
        ("rows", Mesh(devices.reshape(2, 4), ("data", "tensor")), "data"),
        ("columns", Mesh(devices.reshape(1, 8), ("data", "tensor")), "data"),
    ):
        place = lambda x, *spec, mesh=mesh: jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda at: x[at]
        )
        given = place(logits, "data", "tensor"), jax.tree.map(lambda x, p=place: p(x, "data"), params)
        options = dict(limits=LIMITS, features=FEATURES, mesh=mesh, axis="tensor", batch_axis=batch_axis)
        position = 0
        while mode == "loop" or position < 3:
            result = run(*given, place(np.full(B, position, np.int32), "data"), **options)
            own = jax.tree.map(own_rows, (result.tokens, result.logprobs.token))
            printed.setdefault(name, []).append([{row: float(x[row]) for row in x} for x in own])
            if position == 0 and mode == "loop":
                print("drawing", flush=True)
            position += 1
    print(json.dumps(printed), flush=True)


def own_rows(array):
    """The rows of an array that this process holds, by index."""
    rows = {}
    for shard in array.addressable_shards:
        first = shard.index[0].start or 0
        rows.update({first + offset: value for offset, value in enumerate(np.asarray(shard.data))})
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:])
