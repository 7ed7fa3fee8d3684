"""Time of `commit` against the bytes it moves, for every kind of cache, in place on a donated one.

    python -m benchmarks.bench_commit [--dtypes bfloat16 float32 int8 float8_e4m3fn] [--kinds paged]
    python -m benchmarks.bench_commit --layers 2 --rows 4 --slots 64 --heads 2 --calls 5    # small, for a CPU

A row that lands is read from the staged rows once and written to the cache once: that is the floor, printed
first. Before anything is timed, what a first commit wrote is held against NumPy, and every other slot against
zero. Staged rows are those that a model returns, `as_stored`: codes and scales for one-byte caches.
"""

import argparse
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxsample as js
from benchmarks import measure

# What a commit may take: twice the bytes it moves, plus a launch.
ALLOWED_RATIO, ALLOWED_US = 2.0, 5.0
COUNTS = ("all", "some")  # every staged row lands; 0 ... N of them, as verdicts give them


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    bandwidth = measure.copy_bandwidth()
    print(
        f"device {measure.device_name()}: {bandwidth / 1e9:.1f} GB/s read and written by a pass over an array"
    )
    for dtype in options.dtypes:
        cache = jax.eval_shape(lambda dtype=dtype: _cache("contiguous", dtype, options))
        moved = _bytes_moved(cache, options.rows * options.staged)
        print(
            f"{dtype}: {moved / 1e6:.1f} MB move when all rows land, {moved / bandwidth * 1e6:.1f} us at best"
        )
    rows = []
    for dtype in options.dtypes:
        for kind in options.kinds:
            rows += _bench(dtype, kind, bandwidth, options)
            measure.keep("commit", rows, options)
    measure.write("commit", rows, options)


def _bench(dtype: str, kind: str, bandwidth: float, options) -> list[dict]:
    cache = _cache(kind, dtype, options)
    staged_bytes = 2 * cache.keys.shape[0] * options.rows * options.staged * np.prod(cache.keys.shape[3:])
    num_inputs = measure.num_rotated(int(staged_bytes) * cache.keys.dtype.itemsize)
    inputs = [_staged(cache, options, seed) for seed in range(min(num_inputs, options.calls))]
    path = jnp.tile(jnp.arange(options.staged, dtype=jnp.int32), (options.rows, 1))
    call = jax.jit(js.commit, donate_argnums=0)
    lengths, count = _counts("some", 0, options)
    program = call.lower(cache, inputs[0], lengths, path, count).compile()
    cache = program(cache, inputs[0], lengths, path, count)
    _check(cache, inputs[0], np.asarray(lengths), np.asarray(count))
    peak_bytes = measure.peak_temporaries(program)
    cache_bytes = sum(x.nbytes for x in jax.tree.leaves(cache))

    rows, state = [], [cache]
    del cache
    shape = f"L={options.layers} B={options.rows} N={options.staged} S={options.slots}"
    for which in COUNTS:
        cases = [_counts(which, seed, options) for seed in range(8)]
        num_landed = int(np.mean([np.asarray(count).sum() for _, count in cases]))
        moved = _bytes_moved(state[0], num_landed)
        timing = _time(program, state, inputs, path, cases, options.calls)
        baselines = {}
        if kind == "contiguous" and which == "all" and state[0].key_scales is None:
            baseline = jax.jit(_write_all, donate_argnums=0)
            baselines["dynamic_update_slice"] = _time(
                baseline, state, inputs, path, cases, options.calls
            ).time_us
        floor_us = moved / bandwidth * 1e6
        rows.append(
            {
                "case": f"{shape} {dtype} {kind} {which}",
                "what": "commit",
                "clock": timing.clock,
                "time_us": timing.time_us,
                "spread": timing.spread_us,
                "span_us": timing.span_us,
                "host_us": timing.host_us,
                "floor_us": floor_us,
                "moved_bytes": moved,
                "allowed_us": ALLOWED_RATIO * floor_us + ALLOWED_US,
                "peak_bytes": peak_bytes,
                "cache_bytes": cache_bytes,
                "baselines": baselines,
            }
        )
        _print_row(rows[-1])
    return rows


def _time(call: Callable, state: list, inputs, path, cases, num_calls) -> measure.Timing:
    def once(i):
        state[0] = call(
            state[0], inputs[i % len(inputs)], cases[i % len(cases)][0], path, cases[i % len(cases)][1]
        )
        return state[0]

    return measure.time_calls(once, num_calls)


def _write_all(cache: js.KVCache, staged: js.Staged, lengths, path, count) -> js.KVCache:
    """What is written where nothing knows of verdicts: all staged rows, one slice a row of the batch."""
    del path, count

    def write(committed, new):
        one = lambda c, n, at: jax.lax.dynamic_update_slice(c, n, (0, at, 0, 0))
        return jax.vmap(one, in_axes=(1, 1, 0), out_axes=1)(committed, new, lengths)

    return js.KVCache(write(cache.keys, staged.keys), write(cache.values, staged.values))


