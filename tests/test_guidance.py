"""What guidance does to short lists: the published sampler's numbers, a float64 reference, limits, bad values, bits.

One program of 2048 rows serves almost all of it; rows are padded to it.
"""

import json
import math
import pathlib

import jax
import numpy as np
import pytest

import jaxsample as js
from jaxsample import tilt
from tests import reference_guidance as reference

DATA = pathlib.Path(__file__).parent / "data"
ROWS, G = 2048, 16
ULP = 2.0**-23
LIMITS = js.Limits(vocab_size=64, max_length=8)
PARAMS, _ = js.make_params(LIMITS, top_k=G, seed=1)

guide = jax.jit(js.guide)
add_scores = jax.jit(js.add_scores)


def listed(log_q, count, ids=None):
    """A short list of rows that are all guided: log_q f32[R, G], count i32[R]."""
    count = np.asarray(count, np.int32)
    ids = np.broadcast_to(np.arange(log_q.shape[1], dtype=np.int32), log_q.shape) if ids is None else ids
    yes = np.ones(len(count), np.bool_)
    return js.Shortlist(ids, np.asarray(log_q, np.float32), count, yes, yes & (count > 1), yes)


def padded(tree, size):
    """Rows filled up with copies of the first, and as many pieces of ROWS as that takes."""
    return jax.tree.map(lambda x: np.concatenate([x, np.repeat(x[:1], size - len(x), axis=0)]), tree)


def run(program, *arguments):
    """A program over any number of rows, in pieces of ROWS."""
    arguments = jax.tree.map(np.asarray, arguments)
    num_rows = len(jax.tree.leaves(arguments)[0])
    pieces = []
    for start in range(0, num_rows, ROWS):
        piece = jax.tree.map(lambda x, start=start: x[start : start + ROWS], arguments)
        piece = jax.tree.map(np.asarray, program(*padded(piece, ROWS)))
        pieces.append(jax.tree.map(lambda x, start=start: x[: num_rows - start], piece))
    return js.stack_rows(pieces)


def guided(q, z, words, ends=None, num_emitted=0):
    """Rows given as lists of lists of at most G numbers; `words`: a dict for each row, as `make_guidance` takes it."""
    count = [len(row) for row in q]
    wide = lambda x, filler, dtype: np.array([[*row, *[filler] * (G - len(row))] for row in x], dtype)
    with np.errstate(divide="ignore"):
        log_q = np.log(wide(q, 0, np.float64))
    ends = [[False] * len(row) for row in q] if ends is None else ends
    guidance = js.stack_rows([js.make_guidance(LIMITS, PARAMS, **row) for row in words])
    emitted = np.broadcast_to(np.asarray(num_emitted, np.int32), (len(q),))
    filler = np.nan  # what lies past the candidates is never looked at
    result = run(
        guide,
        listed(log_q, count),
        wide(z, filler, np.float32),
        wide(ends, True, np.bool_),
        guidance,
        emitted,
    )
    return result, np.exp(result.log_probs.astype(np.float64))


def aim_error(q, d, root, mean):
    """How far float32 may be from the law at `root`: by its own rounding, and by the aim's where that moves the law.

    The aim has a few roundings, relative to the width where it is held inside an end, else to the mean too; the
    tilt has its own spacing. q' moves by p |d - T| / Var(d) times the aim's error.
    """
    p = reference.tilt(q, d, root)
    wanted, width = (p * d).sum(), d.max()
    variance = float((p * (d - wanted) ** 2).sum())
    edge = 1.01 * max(1e-12, 1e-6 * width)
    moved = 4 * ULP * (min(wanted, width - wanted) if min(wanted, width - wanted) <= edge else width + mean)
    moved += 4 * ULP * abs(root) * variance
    offset = np.abs(d - wanted)
    return 8 * ULP + moved * float((p * offset).max()) / max(variance, 1e-300)


# --- the published sampler's numbers ---------------------------------------------------------------------------------


def oracle():
    with np.load(DATA / "guidance.npz") as file:
        return dict(file)


