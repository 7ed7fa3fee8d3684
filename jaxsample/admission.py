"""From one request's own words to rows of `SamplingParams` and `StopRule`: all validation, on the host.

Whatever depends on values is refused here, before anything reaches the device, with a ValueError that names
the argument, its value and the allowed range. Comparisons are written so that NaN fails them.
"""

import math
import secrets
from collections.abc import Mapping, Sequence

import numpy as np

from jaxsample import rng
from jaxsample.params import Limits, SamplingParams, StopRule, neutral_params, stack_rows

_TINY = float(np.finfo(np.float32).tiny)
_HUGE = float(np.finfo(np.float32).max)
MAX_CHILDREN = 65536  # the most children of one request


def make_params(
    limits: Limits,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    allowed_token_ids: Sequence[int] | None = None,
    banned_token_ids: Sequence[int] = (),
    bad_words_ids: Sequence[Sequence[int]] = (),
    seed: int | None = None,
    n: int = 1,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    min_tokens: int = 0,
    max_tokens: int | None = None,
    eos_token_ids: Sequence[int] = (),
    stop_token_ids: Sequence[int] = (),
    stop_sequences: Sequence[Sequence[int]] = (),
    ignore_eos: bool = False,
    token_temperature_scale: Mapping[int, float] | None = None,
    prompt_length: int = 0,
) -> tuple[SamplingParams, StopRule]:
    """Validate one request and lay it out as n rows of NumPy arrays.

    Args:
      limits: capacities.
      temperature: >= 0; 0 (and anything below the smallest normal float32) is greedy.
      top_k: >= -1; 0, -1 and V or more are off.
      top_p: in [0, 1]; 1 is off, 0 keeps only the top token.
      min_p: in [0, 1]; 0 is off.
      repetition_penalty: > 0; 1 is off. frequency_penalty, presence_penalty: finite; 0 is off.
      logit_bias: token id -> finite number added to the raw logit, or -inf, which bans.
      allowed_token_ids: the only ids that may be drawn; None for all.
      banned_token_ids: ids that are never drawn.
      bad_words_ids: token sequences that never appear in the output.
      seed: any integer, taken modulo 2^64; 0 is a seed; None draws one here.
      n: independent children, at most 65,536; row i of the result is child i, and child 0 equals the request
        with n = 1.
      logprobs: None for none, 0 for the emitted token's, k for its and the k best.
      prompt_logprobs: the same for prompt tokens; checked here, served by `logprobs.score` and in engines.
      min_tokens: EOS and stop ids are banned until so many tokens are out. max_tokens: None for no limit but
        the cache's; a request emits at least one token.
      eos_token_ids: the model's end tokens. stop_token_ids: the request's own.
      stop_sequences: token sequences that end the request.
      ignore_eos: EOS ids become ordinary tokens.
      token_temperature_scale: token id -> factor > 0 on the logit, after penalties, together with the
        temperature (LenVM); rows that are greedy ignore it.
      prompt_length: tokens of the prompt, to be checked against the cache.

    Returns:
      (SamplingParams, StopRule), n rows each.

    Raises:
      ValueError: names the argument, the value and the allowed range. Nothing is kept of a refused request.
    """
    vocab = limits.vocab_size
    check_number("temperature", temperature, 0, _HUGE, ">= 0 and finite in float32")
    check_integer("top_k", top_k, -1, None)
    check_number("top_p", top_p, 0, 1, "in [0, 1]")
    check_number("min_p", min_p, 0, 1, "in [0, 1]")
    check_number("repetition_penalty", repetition_penalty, _TINY, _HUGE, "> 0 and finite in float32")
    check_number("frequency_penalty", frequency_penalty, -_HUGE, _HUGE, "finite in float32")
    check_number("presence_penalty", presence_penalty, -_HUGE, _HUGE, "finite in float32")
    if seed is not None:
        check_integer("seed", seed, None, None)
    check_integer("n", n, 1, MAX_CHILDREN)
    _count("logprobs", logprobs, min(vocab, limits.num_logprobs))
    _count("prompt_logprobs", prompt_logprobs, min(vocab, limits.num_logprobs))
    check_integer("min_tokens", min_tokens, 0, 2**31 - 1)
    if max_tokens is not None:
        check_integer("max_tokens", max_tokens, 1, 2**31 - 1)
        if min_tokens > max_tokens:
            raise ValueError(f"min_tokens is {min_tokens}, allowed is at most max_tokens = {max_tokens}")
    if not isinstance(ignore_eos, bool | np.bool_):
        raise ValueError(f"ignore_eos is {ignore_eos!r}, allowed are True and False")
    check_integer("prompt_length", prompt_length, 0, limits.max_length)

    bias = _table("logit_bias", logit_bias, limits.num_logit_bias, vocab)
    for token, value in bias.items():
        if not (-_HUGE <= value <= _HUGE or value == -math.inf):
            raise ValueError(f"logit_bias[{token}] is {value}, allowed are finite float32 numbers and -inf")
    scale = _table("token_temperature_scale", token_temperature_scale, limits.num_scales, vocab)
    for token, value in scale.items():
        check_number(f"token_temperature_scale[{token}]", value, _TINY, _HUGE, "> 0 and finite in float32")
    eos = _ids("eos_token_ids", eos_token_ids, limits.num_eos, vocab)
    stops = _ids("stop_token_ids", stop_token_ids, limits.num_stop_ids, vocab)
    words = _sequences("bad_words_ids", bad_words_ids, limits.num_bad_words, limits.bad_word_length, vocab)
    sequences = _sequences(
        "stop_sequences", stop_sequences, limits.num_stop_sequences, limits.stop_sequence_length, vocab
    )
    allowed = _allowed_bits(limits, allowed_token_ids, banned_token_ids)
    banned = {token for token, value in bias.items() if value == -math.inf}
    # A word of one token needs no history to be known: it is a banned id as well.
    allowed[[word[0] for word in words if len(word) == 1]] = False
    if min_tokens > 0:
        banned |= set(stops) | (set() if ignore_eos else set(eos))
    if not set(np.flatnonzero(allowed[:vocab])) - banned:
        raise ValueError(
            f"allowed_token_ids, banned_token_ids, logit_bias, bad_words_ids and min_tokens = {min_tokens} "
            "together leave no token to draw, at least one must be left"
        )

    if seed is None:
        seed = secrets.randbits(64)
    params, stop = neutral_params(limits, 1)
    params.temperature[0] = temperature if temperature >= _TINY else 0.0
    params.top_k[0] = min(max(top_k, 0), 2**31 - 1)
    params.top_p[0], params.min_p[0] = top_p, min_p
    params.repetition_penalty[0] = repetition_penalty
    params.frequency_penalty[0], params.presence_penalty[0] = frequency_penalty, presence_penalty
    params.num_logprobs[0] = -1 if logprobs is None else logprobs
    _fill_table(params.bias_ids[0], params.bias_values[0], bias)
    _fill_table(params.scale_ids[0], params.scale_values[0], scale)
    params.allowed[0] = np.packbits(allowed, bitorder="little").view(np.uint32)
    _fill_sequences(params.bad_words[0], params.bad_word_lengths[0], words)
    stop.eos_ids[0, : len(eos)] = eos
    stop.stop_ids[0, : len(stops)] = stops
    _fill_sequences(stop.stop_sequences[0], stop.stop_sequence_lengths[0], sequences)
    stop.ignore_eos[0], stop.min_tokens[0] = ignore_eos, min_tokens
    if max_tokens is not None:
        stop.max_tokens[0] = max_tokens
    params, stop = stack_rows([(params, stop)] * n)
    seeds = [rng.child_seed(int(seed), child) for child in range(n)]
    params.seed[:, 0] = [child_seed & 0xFFFFFFFF for child_seed in seeds]
    params.seed[:, 1] = [child_seed >> 32 for child_seed in seeds]
    return params, stop


