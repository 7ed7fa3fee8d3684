"""Inputs that benchmarks and tests share: rows of logits by kind, and requests by mix of parameters.

NumPy only; knows nothing about how anything is sampled. Every case is a function of its arguments, so that
two runs, or a test and a benchmark, see the same numbers.
"""

from collections.abc import Callable

import numpy as np

VOCAB_SIZE = 151_936  # Qwen2 and Qwen3


def lm_like(num_rows: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """A bulk of normal(0, 2) and 64 tokens raised by 4 ... 14, as a language model's rows look: f32[B, V]."""
    generator = np.random.default_rng(seed)
    logits = _normal(generator, num_rows, vocab_size)
    num_raised = min(64, vocab_size)
    for row in logits:
        ids = generator.choice(vocab_size, num_raised, replace=False)
        row[ids] += generator.uniform(4, 14, num_raised).astype(np.float32)
    return logits


def flat(num_rows: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """normal(0, 2) and nothing else: no small set of tokens holds the mass. f32[B, V]."""
    return _normal(np.random.default_rng(seed), num_rows, vocab_size)


def peaked(num_rows: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """One token far above a normal(0, 2) bulk: f32[B, V]."""
    generator = np.random.default_rng(seed)
    logits = _normal(generator, num_rows, vocab_size)
    logits[np.arange(num_rows), generator.integers(vocab_size, size=num_rows)] += np.float32(30)
    return logits


def all_equal(num_rows: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """Every token tied with every other: f32[B, V], one value a row."""
    value = np.random.default_rng(seed).normal(0, 2, (num_rows, 1)).astype(np.float32)
    return np.repeat(value, vocab_size, axis=1)


def two_values(num_rows: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """Half the tokens at 1, half at 0, in random places: ties on both sides of every cut. f32[B, V]."""
    return np.random.default_rng(seed).integers(0, 2, (num_rows, vocab_size)).astype(np.float32)


KINDS: dict[str, Callable[..., np.ndarray]] = {
    "lm": lm_like,
    "flat": flat,
    "peaked": peaked,
    "equal": all_equal,
    "two_values": two_values,
}


# What one request of each mix asks for, under the names of `jaxsample.make_params`; the ids need V >= 32.
_FILTERS = {"top_k": 50, "top_p": 0.95, "min_p": 0.05}
MIXES: dict[str, dict] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "filtered": {"temperature": 1.0, **_FILTERS},
    "full": {
        "temperature": 0.8,
        **_FILTERS,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "logit_bias": {3: 1.5, 17: -2.0},
        "banned_token_ids": (5,),
        "bad_words_ids": ((7,), (11, 13)),
        "eos_token_ids": (2,),
        "stop_token_ids": (9,),
        "min_tokens": 100,
    },
}


def requests(mix: str, num_rows: int) -> list[dict]:
    """The B requests of a mix; rows differ in their seed alone."""
    return [{**MIXES[mix], "seed": row} for row in range(num_rows)]


def histories(num_rows: int, vocab_size: int, num_prompt: int, num_output: int, seed: int = 0):
    """Prompts and outputs of equal lengths with repeats in them: i32[B, num_prompt], i32[B, num_output]."""
    generator = np.random.default_rng(seed)
    high = min(vocab_size, 1000)
    prompts = generator.integers(high, size=(num_rows, num_prompt), dtype=np.int32)
    outputs = generator.integers(high, size=(num_rows, num_output), dtype=np.int32)
    return prompts, outputs


def _normal(generator, num_rows, vocab_size):
    return generator.standard_normal((num_rows, vocab_size), dtype=np.float32) * np.float32(2)
