"""Time of speculative verification from logits, against one read of target and draft rows.

    python -m benchmarks.bench_verify [--requests 1 8 32 64] [--drafts 7] [--vocab 151936]
    python -m benchmarks.bench_verify --requests 2 --drafts 3 --vocab 1000 --calls 5    # small, for a CPU

The ceiling first: the bytes of target rows (drafts + 1 a request) and draft rows (drafts a request), float32,
each read once. Before anything is timed, verdicts are held against a float64 loop over the same noise. The
baseline is what anyone would write: both softmaxes stored, then the rule on probabilities.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxsample as js
from benchmarks import cases, measure
from jaxsample import rng
from jaxsample.candidates import normaliser
from jaxsample.rng import log

VERIFIERS = {"rejection": js.verify_rejection, "block": js.verify_block}
MIXES = ("plain", "filtered")


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    bandwidth = measure.copy_bandwidth()
    print(
        f"device {measure.device_name()}: {bandwidth / 1e9:.1f} GB/s read and written by a pass over an array"
    )
    rows = []
    for num_requests in options.requests:
        inputs = _inputs(num_requests, options)
        num_bytes = sum(x.nbytes for x in inputs[0])
        read = jax.jit(lambda p, q: (p.max(-1), q.max(-1)))
        r1 = measure.time_calls(lambda i, read=read, inputs=inputs: read(*inputs[i]), options.calls)
        print(
            f"\nR={num_requests} K={options.drafts} V={options.vocab}: "
            f"floor {num_bytes / bandwidth * 1e6:.1f} us"
        )
        print(f"  XLA max of both {r1.time_us:.1f} us")
        for mix in MIXES:
            for name in VERIFIERS:
                rows.append(_bench(name, mix, num_requests, inputs, bandwidth, r1.time_us, options))
                measure.keep("verify", rows, options)
    measure.write("verify", rows, options)


def _inputs(num_requests: int, options):
    """Rotated pairs of target rows f32[R * (K + 1), V'] and draft rows f32[R * K, V'] near them."""
    K, V = options.drafts, options.vocab
    width = -(-V // 128) * 128
    pad = ((0, 0), (0, width - V))
    count = measure.num_rotated(num_requests * (2 * K + 1) * V * 4)
    pairs = []
    for seed in range(min(count, 4)):
        target = cases.lm_like(num_requests * (K + 1), V, seed)
        draft = target.reshape(num_requests, K + 1, V)[:, :K].reshape(-1, V)
        draft = draft + cases.flat(num_requests * K, V, seed + 100) * np.float32(0.3)
        pairs.append(
            tuple(jnp.asarray(np.pad(rows, pad, constant_values=-np.inf)) for rows in (target, draft))
        )
    return [pairs[i % len(pairs)] for i in range(64)]


def _bench(name: str, mix: str, num_requests: int, inputs, bandwidth: float, r1_us: float, options) -> dict:
    K, V = options.drafts, options.vocab
    tree, limits = js.chain(K), js.Limits(V)
    asked = cases.requests(mix, num_requests)
    params, stop = js.stack_rows([js.make_params(limits, **request) for request in asked])
    features = js.required_features(params, stop, limits=limits)
    params = jax.tree.map(jnp.asarray, params)
    tokens = np.zeros((num_requests, K + 1), np.int32)
    run = jax.jit(functools.partial(_verify, VERIFIERS[name], tree, features, V))
    drafted = np.asarray(jnp.argmax(inputs[0][1], axis=1)).reshape(num_requests, K)
    tokens[:, 1:] = drafted
    position = jnp.full((num_requests,), 100, jnp.int32)
    arguments = (params, jnp.asarray(tokens), position)
    verdict = run(*inputs[0], *arguments)
    if mix == "plain":
        _check(name, verdict, inputs[0], tokens, params, position, tree)
    timing = measure.time_calls(lambda i: run(*inputs[i], *arguments), options.calls)
    naive = jax.jit(functools.partial(_naive, K))
    uniform = jnp.asarray(np.random.default_rng(0).random((num_requests, K)), jnp.float32)
    base = measure.time_calls(lambda i: naive(*inputs[i], jnp.asarray(tokens), uniform), options.calls)
    floor_us = sum(x.nbytes for x in inputs[0]) / bandwidth * 1e6
    compiled = run.lower(*inputs[0], *arguments).compile()
    print(
        f"  {name:9} {mix:8} {timing.time_us:9.1f} us = {timing.time_us / floor_us:5.2f} floors "
        f"(stored softmaxes, rejection {base.time_us:.1f} us); {timing.clock} clock"
    )
    return {
        "case": f"R={num_requests} K={K} V={V} {mix}",
        "what": name,
        "time_us": timing.time_us,
        "spread": timing.spread_us,
        "floor_us": floor_us,
        "r1_us": r1_us,
        "peak_bytes": measure.peak_temporaries(compiled),
        "baselines": {"stored softmaxes, rejection": base.time_us},
    }


def _verify(verify, tree, features, vocab_size, target_rows, draft_rows, params, tokens, position):
    """Verdict from logits: summaries of both included."""
    num_requests, num_nodes = tokens.shape
    wide = jax.tree.map(lambda x: jnp.repeat(x, num_nodes, axis=0), params)
    at = (position[:, None] + jnp.arange(num_nodes, dtype=jnp.int32)[None, :]).reshape(-1)
    valid = jnp.ones((num_requests * num_nodes,), bool)
    shaped = js.Shaped(target_rows, target_rows, valid)
    target = js.make_target(shaped, wide, at, vocab_size=vocab_size, features=features, law=True)
    highest, total = normaliser(draft_rows)
    none = js.Cut(
        jnp.full_like(highest, -jnp.inf), jnp.full(highest.shape, vocab_size, jnp.int32), log(total)
    )
    law = jax.tree.map(
        lambda x: x.reshape(num_requests, num_nodes - 1, *x.shape[1:]), js.Law(draft_rows, highest, none)
    )
    draft = js.Draft(tokens, jnp.full((num_requests,), num_nodes - 1, jnp.int32), law)
    return verify(target, draft, tree)


def _naive(K, target_rows, draft_rows, tokens, uniform):
    """Rejection on stored probabilities, drawn by jax.random.categorical."""
    num_requests, width = tokens.shape[0], target_rows.shape[1]
    p = jax.nn.softmax(target_rows, axis=-1).reshape(num_requests, K + 1, width)
    q = jax.nn.softmax(draft_rows, axis=-1).reshape(num_requests, K, width)
    at = tokens[:, 1:, None]
    ratio = jnp.take_along_axis(p[:, :K], at, axis=2) / jnp.take_along_axis(q, at, axis=2)
    accepted = jnp.cumprod(uniform < ratio[:, :, 0], axis=1)
    count = accepted.sum(axis=1)
    row = jnp.take_along_axis(p, count[:, None, None], axis=1)[:, 0]
    other = jnp.take_along_axis(jnp.pad(q, ((0, 0), (0, 1), (0, 0))), count[:, None, None], axis=1)[:, 0]
    return count, jax.random.categorical(jax.random.key(0), jnp.log(jnp.maximum(row - other, 0)))


def _check(name, verdict, rows, tokens, params, position, tree) -> None:
    """Hold the counts against a float64 loop over the same uniforms; rows at a coin's edge are left out."""
    K = tree.max_depth
    num_requests = tokens.shape[0]
    p, q = (_softmax(np.asarray(x, np.float64)) for x in rows)
    p, q = p.reshape(num_requests, K + 1, -1), q.reshape(num_requests, K, -1)
    for request in range(num_requests):
        node = np.arange(1, K + 1, dtype=np.int32)
        at = np.asarray(position)[request] + node - 1
        seeds = np.repeat(np.asarray(params.seed)[request : request + 1], K, axis=0)
        coins = np.asarray(rng.uniform(jnp.asarray(seeds), jnp.asarray(at), rng.ACCEPT, node[:, None]))[:, 0]
        ratio = [p[request, i, t] / q[request, i, t] for i, t in enumerate(tokens[request, 1:])]
        if name == "rejection":
            chances = ratio
            accepted = int(np.cumprod(coins < chances).sum())
        else:
            rho, chances = 1.0, []
            for i in range(K):
                rho = min(1.0, rho * ratio[i])
                z = np.maximum(rho * p[request, i + 1] - q[request, i + 1], 0).sum() if i + 1 < K else 0
                chances.append(rho if i + 1 == K else z / (z + 1 - rho) if z + 1 - rho > 0 else 1.0)
            accepted = max([i + 1 for i in range(K) if coins[i] <= chances[i]], default=0)
        if np.abs(coins - np.minimum(chances, 1)).min() < 1e-4:
            continue
        if int(verdict.count[request]) != accepted + 1:
            raise SystemExit(
                f"{name}: request {request} emits {int(verdict.count[request])}, not {accepted + 1}"
            )


def _softmax(x):
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _options(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--vocab", type=int, default=cases.VOCAB_SIZE)
    parser.add_argument("--calls", type=int, default=20, help="timed calls of each case")
    measure.add_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