def check_number(name, value, low, high, allowed):
    """ValueError unless value is a number in [low, high] as a Python float; `allowed` says so in words."""
    if not low <= _as_float(value) <= high:
        raise ValueError(f"{name} is {value!r}, allowed are numbers {allowed}")


def _as_float(value) -> float:
    """A number as a Python float (a comparison in float16 would round the bounds); NaN for anything else."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    try:
        return float(value) if number else math.nan
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_integer(name, value, low, high):
    """ValueError unless value is an integer in [low, high]; None is no bound."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or (low is not None and value < low) or (high is not None and value > high):
        span = f"from {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} is {value!r}, allowed are integers{'' if low is None else ' ' + span}")


def _count(name, value, most):
    if value is not None:
        check_integer(name, value, 0, most)


def _ids(name, ids, capacity, vocab):
    ids = list(dict.fromkeys(_id(name, token, vocab) for token in _items(name, ids, "token ids")))
    if capacity is not None and len(ids) > capacity:
        raise ValueError(f"{name} has {len(ids)} ids, allowed are at most {capacity} (Limits)")
    return ids


def _items(name, values, what):
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__") or getattr(values, "ndim", 1) == 0:
        raise ValueError(f"{name} is or holds {values!r}, allowed are sequences of {what}")
    return list(values)


