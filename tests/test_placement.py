"""A decoder on a mesh of devices: logits of one device to rounding, the text of one device, refusals with numbers."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsample
from models.decoder import decoder_functions
from models.engines import Sizes, build_engine
from models.generation import Request, generate
from models.joining import join_projections
from models.placement import AXES, cache_sharding, make_mesh, mesh_sizes, place_model, repeat_kv_heads
from models.random_weights import random_weights
from models.speculation import Speculation
from scripts.generate import main
from tests.meshes import collectives, largest_gather
from tests.test_models import SMALL, tolerance

LLAMA = dataclasses.replace(SMALL, num_layers=1, vocab_size=96, num_heads=12, num_kv_heads=3, mlp_width=48)
mesh_of = lambda text: make_mesh(mesh_sizes(text))
FAMILIES = {
    "llama": LLAMA,
    "qwen2": dataclasses.replace(LLAMA, qkv_bias=True, tied_embeddings=True),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True),
}


@functools.cache
def weights_of(family):
    return random_weights(FAMILIES[family], 3)


def logits_of(config, weights, cache=None):
    forward, unembed = decoder_functions(config)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (4, 3)), jnp.int32)
    lengths = jnp.array([0, 5, 8, 2], jnp.int32)

    @jax.jit
    def run(weights, cache):
        positions = lengths[:, None] + jnp.arange(3, dtype=jnp.int32)[None]
        mask = jaxsample.attention_mask(lengths, jaxsample.chain(2), 8)
        return unembed(weights, forward(weights, tokens, positions, cache, mask)[0])

    return np.asarray(run(weights, cache))


def filled_cache(config, repeated=1):
    shape = (config.num_layers, 4, 8, config.num_kv_heads // repeated, config.head_size)
    rng = np.random.default_rng(1)
    keys, values = (np.repeat(rng.standard_normal(shape, np.float32), repeated, axis=3) for _ in range(2))
    return jaxsample.KVCache(jnp.asarray(keys), jnp.asarray(values))


@pytest.mark.parametrize(
    ("family", "mesh", "joined"),
    [
        ("llama", "data=2,tensor=3", False),
        ("qwen2", "tensor=6", False),  # three key-value heads, each on two devices
        pytest.param("qwen3", "data=2,tensor=3", True, marks=pytest.mark.large),
        ("qwen3", "tensor=6", True),
    ],
)
def test_logits_on_a_mesh_are_those_of_one_device_to_rounding(family, mesh, joined):
    config, weights = FAMILIES[family], weights_of(family)
    expected = logits_of(config, weights, filled_cache(config))
    if joined:
        config, weights = join_projections(config, jax.tree.map(jnp.array, weights))
    mesh = mesh_of(mesh)
    placed, split = place_model(config, weights, mesh)
    repeated = placed.num_kv_heads // config.num_kv_heads
    assert repeated == mesh.shape["tensor"] // 3
    down = split["layers"][0]["mlp"]["down"]["weight"]
    assert down.addressable_shards[0].data.shape == (config.width, config.mlp_width // mesh.shape["tensor"])
    embedding = split["embedding"]["weight"]
    assert embedding.addressable_shards[0].data.shape[0] == config.vocab_size // mesh.shape["tensor"]
    cache = jax.device_put(filled_cache(placed, repeated), cache_sharding(placed, 4, mesh))
    assert cache.keys.addressable_shards[0].data.shape[3] == placed.num_kv_heads // mesh.shape["tensor"]
    assert np.abs(logits_of(placed, split, cache) - expected).max() <= tolerance(config, expected)


@pytest.mark.large
def test_repeated_heads_are_the_same_model():
    config, weights = FAMILIES["qwen2"], weights_of("qwen2")
    wider, repeated = repeat_kv_heads(config, weights, 4)
    assert wider.num_kv_heads == 12
    expected = logits_of(config, weights, filled_cache(config))
    found = logits_of(wider, repeated, filled_cache(wider, 4))
    assert np.abs(found - expected).max() <= tolerance(config, expected)


def test_a_vocabulary_that_devices_do_not_divide_is_padded_in_the_head_and_never_gathered():
    V, B, S = 1000, 6, 8
    config, mesh = dataclasses.replace(LLAMA, vocab_size=V, tied_embeddings=True), mesh_of("tensor=3")
    weights = random_weights(config, 3)
    placed, split = place_model(config, weights, mesh)
    assert placed.vocab_size == V and split["embedding"]["weight"].shape[0] == 3 * 3 * 128

    limits, features = jaxsample.Limits(V, max_length=S), jaxsample.Features("plain", full_rows=False)
    params, stop = jaxsample.neutral_params(limits, B)
    params.temperature[:] = 0
    slots = np.arange(B, dtype=np.int32)
    prompts, lengths = 7 * slots[:, None], np.ones(B, np.int32)
    requests = jaxsample.empty_requests(limits, B)
    requests = jaxsample.admit(requests, slots, params, stop, prompts, lengths, limits=limits)
    forward, unembed = decoder_functions(config)
    cache = jaxsample.init_cache(1, B, S, config.num_kv_heads, config.head_size, jnp.float32)
    mask = jaxsample.attention_mask(slots * 0, jaxsample.chain(0), S)
    run = jax.jit(lambda weights: unembed(weights, forward(weights, prompts, prompts * 0, cache, mask)[0]))
    expected = np.asarray(run(weights)).argmax(axis=2)

    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = jax.device_put((requests, cache), (whole, cache_sharding(config, B, mesh)))
    given = dict(limits=limits, features=features, mesh=mesh, axis="tensor")
    step = jaxsample.make_decode_step(forward, unembed, **given).lower(split, *state).compile()
    counted = collectives(step)
    assert (counted["all-to-all"], counted["all-gather"]) == (1, 1)
    assert largest_gather(step) < B * V // 3
    *_, record = step(split, *state)
    np.testing.assert_array_equal(jaxsample.unpack(record, features).tokens, expected)


REQUESTS = [
    Request([1, 2, 3], {"temperature": 0, "max_tokens": 8, "logprobs": 1, "prompt_logprobs": 1}),
    Request([4], {"seed": 5, "top_k": 9, "temperature": 0.8, "max_tokens": 6, "n": 2}),
]


@functools.cache
def text_of_one_device(config):
    replies, _ = generate(config, random_weights(config, 3), REQUESTS, num_slots=16)
    return replies


@pytest.mark.parametrize(
    ("mesh", "vocab_size", "drafts"),
    [
        pytest.param("data=2,tensor=3", 96, False, marks=pytest.mark.large),
        pytest.param("data=2,tensor=3", 100, False, marks=pytest.mark.large),
        pytest.param("data=3,tensor=2", 96, True, marks=pytest.mark.large),
    ],
)
def test_generation_on_a_mesh_gives_the_text_of_one_device(mesh, vocab_size, drafts):
    config = dataclasses.replace(LLAMA, vocab_size=vocab_size)
    if drafts:  # two key-value heads on two devices, since three do not go there
        config = dataclasses.replace(FAMILIES["qwen2"], num_kv_heads=2)
    weights = random_weights(config, 3)
    speculation = Speculation(3, "match", (config, weights)) if drafts else None
    placed = dict(mesh=mesh_of(mesh), speculation=speculation)
    replies, _ = generate(config, weights, REQUESTS, num_slots=16, **placed)
    expected = text_of_one_device(config)
    for reply, wanted in zip(replies, expected):
        assert [sample.token_ids for sample in reply.samples] == [
            sample.token_ids for sample in wanted.samples
        ]
        assert [sample.status for sample in reply.samples] == [sample.status for sample in wanted.samples]
    for of in (lambda reply: reply.samples[0].logprobs, lambda reply: reply.prompt_logprobs[1:]):
        found, wanted = ([entry.logprob for entry in of(answers[0])] for answers in (replies, expected))
        np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("mesh", "verify"),
    [
        pytest.param("data=2,tensor=3", None, marks=pytest.mark.large),
        pytest.param("tensor=6", None, marks=pytest.mark.large),
        pytest.param("data=2,tensor=3", "match", marks=pytest.mark.large),
    ],
)
def test_an_engine_on_a_mesh_gives_the_text_of_one_device(mesh, verify, monkeypatch):
    # One program of each kind.
    features = jaxsample.Features("filtered", full_rows=False, num_logprobs=0)
    monkeypatch.setattr("models.engines._levels", lambda *_, **modes: (features,))
    config, weights = FAMILIES["llama"], weights_of("llama")
    speculation = verify and Speculation(2, verify, (config, weights))
    mesh = mesh_of(mesh)
    sizes = Sizes(slots=3, max_length=16)
    engine = build_engine(config, weights, sizes, speculation=speculation, mesh=mesh)
    assert engine.stats.num_slots == (4 if mesh.shape["data"] == 2 else 3)
    asked = [{**request.params, "logprobs": 0} for request in REQUESTS]
    for params in asked:
        params.pop("prompt_logprobs", None)
    streams = [
        engine.submit(jaxsample.Request(request.prompt, params)) for request, params in zip(REQUESTS, asked)
    ]
    engine.run()
    expected = text_of_one_device(config)
    for stream, wanted in zip(streams, expected):
        found = [sample.tokens().token_ids.tolist() for sample in stream.samples]
        assert found == [sample.token_ids for sample in wanted.samples]
    logprobs = [entry.logprob for entry in expected[0].samples[0].logprobs]
    np.testing.assert_allclose(streams[0].samples[0].tokens().logprobs, logprobs, atol=1e-4)
    assert verify is None or engine.stats.num_accepted > 4
    pages = engine._state.cache.keys
    assert pages.addressable_shards[0].data.shape[3] == 1  # one key-value head a device
    step = next(program for name, program in engine._programs.items() if name[0] == "step")
    if verify is None:
        assert collectives(step)["all-to-all"] == 1
    assert largest_gather(step) < min(pages.size, 4 * config.vocab_size)


@pytest.mark.slow
@pytest.mark.large
def test_the_command_line_takes_a_mesh_and_prints_the_same_text(capsys):
    printed = []
    for arguments in ([], ["--mesh", "data=2,tensor=3"]):
        assert main(["Why is the sky blue?", "--temperature", "0", "--max-tokens", "12", *arguments]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and len(printed[0]) > 20


def test_the_command_line_refuses_a_mesh_before_it_loads_a_model(capsys):
    assert main(["a", "--mesh", "model=2"]) == 2
    assert "mesh is 'model=2', expected data=D,tensor=P" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=2,model=3", "mesh is 'data=2,model=3', expected data=D,tensor=P with sizes from 1"),
        ("data=2,data=4", "mesh is 'data=2,data=4', expected data=D,tensor=P with sizes from 1"),
        ("tensor=0", "mesh is 'tensor=0', expected"),
        ("tensor", "mesh is 'tensor', expected"),
        ("data=3,tensor=3", "mesh data=3,tensor=3 needs 9 devices, there are 8"),
    ],
)
def test_a_mesh_in_other_words_is_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        mesh_of(text)


def test_heads_that_the_devices_do_not_divide_are_refused_with_their_numbers():
    config, weights = FAMILIES["llama"], weights_of("llama")
    with pytest.raises(ValueError, match="12 query and 3 key-value heads on 8 devices along 'tensor'"):
        place_model(config, weights, mesh_of("tensor=8"))
    with pytest.raises(ValueError, match="12 query and 3 key-value heads on 4 devices along 'tensor'"):
        place_model(config, weights, mesh_of("tensor=4"))
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("data",))
    with pytest.raises(ValueError, match="the mesh has no axis 'tensor', only data"):
        place_model(config, weights, mesh)
    assert set(AXES.values()) == {"data", "tensor"}