def setting(data, index):
    """A setting of the file in the words of `make_guidance`."""
    words = {"gamma": float(data["set_gamma"][index])}
    mode, constraint = data["set_value_mode"][index], data["set_constraint"][index]
    if mode >= 0:
        words |= {"mode": str(data["value_mode_names"][mode]), "scale": float(data["set_scale"][index])}
    else:
        words["constraint"] = str(data["constraint_names"][constraint])
    for name in ("value_min", "target_value", "target_length"):
        value = float(data[f"set_{name}"][index])
        if not math.isnan(value):
            words[name] = value
    if words.get("target_length") is not None:
        words["length_mode"] = ("remaining", "total")[data["set_length_mode"][index]]
    return words


def test_all_settings_give_the_published_samplers_laws():
    """Choices exactly; direct tilts to 2^-20; moment modes at the exact root, not where its solver stopped."""
    data = oracle()
    valid = np.arange(G) < data["n_cand"][:, None]
    q = data["probs"].astype(np.float64)
    q /= q.sum(axis=1, keepdims=True)
    v = np.where(data["eos"], 0, 1 / (1 + np.exp(-data["z"].astype(np.float64))))
    with np.errstate(divide="ignore"):
        log_q = np.log(np.where(valid, q, 0))
    rows, batches, settings = listed(log_q, data["n_cand"], data["token_ids"]), [], []
    for index in range(len(data["set_scale"])):
        words = setting(data, index)
        if words.get("target_value", 0) < 0 or words.get("target_value", 0) > 1:
            with pytest.raises(ValueError, match="target_value"):
                js.make_guidance(LIMITS, PARAMS, **words)
            continue
        settings.append(index)
        guidance = js.stack_rows([js.make_guidance(LIMITS, PARAMS, **words)] * len(q))
        emitted = np.full(len(q), data["set_generated_len"][index], np.int32)
        batches.append((rows, data["z"], data["eos"], guidance, emitted))
    assert len(settings) == 185 - 8
    result = run(guide, *js.stack_rows(batches))
    assert result.valid.all()
    laws = np.exp(result.log_probs.astype(np.float64)).reshape(len(settings), len(q), G)
    assert np.abs(laws.sum(axis=2) - 1).max() <= 8 * ULP

    for index, law in zip(settings, laws, strict=True):
        words = setting(data, index)
        if words.get("mode") in ("centered_exp", "value_bias"):
            assert np.abs(law - data["p_gpu_f64"][index]).max() <= 8 * ULP
        elif words.get("constraint", "eq_soft") != "eq_soft":
            assert (law.argmax(axis=1) == data["choice_cpu"][index]).all() and set(np.unique(law)) == {0, 1}
        else:
            for row, root in enumerate(data["lambda_root"][index]):
                n = data["n_cand"][row]
                if math.isnan(root):
                    if words.get("constraint") is None:
                        assert np.abs(law[row] - np.where(valid[row], q[row], 0)).max() <= ULP
                    else:
                        assert set(np.unique(law[row])) <= {0, 1}
                    continue
                d = v[row, :n] - v[row, :n].min()
                bound = aim_error(q[row, :n], d, root, v[row, :n].max())
                assert np.abs(law[row, :n] - reference.tilt(q[row, :n], d, root)).max() <= bound


