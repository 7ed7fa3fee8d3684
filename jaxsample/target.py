"""Rows of logits made ready to draw from: shaped, summarised, cut; and the token plain decoding draws.

What `sample` returns and what verifiers compare drafts with comes from the same `Target`. Knows nothing about
drafts or requests.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsample import rng
from jaxsample.candidates import Candidates, summarize
from jaxsample.draw import draw_candidates, draw_rows, split_words
from jaxsample.law import Law
from jaxsample.logprobs import Logprobs, limit_top, processed_logprobs, raw_logprobs
from jaxsample.params import PAD, Features, SamplingParams
from jaxsample.shaping import Shaped
from jaxsample.truncation import Cut, is_filtered, is_greedy, truncate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Target:
    """R rows ready to draw from.

    Fields:
      shaped: Shaped.
      params: SamplingParams of the R rows.
      position: i32[R], absolute index of the token being chosen.
      candidates: summary of shaped.logits, or None where the program needs none.
      cut: Cut of each row; num_kept: i32[R], its place among the candidates. None likewise.
      features, vocab_size (static).
    """

    shaped: Shaped
    params: SamplingParams
    position: jax.Array
    candidates: Candidates | None
    cut: Cut | None
    num_kept: jax.Array | None
    features: Features = dataclasses.field(metadata={"static": True})
    vocab_size: int = dataclasses.field(metadata={"static": True})


def make_target(shaped: Shaped, params, position, *, vocab_size: int, features: Features, law: bool = False):
    """Summarise and cut shaped rows.

    Args:
      shaped: Shaped of R rows.
      params: SamplingParams of R rows.
      position: i32[R].
      vocab_size: V.
      features: the program's stages.
      law: the distribution itself is needed, so the cut is found even in a program without filters.
    """
    processed = features.num_logprobs >= 0 and features.logprobs_mode == "processed"
    candidates = cut = num_kept = None
    if features.filters or processed or law:
        # Without filters and logprobs a law needs no more than the first token, for greedy rows.
        count = features.num_candidates if features.filters or processed else 1
        candidates = summarize(shaped.logits, count)
        cut, num_kept = truncate(shaped.logits, candidates, params, vocab_size=vocab_size, features=features)
    return Target(shaped, params, position, candidates, cut, num_kept, features, vocab_size)


def law_of(target: Target) -> Law:
    """The distribution each row is drawn from: Law [R]. Needs a target made with law=True or filters."""
    if target.candidates is None or target.cut is None:
        raise ValueError("the target has no cut: make it with law=True")
    return Law(target.shaped.logits, target.candidates.max, target.cut)


def draw_target(target: Target, noise=None):
    """The token plain decoding draws in each row: i32[R], PAD where the row is not valid.

    Where the program can cut full rows, one draw over the row serves all. Else rows that may be cut draw
    among their candidates: the same token, since its noise depends on its id alone.

    Args:
      target: Target.
      noise: f32[R, V] in place of the Gumbel noise; greedy rows ignore it.
    """
    z, features = target.shaped.logits, target.features
    row_noise = _row_noise(target, noise)
    if target.candidates is None or target.num_kept is None:
        tokens = draw_rows(z, row_noise)
    elif features.full_rows:
        tokens = draw_rows(z, row_noise, target.cut)
    else:
        among = draw_candidates(target.candidates, _candidate_noise(target, noise), target.num_kept)
        tokens = draw_rows(z, row_noise)
        tokens = jnp.where(is_filtered(target.params, target.vocab_size), among, tokens)
    return jnp.where(target.shaped.valid, tokens, PAD)


def logprobs_of(target: Target, tokens) -> Logprobs | None:
    """Logprobs of one token a row, i32[R] (PAD for none), in the program's mode; None if it computes none."""
    features = target.features
    if features.num_logprobs < 0:
        return None
    if features.logprobs_mode == "raw":
        found = raw_logprobs(target.shaped.raw, tokens, features.num_logprobs)
    else:
        assert target.candidates is not None
        assert target.cut is not None
        z = target.shaped.logits
        found = processed_logprobs(z, tokens, target.candidates, target.cut, features.num_logprobs)
    return limit_top(found, jnp.where(tokens >= 0, target.params.num_logprobs, -1))


def _row_noise(target: Target, given):
    """Noise of all ids, as the four words of `draw_rows`; 0 for greedy rows."""
    width, params = target.shaped.logits.shape[1], target.params
    if given is not None:
        words = split_words(jnp.pad(given, ((0, 0), (0, width - given.shape[1]))))
    else:
        words = rng.gumbel_words(params.seed, target.position, rng.TARGET, width // 4)
    return tuple(jnp.where(is_greedy(params)[:, None], 0, word) for word in words)


def _candidate_noise(target: Target, given):
    """Noise of the candidates' ids: f32[R, C]; 0 for greedy rows."""
    assert target.candidates is not None
    ids, params = target.candidates.ids, target.params
    if given is not None:
        noise = jnp.take_along_axis(given, jnp.minimum(ids, given.shape[1] - 1), axis=1, mode="clip")
    else:
        noise = rng.gumbel(params.seed, target.position, rng.TARGET, ids)
    return jnp.where(is_greedy(params)[:, None], 0, noise)
