"""Value guidance in slow float64 NumPy, one row at a time, written from the formulas of the paper and its sampler.

Knows nothing of jaxsample: a request's guidance is a dict under the names users know.
"""

import math

import numpy as np

MODES = ("centered_exp", "value_bias", "mul", "linear", "exp", "length_mul")
CONSTRAINTS = ("eq", "ge", "le", "eq_soft")


def candidates(logits, top_k, top_p, min_p):
    """(ids in order, their probabilities renormalised, distance of the closest decision from flipping)."""
    logits = np.asarray(logits, np.float64)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    order = [int(i) for i in np.lexsort((np.arange(len(p)), -logits)) if p[i] > 0]
    kept, mass, margin = [], 0.0, math.inf
    for place, token in enumerate(order[:top_k]):
        if place > 0:
            margin = min(margin, abs(mass - top_p) if top_p < 1 else math.inf)
            margin = min(margin, abs(p[token] / p[order[0]] - min_p) if min_p > 0 else math.inf)
            if (mass > top_p and top_p < 1) or p[token] < min_p * p[order[0]]:
                break
        kept.append(token)
        mass += p[token]
    return kept, p[kept] / p[kept].sum(), margin


def entropy(q):
    return -sum(x * math.log(x) for x in q if x > 0)


def value_of(z):
    """(v, 1 - v) with v = 1 / (1 + exp(-z))."""
    return (1 / (1 + math.exp(-z)), 1 / (1 + math.exp(z))) if abs(z) < 700 else (float(z > 0), float(z < 0))


def differences(z, base):
    """v(z_i) - v(base), without cancellation: sinh((a - b) / 2) / (2 cosh(a / 2) cosh(b / 2)), or by values."""
    v0 = value_of(base)
    result = []
    for x in z:
        v = value_of(x)
        if abs(x) < 300 and abs(base) < 300:
            result.append(math.sinh((x - base) / 2) / (2 * math.cosh(x / 2) * math.cosh(base / 2)))
        else:
            result.append(v[0] - v0[0] if x < 0 or base < 0 else v0[1] - v[1])
    return np.array(result)


def tilt(q, d, t):
    """q exp(t d), normalised."""
    with np.errstate(divide="ignore"):
        x = np.log(q) + t * d
    x = np.exp(x - x.max())
    return x / x.sum()


def root(q, d, wanted):
    """The t at which the mean of d under the tilted q is `wanted`, by bisection."""
    mean = lambda t: float((tilt(q, d, t) * (d - wanted)).sum())
    low, high = -1.0, 1.0
    while mean(low) > 0:
        low *= 4
    while mean(high) < 0:
        high *= 4
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) < 0 else (low, middle)
    return (low + high) / 2


def target_value(guide, num_emitted):
    """v* of a target, with 1 - v* as its second number."""
    if guide.get("target_value") is not None:
        return guide["target_value"], 1 - guide["target_value"]
    left = guide["target_length"]
    if guide.get("length_mode", "total") == "total":
        left = max(left - num_emitted, 0)
    log_rest = left * math.log(guide.get("gamma", 0.997))
    return -math.expm1(log_rest), math.exp(log_rest)


def aim(guide, mean, low, high):
    """T of a mode, less the smallest value, before it is held away from the ends."""
    s, width = guide["scale"], high - low
    if guide["mode"] == "mul":
        return s * mean - low
    if guide["mode"] == "linear":
        return mean - low + ((s - 1) * (high - mean) if s >= 1 else (s - 1) * (mean - low))
    if guide["mode"] == "exp":
        part = min(max((mean - low) / width, 0), 1)
        return (1 - (1 - part) ** max(s, 0)) * width
    mean = min(max(mean, 1e-15), 1 - 1e-15)
    exponent = s * math.log1p(-mean)
    return -math.expm1(min(exponent, 700.0)) - low


def guided(q, z, ends, guide, num_emitted=0):
    """The guided probabilities of a row's candidates.

    Args:
      q: f64[n], in the order of the candidates. z: their value logits. ends: which of them are EOS.
      guide: dict(mode=, scale=, gamma=, value_min=) or dict(target_value= or target_length=, length_mode=,
        constraint=, gamma=).
    """
    q = np.asarray(q, np.float64)
    z = [float(x) for x in z]
    if len(q) == 1:
        return np.ones(1)
    by_value = [-math.inf if end else x for x, end in zip(z, ends)]
    v = np.array([0.0 if x == -math.inf else value_of(x)[0] for x in by_value])
    one = lambda i: np.eye(len(q))[i]
    first = lambda x: one(int(np.argmin(x)))  # of equal ones the likelier
    low = min(by_value)
    d = v.copy() if low == -math.inf else differences(by_value, low)
    width = d.max()
    if "mode" not in guide:
        star, rest = target_value(guide, num_emitted)
        constraint = guide.get("constraint", "eq")
        if constraint == "eq":
            horizon = lambda value, rest: (
                -math.log(min(max(rest, 1e-9), 1 - 1e-9))
                if value > 0.5
                else -math.log1p(-min(max(value, 1e-9), 1 - 1e-9))
            )
            there = [horizon(*((0.0, 1.0) if x == -math.inf else value_of(x))) for x in by_value]
            return first([abs(x - horizon(star, rest)) for x in there])
        if constraint == "le" or (constraint == "ge" and abs(star) <= 1e-12):
            return first(by_value)
        if constraint == "ge":
            return first([-x for x in by_value])
        logit = -math.inf if star <= 0 else math.inf if rest <= 0 else math.log(star) - math.log(rest)
        if logit <= low:
            return first(by_value)
        if logit >= max(by_value):
            return first([-x for x in by_value])
        wanted = star if low == -math.inf else differences([logit], low)[0]
    else:
        s = guide["scale"]
        mean = float((q * v).sum())
        if mean < guide.get("value_min", 0):
            return q
        if guide["mode"] == "centered_exp":
            return tilt(q, d, s)
        if guide["mode"] == "value_bias":
            return tilt(q, np.array(z), s)
        if width <= 1e-8 or (guide["mode"] == "mul" and s <= 0):
            return q
        base = 0.0 if low == -math.inf else value_of(low)[0]
        wanted = aim(guide, mean, base, base + width)
        wanted = min(max(wanted, max(1e-12, 1e-6 * width)), width - max(1e-12, 1e-6 * width))
        if abs(wanted - (q * d).sum()) <= 1e-8:
            return q
    edge = max(1e-12, 1e-6 * width)
    return tilt(q, d, root(q, d, min(max(wanted, edge), width - edge)))
