"""Batches for `sample` from requests in the words of `make_params`, with histories, grammars and padding."""

import jax
import numpy as np

from jaxsample import history as history_module
from jaxsample.admission import make_params
from jaxsample.params import PAD, Features, Limits, neutral_params, stack_rows
from jaxsample.sample import sample
from tests import mixes

# One compiled program for each (shapes, limits, features). A program takes seconds to compile, so files share
# the shapes below: 3 rows of 8 tokens in 16 columns, and up to 64 rows of 333 tokens in 400 columns.
run = jax.jit(sample, static_argnames=("limits", "features"))


def small_limits(vocab_size):
    return Limits(
        vocab_size=vocab_size,
        max_length=32,
        num_logit_bias=4,
        num_bad_words=3,
        bad_word_length=4,
        num_eos=2,
        num_stop_ids=2,
        num_stop_sequences=1,
        stop_sequence_length=2,
        num_scales=2,
        num_logprobs=6,
    )


EIGHT, EIGHT_WIDTH = small_limits(8), 16
LIMITS, WIDTH = small_limits(333), 400
RAW = Features(num_candidates=32, num_logprobs=6, logprobs_mode="raw")
PROCESSED = Features(num_candidates=32, num_logprobs=6, logprobs_mode="processed")


def ragged(lists, width=None):
    """(i32[B, L] padded with PAD, i32[B] lengths)."""
    width = max([1, *(len(row) for row in lists)]) if width is None else width
    result = np.full((len(lists), width), PAD, np.int32)
    for row, values in zip(result, lists):
        row[: len(values)] = values
    return result, np.array([len(values) for values in lists], np.int32)


_start = jax.jit(history_module.start, static_argnums=0)
_append = jax.jit(history_module.append)


def history_of(limits, prompts, outputs, width=None):
    """History after the prompts and then, in one step, the outputs."""
    return _append(_start(limits, *ragged(prompts, width)), *ragged(outputs, width))


def bit_mask(limits, allowed_sets):
    """u32[B, W] from lists of ids; None allows all."""
    bits = np.zeros((len(allowed_sets), limits.num_words * 32), np.uint8)
    for row, ids in zip(bits, allowed_sets):
        row[: limits.vocab_size if ids is None else 0] = 1
        row[list(ids or ())] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


def params_of(limits, requests):
    """(SamplingParams, StopRule) of requests given as keyword arguments; {} and no seed is the neutral row."""
    return stack_rows(
        [make_params(limits, **{"seed": 0, **r}) if r else neutral_params(limits, 1) for r in requests]
    )


def sample_rows(
    logits,
    requests,
    limits,
    features,
    *,
    position=None,
    prompts=None,
    outputs=None,
    grammars=None,
    noise=None,
    edit=lambda params: None,
):
    """Sampled, as NumPy, of a batch with histories and grammar masks always present.

    `edit` may write into the params' arrays what admission would refuse.
    """
    num_rows = len(requests)
    params, stop = params_of(limits, requests)
    edit(params)
    result = run(
        np.asarray(logits),
        params,
        np.zeros(num_rows, np.int32) if position is None else np.asarray(position, np.int32),
        stop=stop,
        history=history_of(limits, prompts or [[]] * num_rows, outputs or [[]] * num_rows, limits.max_length),
        allowed=bit_mask(limits, grammars or [None] * num_rows)
        if grammars or features.tier == "full"
        else None,
        limits=limits,
        features=features,
        noise=noise,
    )
    return jax.tree.map(np.asarray, result)


def sample_eight(logits, requests, features=PROCESSED, **rest):
    """`sample_rows` of at most 3 rows of at most 8 logits: missing ids have -inf, padding columns a huge value."""
    logits = [np.asarray(row) for row in logits]
    full = np.full((3, EIGHT_WIDTH), 99.0, np.float32)
    full[:, :8] = 0
    for row, values in zip(full, logits):
        row[:8] = -np.inf
        row[: len(values)] = values.astype(np.float32)
    full = full.astype(logits[0].dtype if logits[0].dtype.itemsize == 2 else np.float32)
    missing = 3 - len(requests)
    edit = rest.pop("edit", lambda params: None)
    rest = {name: [*value, *[None if name == "grammars" else []] * missing] for name, value in rest.items()}
    result = sample_rows(full, [*requests, *[{}] * missing], EIGHT, features, edit=edit, **rest)
    return jax.tree.map(lambda leaf: leaf[: len(requests)], result)


def random_batch(generator, num_rows, limits, width, kinds=mixes.ROW_KINDS, chance=0.3):
    """A dict of the arguments of `sample_rows` (less limits and features) with everything mixed."""
    vocab = limits.vocab_size
    requests, grammars = [], []
    while len(requests) < num_rows:
        request = mixes.request(generator, vocab, limits, chance)
        try:
            make_params(limits, **request)
        except ValueError:
            continue  # a random mix that contradicts itself
        requests.append(request)
    for request in requests:
        ends = [*request.get("eos_token_ids", ()), *request.get("stop_token_ids", ())]
        choice = generator.random()
        if choice < 0.15:
            grammars.append(np.flatnonzero(generator.random(vocab) < 0.3).tolist())
        elif choice < 0.25 and ends:
            grammars.append(ends)
        else:
            grammars.append(None)
    logits = np.full((num_rows, width), np.nan, np.float32)
    logits[:, :vocab] = mixes.rows(generator, num_rows, vocab, kinds)
    most = limits.max_length // 2
    return dict(
        logits=logits,
        requests=requests,
        grammars=grammars,
        position=generator.integers(0, 2**20, num_rows),
        prompts=[mixes.tokens(generator, vocab, most) for _ in range(num_rows)],
        outputs=[mixes.tokens(generator, min(vocab, 6), most) for _ in range(num_rows)],
    )