def test_short_lists_and_laws_of_whole_rows_equal_the_published_samplers():
    """Away from exact ties: margin above 1e-6. Rows with more than G candidates are left out."""
    most = G
    with np.load(DATA / "candidates.npz") as file:
        data = dict(file)
    few, all_rows = data["n_keep"] <= most, len(data["n_keep"])
    data = {name: x[few] if x.shape[:1] == (all_rows,) else x for name, x in data.items()}
    probs, num_rows = data["probs"], int(few.sum())
    limits = js.Limits(vocab_size=1000, num_guided=most)
    features = js.Features(tier="filtered", full_rows=False, num_candidates=most)
    params, guidance = [], []
    for row in range(num_rows):
        top_k = int(data["top_k"][row])
        words = json.loads(str(data["guide_json"][data["guide_set"][row]]))
        names = {"value_mode": "mode", "value_scale": "scale", "value_constraint": "constraint"}
        names |= {"target_length_mode": "length_mode"}
        words = {names.get(name, name): value for name, value in words.items()}
        threshold = float(data["entropy_threshold"][row])
        words["entropy_threshold"] = threshold if threshold >= 0 else None
        one, _ = js.make_params(
            limits,
            seed=row,
            top_k=most if top_k < 0 else min(top_k, most),
            top_p=float(data["top_p"][row]),
            min_p=min(float(data["min_p"][row]), 1.0),
        )
        params.append(one)
        guidance.append(js.make_guidance(limits, one, **words))

    zeros = np.zeros(num_rows, np.int32)

    @jax.jit
    def begin(logits, params, guidance):
        shaped = js.Shaped(logits, logits, zeros == 0)
        target = js.make_target(shaped, params, zeros, vocab_size=1000, features=features)
        return target, js.shortlist(target, guidance, limits.num_guided)

    @jax.jit
    def end(target, short):
        target = js.guided_target(target, short)
        return js.log_probs(js.law_of(target)), js.draw_target(target)

    with np.errstate(divide="ignore"):
        logits = np.pad(np.log(probs), ((0, 0), (0, 24)), constant_values=-np.inf)
    guidance = js.stack_rows(guidance)
    target, short = jax.tree.map(np.asarray, begin(logits, js.stack_rows(params), guidance))
    z = data["z_vocab"][np.minimum(short.ids, 999)]
    log_law, tokens = end(target, run(guide, short, z, short.ids == data["eos_id"], guidance, zeros))
    kept = np.unpackbits(data["keep"], axis=1, bitorder="little")[:, :1000].astype(bool)
    assert (short.count == data["n_keep"]).all()
    found = np.zeros_like(kept)
    for row in range(num_rows):
        found[row, short.ids[row, : short.count[row]]] = True
    assert (found == kept).all()
    status = np.where(~short.guided, 2, np.where(short.count == 1, 1, 0))
    assert (status == data["status"]).all() and (short.scored == (status == 0)).all()

    laws = np.exp(np.asarray(log_law, np.float64))[:, :1000]
    assert (laws[np.arange(num_rows), tokens] > 0).all()
    for row in np.flatnonzero(status < 2):
        words = str(data["guide_json"][data["guide_set"][row]])
        # Their solver stops at 1e-6 of the width; where two values are close, the law may be that much off.
        bound = (
            1e-4
            if any(mode in words for mode in ('"mul"', "linear", '"exp"', "length_mul", "soft"))
            else 8 * ULP
        )
        assert np.abs(laws[row] - data["p_guided"][row]).max() <= bound


# --- against the reference -------------------------------------------------------------------------------------------


def random_case(generator):
    n = int(generator.integers(1, G + 1))
    q = np.sort(generator.dirichlet(np.full(n, generator.choice([0.3, 1, 10]))) + 1e-12)[::-1]
    spread = generator.choice([0.01, 1, 5])
    z = (generator.normal(generator.choice([-6, 0, 2, 9]), spread, n)).astype(np.float32)
    ends = generator.random(n) < generator.choice([0, 0.15])
    gamma = float(generator.choice([0.9, 0.997, 0.9998]))
    kind = generator.integers(10)
    if kind < 6:
        mode = reference.MODES[kind]
        scale = float(generator.choice([-1000, -3, -0.2, 0, 0.3, 0.9, 1.0, 1.01, 2.5, 40, 1000]))
        words = dict(mode=mode, scale=scale, gamma=gamma, value_min=float(generator.choice([0, 0, 0.4])))
    else:
        words = dict(constraint=reference.CONSTRAINTS[kind - 6], gamma=gamma)
        if generator.random() < 0.5:
            words["target_value"] = float(generator.choice([0, 0.02, 0.5, 0.9, 0.9999, 1]))
        else:
            words["target_length"] = float(generator.choice([0, 1, 7, 100, 3000]))
            words["length_mode"] = str(generator.choice(["total", "remaining"]))
    return q / q.sum(), z, ends, words, int(generator.choice([0, 5, 200]))


