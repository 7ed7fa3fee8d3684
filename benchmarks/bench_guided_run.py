"""A whole decode run through the engine, guided and plain: wall clock, as a user of rollouts measures it.

    python -m benchmarks.bench_guided_run [--model qwen2.5-7b] [--value-model qwen2.5-1.5b] [--requests 800]

Random weights of real shapes, 64 requests at a time, about 300 tokens each. One engine with a value model
runs the same requests plainly (its guided programs are then not used) and guided; both after a short run of
each that is not timed. The floor of a run is its number of steps times that of reading the weights once each.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxsample as js
from benchmarks import measure
from models.decoder import decoder_functions
from models.joining import join_projections
from models.kernels import kernels_of
from models.presets import PRESETS, preset
from models.random_weights import random_weights
from models.value_head import random_value_weights, value_functions

PAGE, NUM_PROMPT, NUM_WARMUP = 16, 128, 8
REFERENCE = 4.03  # guided over plain of LenVM's own run, on an H100
NAMES = ("plain", "guided")


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    begun = time.perf_counter()
    engine, num_bytes, vocab_size = _engine(options, dtype)
    print(f"{measure.device_name()}: compiled in {time.perf_counter() - begun:.1f} s")
    bandwidth = measure.copy_bandwidth()
    lengths = np.random.default_rng(0).integers(*_spread(options.tokens), options.requests)

    found, rows = {}, []
    for name in NAMES:
        _run(engine, _requests(options, vocab_size, lengths[:NUM_WARMUP], name == "guided"))
    for name in NAMES:
        tokens, seconds, num_steps = _run(engine, _requests(options, vocab_size, lengths, name == "guided"))
        found[name] = tokens
        read = num_bytes["plain"] + (num_bytes["value"] if name == "guided" else 0)
        rows.append(
            {
                "case": f"{options.model}+{options.value_model} {options.requests} requests of about "
                f"{options.tokens} tokens, {options.slots} at a time",
                "what": f"decode run, {name}",
                "clock": "host",
                "time_us": seconds * 1e6,
                "spread": 0.0,
                "floor_us": num_steps * read / bandwidth * 1e6,
                "host_us": seconds * 1e6,
                "num_steps": num_steps,
                "tokens_a_second": sum(map(len, tokens)) / seconds,
                "baselines": {},
            }
        )
        print(f"{name}: {seconds:.2f} s, {num_steps} steps, {rows[-1]['tokens_a_second']:.0f} tokens/s")
    _check(found, lengths)
    rows[1]["over_plain"] = rows[1]["time_us"] / rows[0]["time_us"]
    print(f"guided over plain {rows[1]['over_plain']:.3f}; the reference's own run: {REFERENCE}")
    measure.write("guided_run", rows, options)


def _engine(options, dtype):
    """(engine, bytes of the weights a step reads by model, V)."""
    config, value_config = preset(options.model), preset(options.value_model)
    config, weights = join_projections(config, random_weights(config, 0, dtype))
    value_weights = random_value_weights(value_config, 1, dtype)
    value_config, value_weights["trunk"] = join_projections(value_config, value_weights["trunk"])
    limits = js.Limits(config.vocab_size, max_length=options.length, num_guided=options.candidates)
    buckets = js.Buckets(
        rows=(options.slots,),
        lengths=(options.length,),
        prefill=((min(options.slots, 8), NUM_PROMPT),),
        features=(js.Features(tier="filtered", full_rows=False),),
        updates=(options.slots,),
    )

    def cache_of(config):
        def new_cache(num_pages, page_size, table):
            shape = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_size)
            return js.init_paged_cache(*shape, dtype, table)

        return new_cache

    kernels = kernels_of()
    value = value_functions(value_config, kernels=kernels)
    engine = js.Engine(
        *decoder_functions(config, kernels=kernels),
        weights,
        cache_of(config),
        limits=limits,
        buckets=buckets,
        num_pages=options.slots * (options.length // PAGE),
        page_size=PAGE,
        max_waiting=options.requests,
        scorer=js.Scorer(*value, value_weights, cache_of(value_config)),
    )
    total = lambda weights: sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    tables = weights["embedding"]["weight"].nbytes * (not config.tied_embeddings)
    value_table = value_weights["trunk"]["embedding"]["weight"].nbytes
    num_bytes = {"plain": total(weights) - tables, "value": total(value_weights) - value_table}
    return engine, num_bytes, config.vocab_size


def _requests(options, vocab_size: int, lengths, is_guided: bool) -> list[js.Request]:
    generator = np.random.default_rng(1)
    guidance = {"mode": "centered_exp", "scale": -2.0} if is_guided else None
    requests = []
    for seed, length in enumerate(lengths):
        params = {"seed": seed, "top_k": options.candidates, "max_tokens": int(length), "ignore_eos": True}
        prompt = generator.integers(0, vocab_size, NUM_PROMPT).tolist()
        requests.append(js.Request(prompt, params, guidance=guidance))
    return requests


def _run(engine: js.Engine, requests) -> tuple[list[list[int]], float, int]:
    """(tokens of each request, seconds until all had ended, steps)."""
    streams = [engine.submit(request) for request in requests]
    num_steps, begun = 0, time.perf_counter()
    while not all(stream.done for stream in streams):
        engine.step()
        num_steps += 1
    seconds = time.perf_counter() - begun
    return [stream.samples[0].tokens().token_ids.tolist() for stream in streams], seconds, num_steps


def _check(found, lengths) -> None:
    """Every request has all its tokens, and guidance chose others than plain decoding."""
    for name in NAMES:
        if [len(tokens) for tokens in found[name]] != lengths.tolist():
            raise SystemExit(f"error: a request of the {name} run ended early")
    pairs = zip(*(np.concatenate([np.asarray(tokens) for tokens in found[name]]) for name in NAMES))
    differ = float(np.mean([one != other for one, other in pairs]))
    print(f"checked: every request has its tokens; guidance changed {differ:.1%} of them")
    if differ < 0.01:
        raise SystemExit(f"error: guidance changed {differ:.2%} of the tokens")


def _spread(tokens: int) -> tuple[int, int]:
    """Lengths between two thirds and four thirds of `tokens`."""
    return max(tokens * 2 // 3, 1), tokens * 4 // 3 + 1


def _options(arguments):
    parser = argparse.ArgumentParser(prog="bench_guided_run", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-7b", choices=list(PRESETS), help="default %(default)s")
    parser.add_argument("--value-model", default="qwen2.5-1.5b", choices=list(PRESETS))
    parser.add_argument("--requests", type=int, default=800, help="default %(default)s")
    parser.add_argument("--tokens", type=int, default=300, metavar="T", help="of a request, in the mean")
    parser.add_argument("--slots", type=int, default=64, metavar="B", help="requests at a time")
    parser.add_argument("--length", type=int, default=640, metavar="S", help="cache slots, a multiple of 16")
    parser.add_argument("--candidates", type=int, default=5, metavar="G")
    measure.add_options(parser)
    options = parser.parse_args(arguments)
    if NUM_PROMPT + _spread(options.tokens)[1] > options.length:
        parser.error("--length must hold the prompt and four thirds of --tokens")
    return options


if __name__ == "__main__":
    main()
