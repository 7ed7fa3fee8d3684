"""Steps and verifiers on a mesh: tokens, counts, statuses, logprobs and state of one device, to the bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxsample as js
from jaxsample import rng
from jaxsample.sharding import map_rows
from models.lookup import init_lookup_cache, lookup_forward
from tests import laws
from tests.meshes import assert_same_bits, collectives, largest_gather, mesh_of

pytestmark = pytest.mark.usefixtures("on_cpu")

V, PADDED, S, B = 211, 384, 24, 8
LIMITS = js.Limits(V, max_length=S, num_logprobs=2, num_logit_bias=2, num_bad_words=2, num_scales=1)
FEATURES = js.Features(full_rows=False, num_logprobs=2, num_candidates=64)
SERVED = js.Features("filtered", full_rows=False, num_candidates=64)
# The logits after each token; sharp, so that text repeats itself and drafts are accepted. Padding is NaN.
WEIGHTS = np.full((V, PADDED), np.nan, np.float32)
WEIGHTS[:, :V] = np.random.default_rng(0).normal(0, 4, (V, V))


def unembed(weights, hidden):
    return jnp.take(weights, hidden[:, :, 1], axis=0, mode="clip")


REQUESTS = [
    ({"seed": 1, "max_tokens": 9, "logprobs": 2}, [3, 4, 5]),
    ({"temperature": 0, "seed": 0, "max_tokens": 9, "logprobs": 0}, [9]),
    ({"seed": 2, "top_k": 5, "top_p": 0.8, "logprobs": 1}, [1, 2]),
    ({"seed": 3, "temperature": 0.5, "repetition_penalty": 1.7, "frequency_penalty": 0.4, "logprobs": 1}, [5, 5]),
    ({"seed": 4, "eos_token_ids": [0, 1, 2, 3], "min_tokens": 4, "logprobs": 2}, [100]),
    ({"seed": 5, "allowed_token_ids": list(range(40, 60)), "max_tokens": 10}, [7, 8]),
    ({"seed": 6, "logit_bias": {3: 6.0}, "bad_words_ids": [[3, 3], [17]], "max_tokens": 5}, [3] * 9),
]  # fmt: skip
PLAIN_REQUESTS = [
    ({"seed": 1, "max_tokens": 9}, [3, 4, 5]),
    ({"temperature": 0, "seed": 0, "max_tokens": 9}, [9]),
    ({"seed": 2, "top_k": 5, "top_p": 0.8}, [1, 2]),
    ({"seed": 3, "temperature": 0.5}, [5, 5]),
    ({"seed": 4, "eos_token_ids": [0, 1, 2, 3], "top_k": 50}, [100]),
]


prefill = js.make_prefill(lookup_forward, LIMITS)
admit = jax.jit(js.admit, static_argnames="limits")


def admitted(requests):
    """Requests of B slots, the last of them idle, and the cache with their prompts."""
    params, stop = js.stack_rows([js.make_params(LIMITS, **asked) for asked, _ in requests])
    tokens = np.zeros((B, S), np.int32)
    for slot, (_, prompt) in enumerate(requests):
        tokens[slot, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for _, prompt in requests], np.int32)
    slots = np.arange(len(requests), dtype=np.int32)
    state = admit(js.empty_requests(LIMITS, B), slots, params, stop, tokens[slots], lengths, limits=LIMITS)
    counts = np.zeros(B, np.int32)
    counts[slots] = lengths - 1
    return state, prefill(WEIGHTS, init_lookup_cache(B, S), tokens, np.zeros(B, np.int32), counts)


def emitted(step, weights, requests, cache, num_steps=6):
    """Every record of a run, and what it left."""
    records = []
    for _ in range(num_steps):
        requests, cache, record = step(weights, requests, cache)
        records.append(np.asarray(record))
    return records, requests, cache


def drafting(pick, **placed):
    """A draft model that is the target at another temperature, one proposal a step."""
    features = dataclasses.replace(SERVED, num_candidates=64)
    softer = lambda weights, hidden: unembed(weights, hidden) * 0.8
    return js.model_proposer(
        lookup_forward, softer, js.chain(1), limits=LIMITS, features=features, pick=pick, **placed
    )


@functools.cache
def alone(drafts):
    return run_on({}, drafts)


def run_on(placed, drafts):
    placing = lambda tree, *spec: tree
    if placed:
        mesh, rows = placed["mesh"], placed["batch_axis"]
        placing = lambda tree, *spec: jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*spec, rows)))
    if not drafts:
        step = js.make_decode_step(lookup_forward, unembed, limits=LIMITS, features=FEATURES, **placed)
        requests, cache = admitted(REQUESTS)
        return emitted(step, WEIGHTS, placing(requests), placing(cache, None))
    proposer = drafting(js.draw_proposals(rng.DRAFT), **placed)
    judged = dict(proposer=proposer, verify=js.verify_block)
    step = js.make_decode_step(lookup_forward, unembed, limits=LIMITS, features=SERVED, **judged, **placed)
    (requests, cache), (_, copy) = admitted(PLAIN_REQUESTS), admitted(PLAIN_REQUESTS)
    return emitted(step, (WEIGHTS, WEIGHTS), placing(requests), placing((cache, copy), None))


@pytest.mark.parametrize(
    ("drafts", "kind", "sizes", "axis", "batch_axis"),
    [
        pytest.param(False, "auto", dict(x=3), "x", (), marks=pytest.mark.large),
        pytest.param(False, "explicit", dict(data=2, tensor=4), "tensor", "data", marks=pytest.mark.large),
        pytest.param(True, "auto", dict(data=2, tensor=3), "tensor", "data", marks=pytest.mark.large),
        pytest.param(True, "explicit", dict(x=2), ("x",), (), marks=pytest.mark.large),
    ],
)
def test_steps_give_records_and_state_of_one_device(drafts, kind, sizes, axis, batch_axis):
    placed = dict(mesh=mesh_of(kind, **sizes), axis=axis, batch_axis=batch_axis)
    records, requests, cache = run_on(placed, drafts)
    expected, expected_requests, expected_cache = alone(drafts)
    assert_same_bits(records, expected)
    assert_same_bits((requests, cache), (expected_requests, expected_cache))
    if drafts:
        told = [js.unpack(record, SERVED) for record in records]
        accepted, drafted = sum(t.accepted.sum() for t in told), sum(t.drafted.sum() for t in told)
        assert 5 < accepted < drafted


@pytest.mark.large
def test_the_split_step_takes_masks_of_nodes_row_by_row():
    masks = np.zeros((B, 3, LIMITS.num_words), np.uint32)
    masks[:, :, 2] = np.arange(1, B + 1)[:, None]
    records = []
    for placed in ({}, dict(mesh=mesh_of(x=4), axis="x")):
        judged = dict(proposer=js.ngram_proposer(js.chain(2)), limits=LIMITS, features=FEATURES)
        propose, ahead, tail = js.make_split_step(lookup_forward, unembed, **judged, **placed)
        requests, cache = admitted(REQUESTS)
        requests, cache, weights = requests, (cache, ()), (WEIGHTS, ())
        drafted = propose(weights, requests, cache)
        record = tail(weights, requests, cache, drafted, ahead(weights, requests, cache, drafted), masks)[2]
        records.append(np.asarray(record))
    assert_same_bits(*records)
    tokens = js.unpack(records[0], FEATURES).tokens[: len(REQUESTS), 0]
    bits = np.where(tokens >= 0, (np.arange(1, 8) >> (tokens - 64)) & 1, 1)
    assert bits.all() and (tokens >= 0).sum() >= 5


def step_on_three_devices(**given):
    """A compiled step of plain decoding, and its records and state."""
    mesh = mesh_of(x=3)
    weights = jax.device_put(WEIGHTS, NamedSharding(mesh, PartitionSpec(None, "x")))
    state = jax.device_put(admitted(PLAIN_REQUESTS), NamedSharding(mesh, PartitionSpec()))
    features = dataclasses.replace(SERVED, num_logprobs=0)
    given = dict(limits=LIMITS, features=features, mesh=mesh, axis="x") | given
    compiled = js.make_decode_step(lookup_forward, unembed, **given).lower(weights, *state).compile()
    return compiled, emitted(compiled, weights, *state)


def test_a_step_has_one_all_to_all_and_one_all_gather_and_never_gathers_logits():
    compiled, expected = step_on_three_devices()
    assert collectives(compiled) == {"all-to-all": 1, "all-gather": 1}
    assert largest_gather(compiled) < B * PADDED // 3
    # With candidates in place of logits the same comes out.
    compiled, found = step_on_three_devices(draw=js.sample_by_exchange)
    assert collectives(compiled) == {"all-to-all": 1, "all-gather": 1, "all-reduce": 2}
    assert largest_gather(compiled) <= 3 * 9  # three words of three rows a device
    assert_same_bits(found, expected)


@pytest.mark.large
def test_a_step_draws_by_exchange_on_two_axes():
    placed = dict(mesh=mesh_of("explicit", data=2, tensor=3), axis="tensor", batch_axis="data")
    rows = NamedSharding(placed["mesh"], PartitionSpec("data"))
    layers = NamedSharding(placed["mesh"], PartitionSpec(None, "data"))
    found = []
    for given in ({}, placed | {"draw": js.sample_by_exchange}):
        step = js.make_decode_step(lookup_forward, unembed, limits=LIMITS, features=SERVED, **given)
        state = admitted(PLAIN_REQUESTS)
        found.append(emitted(step, WEIGHTS, *(jax.device_put(state, (rows, layers)) if given else state)))
    assert_same_bits(*found)


@pytest.mark.large
def test_drafts_are_matched_by_exchange():
    features = dataclasses.replace(SERVED, num_logprobs=2)
    drafts = dict(limits=LIMITS, features=features, proposer=js.ngram_proposer(js.chain(2)))
    text = [9]  # what the greedy row says behind it, so that n-grams foretell it
    for _ in range(5):
        text.append(int(WEIGHTS[text[-1], :V].argmax()))
    asked = [({"temperature": 0, "seed": 0, "max_tokens": 9, "logprobs": 2}, [*text, 9]), *PLAIN_REQUESTS]
    found = []
    for given in ({}, dict(mesh=mesh_of(x=3), axis="x", draw=js.sample_by_exchange)):
        step = js.make_decode_step(lookup_forward, unembed, **drafts, **given)
        requests, cache = admitted(asked)
        found.append(emitted(step, (WEIGHTS, ()), requests, (cache, ())))
    assert_same_bits(*found)
    assert sum(js.unpack(record, features).accepted.sum() for record in found[0][0]) > 3


def test_a_draw_that_cannot_be_exchanged_is_refused():
    options = dict(limits=LIMITS, draw=js.sample_by_exchange)
    placed = dict(mesh=mesh_of(x=4), axis="x")
    weighed = dict(proposer=js.ngram_proposer(js.chain(1)), verify=js.verify_rejection)
    for given in (placed | weighed, {}, placed | {"features": FEATURES}):
        with pytest.raises(ValueError, match="draw is given with verify"):
            js.make_decode_step(lookup_forward, unembed, **options, **{"features": SERVED, **given})
    step = js.make_decode_step(lookup_forward, unembed, features=SERVED, **options, **placed)
    masks = np.zeros((B, LIMITS.num_words), np.uint32)
    with pytest.raises(ValueError, match="neither masks nor arguments"):
        step.lower(WEIGHTS, *admitted(PLAIN_REQUESTS), masks)


@pytest.mark.large
def test_steps_in_a_loop_inside_a_shard_map_of_the_callers():
    mesh = mesh_of("explicit", x=3)

    def own_columns(weights, hidden):
        columns = PADDED // 3
        shard = jax.lax.dynamic_slice_in_dim(weights, jax.lax.axis_index("x") * columns, columns, axis=1)
        return unembed(shard, hidden)

    step = js.make_decode_step(lookup_forward, own_columns, limits=LIMITS, features=SERVED, axis="x")
    width = 4 + 1

    def loop(weights, requests, cache):
        def body(state):
            requests, cache, records, index = state
            requests, cache, record = step(weights, requests, cache)
            return requests, cache, records.at[index].set(record), index + 1

        state = requests, cache, jnp.zeros((6, B, width), jnp.int32), jnp.int32(0)
        return jax.lax.while_loop(lambda state: state[3] < 6, body, state)[:3]

    whole = PartitionSpec()
    mapped = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=whole, out_specs=whole))
    given = jax.device_put((WEIGHTS, *admitted(PLAIN_REQUESTS)), NamedSharding(mesh, whole))
    requests, cache, records = mapped(*given)
    plain = js.make_decode_step(lookup_forward, unembed, limits=LIMITS, features=SERVED)
    expected, *state = emitted(plain, WEIGHTS, *admitted(PLAIN_REQUESTS))
    assert_same_bits(records, np.stack(expected))
    assert_same_bits([requests, cache], state)


VERIFIERS = {
    "match": (js.verify_match, js.chain(3), "auto", dict(x=3)),
    "rejection": (js.verify_rejection, js.chain(2), "explicit", dict(x=8)),
    "block": (js.verify_block, js.chain(3), "auto", dict(data=2, tensor=4)),
    "tree replaced": (js.verify_tree_replaced, js.from_paths([(0, 0), (1,)]), "auto", dict(x=4)),
    "tree distinct": (
        js.verify_tree_distinct,
        js.from_paths([(0, 0), (1,)]),
        "explicit",
        dict(data=4, tensor=2),
    ),
    "tree points": (js.verify_tree_points, js.from_paths([(0, 0), (1,)]), "explicit", dict(data=2, tensor=3)),
}


ALL_VERIFIERS = [pytest.param(name, marks=[pytest.mark.large] * (name != "rejection")) for name in VERIFIERS]


@pytest.mark.parametrize("name", ALL_VERIFIERS)
def test_every_verifier_gives_the_verdict_of_one_device(name):
    verify, tree, kind, sizes = VERIFIERS[name]
    generator = np.random.default_rng(5)
    num_rows, vocab = 20, 48
    log_p = jax.nn.log_softmax(generator.normal(0, 2, (num_rows, tree.num_nodes, vocab)).astype(np.float32))
    near = np.asarray(log_p)[:, tree.inner] + generator.normal(0, 0.5, (num_rows, len(tree.inner), vocab))
    log_q = None if name in ("match", "tree points") else jax.nn.log_softmax(near.astype(np.float32))
    tokens = generator.integers(0, vocab, (num_rows, tree.num_nodes)).astype(np.int32)
    best = np.asarray(log_p).argmax(axis=2)[:, [max(parent, 0) for parent in tree.parents]]
    tokens = np.where(generator.random(tokens.shape) < 0.7, best, tokens)
    live = generator.integers(0, tree.num_nodes, num_rows).astype(np.int32)
    seed, position = laws.seeds(np.arange(num_rows)), np.arange(num_rows, dtype=np.int32)

    def judge(log_p, log_q, tokens, num_live, seed, position):
        law = None if log_q is None else laws.law_of_draft(log_q)
        return verify(laws.target_of(log_p, tree, seed, position), js.Draft(tokens, num_live, law), tree), ()

    given = (log_p, log_q, tokens, live, seed, position)
    axes = ("tensor", "data") if "tensor" in sizes else ("x", ())
    expected = jax.jit(judge)(*given)
    assert len(set(np.asarray(expected[0].count).tolist())) > 1
    assert_same_bits(jax.jit(map_rows(judge, mesh_of(kind, **sizes), *axes))(*given), expected)


def test_a_batch_the_mesh_does_not_divide_is_refused():
    mesh = mesh_of(data=3, tensor=2)
    placed = dict(mesh=mesh, axis="tensor", batch_axis="data")
    step = js.make_decode_step(lookup_forward, unembed, limits=LIMITS, features=SERVED, **placed)
    with pytest.raises(ValueError, match=r"8 rows on 3 devices along \('data',\)"):
        step.lower(WEIGHTS, *admitted(PLAIN_REQUESTS))


@pytest.mark.parametrize("draw", [None, js.sample_by_exchange])
def test_a_head_narrower_than_the_vocabulary_is_refused_on_a_mesh_too(draw):
    narrow = lambda weights, hidden: unembed(weights, hidden)[..., : V - 1]
    placed = dict(mesh=mesh_of(x=3), axis="x", draw=draw)
    for given in ({}, placed):
        step = js.make_decode_step(lookup_forward, narrow, limits=LIMITS, features=SERVED, **given)
        with pytest.raises(
            ValueError, match=r"logits have 210 columns, expected at least limits\.vocab_size = 211"
        ):
            step.lower(WEIGHTS, *admitted(PLAIN_REQUESTS))


@pytest.mark.parametrize("placed", [{}, dict(mesh=mesh_of(x=3), axis="x")])
def test_a_draft_model_narrower_than_the_vocabulary_is_refused_on_a_mesh_too(placed):
    narrow = lambda weights, hidden: unembed(weights, hidden)[..., : V - 1]
    proposer = js.model_proposer(
        lookup_forward,
        narrow,
        js.chain(1),
        limits=LIMITS,
        features=SERVED,
        pick=js.draw_proposals(rng.DRAFT),
        **placed,
    )
    requests, cache = admitted(PLAIN_REQUESTS)
    with pytest.raises(ValueError, match="logits have 210 columns"):
        proposer.propose(WEIGHTS, cache, requests)


def test_the_rows_of_drafts_are_refused_by_their_own_number_not_that_of_nodes():
    placed = dict(mesh=mesh_of(data=3, tensor=2), axis="tensor", draw=js.sample_by_exchange)
    given = dict(limits=LIMITS, features=SERVED, proposer=js.ngram_proposer(js.chain(2)), **placed)
    step = js.make_decode_step(lookup_forward, unembed, **given, batch_axis="data")
    requests, cache = admitted(PLAIN_REQUESTS)
    with pytest.raises(ValueError, match=r"8 rows on 3 devices along 'data'"):
        step.lower((WEIGHTS, ()), requests, (cache, ()))
    for wrong, message in (("rows", "the mesh has no axis 'rows'"), ("tensor", "may occur only once")):
        with pytest.raises(ValueError, match=message):
            js.make_decode_step(lookup_forward, unembed, **given, batch_axis=wrong)
