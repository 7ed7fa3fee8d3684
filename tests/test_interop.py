"""Requests and arrays of other software: every field is served or refused by name, and means the same here."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsample as js
from jaxsample import interop
from tests.meshes import mesh_of

V = 101
LIMITS = js.Limits(V, max_length=64, num_logprobs=5)


def rows(told, **rest):
    return js.make_params(LIMITS, **{"seed": 0, **told.params}, **rest)


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_chat_body_becomes_the_same_request():
    body = {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 0.7,
        "top_p": 0.9, "n": 2, "seed": 11, "frequency_penalty": 0.5, "presence_penalty": -0.5, "max_completion_tokens": 9,
        "logit_bias": {"5": -100, "7": 3}, "logprobs": True, "top_logprobs": 3, "stop": "END", "user": None,
        "response_format": {"type": "text"},
    }  # fmt: skip
    told = interop.from_openai(body)
    assert told.params == dict(
        temperature=0.7, top_p=0.9, n=2, seed=11, frequency_penalty=0.5, presence_penalty=-0.5, max_tokens=9,
        logit_bias={5: -np.inf, 7: 3.0}, logprobs=3,
    )  # fmt: skip
    assert told.stop_strings == ("END",) and told.filter_order == "vllm"
    params, stop = rows(told)
    assert len(params.seed) == 2 and stop.max_tokens[0] == 9


@pytest.mark.parametrize(
    ("body", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": 4}, 4),
        ({"logprobs": 0}, 0),
    ],
)
def test_both_spellings_of_logprobs(body, logprobs):
    assert interop.from_openai(body).params.get("logprobs") == logprobs


class Struct:
    """As vllm.SamplingParams is: fields named by the class, private ones among them."""

    __struct_fields__ = ("n", "temperature", "top_k", "max_tokens", "stop", "stop_token_ids", "_eos", "detokenize", "top_p",
                         "bad_words", "logprobs", "extra_args")  # fmt: skip

    def __init__(self, **given):
        for name in self.__struct_fields__:
            setattr(self, name, given.get(name))


def test_sampling_params_of_vllm_become_the_same_request():
    given = dict(
        n=1,
        temperature=0.0,
        top_k=-1,
        stop=["a", "b"],
        stop_token_ids=[3],
        _eos=4,
        detokenize=True,
        bad_words=[],
    )
    told = interop.from_vllm(Struct(**given))
    assert told.params == dict(n=1, temperature=0.0, top_k=-1, stop_token_ids=[3], max_tokens=None)
    assert told.stop_strings == ("a", "b")
    assert interop.from_vllm({}).params == {"max_tokens": 16}, "its default"
    params, stop = rows(told)
    assert params.top_k[0] == 0 and stop.stop_ids[0, 0] == 3


def test_a_generation_config_becomes_the_same_request():
    published = {
        "bos_token_id": 1, "pad_token_id": 1, "do_sample": True, "eos_token_id": [2, 3], "repetition_penalty": 1.1,
        "temperature": 0.7, "top_p": 0.8, "top_k": 20, "transformers_version": "4.37.0",
    }  # fmt: skip
    told = interop.from_hf_generation_config(published)
    assert told.params == dict(
        temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1, eos_token_ids=[2, 3]
    )
    assert told.filter_order == "hf"
    shown = types.SimpleNamespace(to_dict=lambda: {"max_new_tokens": 8, "eos_token_id": 2, "num_return_sequences": 1,
                                                   "suppress_tokens": [9], "sequence_bias": [[[4], -1.0]]})  # fmt: skip
    told = interop.from_hf_generation_config(shown)
    assert told.params == dict(
        temperature=0.0, max_tokens=8, n=1, eos_token_ids=[2], banned_token_ids=[9], logit_bias={4: -1.0}
    )
    assert interop.from_hf_generation_config({"do_sample": True}).params == {"top_k": 50}


def test_lengths_that_count_the_prompt_need_its_length():
    config = {"max_length": 30, "min_length": 12}
    assert interop.from_hf_generation_config(config, 10).params == dict(
        temperature=0.0, max_tokens=20, min_tokens=2
    )
    assert "max_tokens" not in interop.from_hf_generation_config({"max_length": 20}).params, "its default"
    assert (
        interop.from_hf_generation_config({"max_length": 30, "max_new_tokens": 5}).params["max_tokens"] == 5
    )
    with pytest.raises(ValueError, match="max_length is 30 and counts the prompt: prompt_length"):
        interop.from_hf_generation_config(config)


@pytest.mark.parametrize(
    ("translate", "fields", "named"),
    [
        (interop.from_openai, {"temprature": 1}, "temprature is 1, a field that is not known"),
        (interop.from_openai, {"best_of": 4}, "best_of is 4, allowed is None, 1"),
        (interop.from_openai, {"tools": [{"type": "function"}]}, "tools is"),
        (interop.from_openai, {"response_format": {"type": "json_object"}}, "response_format is"),
        (interop.from_openai, {"top_logprobs": 2}, "top_logprobs is 2"),
        (interop.from_openai, {"logprobs": False, "top_logprobs": 2}, "top_logprobs is 2"),
        (interop.from_openai, {"stop": [""]}, "stop holds ''"),
        (interop.from_vllm, {"structured_outputs": {"json": {}}}, "structured_outputs is"),
        (interop.from_vllm, {"bad_words": ["no"]}, "bad_words are strings"),
        (interop.from_vllm, {"logprobs": -1}, "logprobs is -1"),
        (interop.from_vllm, {"use_beam_search": True}, "use_beam_search is True, a field that is not known"),
        (interop.from_hf_generation_config, {"num_beams": 4}, "num_beams is 4"),
        (interop.from_hf_generation_config, {"typical_p": 0.9}, "typical_p is 0.9, allowed is None, 1.0"),
        (interop.from_hf_generation_config, {"no_repeat_ngram_size": 3}, "no_repeat_ngram_size is 3"),
        (
            interop.from_hf_generation_config,
            {"sequence_bias": {(4, 5): 1.0}},
            "sequence_bias has the sequence",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(translate, fields, named):
    with pytest.raises(ValueError) as refused:
        translate(fields)
    assert named in str(refused.value)


# --- arrays -----------------------------------------------------------------------------------------------------------


def test_bitmasks_are_the_same_words_and_not_copied():
    words = np.array([[-1, 5], [0, -(2**31)]], np.int32)
    allowed = interop.as_allowed(words)
    assert allowed.dtype == np.uint32 and np.shares_memory(allowed, words)
    assert allowed.tolist() == [[2**32 - 1, 5], [0, 2**31]]
    assert interop.as_allowed(words[0]).shape == (1, 2)
    with pytest.raises(ValueError, match=r"bitmask is int64\[2\]"):
        interop.as_allowed(np.zeros(2, np.int64))


def test_sentinels_and_columns_of_other_loops_are_the_rows_of_make_params():
    found = interop.from_arrays(
        LIMITS,
        temperature=np.array([[-1.0], [0.0], [0.7], [1.3]], np.float32),
        top_k=np.array([2**30, -1, V, 7], np.int32),
        top_p=0.9,
        seed=np.arange(4, dtype=np.int32),
    )
    words = [
        dict(temperature=0.0),
        dict(temperature=0.0),
        dict(temperature=0.7),
        dict(temperature=1.3, top_k=7),
    ]
    wanted, _ = js.stack_rows(
        [js.make_params(LIMITS, top_p=0.9, seed=i, **each) for i, each in enumerate(words)]
    )
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert ours.dtype == theirs.dtype and (np.asarray(ours) == theirs).all()
    for name, value in (("top_k", np.zeros(3, np.int32)), ("temperature", np.ones((4, 2), np.float32))):
        with pytest.raises(ValueError, match=f"{name} has shape"):
            interop.from_arrays(LIMITS, seed=np.arange(4), **{name: value})
    with pytest.raises(ValueError, match="seed has shape"):
        interop.from_arrays(LIMITS, seed=np.zeros((4, 3), np.uint32))


def test_a_sampler_for_loops_that_split_a_key_runs_in_their_while_loop():
    sample_fn = interop.as_sample_fn(LIMITS, js.Features(tier="filtered", full_rows=False), top_k=3)
    logits = np.random.default_rng(0).normal(0, 2, (6, 1, V)).astype(np.float32)
    temperature = jnp.array([[-1.0], [1], [1], [1], [1], [1]], jnp.float32)

    @jax.jit
    def loop(logits, key):
        def body(carry):
            step, key, said = carry
            key, own = jax.random.split(key)
            return step + 1, key, said.at[step].set(sample_fn(logits, own, temperature=temperature))

        said = jnp.zeros((64, 6), jnp.int32)
        return jax.lax.while_loop(lambda carry: carry[0] < 64, body, (0, key, said))[2]

    said = np.asarray(loop(logits, jax.random.key(3)))
    assert (said[:, 0] == logits[0, 0].argmax()).all()
    for row in range(1, 6):
        best = set(np.argsort(-logits[row, 0])[:3].tolist())
        assert set(said[:, row].tolist()) <= best and len(set(said[:, row].tolist())) > 1
    assert (np.asarray(loop(logits, jax.random.key(3))) == said).all()
    assert (np.asarray(loop(logits, jax.random.key(4))) != said).any()


def while_loop(sample_fn, table, first, num_steps):
    """A bare loop: logits of the last tokens by a table f32[V, V], one split of the key a step."""

    def body(carry):
        step, key, said = carry
        key, own = jax.random.split(key)
        return step + 1, key, said.at[step + 1].set(sample_fn(table[said[step]], own))

    said = jnp.zeros((num_steps + 1, first.shape[0]), jnp.int32).at[0].set(first)
    return jax.lax.while_loop(lambda carry: carry[0] < num_steps, body, (0, jax.random.key(5), said))[2]


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_bare_while_loop_gives_the_same_tokens_on_either_kind_of_mesh(kind):
    """Logits split over the vocabulary go into the loop's sampler; tokens come out whole on every device."""
    mesh, rows = mesh_of(kind, tensor=2), jnp.arange(8, dtype=jnp.int32)
    limits, features = js.Limits(256), js.Features(tier="plain", full_rows=False)
    temperature = jnp.where(rows % 2 == 0, 1.0, -1.0)
    table = np.random.default_rng(1).normal(0, 2, (256, 256)).astype(np.float32)
    split, whole = (jax.NamedSharding(mesh, jax.P(*spec)) for spec in ((None, "tensor"), ()))
    draw = interop.as_sample_fn(limits, features, mesh=mesh, axis="tensor", temperature=temperature)
    on_mesh = jax.jit(lambda table, first: while_loop(draw, table, first, 12))
    said = on_mesh(jax.device_put(table, split), jax.device_put(rows, whole))
    alone = interop.as_sample_fn(limits, features, temperature=temperature)
    expected = np.asarray(jax.jit(lambda table, first: while_loop(alone, table, first, 12))(table, rows))
    assert np.asarray(said).tolist() == expected.tolist()
    assert said.sharding.is_fully_replicated
    best = table.argmax(axis=1)
    assert (expected[1:, 1::2] == best[expected[:-1, 1::2]]).all(), "greedy rows"
    assert (expected[1:, ::2] != best[expected[:-1, ::2]]).any()