def test_rows_of_all_modes_in_one_batch_equal_the_reference():
    generator = np.random.default_rng(11)
    cases = [random_case(generator) for _ in range(1000)]
    q, z, ends, words, emitted = map(list, zip(*cases, strict=True))
    result, laws = guided(q, z, words, ends, emitted)
    assert result.valid.all()
    num_moments = 0
    for (q, z, ends, words, emitted), law in zip(cases, laws, strict=True):
        n = len(q)
        wanted = reference.guided(q, z, ends, words, emitted)
        bound = 8 * ULP
        if words.get("mode") not in ("centered_exp", "value_bias") and 0 < wanted.max() < 1:
            v = np.array(
                [0 if end else reference.value_of(float(x))[0] for x, end in zip(z, ends, strict=True)]
            )
            d = v - v.min()
            if np.abs(wanted - q).max() > 1e-7:
                top, other = wanted.argmax(), np.abs(d - d[wanted.argmax()]).argmax()
                root = math.log(max(wanted[top] / q[top], 1e-300) / max(wanted[other] / q[other], 1e-300)) / (
                    d[top] - d[other]
                )
                bound = aim_error(q, d, root, v.max())
                num_moments += 1
        assert np.abs(law[:n] - wanted).max() <= bound, (words, q, z, ends, emitted)
        assert not law[n:].any()
    assert num_moments > 200


@pytest.mark.parametrize("scale", [-1000.0, 1000.0])
def test_the_largest_scales_are_safe_in_every_mode(scale):
    q = [[0.7, 0.2, 0.1 - 1e-30, 1e-30]] * 24
    z = [[-80.0, 80.0, 0.0, 1e-3], [3.0, 3.0, 3.0, 3.0], [20.0, 20.5, 21.0, 60.0], [-1e-3, 0, 1e-3, 2e-3]] * 6
    words = [dict(mode=mode, scale=scale) for mode in reference.MODES for _ in range(4)]
    result, laws = guided(q, z, words)
    assert result.valid.all() and np.isfinite(laws).all() and np.abs(laws.sum(axis=1) - 1).max() <= 8 * ULP
    for row, law in enumerate(laws):
        wanted = reference.guided(q[row], z[row], [False] * 4, words[row])
        assert np.abs(law[:4] - wanted).max() <= 1e-5


def test_means_are_met_where_a_tilt_within_100_cannot():
    """q = (.98, .02), v = (.60, .62), T = .6199 needs a tilt of 459: a Newton iteration held within 100 stops at .6026."""
    v = np.array([0.60, 0.62])
    z = np.log(v / (1 - v))
    result, laws = guided([[0.98, 0.02]], [z], [dict(target_value=0.6199, constraint="eq_soft")])
    assert abs((laws[0, :2] * v).sum() - 0.6199) <= 2 * ULP
    assert result.valid.all()


def test_lengths_far_ahead_keep_their_precision():
    """v = 1 - 1e-6 and 1 - 2e-6 are 17 ulp apart in float32; their lengths 13,800 and 13,100 are not near each other."""
    z = [math.log(1e6), math.log(5e5)]
    lengths = [math.log(1e-6) / math.log(0.999), math.log(2e-6) / math.log(0.999)]
    for wanted in (0, 1):
        words = dict(target_length=lengths[wanted], length_mode="remaining", gamma=0.999)
        _, laws = guided([[0.5, 0.5]], [z], [words])
        assert laws[0, wanted] == 1
    middle = 1 - 1.5e-6  # half way between the values, by hand
    _, laws = guided([[0.5, 0.5]], [z], [dict(target_value=middle, constraint="eq_soft")])
    assert np.abs(laws[0, :2] - 0.5).max() <= 1e-5


# --- single claims ---------------------------------------------------------------------------------------------------


