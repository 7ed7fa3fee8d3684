"""Guided rows: a short list of candidates, redistributed by a value model's scores, drawn like any other law.

The steps, each a pure function over rows of any number (a request's, or those of all nodes of a draft):

    target = make_target(...)                                # as without guidance
    listed = shortlist(target, guidance, num_guided)         # which candidates, which rows need values
    listed = add_scores(listed, scores, weights)             # scorers of the caller's, if any
    listed = guide(listed, z, ends, guidance, num_emitted)   # z: the value model's logit of each candidate
    target = guided_target(target, listed)                   # for draws, laws, logprobs and verifiers

Rows that are not guided keep their logits, cut and noise, hence their tokens, bit for bit. Knows nothing
about value models, caches or requests; what the modes do is in `guidance_modes`.

Source: Zhang et al., "Length Value Model", arXiv 2604.27039, and the sampler published with it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsample import rng, tilt
from jaxsample.candidates import Candidates, prefix_sum
from jaxsample.guidance_rows import OFF, Guidance
from jaxsample.params import PAD, StopRule
from jaxsample.target import Target
from jaxsample.truncation import Cut, is_greedy, passes_min_p


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shortlist:
    """The candidates of R rows, G slots each.

    Fields:
      ids: i32[R, G], token ids; distinct in a row, slots past `count` included.
      log_probs: f32[R, G], the distribution over the candidates, normalised; -inf past `count`. Candidates
        stand in the order of the unguided probabilities.
      count: i32[R], candidates, at least 1.
      guided: bool[R], rows drawn from `log_probs` in this step; others are drawn as without guidance.
      scored: bool[R], guided rows with two candidates or more: their values or scores are needed.
      valid: bool[R], False: a bad row, of logits or of scores. It emits nothing.
    """

    ids: jax.Array
    log_probs: jax.Array
    count: jax.Array
    guided: jax.Array
    scored: jax.Array
    valid: jax.Array


def shortlist(target: Target, guidance: Guidance, num_guided: int) -> Shortlist:
    """The candidates of guided rows, by a rule of their own, and which rows are guided in this step.

    On the whole softmax at the row's temperature: the top_k first tokens (at most G; greedy rows: one); of
    these j while the mass of those before it is <= top_p, not renormalised; of these p >= min_p max p; the
    first in any case. A row is guided if its mode is not OFF, and it has one candidate or an entropy above
    its threshold.

    Args:
      target: Target of R rows with candidates, from a program with filters.
      guidance: Guidance of R rows.
      num_guided: G, static, at most features.num_candidates.

    Raises:
      ValueError: a target without or with too few candidates, at trace time.
    """
    candidates, params = target.candidates, target.params
    if candidates is None:
        raise ValueError("the target has no candidates, guidance needs tier 'filtered' or 'full'")
    if not 1 <= num_guided <= target.features.num_candidates:
        raise ValueError(
            f"num_guided is {num_guided}, allowed are 1 ... num_candidates = {target.features.num_candidates}"
        )
    values, ids = candidates.values[:, :num_guided], candidates.ids[:, :num_guided]
    size = values.shape[1]
    mass = prefix_sum(rng.exp(values - candidates.max[:, None]))
    before = jnp.pad(mass[:, :-1], ((0, 0), (1, 0)))
    top_k = jnp.where(params.top_k <= 0, size, params.top_k)
    top_k = jnp.where(is_greedy(params), 1, top_k)
    kept = _slots(size) < top_k[:, None]
    kept &= (before <= (params.top_p * candidates.sum)[:, None]) | (params.top_p >= 1)[:, None]
    kept &= passes_min_p(values, candidates.max, params.min_p)
    count = jnp.maximum(jnp.sum(kept, axis=1, dtype=jnp.int32), 1)

    kept = _slots(size) < count[:, None]
    log_q = tilt.normalise(jnp.where(kept, values - candidates.max[:, None], -jnp.inf))
    entropy = -tilt.total(jnp.where(kept, rng.exp(log_q) * log_q, 0))[:, 0]
    guided = (guidance.mode != OFF) & target.shaped.valid
    guided &= (count == 1) | (entropy > guidance.entropy_threshold)
    return Shortlist(ids, log_q, count, guided, guided & (count > 1), target.shaped.valid)


def ends_row(ids, stop: StopRule):
    """Which tokens i32[R, G] end their row as EOS, so that nothing comes after them: bool[R, G].

    Stop ids and sequences do not count; with ignore_eos nothing does.
    """
    same = (ids[:, :, None] == stop.eos_ids[:, None, :]) & (stop.eos_ids != PAD)[:, None, :]
    return jnp.any(same, axis=2) & ~stop.ignore_eos[:, None]


def add_scores(listed: Shortlist, scores, weights) -> Shortlist:
    """q'(i) ~ q(i) exp(sum_m weights[m] f_m(i)): the hook for other scorers than a value model.

    Controlled decoding, for example, has f = the value of a prefix scorer; RAD a reward, ARGS the same on
    top-k; FUDGE has f = log sigmoid(c) with the logit c of a classifier, and a second model whose style is
    wanted has f = its log-probability less that of one without the style. A row guided by nothing else has
    the mode "scores":

        c = classifier(prefix, listed.ids)                                   # f32[R, G]
        listed = add_scores(listed, jax.nn.log_sigmoid(c)[:, None], strength[:, None])

    Args:
      listed: Shortlist.
      scores: f32[R, M, G], the scores of M scorers; finite for candidates, anything behind.
      weights: f32[R, M]; 0 leaves a scorer out.

    Returns:
      Shortlist. Only rows that are scored change; a score that is not finite makes its row invalid.
    """
    known = is_candidate(listed)[:, None, :] & listed.scored[:, None, None] & (weights != 0)[:, :, None]
    finite = jnp.all(jnp.isfinite(scores) | ~known, axis=(1, 2))
    added = jnp.where(known & jnp.isfinite(scores), weights[:, :, None] * scores, 0)
    log_weights = listed.log_probs
    for scorer in range(scores.shape[1]):
        log_weights = log_weights + added[:, scorer]
    changed = jnp.any(weights != 0, axis=1) & listed.scored
    return redistributed(listed, changed, tilt.normalise(log_weights), finite)


def guided_target(target: Target, listed: Shortlist) -> Target:
    """The target in which guided rows have the law of their short list, and all others what they had.

    Draws, laws, processed logprobs and every verifier take it like any other; the noise is that of the token
    ids. Raw logprobs stay the model's own.

    Args:
      target: Target that `listed` was made from.
      listed: Shortlist, redistributed.
    """
    candidates, cut = target.candidates, target.cut
    assert candidates is not None
    assert cut is not None
    guided = listed.guided
    z = target.shaped.logits
    token = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
    placed = jnp.full_like(z, -jnp.inf)
    for slot in range(listed.ids.shape[1]):  # a compare each, not a scatter, which would copy z
        placed = jnp.where(token == listed.ids[:, slot, None], listed.log_probs[:, slot, None], placed)
    shaped = dataclasses.replace(
        target.shaped,
        logits=jnp.where(guided[:, None], placed, z),
        valid=target.shaped.valid & listed.valid,
    )
    fewer, ids = jax.lax.sort((-listed.log_probs, listed.ids), dimension=1, num_keys=2)
    rest = candidates.ids[:, ids.shape[1] :]
    # Log-probabilities are logits of maximum 0 and mass 1: nothing is left to normalise.
    own = Candidates(
        values=jnp.concatenate([-fewer, jnp.full(rest.shape, -jnp.inf)], axis=1),
        ids=jnp.concatenate([ids, rest], axis=1),
        max=jnp.zeros_like(candidates.max),
        sum=jnp.ones_like(candidates.sum),
    )
    own_cut = Cut(
        value=jnp.full_like(cut.value, -jnp.inf),
        id=jnp.full_like(cut.id, target.vocab_size),
        log_mass=jnp.zeros_like(cut.log_mass),
    )
    num_own = jnp.maximum(jnp.sum(listed.log_probs > -jnp.inf, axis=1, dtype=jnp.int32), 1)

    def pick(ours, theirs):
        return jnp.where(guided.reshape(-1, *(1,) * (ours.ndim - 1)), ours, theirs)

    return dataclasses.replace(
        target,
        shaped=shaped,
        candidates=jax.tree.map(pick, own, candidates),
        cut=jax.tree.map(pick, own_cut, cut),
        num_kept=pick(num_own, target.num_kept),
    )


def redistributed(listed: Shortlist, changed, log_probs, finite) -> Shortlist:
    """The list with new log-probabilities f32[R, G] where `changed`; rows that are not `finite` are bad."""
    return dataclasses.replace(
        listed,
        log_probs=jnp.where(changed[:, None], log_probs, listed.log_probs),
        valid=listed.valid & finite,
    )


def is_candidate(listed: Shortlist):
    """Which slots hold a candidate: bool[R, G]."""
    return _slots(listed.ids.shape[1]) < listed.count[:, None]


def _slots(size: int):
    return jnp.arange(size, dtype=jnp.int32)[None, :]