def test_a_loop_on_the_host_that_hands_over_a_key_and_logits_takes_the_sampler():
    """tpu-inference's decode loop: sample_fn(step_rng, logits f32[B, Vp]) -> (tokens i32[B], something)."""
    draw = interop.as_sample_fn(LIMITS, js.Features(tier="filtered", full_rows=False), top_k=4)
    temperature, top_k = jnp.array([-1.0, 1.0, 1.0]), jnp.array([-1, 0, 3])
    sample_fn = jax.jit(lambda rng, logits: (draw(logits, rng, temperature=temperature, top_k=top_k), logits))
    padded = np.full((3, 128), np.nan, np.float32)
    padded[:, :V] = np.random.default_rng(2).normal(0, 1, (3, V))
    rng, tokens = jax.random.PRNGKey(0), []
    for _ in range(64):
        rng, own = jax.random.split(rng)
        tokens.append(sample_fn(own, padded)[0])
    tokens = np.asarray(tokens)
    assert tokens.dtype == np.int32 and tokens.shape == (64, 3)
    assert (tokens[:, 0] == padded[0, :V].argmax()).all()
    assert len(set(tokens[:, 1].tolist())) > 20 and tokens.max() < V
    assert set(tokens[:, 2].tolist()) == set(np.argsort(-padded[2, :V])[:3].tolist())