def _id(name, token, vocab):
    if not isinstance(token, int | np.integer) or isinstance(token, bool) or not 0 <= token < vocab:
        raise ValueError(f"{name} holds {token!r}, allowed are token ids in [0, {vocab})")
    return int(token)


def _table(name, table, capacity, vocab):
    if table is None:
        return {}
    if not isinstance(table, Mapping):
        raise ValueError(f"{name} is {table!r}, allowed are mappings from token id to number")
    if len(table) > capacity:
        raise ValueError(f"{name} has {len(table)} entries, allowed are at most {capacity} (Limits)")
    result = {}
    for token, value in table.items():
        number = _as_float(value)
        if number != number:
            raise ValueError(f"{name}[{token!r}] is {value!r}, allowed are numbers")
        result[_id(name, token, vocab)] = number
    return result


def _sequences(name, sequences, capacity, max_length, vocab):
    result = []
    for sequence in _items(name, sequences, "token id sequences"):
        sequence = [_id(name, token, vocab) for token in _items(name, sequence, "token ids")]
        if not 1 <= len(sequence) <= max_length:
            raise ValueError(f"{name} holds {len(sequence)} ids in one entry, allowed are 1 ... {max_length}")
        result.append(sequence)
    if len(result) > capacity:
        raise ValueError(f"{name} has {len(result)} entries, allowed are at most {capacity} (Limits)")
    return result


def _allowed_bits(limits, allowed_ids, banned_ids):
    """bool[W * 32]; bits past the vocabulary are set, as in the neutral mask."""
    bits = np.ones(limits.num_words * 32, np.bool_)
    if allowed_ids is not None:
        ids = _ids("allowed_token_ids", allowed_ids, None, limits.vocab_size)
        if not ids:
            raise ValueError("allowed_token_ids is empty, at least one id must be allowed (None allows all)")
        bits[: limits.vocab_size] = False
        bits[ids] = True
    bits[_ids("banned_token_ids", banned_ids, None, limits.vocab_size)] = False
    if not bits[: limits.vocab_size].any():
        raise ValueError("banned_token_ids leaves no token of the allowed ones, at least one must be left")
    return bits


def _fill_table(ids, values, table):
    for slot, (token, value) in enumerate(table.items()):
        ids[slot], values[slot] = token, value


def _fill_sequences(rows, lengths, sequences):
    for slot, sequence in enumerate(sequences):
        rows[slot, : len(sequence)] = sequence
        lengths[slot] = len(sequence)
