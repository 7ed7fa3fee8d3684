"""Speculative verification in float64, written from the papers: chances, what is left, enumeration.

Knows nothing of jaxsample. For a draft x of K tokens: p f64[K+1, V] target rows, q f64[K, V] draft rows (one-hot
for a proposal that was not drawn). For a tree: p f64[N, V] by node, q f64[N, V] by node.
"""

import itertools
from typing import NamedTuple

import numpy as np

# Relative error of one float32 ratio of two probabilities not below 2^-12: a log-probability near -8.4 is rounded
# three times (input, maximum, mass) by half an ulp of 2^-20 each, and a ratio has two of them.
RATIO_ERROR = 4e-6


class Rule(NamedTuple):
    """Chances of a chain's K coins, and the weights of the token that follows a = 0 ... K accepted ones.

    chance f64[K]; chance_error f64[K], what float32 may be off by (inf: 0/0). weights, weight_error f64[K+1, V].
    """

    chance: np.ndarray
    chance_error: np.ndarray
    weights: np.ndarray
    weight_error: np.ndarray
    takes_last: bool  # the last coin that passes counts (block), else the first that fails

    def num_accepted(self, uniforms):
        """How many proposals these coins accept."""
        passes = np.asarray(uniforms) < self.chance
        if self.takes_last:
            return int(max(np.flatnonzero(passes) + 1, default=0))
        return int(np.cumprod(passes).sum())

    def is_sure(self, uniforms):
        """Whether float32 must find the same count: no coin that decides it is within its error."""
        count = self.num_accepted(uniforms)
        deciding = slice(max(count - 1, 0), None) if self.takes_last else slice(0, count + 1)
        return bool((np.abs(uniforms - self.chance) > self.chance_error)[deciding].all())

    def law_of_count(self):
        """P(a accepted): f64[K+1]."""
        if self.takes_last:
            later = np.cumprod((1 - self.chance)[::-1])[::-1]
            return np.append(1, self.chance) * np.append(later, 1)
        return np.append(1, np.cumprod(self.chance)) * np.append(1 - self.chance, 1)

    def conditional(self):
        """P(a accepted, y last): f64[K+1, V]."""
        return self.law_of_count()[:, None] * self.weights / self.weights.sum(axis=1, keepdims=True)


def chain_rule(p, q, drafts) -> Rule:
    """Leviathan et al. 2023, Chen et al. 2023."""
    at = np.arange(len(drafts))
    ratio = p[at, drafts] / q[at, drafts]
    error = np.where(ratio > 1 + RATIO_ERROR, 0, ratio * RATIO_ERROR)
    return _rule(p, q, np.minimum(ratio, 1), error, np.ones(len(drafts) + 1), False)


def block_rule(p, q, drafts) -> Rule:
    """Sun et al. 2024 (arXiv 2403.10444)."""
    num = len(drafts)
    rho, rho_error = np.ones(num + 1), np.zeros(num + 1)
    for i, token in enumerate(drafts):
        product, error = rho[i] * p[i, token] / q[i, token], (i + 1) * RATIO_ERROR
        rho[i + 1] = min(1, product)
        rho_error[i + 1] = 0 if product > 1 + error else product * error
    chance, error = rho[1:].copy(), rho_error[1:].copy()
    for i in range(1, num):
        mass, gap = np.maximum(rho[i] * p[i] - q[i], 0).sum(), 1 - rho[i]
        mass_error, gap_error = (i + 1) * RATIO_ERROR, rho_error[i]
        chance[i - 1] = mass / (mass + gap) if mass + gap > 0 else 1
        if mass + gap > 4 * (mass_error + gap_error):
            error[i - 1] = 2 * (mass * gap_error + gap * mass_error) / (mass + gap) ** 2
        else:
            error[i - 1] = np.inf  # 0 / 0, or close to it
    return _rule(p, q, chance, error, rho, True)


def _rule(p, q, chance, chance_error, scale, takes_last):
    scaled = scale[:-1, None] * p[:-1]
    left = np.maximum(scaled - q, 0)
    # Nothing left: from p itself. With exact numbers no coin leads there.
    left = np.where(left.sum(axis=1, keepdims=True) > 0, left, p[:-1])
    num = len(chance)
    error = (scaled + q) * RATIO_ERROR * (1 + np.arange(num)[:, None])
    last = p[-1:]
    return Rule(
        chance,
        chance_error,
        np.append(left, last, axis=0),
        np.append(error, last * RATIO_ERROR, axis=0),
        takes_last,
    )


