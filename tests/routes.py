"""Both routes of the cut on rows of any width: by candidates and by full rows, as NumPy."""

import functools

import jax
import numpy as np

from jaxsample.candidates import summarize
from jaxsample.truncation import cut_candidates, cut_rows, kept

ORDERS = ("vllm", "hf", "joint")


def padded(logits):
    """float32 rows as the cuts take them: whole tiles, no -0.0, no subnormals."""
    z = np.asarray(logits, np.float32)
    z = np.where(np.abs(z) < np.finfo(np.float32).tiny, np.float32(0), z)
    return np.pad(z, ((0, 0), (0, -z.shape[1] % 128)), constant_values=-np.inf)


@functools.partial(jax.jit, static_argnames=("vocab_size", "filter_order"))
def by_rows(logits, top_k, top_p, min_p, *, vocab_size, filter_order):
    cut = cut_rows(logits, top_k, top_p, min_p, vocab_size=vocab_size, filter_order=filter_order)
    return kept(logits, cut), cut.log_mass


@functools.partial(jax.jit, static_argnames=("vocab_size", "num_candidates", "filter_order"))
def by_candidates(logits, top_k, top_p, min_p, *, vocab_size, num_candidates, filter_order):
    candidates = summarize(logits, num_candidates)
    cut, num_kept, exact = cut_candidates(
        candidates, top_k, top_p, min_p, vocab_size=vocab_size, filter_order=filter_order
    )
    return kept(logits, cut), exact, num_kept, cut.log_mass


def route_results(logits, filters, filter_order, num_candidates):
    """(kept by rows, kept by candidates, exact, num_kept, log mass by rows, by candidates), as NumPy."""
    vocab_size = logits.shape[1]
    top_k, top_p, min_p = (np.asarray(column) for column in zip(*filters))
    arrays = padded(logits), top_k.astype(np.int32), top_p.astype(np.float32), min_p.astype(np.float32)
    static = dict(vocab_size=vocab_size, filter_order=filter_order)
    full, full_mass = map(np.asarray, by_rows(*arrays, **static))
    short, exact, num_kept, short_mass = map(
        np.asarray, by_candidates(*arrays, num_candidates=num_candidates, **static)
    )
    assert not full[:, vocab_size:].any()
    assert not short[:, vocab_size:].any()
    return full[:, :vocab_size], short[:, :vocab_size], exact, num_kept, full_mass, short_mass


def kept_sets(logits, filters, filter_order, num_candidates=64):
    """The kept ids of each row; both routes must agree where the candidates claim to be exact."""
    full, short, exact, *_ = route_results(logits, filters, filter_order, num_candidates)
    assert (full[exact] == short[exact]).all()
    return [np.flatnonzero(row).tolist() for row in full]


def kept_of(values, filters, filter_order, num_vocab=8):
    """The kept ids of one short row; the ids behind it cannot be drawn. One shape, so that it compiles once."""
    row = np.full((1, num_vocab), -np.inf, np.float32)
    row[0, : len(values)] = values
    return kept_sets(row, [filters], filter_order)[0]
