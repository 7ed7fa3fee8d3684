"""What each mode of guidance does to a short list: tilts by value, tilts to a wanted mean, and point masses.

All modes are computed for all rows and selected by row, so any mix shares one program. Knows nothing about
where values come from, or what becomes of the list.

Source: Zhang et al., "Length Value Model", arXiv 2604.27039, and the sampler published with it.
"""

import jax.numpy as jnp
import numpy as np

from jaxsample import rng, tilt
from jaxsample.guidance import Shortlist, is_candidate, redistributed
from jaxsample.guidance_rows import (
    CENTERED_EXP,
    EQ,
    EQ_SOFT,
    EXP,
    GE,
    LE,
    LENGTH_MUL,
    LINEAR,
    MUL,
    SCORES,
    VALUE_BIAS,
    Guidance,
)

_TINY_VALUE = np.float32(1e-8)  # widths and shifts of values up to this are none
_EDGE = np.float32(1e-6)  # wanted means keep this distance from the ends, in widths,
_EDGE_VALUE = np.float32(1e-12)  # and this one in values
_LEAST_REST = np.float32(1e-15)  # what a mean value is kept from 0 and 1 by, where its length is scaled
_MOST_LOGIT = np.float32(20.723266)  # lengths are told apart between the values 1e-9 and 1 - 1e-9


def guide(listed: Shortlist, z, ends, guidance: Guidance, num_emitted) -> Shortlist:
    """Redistribute the candidates of each row by its own mode.

    With v = sigmoid(z), 0 for tokens that end the row, mu the mean of v under q, and s the scale:

        centered_exp  q' ~ q exp(s v)
        value_bias    q' ~ q exp(s z), the raw logit for tokens that end the row too
        mul           q' ~ q exp(t v) with the mean value T = s mu (no change where s <= 0)
        linear        T = mu + (s - 1)(max v - mu) for s >= 1, else mu - (1 - s)(mu - min v)
        exp           T = min v + (1 - (1 - n)^max(s, 0)) R, with n = (mu - min v) / R, R = max v - min v
        length_mul    T = 1 - (1 - mu)^s: the expected length times s
        eq            the candidate whose length ln(1 - v) / ln gamma is nearest to the target's
        ge            the largest v; the smallest where the target is used up
        le            the smallest v
        eq_soft       T = the target's value; the smallest or largest v where T is none between

    T is held max(1e-12, 1e-6 R) away from the ends. Where R <= 1e-8, or T is within 1e-8 of mu, or mu <
    value_min, a mode changes nothing. Of equal choices the more probable candidate wins.

    Args:
      listed: Shortlist of R rows.
      z: f32[R, G], the value model's logit for each candidate at its own position; anything where it is not
        needed, that is past `count` and in rows that are not scored.
      ends: bool[R, G], from `ends_row`.
      guidance: Guidance of R rows.
      num_emitted: i32[R], tokens emitted before the one chosen.

    Returns:
      Shortlist. NaN or an infinite z of a candidate makes the row invalid.
    """
    known = is_candidate(listed)
    by_value = listed.scored & (guidance.mode != SCORES)
    finite = jnp.all(jnp.isfinite(z) | ~known, axis=1) | ~by_value
    raw = jnp.where(known & jnp.isfinite(z), z, 0)
    z = jnp.where(ends, -jnp.inf, raw)
    mode, scale, log_q = guidance.mode, guidance.scale, listed.log_probs
    q = rng.exp(log_q)
    mean = lambda x: tilt.total(jnp.where(known, q * x, 0))[:, 0]
    values = tilt.place(z, known)
    horizon = _target_horizon(guidance, num_emitted)

    tilt_of_mode = _tilt(guidance, z, values, horizon, log_q, mean)
    tilted = tilt.normalise(tilt.tilted(log_q, values.above, values.below, tilt_of_mode[:, None]))
    # From the end that the scale favours: no difference of large numbers decides between good candidates.
    highest = jnp.max(jnp.where(known, raw, -jnp.inf), axis=1)
    lowest = jnp.min(jnp.where(known, raw, jnp.inf), axis=1)
    biased = log_q + scale[:, None] * (raw - jnp.where(scale >= 0, highest, lowest)[:, None])
    is_bias = mode == VALUE_BIAS
    new = jnp.where(is_bias[:, None], tilt.normalise(biased), tilted)
    changes = jnp.where(is_bias, scale != 0, tilt_of_mode != 0)
    is_mode = (mode >= CENTERED_EXP) & (mode <= LENGTH_MUL)
    changes &= ~(is_mode & (mean(tilt.sigmoid(z)) < guidance.value_min))

    choice, is_choice = _choose(mode, z, known, values, horizon)
    chosen = jnp.where(
        jnp.arange(z.shape[1], dtype=jnp.int32)[None, :] == choice[:, None], jnp.float32(0), -jnp.inf
    )
    new = jnp.where(is_choice[:, None], chosen, new)
    return redistributed(listed, by_value & (changes | is_choice), new, finite)


