"""`sample` as a whole: random mixes of every parameter against the reference, bad rows, precedence, composition."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxsample import rng
from jaxsample.admission import make_params
from jaxsample.params import PAD, Features, Limits, neutral_params
from jaxsample.sample import sample
from tests import batches, mixes, reference

# --- bad rows --------------------------------------------------------------------------------------------------------

BAD_ROWS = {
    "one NaN": lambda z: z.__setitem__(3, np.nan),
    "all NaN": lambda z: z.fill(np.nan),
    "plus infinity": lambda z: z.__setitem__(5, np.inf),
    "all minus infinity": lambda z: z.fill(-np.inf),
    "NaN among minus infinities": lambda z: (z.fill(-np.inf), z.__setitem__(2, np.nan)),
}


# Fault report B11: a row of NaN turned into a uniform draw.
@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_bad_row_is_flagged_and_its_neighbours_are_bit_unchanged(kind, dtype):
    limits = batches.EIGHT
    features = batches.PROCESSED
    generator = np.random.default_rng(3)
    logits = generator.normal(0, 2, (3, 16)).astype(dtype)
    good = batches.sample_rows(logits, [dict(seed=s, logprobs=3) for s in (1, 2, 3)], limits, features)
    spoiled = logits.copy()
    BAD_ROWS[kind](spoiled[1, :8])
    for request in (
        dict(seed=2),
        dict(temperature=0.0),
        dict(top_p=0.5, seed=2),
        dict(banned_token_ids=[3, 5], logprobs=3),
    ):
        bad = batches.sample_rows(
            spoiled, [dict(seed=1, logprobs=3), request, dict(seed=3, logprobs=3)], limits, features
        )
        assert bad.valid.tolist() == [True, False, True]
        assert bad.tokens[1] == PAD
        for row in (0, 2):
            take = lambda leaf, row=row: leaf[row].tobytes()
            assert jax.tree.map(take, bad) == jax.tree.map(take, good)


@pytest.mark.parametrize("padding", [np.nan, np.inf, -np.inf, 3e38, 5.0, -0.0])
def test_padding_columns_are_never_looked_at(padding):
    # Fault report B27: padding columns had 98.9 % of the mass.
    limits = batches.EIGHT
    generator = np.random.default_rng(4)
    logits = generator.normal(0, 2, (3, 16)).astype(np.float32)
    requests = [
        dict(top_p=0.9, seed=1, logprobs=3),
        dict(temperature=0.0),
        dict(seed=5, min_p=0.2, logprobs=2),
    ]
    results = []
    for value in (0.0, padding):
        logits[:, 8:] = value
        results.append(batches.sample_rows(logits, requests, limits, batches.PROCESSED))
    assert results[1].valid.all()
    assert jax.tree.all(jax.tree.map(lambda x, y: x.tobytes() == y.tobytes(), *results))


def test_masks_that_leave_nothing_end_that_row_alone():
    limits = batches.EIGHT
    logits = np.zeros((3, 16), np.float32)
    requests = [dict(seed=1), dict(allowed_token_ids=[4, 5], seed=1), dict(seed=1)]
    result = batches.sample_rows(logits, requests, limits, batches.PROCESSED, grammars=[None, [1, 2], []])
    assert result.valid.tolist() == [True, False, False]
    assert result.tokens[1:].tolist() == [PAD, PAD]


# --- precedence ------------------------------------------------------------------------------------------------------


# Fault report B23.
def test_a_finished_grammar_outranks_min_tokens():
    limits = batches.EIGHT
    logits = np.zeros((3, 16), np.float32)
    ends = dict(eos_token_ids=[2], stop_token_ids=[5], min_tokens=64)
    for request in (dict(temperature=0.0, **ends), dict(seed=3, **ends)):
        for grammars, expected in [
            ([[2], [2, 5], [5]], [{2}, {2, 5}, {5}]),
            ([[2, 3], None, [2, 5, 7]], [{3}, {0, 1, 3, 4, 6, 7}, {7}]),
        ]:
            result = batches.sample_rows(
                logits, [request] * 3, limits, batches.PROCESSED, outputs=[[1] * 10] * 3, grammars=grammars
            )
            assert result.valid.all()
            assert all(int(token) in allowed for token, allowed in zip(result.tokens, expected))


def test_min_tokens_bans_eos_and_stop_ids_until_so_many_tokens_are_out():
    limits = batches.EIGHT
    logits = np.zeros((3, 16), np.float32)
    logits[:, 2], logits[:, 5] = 9, 8
    request = dict(temperature=0.0, eos_token_ids=[2], stop_token_ids=[5], min_tokens=3)
    outputs = [[1, 1], [1, 1, 1], []]
    result = batches.sample_rows(
        logits, [request] * 3, limits, batches.PROCESSED, outputs=outputs, prompts=[[1] * 9] * 3
    )
    assert result.tokens.tolist() == [0, 2, 0]


def test_ignore_eos_makes_eos_an_ordinary_token_and_leaves_stop_ids_banned():
    limits = batches.EIGHT
    logits = np.zeros((3, 16), np.float32)
    logits[:, 5], logits[:, 2] = 9, 8
    ends = dict(temperature=0.0, eos_token_ids=[2], stop_token_ids=[5], min_tokens=3)
    requests = [dict(ends, ignore_eos=True), ends, dict(ends, ignore_eos=True, stop_token_ids=[])]
    result = batches.sample_rows(logits, requests, limits, batches.PROCESSED)
    assert result.tokens.tolist() == [2, 0, 5]


# Fault report B25: a row without a mask got one of zeros.
def test_a_row_without_a_mask_is_free_beside_a_row_with_one():
    limits = batches.EIGHT
    generator = np.random.default_rng(5)
    logits = generator.normal(0, 1, (3, 16)).astype(np.float32)
    requests = [dict(seed=s, logprobs=3) for s in range(3)]
    free = batches.sample_rows(logits, requests, limits, batches.PROCESSED)
    bound = batches.sample_rows(logits, requests, limits, batches.PROCESSED, grammars=[None, [4], None])
    assert bound.tokens[1] == 4
    for row in (0, 2):
        take = lambda leaf, row=row: leaf[row].tobytes()
        assert jax.tree.map(take, bound) == jax.tree.map(take, free)


def test_ids_no_mask_allows_are_never_emitted_whatever_their_bias():
    limits = batches.EIGHT
    logits = np.zeros((3, 16), np.float32)
    request = dict(logit_bias={1: 100.0, 2: 100.0}, banned_token_ids=[1], bad_words_ids=[[2]])
    for seed in range(30):
        result = batches.sample_rows(
            logits,
            [{**request, "seed": seed}] * 3,
            limits,
            batches.PROCESSED,
            grammars=[None, [1, 2, 7], [3]],
        )
        assert int(result.tokens[0]) not in (1, 2)
        assert result.tokens[1:].tolist() == [7, 3]


# --- draws -----------------------------------------------------------------------------------------------------------


def test_tokens_are_the_first_of_the_order_of_logit_plus_gumbel_noise():
    limits = batches.LIMITS
    generator = np.random.default_rng(6)
    logits = generator.normal(0, 2, (64, batches.WIDTH)).astype(np.float32)
    requests = [dict(seed=int(seed)) for seed in generator.integers(0, 2**63, 64)]
    position = generator.integers(0, 2**31 - 1, 64)
    features = batches.PROCESSED
    result = batches.sample_rows(logits, requests, limits, features, position=position)
    for b in range(64):
        noise = reference.gumbel_row(requests[b]["seed"], int(position[b]), rng.TARGET, 333)
        token, margin = reference.draw(logits[b, :333], np.ones(333, bool), noise)
        assert margin < 1e-4 or result.tokens[b] == token


def test_given_noise_equal_to_the_gumbel_noise_gives_the_same_tokens():
    limits = batches.LIMITS
    generator = np.random.default_rng(7)
    batch = batches.random_batch(generator, 64, limits, batches.WIDTH)
    params, _ = batches.params_of(limits, batch["requests"])
    position = np.asarray(batch["position"], np.int32)
    noise = np.asarray(rng.gumbel_range(params.seed, position, rng.TARGET, 333))
    features = batches.PROCESSED
    own = batches.sample_rows(**batch, limits=limits, features=features)
    given = batches.sample_rows(**batch, limits=limits, features=features, noise=noise)
    assert jax.tree.all(jax.tree.map(lambda x, y: x.tobytes() == y.tobytes(), own, given))


def test_greedy_is_the_first_token_of_the_order_whatever_the_filters_and_the_noise():
    limits = batches.LIMITS
    generator = np.random.default_rng(8)
    logits = mixes.rows(generator, 64, 333)
    wide = np.pad(logits, ((0, 0), (0, batches.WIDTH - 333)), constant_values=np.nan)
    features = batches.PROCESSED
    expected = [int(reference.order(z)[0]) for z in logits]
    for filters in ({}, dict(top_k=5), dict(top_p=0.1), dict(min_p=0.9), dict(top_p=0.0)):
        requests = [dict(temperature=0.0, seed=b, **filters) for b in range(64)]
        assert batches.sample_rows(wide, requests, limits, features).tokens.tolist() == expected
        noise = generator.gumbel(size=(64, 333)).astype(np.float32) * 100
        assert batches.sample_rows(wide, requests, limits, features, noise=noise).tokens.tolist() == expected
    requests = [dict(top_k=1, seed=b) for b in range(64)]
    assert batches.sample_rows(wide, requests, limits, features).tokens.tolist() == expected


# Fault report B09: division by a tiny temperature overflowed.
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_a_tiny_temperature_does_not_overflow(dtype):
    limits = batches.EIGHT
    logits = np.full((3, 16), -60000, np.float32)
    logits[0, :4] = 2.875, 2.955, 11.0625, -2.447
    logits[1, :3] = 2, 4, 3
    logits[2, :3] = -60000, 60000, 59000
    for temperature in (1e-5, 1e-10, 1e-30, 2.0**-126, 1e-45, 1e-300, 0.0):
        requests = [dict(temperature=temperature, seed=b, logprobs=3) for b in range(3)]
        result = batches.sample_rows(logits.astype(dtype), requests, limits, batches.PROCESSED)
        assert result.valid.all()
        assert result.tokens.tolist() == [2, 1, 1]
        assert not np.isnan(result.logprobs.top).any()
        assert result.logprobs.token.tolist() == [0, 0, 0]


def test_a_huge_temperature_is_uniform_over_what_is_left():
    limits = batches.EIGHT
    logits = np.linspace(-50, 50, 48).astype(np.float32).reshape(3, 16)
    request = dict(temperature=1e30, banned_token_ids=[0, 7], logprobs=6, seed=1)
    result = batches.sample_rows(logits, [request] * 3, limits, batches.PROCESSED)
    np.testing.assert_allclose(result.logprobs.top, np.log(1 / 6), rtol=1e-6)


# --- composition -----------------------------------------------------------------------------------------------------


def test_defaults_take_the_whole_width_as_vocabulary_and_every_stage():
    generator = np.random.default_rng(9)
    logits = generator.normal(0, 2, (3, 40)).astype(np.float32)
    params, _ = batches.params_of(
        Limits(40), [dict(seed=1, top_k=3), dict(temperature=0), dict(seed=2, logit_bias={39: 99.0})]
    )
    position = np.arange(3, dtype=np.int32)
    result = jax.jit(sample)(logits, params, position)
    assert result.tokens.dtype == jnp.int32
    assert result.valid.dtype == jnp.bool_
    assert result.logprobs is None
    assert int(result.tokens[1]) == int(logits[1].argmax())
    assert int(result.tokens[2]) == 39


def test_sample_runs_inside_scan_and_while_loops():
    limits = batches.small_limits(33)
    params, _ = batches.params_of(limits, [dict(seed=b, top_k=9, top_p=0.9) for b in range(3)])
    params = jax.tree.map(jnp.asarray, params)
    logits = jnp.asarray(np.random.default_rng(10).normal(0, 2, (3, 33)).astype(np.float32))
    features = Features(tier="filtered", num_candidates=16, full_rows=False)
    one = functools.partial(sample, limits=limits, features=features)

    def body(position, _):
        return position + 1, one(logits, params, position).tokens

    _, scanned = jax.lax.scan(body, jnp.zeros(3, jnp.int32), None, length=4)
    apart = jax.jit(one)
    apart = [apart(logits, params, jnp.full(3, step, jnp.int32)).tokens for step in range(4)]
    assert scanned.tolist() == [tokens.tolist() for tokens in apart]
    last = jax.lax.while_loop(
        lambda state: state[0][0] < 4,
        lambda state: (state[0] + 1, one(logits, params, state[0]).tokens),
        (jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.int32)),
    )[1]
    assert last.tolist() == scanned[-1].tolist()


def test_transforms_run_in_order_each_with_its_own_rows():
    def add(logits, argument, position):
        return logits + argument[:, None]

    def favour(logits, argument, position):
        ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        return jnp.where(ids == argument["id"][:, None] + position[:, None], logits * 0 + 50, logits)

    limits = batches.EIGHT
    params, _ = batches.params_of(
        limits, [dict(temperature=0.0)] * 2 + [dict(temperature=0.0, banned_token_ids=[5])]
    )
    features = Features(transforms=(add, favour), full_rows=False, num_candidates=1)
    args = (np.array([1, 2, 3], np.float32), {"id": np.array([0, 1, 4], np.int32)})
    position = np.array([3, 3, 1], np.int32)
    logits = np.zeros((3, 8), np.float32)
    result = batches.run(logits, params, position, limits=limits, features=features, transform_args=args)
    assert result.tokens.tolist() == [3, 4, 0]  # a ban outranks a transform
    with pytest.raises(ValueError, match="transform_args"):
        sample(logits, params, position, limits=limits, features=features)
    narrow = Features(transforms=(lambda logits, argument, position: logits[:, :4],))
    with pytest.raises(ValueError, match="transform"):
        sample(logits, params, position, limits=limits, features=narrow, transform_args=(0,))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("logits", dict(logits=np.zeros((3, 7), np.float32))),
        ("logits", dict(logits=np.zeros(8, np.float32))),
        ("logits", dict(logits=np.zeros((3, 8), np.int32))),
        ("position", dict(position=np.zeros(2, np.int32))),
        ("position", dict(position=np.zeros(3, np.float32))),
        ("allowed", dict(allowed=np.zeros((3, 2), np.uint32))),
        ("allowed", dict(allowed=np.zeros((3, 1), np.int32))),
        ("noise", dict(noise=np.zeros((3, 7), np.float32))),
        ("temperature", dict(logits=np.zeros((4, 8), np.float32), position=np.zeros(4, np.int32))),
        ("history", dict(stop=neutral_params(batches.small_limits(8), 3)[1])),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(name, change):
    limits = batches.EIGHT
    params, _ = neutral_params(limits, 3)
    arguments = dict(logits=np.zeros((3, 8), np.float32), params=params, position=np.zeros(3, np.int32))
    with pytest.raises(ValueError, match=name):
        jax.eval_shape(functools.partial(sample, limits=limits), **{**arguments, **change})


def test_children_of_one_request_draw_apart():
    params, _ = make_params(batches.LIMITS, seed=42, n=64)
    requests = [dict(seed=low | high << 32) for low, high in params.seed.tolist()]
    logits = np.zeros((64, batches.WIDTH), np.float32)
    assert (
        len(set(batches.sample_rows(logits, requests, batches.LIMITS, batches.PROCESSED).tokens.tolist()))
        > 40
    )