# --- trees -----------------------------------------------------------------------------------------------------------


class Walk(NamedTuple):
    """One way through a tree's coins, the nodes it visits and the weights of the token at its end.

    trials: (node, chance, error of the chance in float32, accepted) in order.
    """

    trials: tuple
    path: tuple
    weights: np.ndarray
    weight_error: np.ndarray
    probability: float


def walks(children, p, q, tokens, kind, node=0):
    """All walks of positive probability from a node. kind: "replaced", "distinct" or "points"; -1 ends a branch."""
    left, drawn, left_error = p[node], q[node], p[node] * RATIO_ERROR
    trials, chance_here = (), 1.0
    for child in children[node]:
        token = tokens[child]
        if token < 0:
            continue
        tried = np.eye(len(left))[token] if kind == "points" else drawn
        chance = min(1, left[token] / tried[token])
        error = left_error[token] / tried[token] + 4 * RATIO_ERROR * chance
        if chance > 0:
            for walk in walks(children, p, q, tokens, kind, child):
                yield Walk(
                    (*trials, (child, chance, error, True), *walk.trials),
                    (node, *walk.path),
                    walk.weights,
                    walk.weight_error,
                    chance_here * chance * walk.probability,
                )
        rest = np.maximum(left - tried, 0)
        if chance == 1 or rest.sum() <= 0:
            return
        trials, chance_here = (*trials, (child, chance, error, False)), chance_here * (1 - chance)
        left_error = (left_error + (left + tried) * 2 * RATIO_ERROR) / rest.sum()
        left = rest / rest.sum()
        if kind == "distinct":
            drawn = np.where(np.arange(len(drawn)) == token, 0, drawn)
            drawn = drawn / drawn.sum() if drawn.sum() > 0 else drawn
    yield Walk(trials, (node,), left, left_error, chance_here)


def proposals(children, table, root, kind):
    """All (tokens, probability) a drafter with law table[previous token] puts on a tree."""
    states = [({0: root}, 1.0)]
    for node, nodes in enumerate(children):
        states = [
            ({**tokens, **dict(zip(nodes, chosen))}, weight * chance)
            for tokens, weight in states
            for chosen, chance in _siblings(table, tokens[node], len(nodes), kind)
        ]
    for tokens, weight in states:
        yield np.array([tokens[node] for node in range(len(children))]), weight


def _siblings(table, parent, count, kind):
    if parent < 0:
        return [((-1,) * count, 1.0)]
    law = table[parent]
    if kind == "points":
        best = np.argsort(-law, kind="stable")[:count]
        return [(tuple(best), 1.0)]
    found = []
    for chosen in itertools.product(range(-1, len(law)), repeat=count):
        rest, chance = law.copy(), 1.0
        for token in chosen:
            if token < 0:  # nothing is left to draw without replacement
                chance *= rest.sum() <= 0
                continue
            chance *= rest[token] / rest.sum() if rest.sum() > 0 else 0.0
            if kind == "distinct":
                rest[token] = 0
        if chance > 0:
            found.append((chosen, chance))
    return found


def tree_law(children, target, table, root, kind, length):
    """Law of the first `length` tokens of steps that verify a tree and then go on by the target alone.

    target, table: f64[V, V], laws given the previous token.
    """
    vocab = len(target)
    law = np.zeros((vocab,) * length)
    for tokens, weight in proposals(children, table, root, kind):
        rows = np.where(tokens >= 0, tokens, 0)
        for walk in walks(children, target[rows], table[rows], tokens, kind):
            accepted = tuple(int(tokens[node]) for node in walk.path[1:])
            for last, chance in enumerate(walk.weights / walk.weights.sum()):
                if chance > 0:
                    _complete(law, (*accepted, last), weight * walk.probability * chance, target)
    return law


def sequence_law(target, root, length):
    """Law of the first `length` tokens of plain decoding: f64[V, ..., V]."""
    law = np.zeros((len(target),) * length)
    _complete(law, (), 1.0, target, root)
    return law


def _complete(law, tokens, weight, target, root=None):
    """Add a prefix to a law, its missing tokens drawn from the target."""
    if len(tokens) >= law.ndim:
        law[tokens[: law.ndim]] += weight
        return
    for token, chance in enumerate(target[tokens[-1] if tokens else root]):
        if chance > 0:
            _complete(law, (*tokens, token), weight * chance, target)