def _target_horizon(guidance: Guidance, num_emitted):
    """-ln(1 - v*) = -l ln gamma of each row's target: f32[R], 0 or more."""
    emitted = jnp.where(guidance.is_total, num_emitted, 0).astype(jnp.float32)
    return jnp.maximum(guidance.target_length - emitted, 0) * -guidance.log_gamma


def _tilt(guidance: Guidance, z, values: tilt.Values, horizon, log_q, mean):
    """The tilt of each row, times its width: f32[R]; 0 changes nothing."""
    mode, scale, width = guidance.mode, guidance.scale, values.width
    divisor = jnp.where(width > 0, width, 1)
    above, below = mean(values.above), mean(values.below)
    mean_value, rest = mean(tilt.sigmoid(z)), mean(tilt.sigmoid(-z))

    # T - mu in widths, by formulas in which nothing cancels where s is near 1.
    log_rest = _log_of_rest(mean_value, rest, _LEAST_REST)
    by_length = -rng.exp(log_rest) * jnp.expm1((scale - 1) * log_rest) / divisor
    log_below = _log_of_rest(above, below, np.finfo(np.float32).tiny)
    by_power = -below * jnp.expm1((jnp.maximum(scale, 0) - 1) * log_below)
    shift = jnp.select(
        [mode == MUL, mode == LINEAR, mode == EXP, mode == LENGTH_MUL],
        [
            (scale - 1) * mean_value / divisor,
            (scale - 1) * jnp.where(scale >= 1, below, above),
            by_power,
            by_length,
        ],
        0,
    )
    edge = jnp.maximum(_EDGE_VALUE / divisor, _EDGE)
    moved = jnp.clip(shift, edge - above, below - edge) * width
    still = (width <= _TINY_VALUE) | (jnp.abs(moved) <= _TINY_VALUE) | ((mode == MUL) & (scale <= 0))

    # The wanted means of both sides: products where there is one, which keep precision near the ends.
    wanted_above, wanted_below = above + shift, below - shift
    shrinks, grows = (mode == LINEAR) & (scale < 1), (mode == LINEAR) & (scale >= 1)
    wanted_above = jnp.where(shrinks, scale * above, wanted_above)
    wanted_below = jnp.where(grows, (2 - scale) * below, wanted_below)
    wanted_below = jnp.where(mode == EXP, rng.exp(jnp.maximum(scale, 0) * log_below), wanted_below)
    soft = jnp.clip(tilt.inverse_softplus(horizon), values.lowest, values.highest)
    is_soft = mode == EQ_SOFT
    wanted_above = jnp.where(is_soft, tilt.difference(soft, values.lowest) / divisor, wanted_above)
    wanted_below = jnp.where(is_soft, tilt.difference(values.highest, soft) / divisor, wanted_below)
    still = jnp.where(is_soft, width <= _TINY_VALUE, still)

    inside = lambda wanted: jnp.clip(wanted, edge, 1 - edge)
    found = tilt.solve(log_q, values, inside(wanted_above), inside(wanted_below))
    return jnp.where(mode == CENTERED_EXP, scale * width, jnp.where(still, 0, found))


def _log_of_rest(part, rest, least):
    """ln(1 - part), from the smaller of part and rest = 1 - part, both kept from 0 by `least`."""
    return jnp.where(part < 0.5, jnp.log1p(-jnp.clip(part, least, 0.5)), rng.log(jnp.maximum(rest, least)))


def _choose(mode, z, known, values: tilt.Values, horizon):
    """(slot i32[R], whether the row is a point mass there, bool[R])."""
    wanted = tilt.inverse_softplus(horizon)
    too_low, too_high = wanted <= values.lowest, wanted >= values.highest
    smallest = (mode == LE) | ((mode == GE) & (horizon <= _EDGE_VALUE)) | ((mode == EQ_SOFT) & too_low)
    best = jnp.where(smallest, values.lowest, values.highest)
    within = lambda x: jnp.clip(x, -_MOST_LOGIT, _MOST_LOGIT)
    z = jnp.where((mode == EQ)[:, None], within(z), z)
    best = jnp.where(mode == EQ, _nearest(z, known, within(wanted)), best)
    # Slots stand in order of probability, so the first of equal values is the most probable.
    choice = jnp.argmax(known & (z == best[:, None]), axis=1).astype(jnp.int32)
    is_choice = ((mode >= EQ) & (mode <= LE)) | ((mode == EQ_SOFT) & (too_low | too_high))
    return choice, is_choice


def _nearest(z, known, wanted):
    """The z whose length is nearest to that of `wanted`: f32[R]. On each side of it z tells the order."""
    lower = known & (z <= wanted[:, None])
    below = jnp.max(jnp.where(lower, z, -jnp.inf), axis=1)
    above = jnp.min(jnp.where(known & ~lower, z, jnp.inf), axis=1)
    length = tilt.softplus(wanted)
    down = jnp.where(below > -jnp.inf, length - tilt.softplus(below), jnp.inf)
    up = jnp.where(above < jnp.inf, tilt.softplus(above) - length, jnp.inf)
    return jnp.where(down <= up, below, above)