def test_tokens_that_end_the_row_have_value_0_but_for_value_bias():
    q, z, ends = [0.6, 0.4], [2.0, 2.0], [False, True]
    words = [
        dict(mode="centered_exp", scale=-5),
        dict(mode="value_bias", scale=-5),
        dict(target_length=0),
        dict(target_length=0, constraint="le"),
    ]
    _, laws = guided([q] * 4, [z] * 4, words, [ends] * 4)
    v = 1 / (1 + math.exp(-2))
    assert abs(laws[0, 1] / laws[0, 0] - 0.4 / 0.6 * math.exp(5 * v)) <= 1e-4
    assert np.abs(laws[1, :2] - q).max() <= ULP
    assert laws[2, 1] == laws[3, 1] == 1


def test_totals_count_what_was_emitted_and_never_go_below_0():
    z = [math.log(math.expm1(-left * math.log(0.997))) for left in (40, 100, 5)]
    words = [
        dict(target_length=100),
        dict(target_length=100),
        dict(target_length=100),
        dict(target_length=100, length_mode="remaining"),
    ]
    _, laws = guided([[0.5, 0.3, 0.2]] * 4, [z] * 4, words, num_emitted=[60, 0, 150, 60])
    assert laws[:, :3].argmax(axis=1).tolist() == [0, 1, 2, 1]


def test_equal_values_go_to_the_likelier_candidate():
    words = [dict(target_value=0.5, constraint=constraint) for constraint in ("eq", "ge", "le")]
    _, laws = guided(
        [[0.2, 0.3, 0.3, 0.2][:4]] * 3, [[1.0, 0.5, 0.5, 1.0], [0, 1, 1, 0], [1, 0, 0, 1]], words
    )
    assert laws.argmax(axis=1).tolist() == [1, 1, 1]


def test_value_min_leaves_rows_with_a_small_mean_as_they_are():
    words = [
        dict(mode=mode, scale=3, value_min=value_min)
        for mode in reference.MODES
        for value_min in (0.49, 0.51)
    ]
    _, laws = guided([[0.5, 0.5]] * 12, [[1.0, -1.0]] * 12, words)
    assert (np.abs(laws[1::2, :2] - 0.5) <= ULP).all() and (np.abs(laws[0::2, 0] - 0.5) > 0.05).all()


def test_a_value_that_is_not_a_number_makes_its_row_bad_and_no_other():
    z = [[0.0, 1.0], [math.nan, 1.0], [0.0, math.inf], [-math.inf, 1.0], [math.nan, 1.0], [math.nan]]
    words = [dict(mode="centered_exp", scale=2)] * 4 + [dict(mode="scores")] + [dict(mode="exp", scale=2)]
    result, _ = guided([[0.5, 0.5]] * 5 + [[1.0]], z, words)
    assert result.valid.tolist() == [True, False, False, False, True, True]
    alone, _ = guided([[0.5, 0.5]], z[:1], words[:1])
    assert (result.log_probs[0] == alone.log_probs[0]).all()


def test_a_lone_survivor_of_masks_has_probability_1_whatever_its_score():
    """Fault B65: candidates were compared on scores normalised before the mask, so a forced token paid its own."""
    words = [
        dict(mode="centered_exp", scale=-1000),
        dict(mode="value_bias", scale=1000),
        dict(target_value=0.5),
    ]
    result, laws = guided([[1.0]] * 3, [[50.0]] * 3, words)
    assert (laws[:, 0] == 1).all() and (result.log_probs[:, 0] == 0).all()


def test_rows_have_the_same_bits_in_any_batch():
    """Rows of all modes among 2048 and in parts of 3, which fill no vector of the machine."""
    generator = np.random.default_rng(3)
    words = [dict(mode=mode, scale=scale) for mode in reference.MODES for scale in (1.7, 0.4)]
    words += [dict(target_value=0.5, constraint=constraint) for constraint in reference.CONSTRAINTS] + [
        {}
    ] * 2
    guidance = js.stack_rows([js.make_guidance(LIMITS, PARAMS, **row) for row in words])
    log_q = np.sort(np.log(generator.dirichlet(np.ones(G), 18)))[:, ::-1].astype(np.float32)
    z = generator.normal(0, 2, (18, G)).astype(np.float32)
    ends, emitted = generator.random((18, G)) < 0.1, np.zeros(18, np.int32)
    arguments = (listed(log_q, [G] * 18), z, ends, guidance, emitted)
    whole = run(guide, *arguments).log_probs
    for first in range(0, 18, 3):
        part = guide(*jax.tree.map(lambda x, first=first: x[first : first + 3], arguments)).log_probs
        assert np.asarray(part).tobytes() == whole[first : first + 3].tobytes()


