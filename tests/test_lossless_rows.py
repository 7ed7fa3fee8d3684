"""Verifiers on mixed batches with real parameters: greedy, filtered, short, broken rows; matching; refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxsample import (
    Draft,
    Features,
    Limits,
    chain,
    draw_target,
    from_paths,
    law_of,
    log_probs,
    make_params,
    make_target,
    rng,
    sample,
    shape,
    stack_rows,
    verify_block,
    verify_match,
    verify_rejection,
    verify_tree_distinct,
    verify_tree_points,
    verify_tree_replaced,
)
from tests import laws

ALPHA = 1e-4  # of each test; with fixed seeds a test passes always or never
VOCAB, NUM_ROWS, TREE = 16, 64, chain(2)
LIMITS = Limits(vocab_size=VOCAB, max_length=8, num_logit_bias=1, num_bad_words=0, num_scales=0)
FEATURES = Features(tier="filtered", full_rows=False, num_candidates=VOCAB)
DRAWN = -2  # in tokens: the program draws the proposal from the draft's law
VERIFIERS = {
    "rejection": verify_rejection,
    "block": verify_block,
    "replaced": verify_tree_replaced,
    "distinct": verify_tree_distinct,
    "points": verify_tree_points,
}
every_verifier = pytest.mark.parametrize("verify", VERIFIERS.values(), ids=VERIFIERS.keys())


@jax.jit
def prepare(logits, draft_logits, params, draft_params, tokens, num_live, position):
    """(Target, Draft, plain draws i32[B, N], log-probabilities of the target f32[B, N, V']).

    logits f32[B, N, V], draft_logits f32[B, N - 1, V]; the draft's rows are shaped and cut by draft_params.
    """

    def rows_of(logits, params, offset):
        num_nodes = logits.shape[1]
        spread = jax.tree.map(lambda leaf: jnp.repeat(leaf, num_nodes, axis=0), params)
        at = (position[:, None] + offset + jnp.arange(num_nodes, dtype=jnp.int32)[None]).reshape(-1)
        shaped = shape(logits.reshape(-1, VOCAB), spread, at, limits=LIMITS, features=FEATURES)
        return make_target(shaped, spread, at, vocab_size=VOCAB, features=FEATURES, law=True)

    target = rows_of(logits, params, 0)
    # Draws for the proposals take noise of positions that nothing else uses.
    drafted = rows_of(draft_logits, draft_params, 1 << 20)
    proposals = draw_target(drafted).reshape(-1, TREE.max_depth)
    tokens = tokens.at[:, 1:].set(jnp.where(tokens[:, 1:] == DRAWN, proposals, tokens[:, 1:]))
    law = jax.tree.map(lambda leaf: leaf.reshape(-1, TREE.max_depth, *leaf.shape[1:]), law_of(drafted))
    by_node = lambda x: x.reshape(-1, TREE.num_nodes, *x.shape[1:])
    plain, log_p = by_node(draw_target(target)), by_node(log_probs(law_of(target)))
    return target, Draft(tokens, num_live, law), plain, log_p


@functools.partial(jax.jit, static_argnames=("verify", "tree"))
def judge(verify, tree, target, draft):
    return verify(target, draft, tree)


def batch(requests, seed=0, num_rows=NUM_ROWS):
    """A dict of the arguments of `prepare` with drawn proposals; row r has request r % len(requests)."""
    generator = np.random.default_rng(seed)
    params = [make_params(LIMITS, seed=1000 + r, **requests[r % len(requests)])[0] for r in range(num_rows)]
    logits = generator.normal(0, 2, (num_rows, TREE.num_nodes, VOCAB)).astype(np.float32)
    near = logits[:, :-1] + generator.normal(0, 0.7, (num_rows, TREE.max_depth, VOCAB))
    return dict(
        logits=logits,
        draft_logits=near.astype(np.float32),
        params=stack_rows(params),
        draft_params=stack_rows(params),
        tokens=np.full((num_rows, TREE.num_nodes), DRAWN, np.int32),
        num_live=np.full(num_rows, TREE.max_depth, np.int32),
        position=generator.integers(0, 1000, num_rows).astype(np.int32),
    )


def result(verify, given):
    """(Verdict, plain draws, log-probabilities of the target, tokens proposed), as NumPy."""
    target, draft, plain, log_p = prepare(**given)
    if verify in (verify_tree_points, verify_match):
        draft = dataclasses.replace(draft, law=None)
    return jax.tree.map(np.asarray, (judge(verify, TREE, target, draft), plain, log_p, draft.tokens))


MIXED = [
    dict(temperature=0),
    dict(),
    dict(top_k=3),
    dict(top_p=0.8),
    dict(min_p=0.2, temperature=0.7),
    dict(top_k=1),
    dict(temperature=0),  # no proposals
    dict(top_p=0.9),  # no proposals
    dict(),  # -1 as the first proposal
    dict(),  # -1 as the second
    dict(temperature=0),  # NaN after the first, which is the arg-max
    dict(temperature=0),  # NaN after the second; both are the arg-max
    dict(),  # NaN at the root
    dict(temperature=0),  # +inf after the first, which is not the arg-max
]


def mixed_batch():
    given = batch(MIXED)
    kind = np.arange(NUM_ROWS) % len(MIXED)
    logits, tokens = given["logits"], given["tokens"]
    best = logits.argmax(axis=2)
    given["num_live"][np.isin(kind, (6, 7))] = 0
    tokens[kind == 8, 1] = tokens[kind == 9, 2] = -1
    tokens[kind == 10, 1:], tokens[kind == 11, 1:] = best[kind == 10, :2], best[kind == 11, :2]
    tokens[kind == 13, 1] = (best[kind == 13, 0] + 1) % VOCAB
    logits[kind == 10, 1, 3] = logits[kind == 11, 2, 3] = logits[kind == 12, 0, 3] = np.nan
    logits[kind == 13, 1, 3] = np.inf
    return given, kind, best


@every_verifier
def test_every_sort_of_row_gets_what_its_request_asks_for(verify):
    given, kind, best = mixed_batch()
    verdict, plain, log_p, proposed = result(verify, given)
    count, tokens = verdict.count, verdict.tokens
    column = np.arange(TREE.num_nodes)
    assert (np.where(column < count[:, None], tokens, 0) >= 0).all()
    assert (tokens[column >= count[:, None]] == -1).all()
    assert (verdict.accepted.sum(axis=1) == verdict.path.astype(bool).sum(axis=1)).all()
    inner = np.where(verdict.accepted, proposed[:, 1:], 0)
    np.testing.assert_array_equal(np.where(verdict.accepted, tokens[:, :-1], 0), inner)
    for row in np.flatnonzero(~np.isin(kind, (10, 11, 12, 13))):
        assert count[row] == verdict.accepted[row].sum() + 1
        for node in range(count[row]):
            assert log_p[row, node, tokens[row, node]] > -np.inf
    for row in np.flatnonzero(np.isin(kind, (0, 5, 6))):  # greedy: the arg-max, as long as proposals equal it
        same = np.cumprod(
            proposed[row, 1 : given["num_live"][row] + 1] == best[row, : given["num_live"][row]]
        )
        assert count[row] == 1 + same.sum()
        np.testing.assert_array_equal(tokens[row, : count[row]], best[row, : count[row]])
    for row in np.flatnonzero(np.isin(kind, (6, 7, 8))):  # nothing proposed: plain decoding's draw
        assert count[row] == 1 and tokens[row, 0] == plain[row, 0]
    assert (count[kind == 9] <= 2).all()
    for row in np.flatnonzero(kind == 9):  # the end of the draft is no refusal
        assert count[row] == 1 or tokens[row, 1] == plain[row, 1]
    for bad, expected in ((10, 1), (11, 2), (12, 0), (13, 1)):
        assert (count[kind == bad] == expected).all()
    np.testing.assert_array_equal(tokens[kind == 10, 0], best[kind == 10, 0])
    np.testing.assert_array_equal(tokens[kind == 11, :2], best[kind == 11, :2])
    np.testing.assert_array_equal(tokens[kind == 13, 0], best[kind == 13, 0])
    accepted = verdict.accepted[np.isin(kind, (1, 2, 3, 4))]
    assert accepted.any() and not accepted.all()


# Every sum over a row is `tile_sum`: `rejection` and `replaced` have none that these have not.
@pytest.mark.parametrize(
    "verify",
    [pytest.param(verify_block, marks=pytest.mark.large), verify_tree_distinct, verify_tree_points],
    ids=["block", "distinct", "points"],
)
def test_a_row_alone_is_the_row_in_a_batch_of_64(verify):
    given, _, _ = mixed_batch()
    together = result(verify, given)[0]
    for row in range(len(MIXED)):
        one = slice(row, row + 1)
        alone = result(verify, _rows(given, one))[0]
        _assert_equal(alone, _rows(together, one))


def _rows(tree, rows):
    return jax.tree.map(lambda leaf: leaf[rows], tree)


def _assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@every_verifier
def test_neighbours_of_a_bad_row_keep_their_bits(verify):
    given, kind, _ = mixed_batch()
    before = result(verify, given)[0]
    given["logits"][kind == 1] = np.nan
    after = result(verify, given)[0]
    _assert_equal(_rows(after, kind != 1), _rows(before, kind != 1))
    assert (after.count[kind == 1] == 0).all()


@every_verifier
def test_a_proposal_that_is_the_argmax_of_a_greedy_row_is_always_accepted(verify):
    for seed in range(4):  # 256 rows
        given = batch([dict(temperature=0)], seed)
        best = given["logits"].argmax(axis=2)
        given["tokens"][:, 1:] = best[:, :2]
        # The draft is not greedy: q of the proposal is anything.
        given["draft_params"] = batch([{}], seed)["params"]
        verdict = result(verify, given)[0]
        assert (verdict.count == 3).all()
        np.testing.assert_array_equal(verdict.tokens, best)


@every_verifier
def test_refused_every_step_a_request_moves_by_one_token_of_the_row_that_refused(verify):
    # B55: the arg-max of the root's row is 4, that of the next 5, and 6 is proposed.
    given = batch([dict(temperature=0)])
    given["logits"][:], given["num_live"][:] = 0, 1
    given["logits"][:, 0, 4] = given["logits"][:, 1, 5] = 1
    given["tokens"][:, 1] = 6
    length = np.full(NUM_ROWS, 7, np.int32)
    for _ in range(10):
        verdict = result(verify, {**given, "position": length + 1})[0]
        assert (verdict.tokens == [4, -1, -1]).all()
        length += verdict.count
    assert (length == 17).all()


@every_verifier
def test_a_draft_is_weighed_by_the_law_it_was_drawn_from(verify):
    # B43: drawn with top_k = 1 the law of the draft is (1, 0, 0), although its logits say (.5, .3, .2).
    given = batch([{}])
    given["draft_params"] = batch([dict(top_k=1)])["params"]
    given["logits"][:], given["draft_logits"][:], given["num_live"][:] = -np.inf, -np.inf, 1
    given["logits"][:, :, :2] = np.log([0.6, 0.4])
    given["draft_logits"][:, :, :3] = np.log([0.5, 0.3, 0.2])
    firsts, accepted = [], []
    for step in range(64):
        given["position"] = np.full(NUM_ROWS, 3 * step, np.int32)
        verdict, _, _, proposed = result(verify, given)
        assert (proposed[:, 1] == 0).all()
        firsts.append(verdict.tokens[:, 0])
        accepted.append(verdict.accepted[:, 0])
    firsts, accepted = np.concatenate(firsts), np.concatenate(accepted)
    np.testing.assert_array_equal(firsts, np.where(accepted, 0, 1))
    assert scipy.stats.binomtest(int(accepted.sum()), accepted.size, 0.6).pvalue > ALPHA


@every_verifier
def test_filtered_targets_keep_their_law_with_drafts_filtered_otherwise(verify):
    requests = [dict(top_k=4), dict(top_p=0.8), dict(min_p=0.1, temperature=0.7), dict(top_k=6, top_p=0.9)]
    drafts = [dict(top_k=2), {}, dict(top_p=0.6), dict(temperature=1.5)]
    given = batch(requests)
    first = np.arange(NUM_ROWS) % 4
    for name in ("logits", "draft_logits"):
        given[name] = given[name][first]  # one law for each of the four requests
    given["draft_params"] = batch(drafts)["params"]
    tokens = []
    for step in range(64):
        given["position"] = np.full(NUM_ROWS, 3 * step, np.int32)
        verdict, _, log_p, _ = result(verify, given)
        tokens.append(verdict.tokens[:, 0])
    tokens = np.stack(tokens)
    for kind in range(4):
        p = np.exp(log_p[kind, 0, :VOCAB].astype(np.float64))
        drawn = np.bincount(tokens[:, first == kind].ravel(), minlength=VOCAB)
        assert 1 < (p > 0).sum() < VOCAB and drawn[p == 0].sum() == 0
        drawn, expected = drawn[p > 0], p[p > 0] / p.sum() * drawn.sum()
        keep = expected >= 5
        drawn = np.append(drawn[keep], drawn[~keep].sum())
        expected = np.append(expected[keep], max(expected[~keep].sum(), 1e-300))
        chi = ((drawn - expected) ** 2 / expected).sum()
        assert scipy.stats.chi2.sf(chi, max(keep.sum() - (keep.all()), 1)) > ALPHA


def test_matching_emits_the_tokens_of_plain_decoding_position_by_position():
    given = batch(MIXED[:6])
    generator = np.random.default_rng(5)
    table = generator.normal(0, 2, (VOCAB, VOCAB)).astype(np.float32)  # logits given the previous token
    length = 12
    start = given["position"]
    draw = jax.jit(sample, static_argnames=("limits", "features"))
    plain = np.zeros((NUM_ROWS, length + 1), np.int32)
    for step in range(length):
        at = (start + step).astype(np.int32)
        sampled = draw(table[plain[:, step]], given["params"], at, limits=LIMITS, features=FEATURES)
        plain[:, step + 1] = np.asarray(sampled.tokens)
    done, root, found = (
        np.zeros(NUM_ROWS, np.int32),
        np.zeros(NUM_ROWS, np.int32),
        [[] for _ in range(NUM_ROWS)],
    )
    counts = []
    while (done < length).any():
        ahead = np.minimum(done[:, None] + [1, 2], length)
        guess = np.take_along_axis(plain, ahead, axis=1)
        guess = np.where(
            generator.random(guess.shape) < 0.7, guess, generator.integers(-1, VOCAB, guess.shape)
        )
        tokens = np.column_stack([root, guess]).astype(np.int32)
        logits = table[np.maximum(tokens, 0)]
        live = generator.integers(0, 3, NUM_ROWS).astype(np.int32)
        step = {**given, "logits": logits, "tokens": tokens, "num_live": live, "position": start + done}
        verdict = result(verify_match, step)[0]
        counts += verdict.count.tolist()
        for row in range(NUM_ROWS):
            found[row] += verdict.tokens[row, : verdict.count[row]].tolist()
        root = verdict.tokens[np.arange(NUM_ROWS), verdict.count - 1]
        done = done + verdict.count
    assert set(counts) == {1, 2, 3}
    np.testing.assert_array_equal([row[:length] for row in found], plain[:, 1:])


# --- refusals --------------------------------------------------------------------------------------------------------


def _traced(verify, tree, *, num_nodes=None, num_inner=None, num_live=4, law=True):
    """Trace a verifier for 4 rows; sizes default to those of the tree."""
    nodes = tree.num_nodes if num_nodes is None else num_nodes
    inner = len(tree.inner) if num_inner is None else num_inner

    def program():
        target = laws.target_of(
            jnp.zeros((4, tree.num_nodes, 8)), tree, np.zeros((4, 2), np.uint32), np.zeros(4, np.int32)
        )
        drawn = laws.law_of_draft(jnp.zeros((4, inner, 8))) if law else None
        return verify(
            target, Draft(jnp.zeros((4, nodes), jnp.int32), jnp.zeros(num_live, jnp.int32), drawn), tree
        )

    return jax.eval_shape(program)


@every_verifier
def test_drafts_that_do_not_fit_the_tree_are_refused(verify):
    law = verify is not verify_tree_points
    verdict = _traced(verify, TREE, law=law)
    assert verdict.tokens.shape == (4, 3) and verdict.accepted.shape == (4, 2)
    with pytest.raises(ValueError, match=r"draft\.tokens has shape \[4, 2\], expected \[4, 3\]"):
        _traced(verify, TREE, num_nodes=2, law=law)
    with pytest.raises(ValueError, match=r"draft\.num_live has shape \[5\], expected \[4\]"):
        _traced(verify, TREE, num_live=5, law=law)
    if law:
        with pytest.raises(ValueError, match=r"draft\.law has rows \[4, 3\], expected \[4, 2\]"):
            _traced(verify, TREE, num_inner=3)


@pytest.mark.parametrize("verify", [verify_rejection, verify_block], ids=["rejection", "block"])
def test_a_chain_verifier_refuses_a_branching_tree(verify):
    with pytest.raises(ValueError, match="branches, this verifier takes chains only"):
        _traced(verify, from_paths([(0, 0), (1,)]))


@every_verifier
def test_a_target_without_a_law_is_refused(verify):
    def program():
        target = laws.target_of(
            jnp.zeros((4, 3, 8)), TREE, np.zeros((4, 2), np.uint32), np.zeros(4, np.int32)
        )
        law = laws.law_of_draft(jnp.zeros((4, 2, 8))) if verify is not verify_tree_points else None
        draft = Draft(jnp.zeros((4, 3), jnp.int32), jnp.zeros(4, jnp.int32), law)
        return verify(dataclasses.replace(target, cut=None), draft, TREE)

    with pytest.raises(ValueError, match="law=True"):
        jax.eval_shape(program)


@every_verifier
def test_a_step_without_proposals_is_plain_decoding_on_the_root_alone(verify):
    root = chain(0)
    generator = np.random.default_rng(2)
    log_p = laws.logs(generator.dirichlet(np.ones(8), (256, 1)))
    seed, position = laws.seeds(np.arange(256)), np.arange(256, dtype=np.int32)
    log_q = None if verify is verify_tree_points else np.zeros((256, 0, 8), np.float32)
    live = np.zeros(256, np.int32)
    verdict = laws.run(verify, root, log_p, log_q, np.zeros((256, 1), np.int32), live, seed, position)
    noise = np.asarray(rng.gumbel_range(seed, position, rng.TARGET, 8))
    np.testing.assert_array_equal(verdict.tokens[:, 0], (log_p[:, 0] + noise).argmax(axis=1))
    assert (np.asarray(verdict.count) == 1).all() and verdict.accepted.shape == (256, 0)
