"""Targets and drafts built straight from log-probabilities, and one compiled program for each verifier and tree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample import rng
from jaxsample.candidates import normaliser
from jaxsample.draft import Draft
from jaxsample.law import Law
from jaxsample.params import TILE, Features, Limits, neutral_params
from jaxsample.shaping import Shaped
from jaxsample.target import make_target
from jaxsample.truncation import Cut

# Rows are not filtered, so that one candidate serves them all.
VOCAB = 8
FEATURES = Features(tier="filtered", full_rows=False, num_candidates=1)
LIMITS = Limits(
    vocab_size=VOCAB,
    max_length=4,
    num_logit_bias=0,
    num_bad_words=0,
    num_eos=0,
    num_stop_ids=0,
    num_stop_sequences=0,
    num_scales=0,
)
LARGEST = np.float32(1 - 2.0**-24)  # the largest uniform there is


def logs(probabilities):
    """log in float64, then float32; padded with -inf to 8 tokens."""
    with np.errstate(divide="ignore"):
        result = np.log(np.asarray(probabilities, np.float64)).astype(np.float32)
    missing = VOCAB - result.shape[-1]
    return np.pad(result, [(0, 0)] * (result.ndim - 1) + [(0, missing)], constant_values=-np.inf)


def seeds(numbers):
    """u32[B, 2] from 64-bit integers."""
    numbers = np.asarray(numbers, np.uint64)
    return np.stack([numbers & np.uint64(0xFFFFFFFF), numbers >> np.uint64(32)], axis=-1).astype(np.uint32)


def target_of(log_p, tree, seed, position, valid=None):
    """Target of neutral requests: log_p f32[B, N, V], seed u32[B, 2], position i32[B] of the first token chosen."""
    num_rows, num_nodes, vocab = log_p.shape
    rows = num_rows * num_nodes
    logits = _padded(log_p).reshape(rows, -1)
    params, _ = neutral_params(LIMITS, 1)
    params = jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.asarray(leaf), (rows, *leaf.shape[1:])), params)
    params = dataclasses.replace(params, seed=jnp.repeat(jnp.asarray(seed), num_nodes, axis=0))
    position = (jnp.asarray(position)[:, None] + jnp.asarray(tree.depth)[None, :]).reshape(rows)
    valid = jnp.any(logits > -jnp.inf, axis=1) if valid is None else valid.reshape(rows)
    shaped = Shaped(logits, logits, valid)
    return make_target(shaped, params, position, vocab_size=vocab, features=FEATURES, law=True)


def law_of_draft(log_q):
    """Law [B, I] of f32[B, I, V], nothing cut."""
    shape, vocab = log_q.shape[:-1], log_q.shape[-1]
    logits = _padded(log_q)
    highest, total = normaliser(logits.reshape(-1, logits.shape[-1]))
    cut = Cut(jnp.full(shape, -jnp.inf), jnp.full(shape, vocab, jnp.int32), rng.log(total).reshape(shape))
    return Law(logits, highest.reshape(shape), cut)


@functools.partial(jax.jit, static_argnames=("verify", "tree"))
def run(verify, tree, log_p, log_q, tokens, num_live, seed, position, noise=None):
    """Verdict of a verifier on laws; log_q None for proposals that were not drawn."""
    law = None if log_q is None else law_of_draft(log_q)
    draft = Draft(tokens, num_live, law)
    target = target_of(log_p, tree, seed, position)
    return verify(target, draft, tree) if noise is None else verify(target, draft, tree, noise)


def _padded(logits):
    missing = -logits.shape[-1] % TILE
    return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, missing)], constant_values=-np.inf)
