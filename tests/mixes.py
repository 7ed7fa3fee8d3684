"""Rows of logits of every kind and requests that mix every parameter, drawn from a seeded NumPy generator."""

import ml_dtypes
import numpy as np

ROW_KINDS = (
    "normal",
    "flat",
    "equal",
    "peaked",
    "language",
    "tied",
    "bfloat16",
    "masked",
    "lone",
    "zeros",
    "large",
)


def row(generator, kind, num_vocab):
    """One float32 row of logits; always with a finite value, never with NaN or +inf."""
    z = generator.normal(0, 2, num_vocab)
    if kind == "flat":
        z = z * 1e-3
    elif kind == "equal":
        z = np.full(num_vocab, z[0])
    elif kind == "peaked":
        z[generator.integers(num_vocab)] += 30
    elif kind == "language":
        raised = generator.choice(num_vocab, min(num_vocab, 64), replace=False)
        z[raised] += generator.uniform(4, 14, len(raised))
    elif kind == "tied":
        z = np.round(z)
    elif kind == "bfloat16":
        z = z.astype(ml_dtypes.bfloat16)
    elif kind == "masked":
        z[generator.random(num_vocab) < 0.8] = -np.inf
    elif kind == "lone":
        z[np.arange(num_vocab) != generator.integers(num_vocab)] = -np.inf
    elif kind == "zeros":  # zeros of both signs, subnormals, and few others
        z = generator.choice(np.array([0.0, -0.0, 1e-40, -1e-40, 1e-20, 1.0, -1.0]), num_vocab)
    elif kind == "large":
        z = z * 1e4 + 3e5
    z = np.asarray(z).astype(np.float32)
    if not np.isfinite(z).any():
        z[generator.integers(num_vocab)] = 1.0
    return z


def rows(generator, num_rows, num_vocab, kinds=ROW_KINDS):
    return np.stack(
        [row(generator, kinds[generator.integers(len(kinds))], num_vocab) for _ in range(num_rows)]
    )


def filter_numbers(generator, num_vocab):
    """(top_k, top_p, min_p), each off in about a third of the cases, ends of the range included."""
    pick = lambda *values: values[generator.integers(len(values))]
    top_k = pick(0, -1, num_vocab, num_vocab + 1, 1, 2, 50, int(generator.integers(1, num_vocab + 1)), 2**30)
    top_p = pick(1.0, 1.0, 0.0, 0.9, 0.5, 1 - 2.0**-24, float(generator.random()), float(generator.random()))
    min_p = pick(0.0, 0.0, 1.0, 0.1, 1e-3, 1e-30, float(generator.random()))
    return int(top_k), float(np.float32(top_p)), float(np.float32(min_p))


def tokens(generator, num_vocab, most):
    return generator.integers(0, num_vocab, generator.integers(0, most + 1)).tolist()


def request(generator, num_vocab, limits, chance=0.3):
    """Keyword arguments of `make_params`: every parameter is present with the given chance."""
    with_chance = lambda: generator.random() < chance
    ids = lambda most: generator.choice(
        num_vocab, min(num_vocab, int(generator.integers(1, most + 1))), replace=False
    ).tolist()
    result = {"seed": int(generator.integers(2**63))}
    if with_chance():
        result["temperature"] = float(generator.choice([0.0, 0.0, 0.01, 0.3, 0.7, 1.5, 10.0]))
    if with_chance() or with_chance():
        result["top_k"], result["top_p"], result["min_p"] = filter_numbers(generator, num_vocab)
    if with_chance():
        result["repetition_penalty"] = float(generator.choice([0.5, 1.1, 2.0]))
    if with_chance():
        result["frequency_penalty"] = float(generator.choice([-0.5, 0.3, 1.0]))
    if with_chance():
        result["presence_penalty"] = float(generator.choice([-0.5, 0.3, 1.0]))
    if with_chance():
        result["logit_bias"] = {
            i: float(generator.choice([-np.inf, -5, 1.5, 5])) for i in ids(limits.num_logit_bias)
        }
    if with_chance():
        keep = generator.random(num_vocab) < 0.5
        keep[generator.integers(num_vocab)] = True
        result["allowed_token_ids"] = np.flatnonzero(keep).tolist()
    if with_chance():
        result["banned_token_ids"] = ids(3)
    if with_chance():
        result["bad_words_ids"] = [
            [
                *tokens(generator, min(num_vocab, 3), limits.bad_word_length - 1),
                int(generator.integers(num_vocab)),
            ]
            for _ in range(limits.num_bad_words)
        ]
    if with_chance():
        result["eos_token_ids"], result["stop_token_ids"] = ids(limits.num_eos), ids(limits.num_stop_ids)
        result["min_tokens"] = int(generator.integers(0, 8))
        result["ignore_eos"] = bool(generator.random() < 0.3)
    if with_chance():
        result["token_temperature_scale"] = {
            i: float(generator.choice([0.5, 1.3, 2.0])) for i in ids(limits.num_scales)
        }
    if generator.random() < 0.5:
        result["logprobs"] = int(generator.integers(0, min(limits.num_logprobs, num_vocab) + 1))
    return result
