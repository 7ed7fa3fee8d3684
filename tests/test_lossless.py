"""Chain verifiers: every coin and every weight held to float64 at its boundary, and the law over many seeds."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsample import (
    GivenNoise,
    chain,
    verify_block,
    verify_rejection,
    verify_tree_distinct,
    verify_tree_points,
)
from tests import laws, reference_verify

ORACLE = dict(np.load(pathlib.Path(__file__).parent / "data" / "rejection.npz"))
RULES = {verify_rejection: reference_verify.chain_rule, verify_block: reference_verify.block_rule}
NAMES = {verify_rejection: "chain", verify_block: "block"}
CHUNK = 4096
VERIFIERS = pytest.mark.parametrize("verify", RULES, ids=NAMES.values())
LENGTHS = pytest.mark.parametrize("num_drafts", [1, 2, 4])
# The slots of the program; short drafts fill some of them. Points: the same drafts as if they had not been drawn.
SORTS = pytest.mark.parametrize(
    ("num_slots", "lengths", "with_law"),
    [
        pytest.param(1, [1], True, marks=pytest.mark.large),
        pytest.param(4, [4], True, marks=pytest.mark.large),
        (4, [1, 2, 4], True),
        (4, [1, 2, 4], False),
    ],
    ids=["1", "4", "short", "points"],
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One draft of one oracle case: p f64[K+1, V], q f64[K, V], drafts i32[K] and its probability under q."""

    group: str
    index: int
    number: int
    p: np.ndarray
    q: np.ndarray
    drafts: np.ndarray
    probability: float


@functools.cache
def oracle_cases(num_drafts):
    """All drafts of all cases with this K."""
    cases = []
    for group in [f"K{k}V{v}" for k, v in ORACLE["configs"] if k == num_drafts]:
        for c, count in enumerate(ORACLE[f"{group}_num_drafts"]):
            for n in range(count):
                drafts = ORACLE[f"{group}_drafts"][c, n]
                p, q = ORACLE[f"{group}_p"][c], ORACLE[f"{group}_q"][c]
                cases.append(Case(group, c, n, p, q, drafts, ORACLE[f"{group}_draft_prob"][c, n]))
    for group in [f"markov_K{k}V{v}" for k, v in ORACLE["markov_configs"] if k == num_drafts]:
        for c in range(3):
            for n, drafts in enumerate(ORACLE[f"{group}_drafts"][c]):
                first, then = ORACLE[f"{group}_p_first"][c], ORACLE[f"{group}_p_next"][c]
                p = np.stack([first, *(then[i, token] for i, token in enumerate(drafts))])
                first, then = ORACLE[f"{group}_q_first"][c], ORACLE[f"{group}_q_next"][c]
                q = np.stack([first, *(then[i, token] for i, token in enumerate(drafts[:-1]))])
                cases.append(Case(group, c, n, p, q, drafts, ORACLE[f"{group}_draft_prob"][c, n]))
    if num_drafts == 2:
        for n, drafts in enumerate(np.ndindex(2, 2)):
            p, q, drafts = ORACLE["toy_p"], ORACLE["toy_q"], np.array(drafts)
            cases.append(Case("toy", 0, n, p, q, drafts, q[[0, 1], drafts].prod()))
    return cases


def as_points(case):
    """The same draft as if it had not been drawn: a point mass on each proposal."""
    return dataclasses.replace(case, q=np.eye(case.p.shape[1])[case.drafts])


