"""Random mixes of every parameter, in one program, against the reference: tokens, validity, logprobs, shaped logits."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from jaxsample.candidates import tidy
from jaxsample.params import PAD, Features
from jaxsample.shaping import shape
from tests import batches, mixes, reference

# float32 against float64, relative to the size of the logits: a handful of roundings in shaping, the
# log-sum-exp and the sum with the noise.
TOLERANCE = 2.0**-19


def check_logprobs(logits, logprobs, actual, token, num_top, scale):
    """One row's reported values against the reference's, where ties may hide behind rounding."""
    value = logprobs[token]
    if np.isfinite(value):
        assert abs(actual.token - value) <= scale * (1 + abs(value))
        finite = logits[np.isfinite(logits)]
        lowest = 1 + int((finite > logits[token] + scale).sum())
        assert lowest <= actual.rank <= max(int((finite >= logits[token] - scale).sum()), lowest)
    ids, top = actual.top_ids[:num_top], actual.top[:num_top]
    best = np.sort(logprobs)[::-1][:num_top]
    finite = np.isfinite(best)
    assert (np.isfinite(top) == finite).all()
    assert (np.abs(top[finite] - best[finite]) <= scale * (1 + np.abs(best[finite]))).all()
    inside = ids[finite]
    assert len(set(inside.tolist())) == len(inside)
    assert (np.abs(logprobs[inside] - best[finite]) <= 2 * scale * (1 + np.abs(best[finite]))).all()
    assert (actual.top_ids[num_top:] == PAD).all()
    assert (actual.top[num_top:] == -np.inf).all()


def check_batch(batch, limits, features, noise):
    """Every row of `sample` against the reference; returns how many tokens could be compared exactly."""
    result = batches.sample_rows(**batch, limits=limits, features=features, noise=noise)
    num_compared = 0
    for b, request in enumerate(batch["requests"]):
        expected = reference.sample(
            batch["logits"][b],
            {k: v for k, v in request.items() if k in reference.NEUTRAL},
            vocab_size=limits.vocab_size,
            noise=noise[b],
            prompt=batch["prompts"][b],
            output=batch["outputs"][b],
            grammar=batch["grammars"][b],
            filter_order=features.filter_order,
        )
        assert result.valid[b] == expected["valid"], (request, batch["grammars"][b])
        token = int(result.tokens[b])
        if not expected["valid"]:
            assert token == PAD
            continue
        assert 0 <= token < limits.vocab_size
        shaped, raw = expected["shaped"], batch["logits"][b, : limits.vocab_size].astype(np.float64)
        assert np.isfinite(shaped[token]), "an id that no mask allows"
        size = max(np.abs(shaped[np.isfinite(shaped)]).max(), np.abs(raw[np.isfinite(raw)]).max(), 1)
        if request.get("temperature", 1) > 0:
            size = max(size, np.abs(raw[np.isfinite(raw)]).max() / request.get("temperature", 1))
        clear = expected["margin"] > TOLERANCE * size
        if clear:
            assert token == expected["token"], request
            num_compared += 1
        if features.num_logprobs < 0:
            continue
        actual = jax.tree.map(lambda leaf, b=b: leaf[b], result.logprobs)
        num_top = min(request.get("logprobs", 0), features.num_logprobs)
        if features.logprobs_mode == "raw":
            check_logprobs(
                reference.normalised(raw), expected["raw"], actual, token, num_top, TOLERANCE * size
            )
        elif clear:
            check_logprobs(shaped, expected["processed"], actual, token, num_top, TOLERANCE * size)
    return num_compared


PROGRAMS = [
    (1, 2, 2, "vllm", "raw", 64),
    pytest.param(3, 31, 40, "hf", "processed", 16, marks=pytest.mark.large),
    pytest.param(3, 32, 32, "joint", "raw", 16, marks=pytest.mark.large),
    pytest.param(64, 33, 64, "vllm", "processed", 16, marks=pytest.mark.large),
    (64, 1000, 1024, "vllm", "raw", 64),
    pytest.param(64, 1000, 1000, "joint", "processed", 64, marks=pytest.mark.large),
    (3, 1000, 1003, "hf", "processed", 8),
    (3, 32000, 32000, "joint", "processed", 128),
]


@pytest.mark.parametrize(
    ("num_rows", "num_vocab", "width", "filter_order", "mode", "num_candidates"), PROGRAMS
)
def test_any_mix_of_parameters_gives_what_the_reference_gives(
    num_rows, num_vocab, width, filter_order, mode, num_candidates
):
    limits = batches.small_limits(num_vocab)
    features = Features(
        num_candidates=num_candidates,
        filter_order=filter_order,
        logprobs_mode=mode,
        num_logprobs=min(6, num_candidates),
    )
    compared = []

    @hypothesis.settings(max_examples=8 if num_rows * num_vocab < 50_000 else 3)
    @hypothesis.given(
        seed=st.integers(0, 2**32),
        chance=st.sampled_from([0.1, 0.3, 0.6]),
        kinds=st.lists(st.sampled_from(mixes.ROW_KINDS), min_size=1, max_size=11, unique=True),
    )
    def sweep(seed, chance, kinds):
        generator = np.random.default_rng(seed)
        batch = batches.random_batch(generator, num_rows, limits, width, kinds, chance)
        noise = generator.gumbel(size=(num_rows, num_vocab)).astype(np.float32)
        compared.append(check_batch(batch, limits, features, noise))

    sweep()
    assert sum(compared) > 0.5 * num_rows * len(compared)


def test_a_row_of_a_full_vocabulary_gives_what_the_reference_gives():
    limits = batches.small_limits(151_936)
    generator = np.random.default_rng(1)
    features = Features(num_logprobs=6, logprobs_mode="processed")
    num_compared = 0
    for kind in ("language", "flat", "bfloat16"):
        batch = batches.random_batch(generator, 1, limits, 151_936, (kind,), 0.2)
        noise = generator.gumbel(size=(1, 151_936)).astype(np.float32)
        num_compared += check_batch(batch, limits, features, noise)
    assert num_compared > 0


def test_shaped_logits_follow_the_reference_up_to_a_constant():
    limits = batches.small_limits(200)
    generator = np.random.default_rng(2)
    run = jax.jit(shape, static_argnames=("limits", "features"))
    for _ in range(4):
        batch = batches.random_batch(generator, 64, limits, 256, chance=0.5)
        params, stop = batches.params_of(limits, batch["requests"])
        state = batches.history_of(limits, batch["prompts"], batch["outputs"], limits.max_length)
        result = run(
            batch["logits"],
            params,
            np.zeros(64, np.int32),
            stop=stop,
            history=state,
            allowed=batches.bit_mask(limits, batch["grammars"]),
            limits=limits,
            features=Features(),
        )
        assert result.logits.shape == (64, 256)
        assert (np.asarray(result.logits)[:, 200:] == -np.inf).all()
        assert np.array_equal(
            np.asarray(tidy(result.raw))[:, :200], reference.normalised(batch["logits"][:, :200])
        )
        for b, request in enumerate(batch["requests"]):
            expected, _, valid = reference.shape(
                batch["logits"][b],
                {k: v for k, v in request.items() if k in reference.NEUTRAL},
                vocab_size=200,
                prompt=batch["prompts"][b],
                output=batch["outputs"][b],
                grammar=batch["grammars"][b],
            )
            assert bool(result.valid[b]) == valid
            if not valid:
                continue
            actual = np.asarray(result.logits)[b, :200].astype(np.float64)
            finite = np.isfinite(expected)
            assert (np.isfinite(actual) == finite).all()
            actual, expected = (
                actual[finite] - actual[finite].max(),
                expected[finite] - expected[finite].max(),
            )
            size = np.abs(batch["logits"][b, :200][np.isfinite(batch["logits"][b, :200])]).max()
            size = 1 + (size + 10) / (request.get("temperature") or 1) + np.abs(expected).max()
            assert (np.abs(actual - expected) <= 2.0**-20 * size).all(), request
