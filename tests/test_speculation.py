"""The step with drafts on the lookup model: same text, same cache, nothing written that is rejected."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsample as js
from jaxsample import rng
from models.lookup import init_lookup_cache, lookup_functions

V, S = 67, 40
LIMITS = js.Limits(
    V,
    max_length=S,
    num_logit_bias=1,
    num_bad_words=2,
    bad_word_length=2,
    num_eos=3,
    num_stop_ids=5,
    num_stop_sequences=2,
    stop_sequence_length=2,
    num_scales=1,
    num_logprobs=2,
)
FEATURES = js.Features(num_logprobs=2, num_candidates=16)
SERVED = dataclasses.replace(FEATURES, full_rows=False)  # for requests that the candidates always serve
WEIGHTS, OTHER = jnp.asarray([7, 11], jnp.uint32), jnp.asarray([8, 11], jnp.uint32)
CHAIN = js.chain(2)
TREE = js.from_paths([(0, 0), (0, 1), (1, 0)])

forward, unembed = lookup_functions(V)
prefill = js.make_prefill(forward, LIMITS)
admit = jax.jit(js.admit, static_argnames="limits")
start = jax.jit(js.start, static_argnums=0)
propose_ngram = jax.jit(js.propose_ngram, static_argnames=("tree", "max_ngram", "min_ngram"))

REQUESTS = [
    ({"seed": 1, "max_tokens": 14, "logprobs": 2}, [3, 4, 5, 3, 4]),
    ({"temperature": 0, "seed": 9, "max_tokens": 20, "logprobs": 1}, [9]),
    ({"seed": 2, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.5, "max_tokens": 15, "logprobs": 2}, [1, 2]),
    ({"seed": 3, "temperature": 0.3, "frequency_penalty": 0.6, "presence_penalty": 0.3,
      "stop_sequences": [[5], [6, 7]], "logprobs": 2}, [5, 5, 5, 5]),
    ({"seed": 4, "eos_token_ids": [0, 1, 2], "stop_token_ids": [3, 4, 5, 6, 7], "min_tokens": 6, "logprobs": 0}, [50] * 20),
    ({"seed": 5, "allowed_token_ids": list(range(40, 60)), "bad_words_ids": [[41, 42], [45]], "min_p": 0.02,
      "temperature": 1.5, "logprobs": 2}, [7, 8]),
]  # fmt: skip


def _sharp(weights, hidden):
    """The lookup model on one token and with sharp logits: its text repeats itself, so that n-grams hit."""
    return unembed(weights, jnp.where(jnp.arange(3)[None, None] == 0, 0, hidden)) * 6


def _admitted(requests, num_slots=None):
    num_slots = num_slots or len(requests)
    params, stop = js.stack_rows([js.make_params(LIMITS, **asked) for asked, _ in requests])
    prompts = np.full((len(requests), S), js.PAD, np.int32)
    for row, (_, prompt) in enumerate(requests):
        prompts[row, : len(prompt)] = prompt
    lengths = np.asarray([len(prompt) for _, prompt in requests], np.int32)
    slots = np.arange(len(requests), dtype=np.int32)
    state = admit(js.empty_requests(LIMITS, num_slots), slots, params, stop, prompts, lengths, limits=LIMITS)
    tokens, counts = np.zeros((num_slots, 24), np.int32), np.zeros(num_slots, np.int32)
    tokens[: len(requests)] = np.maximum(prompts[:, :24], 0)
    counts[: len(requests)] = lengths - 1

    def cache(weights):
        return prefill(weights, init_lookup_cache(num_slots, S), tokens, np.zeros_like(counts), counts)

    return state, cache


def _run(step, weights, requests, cache, num_steps=S):
    """Everything emitted, by slot; also the final state and the sums of drafted, accepted, committed."""
    outputs = [[] for _ in range(requests.status.shape[0])]
    sums = np.zeros(3, int)
    for _ in range(num_steps):
        requests, cache, record = step(weights, requests, cache)
        told = js.unpack(record, FEATURES)
        sums += [told.drafted.sum(), told.accepted.sum(), told.count.sum()]
        for slot, out in enumerate(outputs):
            for column in range(told.count[slot]):
                numbers = (told.logprobs, told.ranks, told.top_ids, told.top_logprobs)
                out.append((int(told.tokens[slot, column]), *(x[slot, column].tobytes() for x in numbers)))
        if not (told.status == js.RUNNING).any():
            break
    return outputs, requests, cache, sums


# One compiled program of each for all tests.
plain_step = js.make_decode_step(forward, _sharp, limits=LIMITS, features=FEATURES)
ngram_step = js.make_decode_step(
    forward, _sharp, limits=LIMITS, features=FEATURES, proposer=js.ngram_proposer(js.chain(4), max_ngram=2)
)


def _greedy(requests):
    return [({**asked, "temperature": 0}, prompt) for asked, prompt in requests]


@functools.cache
def _plain(greedy=False):
    requests, cache = _admitted(_greedy(REQUESTS) if greedy else REQUESTS)
    return _run(plain_step, WEIGHTS, requests, cache(WEIGHTS))


def _same_state(requests, cache, greedy=False):
    """Requests (but for the counts of writes) and cache equal to those plain decoding left."""
    _, plain_requests, plain_cache, _ = _plain(greedy)
    requests = dataclasses.replace(requests, writes=plain_requests.writes)
    for ours, theirs in zip(jax.tree.leaves(requests), jax.tree.leaves(plain_requests), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    for ours, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(plain_cache), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_matching_ngrams_gives_the_text_cache_and_logprobs_of_plain_decoding():
    requests, cache = _admitted(REQUESTS)
    outputs, requests, (cache, _), sums = _run(ngram_step, (WEIGHTS, ()), requests, (cache(WEIGHTS), ()))
    assert outputs == _plain()[0]
    _same_state(requests, cache)
    assert sums[1] > 5, sums
    writes = jax.tree.map(np.asarray, requests.writes)
    np.testing.assert_array_equal(writes.staged, writes.committed + writes.rejected)
    np.testing.assert_array_equal(writes.committed, [len(out) for out in outputs])
    assert writes.accepted.sum() == sums[1]
    assert (writes.staged - writes.windows).sum() == sums[0]


@pytest.mark.large
def test_matching_the_models_own_draws_accepts_every_proposal():
    # A draft model equal to the target, drawing with the target's noise, proposes what the target draws: along the
    # chain of first children, that is.
    tree = js.from_paths([(0, 0, 0), (0, 1), (1, 0)])
    pick = js.draw_proposals(rng.TARGET)
    proposer = js.model_proposer(forward, _sharp, tree, limits=LIMITS, features=FEATURES, pick=pick)
    step = js.make_decode_step(forward, _sharp, limits=LIMITS, features=FEATURES, proposer=proposer)
    requests, cache = _admitted(REQUESTS)
    outputs, requests, (cache, draft_cache), sums = _run(
        step, (WEIGHTS, WEIGHTS), requests, (cache(WEIGHTS), cache(WEIGHTS))
    )
    assert outputs == _plain()[0]
    _same_state(requests, cache)
    _same_state(requests, draft_cache)
    assert sums[2] - sums[1] <= len(REQUESTS) * -(-20 // (tree.max_depth + 1)) + len(REQUESTS)


VERIFIERS = {
    "rejection": (js.verify_rejection, CHAIN, js.draw_proposals(rng.DRAFT)),
    "rejection_points": (js.verify_rejection, CHAIN, js.first_proposals),
    "block": (js.verify_block, CHAIN, js.draw_proposals(rng.DRAFT)),
    "tree_distinct": (js.verify_tree_distinct, TREE, js.draw_proposals(rng.DRAFT)),
    "tree_points": (js.verify_tree_points, TREE, js.first_proposals),
}


@pytest.mark.large
@pytest.mark.parametrize(
    "name",
    VERIFIERS,
)
def test_greedy_rows_get_the_text_of_plain_decoding_from_every_verifier(name):
    verify, tree, pick = VERIFIERS[name]
    proposer = js.model_proposer(forward, _sharp, tree, limits=LIMITS, features=SERVED, pick=pick)
    step = js.make_decode_step(
        forward, _sharp, limits=LIMITS, features=SERVED, proposer=proposer, verify=verify
    )
    requests, cache = _admitted(_greedy(REQUESTS))
    outputs, requests, (cache, _), sums = _run(
        step, (WEIGHTS, OTHER), requests, (cache(WEIGHTS), cache(OTHER))
    )
    assert outputs == _plain(greedy=True)[0]
    _same_state(requests, cache, greedy=True)
    assert sums[0] > 0


@pytest.mark.large
def test_a_step_at_one_prompt_draws_by_the_models_law_whatever_the_draft():
    # 20,000 seeds at once: the first token after a fixed prompt, drafted by another model.
    num_rows = 20_000
    limits = js.Limits(16, max_length=8, num_logprobs=0)
    features = js.Features("filtered", full_rows=False, num_candidates=16)
    small_forward, small_unembed = lookup_functions(16)
    params, stop = js.neutral_params(limits, num_rows)
    params.seed[:, 0] = np.arange(num_rows)
    params.top_k[:] = np.where(np.arange(num_rows) % 2, 0, 6)
    slots = np.arange(num_rows, dtype=np.int32)
    prompts, lengths = np.full((num_rows, 1), 3, np.int32), np.ones(num_rows, np.int32)
    base = admit(js.empty_requests(limits, num_rows), slots, params, stop, prompts, lengths, limits=limits)
    logits = np.asarray(small_unembed(WEIGHTS, jnp.asarray([[[-1, 3, 0]]], jnp.int32)))[0, 0].astype(float)
    expected = []
    for k in (6, 16):
        law = np.where(np.argsort(np.argsort(-logits)) < k, np.exp(logits - logits.max()), 0)
        expected.append(law / law.sum())
    pick = js.draw_proposals(rng.DRAFT)
    proposer = js.model_proposer(
        small_forward, small_unembed, js.chain(2), limits=limits, features=features, pick=pick
    )
    step = js.make_decode_step(
        small_forward,
        small_unembed,
        limits=limits,
        features=features,
        proposer=proposer,
        verify=js.verify_block,
    )
    caches = tuple(init_lookup_cache(num_rows, 8) for _ in range(2))
    _, _, record = step((WEIGHTS, OTHER), base, caches)
    tokens = js.unpack(record, features).tokens[:, 0]
    for rows, law in ((slice(0, None, 2), expected[0]), (slice(1, None, 2), expected[1])):
        seen = np.bincount(tokens[rows], minlength=16)
        total = seen.sum()
        assert total == num_rows // 2
        assert not seen[law == 0].any()
        live = law > 0
        statistic = ((seen[live] - total * law[live]) ** 2 / (total * law[live])).sum()
        degrees = live.sum() - 1
        # Wilson-Hilferty at alpha = 1e-4.
        limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * np.sqrt(2 / (9 * degrees))) ** 3
        assert statistic < limit


def test_the_split_step_masks_every_node_by_its_own_path():
    # The grammar: even and odd tokens alternate.
    proposer = js.ngram_proposer(js.chain(2), max_ngram=2)
    parts = js.make_split_step(forward, _sharp, limits=LIMITS, features=SERVED, proposer=proposer)
    propose, ahead_of, tail = parts
    words = LIMITS.num_words
    masks = np.zeros((2, words * 32), bool)
    masks[0, 0:V:2], masks[1, 1:V:2] = True, True
    packed = np.packbits(masks, axis=1, bitorder="little").view(np.uint32)
    asked = [({"seed": seed, "max_tokens": 12}, [3, 4, 3, 4]) for seed in range(2)]
    requests, cache = _admitted(asked)
    state = (cache(WEIGHTS), ())
    outputs = [[4], [4]]
    for _ in range(12):
        drafted = propose((WEIGHTS, ()), requests, state)
        ahead = ahead_of((WEIGHTS, ()), requests, state, drafted)
        tokens = np.asarray(drafted[0].tokens)
        allowed = packed[(np.maximum(tokens, 0) + 1) % 2]
        requests, state, record = tail((WEIGHTS, ()), requests, state, drafted, ahead, allowed)
        told = js.unpack(record, FEATURES)
        for slot, out in enumerate(outputs):
            out += told.tokens[slot, : told.count[slot]].tolist()
    for out in outputs:
        assert len(out) == 13
        assert all((one + other) % 2 for one, other in itertools.pairwise(out))


def test_ngrams_propose_what_followed_the_longest_and_latest_occurrence():
    history = start(
        js.Limits(20, max_length=11),
        np.asarray([[1, 2, 3, 9, 2, 3, 8, 2, 3], [1, 2, 3, 1, 2, 4, 0, 1, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9],
                    [5, 5, 5, 0, 0, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0, 0, 0, 0]], np.int32),
        np.asarray([9, 9, 9, 3, 1], np.int32),
    )  # fmt: skip
    draft = propose_ngram(history, js.chain(3), max_ngram=3, min_ngram=1)
    np.testing.assert_array_equal(
        np.asarray(draft.tokens),
        [[3, 8, 2, 3], [2, 4, 0, 1], [9, -1, -1, -1], [5, 5, -1, -1], [7, -1, -1, -1]],
    )
    np.testing.assert_array_equal(np.asarray(draft.num_live), [3, 3, 0, 1, 0])


def test_a_longer_match_goes_before_a_later_one():
    tokens = np.asarray([[1, 2, 3, 7, 9, 3, 8, 2, 3]], np.int32)
    history = start(js.Limits(20, max_length=11), tokens, np.asarray([9], np.int32))
    draft = propose_ngram(history, js.chain(1), max_ngram=3, min_ngram=1)
    np.testing.assert_array_equal(np.asarray(draft.tokens), [[3, 7]])
    none = propose_ngram(history, js.chain(1), max_ngram=3, min_ngram=3)
    assert int(none.num_live[0]) == 0


def test_the_draft_length_follows_acceptance_and_comes_back_whole():
    state = js.new_draft_length(2)
    length = functools.partial(js.draft_length_of, target_rate=0.5, shortest=1, longest=6)
    np.testing.assert_array_equal(np.asarray(length(state)), [6, 6])
    for _ in range(40):
        state = js.update_draft_length(
            state, jnp.asarray([4, 0], jnp.int32), jnp.asarray([0, 0], jnp.int32), decay=0.5
        )
    np.testing.assert_array_equal(np.asarray(length(state)), [1, 6])
    for _ in range(40):
        state = js.update_draft_length(
            state, jnp.asarray([4, 4], jnp.int32), jnp.asarray([4, 1], jnp.int32), decay=0.5
        )
    np.testing.assert_array_equal(np.asarray(length(state)), [6, 3])


def test_an_adaptive_proposer_changes_the_number_of_proposals_and_not_the_text():
    inner = js.ngram_proposer(js.chain(4), max_ngram=2)
    proposer = js.adaptive(inner, target_rate=0.9, decay=0.5)
    step = js.make_decode_step(forward, _sharp, limits=LIMITS, features=FEATURES, proposer=proposer)
    requests, cache = _admitted(REQUESTS)
    state = ((), js.new_draft_length(len(REQUESTS)))
    outputs, requests, (cache, (_, lengths)), _ = _run(step, (WEIGHTS, ()), requests, (cache(WEIGHTS), state))
    assert outputs == _plain()[0]
    _same_state(requests, cache)
    assert (np.asarray(lengths.rate) < 1).any()


@pytest.mark.parametrize(
    "wrong", [{"target_rate": 0.0}, {"decay": 1.0}, {"shortest": 5}, {"longest": 9}, {"shortest": -1}]
)
def test_adaptive_bounds_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        js.adaptive(js.ngram_proposer(js.chain(4)), **wrong)


def test_a_head_proposes_from_the_hidden_state_the_root_was_drawn_from():
    def predict(weights, hidden, requests):
        # The lookup model's hidden state of the position before the root names that position's own token.
        del weights
        token = (hidden[:, 1].astype(jnp.int32) + requests.root) % V
        tokens = jnp.stack([requests.root, token], axis=1)
        return js.Draft(tokens, jnp.ones_like(requests.root))

    proposer, make_state = js.head_proposer(predict, js.chain(1), width=3)
    seen = []

    def spy(weights, state, requests):
        draft, staged = proposer.propose(weights, state, requests)
        jax.debug.callback(lambda t, n: seen.append((t.tolist(), n.tolist())), draft.tokens, draft.num_live)
        return draft, staged

    features = dataclasses.replace(SERVED, tier="filtered")  # all that this request needs
    step = js.make_decode_step(
        forward, _sharp, limits=LIMITS, features=features, proposer=proposer._replace(propose=spy)
    )
    requests, cache = _admitted(REQUESTS[:1])
    outputs, _, _, _ = _run(step, (WEIGHTS, ()), requests, (cache(WEIGHTS), make_state(1)))
    jax.effects_barrier()
    assert outputs == _plain()[0][:1]
    assert seen[0][1] == [0]
    text = REQUESTS[0][1] + [entry[0] for entry in outputs[0]]
    place = len(REQUESTS[0][1]) - 1
    for tokens, num_live in seen[1:]:
        place += 1
        while text[place] != tokens[0][0]:
            place += 1
        if num_live == [1] and place < len(text):
            assert tokens[0][1] == (text[place - 1] + text[place]) % V


def test_a_resumed_request_takes_nothing_from_the_last_tenant_of_its_slot():
    def predict(weights, hidden, requests):
        del weights, hidden
        tokens = jnp.stack([requests.root, requests.root], axis=1)
        return js.Draft(tokens, jnp.ones_like(requests.root))

    head, make_state = js.head_proposer(predict, js.chain(1), width=3)
    slow = js.adaptive(js.ngram_proposer(js.chain(4), max_ngram=2), target_rate=1.0)
    asked, prompt = REQUESTS[0]
    params, stop = js.stack_rows(
        [js.make_params(LIMITS, **asked), js.make_params(LIMITS, **asked | {"seed": 99})]
    )
    prompts = np.tile(np.asarray([*prompt, 7, 3, 4], np.int32), (2, 1))  # three tokens were emitted before
    lengths, emitted = np.full(2, len(prompt), np.int32), np.full(2, 3, np.int32)
    state = admit(
        js.empty_requests(LIMITS, 2),
        np.arange(2, dtype=np.int32),
        params,
        stop,
        prompts,
        lengths,
        emitted,
        limits=LIMITS,
    )
    # The slots were the first request's, which had emitted as much: its own past counts, another's does not.
    past = dataclasses.replace(
        js.new_draft_length(2).past,
        seed=jnp.tile(state.params.seed[:1], (2, 1)),
        num_emitted=jnp.asarray(emitted),
    )
    hidden, _ = make_state(2)
    assert head.propose((), (hidden, past), state)[0].num_live.tolist() == [1, 0]
    rate = js.DraftLength(jnp.full(2, 0.25), past)
    assert slow.propose((), ((), rate), state)[1][1].tolist()[0] == 1
    assert slow.propose((), ((), rate), state)[1][1].tolist()[1] > 1
    earlier = dataclasses.replace(past, num_emitted=jnp.asarray(emitted) - 1)
    assert head.propose((), (hidden, earlier), state)[0].num_live.tolist() == [0, 0]


def test_a_smaller_draft_vocabulary_widens_to_the_targets():
    wide = js.widen(jnp.asarray([[1.0, 2.0]]), jnp.asarray([4, 1]), 6)
    np.testing.assert_array_equal(np.asarray(wide), [[-np.inf, 2, -np.inf, -np.inf, 1, -np.inf]])
    for ids, message in (
        ([4, -1], "-1 to 4, allowed are 0 ... 5"),
        ([6, 0], "0 to 6"),
        ([1, 1], "2 distinct"),
        ([1], "2 distinct"),
    ):
        with pytest.raises(ValueError, match=message):
            js.widen(jnp.asarray([[1.0, 2.0]]), np.asarray(ids), 6)


def test_proposers_refuse_what_they_cannot_do():
    with pytest.raises(ValueError, match="branches"):
        js.ngram_proposer(TREE)
    with pytest.raises(ValueError, match="min_ngram"):
        js.ngram_proposer(CHAIN, max_ngram=2, min_ngram=3)


def test_a_cancelled_request_commits_nothing():
    requests, cache = _admitted(REQUESTS)
    requests = js.cancel(requests, np.arange(3, dtype=np.int32))
    before = np.asarray(cache(WEIGHTS).keys)
    after, (new_cache, _), record = ngram_step((WEIGHTS, ()), requests, (cache(WEIGHTS), ()))
    told = js.unpack(record, FEATURES)
    assert told.count[:3].tolist() == [0, 0, 0]
    assert told.drafted[:3].tolist() == [0, 0, 0]
    np.testing.assert_array_equal(np.asarray(new_cache.keys)[:, :3], before[:, :3])
    assert dataclasses.is_dataclass(after)


@pytest.mark.large
@pytest.mark.parametrize(
    ("verify", "placeholder"), [(js.verify_rejection, 200), (js.verify_tree_points, -100)]
)
def test_placeholders_of_a_prompt_are_never_proposed_nor_emitted(verify, placeholder):
    # What followed the last [5] is no token: prompts may hold ids that stand for images.
    limits, features = js.Limits(128, max_length=32), js.Features("plain", num_candidates=8)
    flat = lambda weights, hidden: jnp.zeros((*hidden.shape[:2], 128), jnp.float32)
    params, stop = js.stack_rows([js.make_params(limits, seed=seed) for seed in range(200)])
    prompts = np.tile(np.asarray([5, placeholder, placeholder, 7, 5], np.int32), (200, 1))
    lengths, slots = np.full(200, 5, np.int32), np.arange(200, dtype=np.int32)
    state = js.admit(js.empty_requests(limits, 200), slots, params, stop, prompts, lengths, limits=limits)
    step = js.make_decode_step(
        forward, flat, limits=limits, features=features, proposer=js.ngram_proposer(CHAIN), verify=verify
    )
    _, _, record = step((WEIGHTS, ()), state, (init_lookup_cache(200, 32), ()))
    out = js.unpack(record, features)
    assert (out.count == 1).all()
    assert ((out.tokens[:, 0] >= 0) & (out.tokens[:, 0] < 128)).all()


def test_steps_refuse_what_is_no_proposer_no_verifier_and_too_few_logits():
    sizes = dict(limits=LIMITS, features=FEATURES)
    with pytest.raises(ValueError, match="verify is 'block'"):
        js.make_decode_step(forward, unembed, **sizes, proposer=js.ngram_proposer(CHAIN), verify="block")
    with pytest.raises(ValueError, match="proposer is "):
        js.make_decode_step(forward, unembed, **sizes, proposer=CHAIN)
    state, cache = _admitted(REQUESTS[:1])
    narrow = lambda weights, hidden: unembed(weights, hidden)[..., : V - 1]
    with pytest.raises(ValueError, match=f"logits have {V - 1} columns"):
        js.make_decode_step(forward, narrow, **sizes)(WEIGHTS, state, cache(WEIGHTS))


@pytest.mark.parametrize(("name", "place"), [("weights", 0), ("cache", 2)])
def test_a_step_with_a_proposer_asks_for_pairs(name, place):
    state, cache = _admitted(REQUESTS[:1])
    proposer = js.ngram_proposer(CHAIN)
    step = js.make_decode_step(
        forward, unembed, limits=LIMITS, features=FEATURES, proposer=proposer, verify=js.verify_match
    )
    given = [(WEIGHTS, ()), state, (cache(WEIGHTS), ())]
    given[place] = given[place][0]
    with pytest.raises(ValueError, match=f"{name} is a .*pair"):
        step(*given)