class Rows:
    """Rows for one verifier, gathered and then run in chunks of one shape."""

    def __init__(self):
        self.cases, self.accept, self.token, self.count, self.last = [], [], [], [], []

    def add(self, case, accept, count, token=None, last=-1):
        """Uniforms, the count they lead to, Gumbel noise, and the last token it leads to (-1: any)."""
        self.cases.append(case)
        self.accept.append(accept)
        self.token.append(np.zeros(laws.VOCAB) if token is None else token)
        self.count.append(count)
        self.last.append(last)

    def check(self, verify, tree, with_law=True):
        """Run all rows on a chain at least as long as their drafts; compare counts and tokens."""
        num_rows, num_slots = len(self.cases), tree.max_depth
        size = -(-num_rows // CHUNK) * CHUNK
        log_p = np.zeros((size, num_slots + 1, laws.VOCAB), np.float32)
        log_q = np.zeros((size, num_slots, laws.VOCAB), np.float32)
        tokens, live = np.zeros((size, num_slots + 1), np.int32), np.zeros(size, np.int32)
        accept, token = np.zeros((size, num_slots), np.float32), np.zeros((size, 128), np.float32)
        for row, case in enumerate(self.cases):
            live[row] = num = len(case.drafts)
            log_p[row, : num + 1], log_q[row, :num] = _logs(case)
            tokens[row, 1 : num + 1], accept[row, :num] = case.drafts, self.accept[row]
            token[row, : laws.VOCAB] = self.token[row]
        seed, position = laws.seeds(np.arange(CHUNK)), np.zeros(CHUNK, np.int32)
        verdicts = []
        for start in range(0, size, CHUNK):
            at = slice(start, start + CHUNK)
            noise = GivenNoise(jnp.asarray(accept[at]), jnp.asarray(token[at]))
            drawn = log_q[at] if with_law else None
            verdict = laws.run(verify, tree, log_p[at], drawn, tokens[at], live[at], seed, position, noise)
            verdicts.append(jax.tree.map(np.asarray, verdict))
        verdict = jax.tree.map(lambda *parts: np.concatenate(parts)[:num_rows], *verdicts)
        count, column = np.array(self.count), np.arange(num_slots + 1)
        np.testing.assert_array_equal(verdict.count, count + 1)
        np.testing.assert_array_equal(verdict.accepted, column[:num_slots] < count[:, None])
        kept = np.where(column[1:] <= count[:, None], tokens[:num_rows, 1:], -1)
        emitted = np.where(column[:-1] < count[:, None], verdict.tokens[:, :-1], -1)
        np.testing.assert_array_equal(emitted, kept)
        last, expected = verdict.tokens[np.arange(num_rows), count], np.array(self.last)
        np.testing.assert_array_equal(np.where(expected < 0, -1, last), expected)
        np.testing.assert_array_equal(verdict.path, np.where(column <= count[:, None], column, 0))
        assert (verdict.tokens[column > count[:, None]] == -1).all()


@functools.lru_cache(4096)
def _logs_of(rows, shape):
    return laws.logs(np.frombuffer(rows).reshape(shape))


def _logs(case):
    return [_logs_of(np.ascontiguousarray(rows).tobytes(), rows.shape) for rows in (case.p, case.q)]


def coins_reaching(rule, count):
    """Uniforms well inside the branch that accepts `count`, or None if float32 cannot be sure of it."""
    num = len(rule.chance)
    must_pass = [count - 1] * (count > 0) if rule.takes_last else range(count)
    must_fail = range(count, num) if rule.takes_last else [count] * (count < num)
    coins = np.full(num, laws.LARGEST, np.float64)
    for i in must_pass:
        coins[i] = rule.chance[i] / 2
    for i in must_fail:
        coins[i] = (1 + rule.chance[i]) / 2
    return coins if rule.num_accepted(coins) == count and rule.is_sure(coins) else None


def boundary_rows(rule):
    """(uniforms, count): just below and just above the chance of each coin, wherever float32 must agree."""
    for i, (chance, error) in enumerate(zip(rule.chance, rule.chance_error)):
        step = 2 * error + 2.0**-23
        for branch in (i, i + 1):  # the other coins are those of either branch
            for uniform in (min(chance - step, laws.LARGEST), chance + step, laws.LARGEST):
                coins = coins_reaching(rule, branch)
                if coins is not None and 0 < uniform < 1:
                    coins[i] = np.float32(uniform)
                    if rule.is_sure(coins):
                        yield coins, rule.num_accepted(coins)


def flips(weights, error):
    """(Gumbel noise, token): for the heaviest token against each other one, on both sides of equal scores."""
    best = int(np.argmax(weights))
    for other, weight in enumerate(weights):
        if other == best:
            continue
        noise = np.full(laws.VOCAB, -1e4)
        noise[best] = 0
        if weight > 4 * error[other]:
            margin = 2 * (error[best] / weights[best] + error[other] / weight) + 4e-6
            for side, token in ((margin, other), (-margin, best)):
                noise[other] = np.log(weights[best] / weight) + side
                yield noise.copy(), token
        elif weight == 0:
            noise[other] = 10  # a token of weight e^-10 of the best would win
            yield noise, best


@VERIFIERS
@LENGTHS
def test_the_float64_rules_are_the_oracle(verify, num_drafts):
    name, by_case = NAMES[verify], {}
    for case in oracle_cases(num_drafts):
        by_case.setdefault((case.group, case.index), []).append(case)
        if case.group != "toy":
            conditional = RULES[verify](case.p, case.q, case.drafts).conditional()
            stored = ORACLE[f"{case.group}_{name}_conditional"][case.index, case.number]
            np.testing.assert_allclose(conditional, stored, rtol=0, atol=1e-12)
    for (group, index), cases in by_case.items():
        fields = {key: ORACLE[key] for key in ORACLE if key.startswith(f"{group}_")}
        if group != "toy":
            fields = {key: field[index] for key, field in fields.items() if len(field) > index}
        assert (
            fields[f"{group}_block_expected_accepted"] >= fields[f"{group}_chain_expected_accepted"] - 1e-12
        )
        joint, vocab = 0, cases[0].p.shape[1]
        if len(cases) == 64:  # a random choice, of rows that do not depend on the prefix
            if vocab**num_drafts > 625:
                continue
            cases = _all_drafts(cases[0])
        for case in cases:
            joint += case.probability * RULES[verify](case.p, case.q, case.drafts).conditional()
        accepted = joint.sum(axis=1)
        mean = accepted @ np.arange(num_drafts + 1)
        np.testing.assert_allclose(accepted, fields[f"{group}_{name}_num_accepted"], rtol=0, atol=1e-12)
        np.testing.assert_allclose(mean, fields[f"{group}_{name}_expected_accepted"], rtol=0, atol=1e-12)
        if group.startswith("K"):
            np.testing.assert_allclose(joint, fields[f"{group}_{name}_accepted_and_last"], rtol=0, atol=1e-12)


def _all_drafts(case):
    at = np.arange(len(case.drafts))
    for drafts in np.ndindex(*[case.p.shape[1]] * len(at)):
        if (probability := case.q[at, drafts].prod()) > 0:
            yield dataclasses.replace(case, drafts=np.array(drafts), probability=probability)


def _cases(lengths, with_law):
    cases = [case for num_drafts in lengths for case in oracle_cases(num_drafts)]
    return cases if with_law else [as_points(case) for case in cases]


@VERIFIERS
@SORTS
def test_each_coin_flips_at_the_chance_of_float64(verify, num_slots, lengths, with_law):
    rows, num_coins, num_held = Rows(), 0, 0
    for case in _cases(lengths, with_law):
        rule = RULES[verify](case.p, case.q, case.drafts)
        held = set()
        for coins, count in boundary_rows(rule):
            rows.add(case, coins, count)
            for i in np.flatnonzero(np.abs(coins - rule.chance) < 2.5 * rule.chance_error + 2.0**-22):
                held.add((i, bool(coins[i] < rule.chance[i])))
        inner = np.flatnonzero((rule.chance > 1e-3) & (rule.chance < 0.999))
        num_coins += 2 * len(inner)
        num_held += sum((i, side) in held for i in inner for side in (False, True))
    # The others are hidden behind a coin that always decides.
    assert num_held > 0.7 * num_coins
    rows.check(verify, chain(num_slots), with_law)


@VERIFIERS
@SORTS
def test_the_token_after_the_kept_ones_has_the_weights_of_float64(verify, num_slots, lengths, with_law):
    rows, reached = Rows(), set()
    for case in _cases(lengths, with_law):
        rule = RULES[verify](case.p, case.q, case.drafts)
        for count in range(len(case.drafts) + 1):
            coins = coins_reaching(rule, count)
            if coins is None:
                continue
            reached.add(count)
            for noise, token in flips(rule.weights[count], rule.weight_error[count]):
                rows.add(case, coins, count, noise, token)
    assert reached == set(range(max(lengths) + 1))
    rows.check(verify, chain(num_slots), with_law)


@VERIFIERS
def test_a_draft_that_is_the_target_is_accepted_whole(verify):
    rows = Rows()
    for case in oracle_cases(4):
        if np.array_equal(case.p[:-1], case.q):
            rows.add(case, np.full(4, laws.LARGEST), 4)
    assert len(rows.cases) > 100
    rows.check(verify, chain(4))


@VERIFIERS
def test_a_refusal_that_leaves_nothing_draws_from_the_target(verify):
    # Only a uniform of 1, which no generator gives, refuses a draft whose law is the target.
    rows = Rows()
    for case in oracle_cases(4):
        if np.array_equal(case.p[:-1], case.q):
            rule = RULES[verify](case.p, case.q, case.drafts)
            for noise, token in flips(rule.weights[0], rule.weight_error[0]):
                rows.add(case, np.full(4, 1.5), 0, noise, token)
    rows.check(verify, chain(4))


def never_emits(verify, tree, law, tokens, wrong):
    """No row of many gets a token that `wrong` is true of."""
    num_rows = 512
    rows = lambda law: np.tile(law, (num_rows, 1, 1))
    log_p, log_q = rows(law[0]), None if law[1] is None else rows(law[1])
    tokens = np.tile(np.asarray(tokens, np.int32), (num_rows, 1))
    live, position = np.full(num_rows, tree.num_nodes - 1, np.int32), np.zeros(num_rows, np.int32)
    given = tokens, live, laws.seeds(np.arange(num_rows)), position
    verdict = laws.run(verify, tree, log_p, log_q, *given)
    column = np.arange(tree.max_depth + 1)[None, :]
    emitted = np.asarray(verdict.tokens)[column < np.asarray(verdict.count)[:, None]]
    assert not wrong(emitted).any()


@pytest.mark.parametrize("verify", [verify_rejection, verify_block, verify_tree_points, verify_tree_distinct])
@pytest.mark.parametrize("token", [133, 128, -7, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_never_emitted(verify, token):
    with np.errstate(divide="ignore"):
        p = np.log(np.full((2, 128), [0.5] + [0] * 126 + [0.5])).astype(np.float32)
    q = None if verify is verify_tree_points else np.zeros((1, 128), np.float32)
    never_emits(verify, chain(1), (p, q), [0, token], lambda emitted: (emitted != 0) & (emitted != 127))


@pytest.mark.parametrize("verify", [verify_rejection, verify_block, verify_tree_distinct])
@pytest.mark.parametrize("drafts", [[0, 3, 1], [0, 3, 2], [0, 1, 3]])
@pytest.mark.parametrize("q", ["the target's", "NaN"])
def test_a_draft_that_its_own_law_excludes_does_not_get_what_the_target_excludes_out(verify, drafts, q):
    p = laws.logs(np.full((3, 4), [0.5, 0.5, 0, 0]))
    law = p, p[:2] if q == "the target's" else np.full_like(p[:2], np.nan)
    never_emits(verify, chain(2), law, drafts, lambda emitted: emitted > 1)