def test_rows_of_one_key_and_steps_of_one_stream_have_seeds_of_their_own():
    key = jax.random.key(0)
    seeds = np.concatenate([np.asarray(interop.seeds_of_key(k, 512)) for k in jax.random.split(key, 4)])
    assert seeds.dtype == np.uint32 and seeds.shape == (2048, 2)
    assert len({tuple(seed) for seed in seeds.tolist()}) == 2048
    assert (
        np.asarray(interop.seeds_of_key(jax.random.PRNGKey(0), 3)) == np.asarray(interop.seeds_of_key(key, 3))
    ).all()


# --- what a newcomer broke ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("translate", "fields", "named"),
    [
        (interop.from_openai, None, "body is None"),
        (interop.from_openai, {"logprobs": 3, "top_logprobs": 2}, "top_logprobs is 2"),
        (interop.from_openai, {"max_tokens": 5, "max_completion_tokens": 7}, "max_completion_tokens 7"),
        (interop.from_openai, {"_top_k": 5}, "_top_k is 5"),
        (interop.from_openai, {"stop": {"a": 1}}, "stop is {'a': 1}"),
        (interop.from_openai, {"stop": 5}, "stop is 5"),
        (interop.from_openai, {"logit_bias": {5.7: 2}}, "logit_bias has the key 5.7"),
        (interop.from_openai, {"logit_bias": {"1.5": 2}}, "logit_bias has the key '1.5'"),
        (interop.from_openai, {"logit_bias": {"5": 3, 5: 4}}, "token 5 twice"),
        (interop.from_openai, {"logit_bias": {"5": None}}, "logit_bias['5'] is None"),
        (interop.from_openai, {"logit_bias": [1, 2]}, "logit_bias is [1, 2]"),
        (interop.from_openai, {"tools": np.array([1, 2])}, "tools is array([1, 2])"),
        (interop.from_vllm, 5, "params is 5"),
        (interop.from_vllm, {"truncate_prompt_tokens": 4}, "truncate_prompt_tokens is 4"),
        (interop.from_hf_generation_config, {"max_time": 1.0}, "max_time is 1.0"),
        (interop.from_hf_generation_config, {"do_sample": "false"}, "do_sample is 'false'"),
        (interop.from_hf_generation_config, {"eos_token_id": 5.0}, "eos_token_id holds 5.0"),
        (interop.from_hf_generation_config, {"sequence_bias": {(5, 6): 2.0}}, "sequence (5, 6)"),
        (interop.from_hf_generation_config, {"max_length": "50"}, "max_length is '50'"),
        (
            interop.from_hf_generation_config,
            {"begin_suppress_tokens": np.array([3])},
            "begin_suppress_tokens",
        ),
    ],
)
def test_odd_fields_are_refused_by_name(translate, fields, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        translate(fields)


def test_arrays_and_unset_fields_of_other_software_are_read():
    told = interop.from_hf_generation_config(
        {"eos_token_id": np.array(5), "suppress_tokens": np.array([1, 2])}
    )
    assert told.params["eos_token_ids"] == [5] and told.params["banned_token_ids"] == [1, 2]
    assert "seed" not in interop.from_vllm({"seed": -1}).params


@pytest.mark.parametrize("seed", [-1, 7, -(2**31), 2**32 + 7, -(2**40)])
def test_a_seed_in_an_array_is_that_of_make_params(seed):
    wanted = js.make_params(LIMITS, seed=seed)[0].seed
    arrays = [np.array([seed], np.int64), np.array([[seed]], np.int64)]
    if -(2**31) <= seed < 2**31:
        arrays += [jnp.array([seed], jnp.int32), np.array([seed], np.int32)]
    for array in arrays:
        np.testing.assert_array_equal(interop.from_arrays(LIMITS, seed=array).seed, wanted)


def test_a_top_k_beyond_32_bits_is_off():
    seed = np.array([0])
    for top_k in (2**31, 2**32 + 1, np.array([2**32 + 1])):
        assert interop.from_arrays(LIMITS, top_k=top_k, seed=seed).top_k.tolist() == [0]


@pytest.mark.parametrize(
    ("features", "settings", "named"),
    [
        (js.Features("plain"), {"top_k": 1}, "tier 'plain'"),
        (js.Features("filtered", full_rows=False), {"top_p": 0.5}, "full_rows=False"),
        (js.Features("filtered"), {"temprature": 1.0}, "'temprature' is no setting"),
        (js.Features("filtered"), {"seed": 3}, "seeds come from the key"),
        (js.Features("filtered"), {"temperature": np.nan}, "temperature is nan"),
    ],
)
def test_settings_that_a_sampler_does_not_serve_are_refused_when_it_is_made(features, settings, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        interop.as_sample_fn(LIMITS, features, **settings)


def test_logits_of_another_shape_are_refused_by_a_sampler():
    draw = interop.as_sample_fn(LIMITS, js.Features("plain"))
    with pytest.raises(ValueError, match=re.escape("[2, 3, 101]")):
        draw(jnp.zeros((2, 3, V)), jax.random.key(0))


def test_a_bitmask_may_be_an_array_inside_jit():
    words = np.array([[-1, 5, 0, -2]], np.int32)
    found = jax.jit(interop.as_allowed)(words)
    np.testing.assert_array_equal(found, interop.as_allowed(words))
    assert found.dtype == np.uint32