# --- scorers ---------------------------------------------------------------------------------------------------------


def test_scores_are_added_with_their_weights():
    generator = np.random.default_rng(5)
    q = generator.dirichlet(np.ones(4), 3)
    scores = generator.normal(0, 3, (3, 2, 4))
    weights = np.array([[0.5, -2.0], [0.0, 0.0], [1000.0, 0.0]])
    wide = np.full((3, 2, G), np.nan)
    wide[:, :, :4] = scores
    with np.errstate(divide="ignore"):
        rows = listed(np.log(np.pad(q, ((0, 0), (0, G - 4)))), [4, 4, 4])
    result = run(add_scores, rows, wide.astype(np.float32), weights.astype(np.float32))
    assert result.valid.all() and (result.log_probs[1] == rows.log_probs[1]).all()
    for row in (0, 2):
        wanted = np.log(q[row]) + (weights[row][:, None] * scores[row]).sum(axis=0)
        wanted = np.exp(wanted - wanted.max()) / np.exp(wanted - wanted.max()).sum()
        # At 1000 the float32 rounding of the scores themselves counts.
        assert np.abs(np.exp(result.log_probs[row, :4]) - wanted).max() <= (1e-6 if row == 0 else 1e-3)


def test_the_example_of_a_classifier_gives_fudges_law():
    q, logits = np.array([0.5, 0.3, 0.2]), np.array([-2.0, 0.0, 3.0])
    scores = np.zeros((1, 1, G))
    scores[0, 0, :3] = -np.log1p(np.exp(-logits))
    scores = np.concatenate([scores, np.zeros((1, 1, G))], axis=1)
    with np.errstate(divide="ignore"):
        rows = listed(np.log(np.pad(q, (0, G - 3)))[None], [3])
    result = run(add_scores, rows, scores.astype(np.float32), np.array([[1.0, 0.0]], np.float32))
    wanted = q / (1 + np.exp(-logits))
    assert np.abs(np.exp(result.log_probs[0, :3]) - wanted / wanted.sum()).max() <= 8 * ULP


def test_a_score_that_is_not_finite_counts_only_where_it_has_a_weight():
    scores = np.zeros((3, 2, G), np.float32)
    scores[1:, 1, 0] = np.nan
    weights = np.array([[1, 1], [1, 1], [1, 0]], np.float32)
    result = run(add_scores, listed(np.log(np.full((3, G), 1 / G)), [G] * 3), scores, weights)
    assert result.valid.tolist() == [True, False, True]


# --- the solver ------------------------------------------------------------------------------------------------------


def test_values_near_each_other_and_near_both_ends_keep_their_relative_precision():
    upper = np.array([-20.0, 20.5, 0.001, 30.0, 5.0, 60.0], np.float32)
    lower = np.array([-20.5, 20.0, 0.0, -30.0, -np.inf, 59.0], np.float32)
    found = np.asarray(jax.jit(tilt.difference)(upper, lower), np.float64)
    for high, low, difference in zip(upper.tolist(), lower.tolist(), found, strict=True):
        wanted = reference.value_of(high)[0] if low == -np.inf else reference.differences([high], low)[0]
        assert abs(difference / wanted - 1) <= 8 * ULP


def test_softplus_is_inverted_from_the_smallest_to_the_largest_lengths():
    x = np.append(np.geomspace(1e-30, 80, 300), 0).astype(np.float32)
    z, back = map(
        np.asarray, jax.jit(lambda x: (tilt.inverse_softplus(x), tilt.softplus(tilt.inverse_softplus(x))))(x)
    )
    # z has half an ulp of its own, which moves softplus(z) by z sigmoid(z) ulp.
    assert np.abs(back[:-1].astype(np.float64) / x[:-1] - 1).max() <= 8 * ULP * 80
    assert z[-1] == -np.inf and back[-1] == 0