def _cache(kind: str, dtype: str, options) -> js.KVCache | js.PagedKVCache:
    shape, heads = (options.layers, options.rows, options.slots), (options.heads, options.head_size)
    if kind == "contiguous":
        return js.init_cache(*shape, *heads, jnp.dtype(dtype))
    num_pages = options.rows * options.slots // options.page_size
    table = np.random.default_rng(0).permutation(num_pages).astype(np.int32).reshape(options.rows, -1)
    return js.init_paged_cache(options.layers, num_pages, options.page_size, *heads, jnp.dtype(dtype), table)


def _float_of(cache) -> np.dtype:
    return jnp.dtype(jnp.float32) if cache.key_scales is not None else cache.keys.dtype


def _staged(cache, options, seed: int) -> js.Staged:
    shape = (options.layers, options.rows, options.staged, options.heads, options.head_size)
    dtype = _float_of(cache)

    @jax.jit
    def make(key):
        keys, values = jax.random.normal(key, (2, *shape), jnp.float32).astype(dtype)
        return js.stage(keys, values, cache.keys.dtype)

    return make(jax.random.key(seed))


def _counts(which: str, seed: int, options) -> tuple[jax.Array, jax.Array]:
    """lengths, count i32[B]; windows start anywhere, so slots of neighbouring rows are no neighbours."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, options.slots - options.staged + 1, options.rows)
    count = np.full(options.rows, options.staged)
    if which == "some":
        count = rng.integers(0, options.staged + 1, options.rows)
    return jnp.asarray(lengths, jnp.int32), jnp.asarray(count, jnp.int32)


def _bytes_moved(cache, num_landed: int) -> int:
    """Bytes read of the staged rows that land, and written of what they become."""
    numbers = 2 * cache.keys.shape[0] * int(np.prod(cache.keys.shape[3:]))
    read = numbers * cache.keys.dtype.itemsize
    if cache.key_scales is not None:
        read += numbers // cache.keys.shape[4] * cache.key_scales.dtype.itemsize
    return num_landed * (read + js.bytes_per_row(cache))


def _check(cache, staged: js.Staged, lengths: np.ndarray, count: np.ndarray) -> None:
    """After one commit of a chain to a cache of zeros: the slots it wrote hold the rows, all others zeros."""
    slots = np.arange(cache.num_slots)[None, :]
    node = slots - lengths[:, None]
    written = (node >= 0) & (node < count[:, None])
    row, slot = np.nonzero(written)
    if isinstance(cache, js.PagedKVCache):
        table, size = np.asarray(cache.page_table), cache.keys.shape[2]
        at = (table[row, slot // size], slot % size)
    else:
        at = (row, slot)
    expected = np.zeros(cache.keys.shape[1:3], bool)
    expected[at] = True
    any_set = jax.jit(lambda x: jnp.any(x != 0, axis=tuple(range(3, x.ndim))))
    for name in ("keys", "values", "key_scales", "value_scales"):
        array, new = getattr(cache, name), getattr(staged, name)
        if array is None:
            continue
        found = np.asarray(any_set(array))
        if not np.array_equal(found, np.broadcast_to(expected, found.shape)):
            raise SystemExit(f"error: {name} were written at other slots than the accepted ones")
        stored = np.asarray(array[:, *map(jnp.asarray, at)])
        wanted = np.asarray(new)[:, row, node[row, slot]]
        if stored.tobytes() != wanted.tobytes():
            raise SystemExit(f"error: the {name} stored are not those staged")


def _print_row(row) -> None:
    baselines = "".join(f"   {name} {time_us:.1f} us" for name, time_us in row["baselines"].items())
    within = ""
    if row["clock"] == "device":
        within = ", within 2x + 5 us" if row["time_us"] <= row["allowed_us"] else ", ABOVE 2x + 5 us"
    print(
        f"{row['case']}\n"
        f"  {row['time_us']:.1f} us +- {row['spread']:.1f} ({row['clock']} clock; span {row['span_us']:.1f})"
        f"   floor {row['floor_us']:.1f} us{within}\n"
        f"  temporaries {row['peak_bytes'] / 1e6:.2f} MB beside a cache of {row['cache_bytes'] / 1e6:.0f} MB"
        f"{baselines}"
    )
    sys.stdout.flush()


def _options(arguments):
    parser = argparse.ArgumentParser(prog="bench_commit", description=__doc__.splitlines()[0])
    dtypes = ["bfloat16", "float32", "int8", "float8_e4m3fn"]
    parser.add_argument("--dtypes", nargs="+", default=dtypes, choices=dtypes)
    kinds = ["contiguous", "paged"]
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--layers", type=int, default=28, metavar="L")
    parser.add_argument("--rows", type=int, default=64, metavar="B")
    parser.add_argument("--staged", type=int, default=8, metavar="N", help="staged rows of a request")
    parser.add_argument("--slots", type=int, default=1024, metavar="S")
    parser.add_argument("--heads", type=int, default=4, metavar="H")
    parser.add_argument("--head-size", type=int, default=128, metavar="D")
    parser.add_argument("--page-size", type=int, default=16, help="slots of a page; divides S")
    parser.add_argument("--calls", type=int, default=20, help="timed calls of each case")
    measure.add_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
