"""The jitted step on the lookup model, exactly: against a plain loop, and against itself in any company."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsample as js
from models.lookup import init_lookup_cache, lookup_functions, table

V, PADDED, S = 211, 224, 48
LIMITS = js.Limits(V, max_length=S, num_logprobs=4)
FEATURES = js.Features(num_logprobs=4)
TOKENS = js.Features(full_rows=False)  # no logprobs, for requests that the candidates always serve
WEIGHTS = jnp.asarray([7, 11], jnp.uint32)

forward, unembed = lookup_functions(V, padded_size=PADDED)
step = js.make_decode_step(forward, unembed, limits=LIMITS, features=FEATURES)
prefill = js.make_prefill(forward, LIMITS)
admit = jax.jit(js.admit, static_argnames="limits")
sample = jax.jit(js.sample, static_argnames=("limits", "features"))
start, append = jax.jit(js.start, static_argnums=0), jax.jit(js.append)
logits_of = jax.jit(table, static_argnums=4)

REQUESTS = [
    ({"seed": 1, "max_tokens": 12, "logprobs": 4}, [3, 4, 5]),
    ({"temperature": 0, "max_tokens": 9, "logprobs": 0}, [9]),
    ({"seed": 2, "top_k": 5, "top_p": 0.8, "max_tokens": 15, "logprobs": 2}, [1, 2]),
    ({"seed": 3, "temperature": 2.5, "repetition_penalty": 1.7, "frequency_penalty": 0.4, "logprobs": 1,
      "presence_penalty": 0.3, "max_tokens": 20}, [5, 5, 5, 5]),
    ({"seed": 4, "eos_token_ids": list(range(4)), "min_tokens": 6, "top_p": 0.999, "logprobs": 3}, [100]),
    ({"seed": 5, "allowed_token_ids": list(range(40, 60)), "min_p": 0.1, "max_tokens": 10,
      "logprobs": 4}, [7, 8]),
    ({"seed": 6, "logit_bias": {3: 6.0, 9: -np.inf}, "bad_words_ids": [[3, 3], [17]], "max_tokens": 11,
      "logprobs": 4}, [3] * 20),
    ({"seed": 7, "top_k": 150, "top_p": 0.97, "stop_sequences": [[1], [2], [3], [4]], "logprobs": 4}, [0]),
]  # fmt: skip


def _admit_all(num_slots, slots, chosen, chunk=None):
    """Requests and cache with requests REQUESTS[chosen[i]] in slots[i], prompts committed."""
    chosen = [REQUESTS[i] for i in chosen]
    params, stop = js.stack_rows([js.make_params(LIMITS, **asked) for asked, _ in chosen])
    prompts = np.full((len(chosen), S), js.PAD, np.int32)
    tokens = np.zeros((num_slots, S), np.int32)
    lengths, counts = np.zeros(len(chosen), np.int32), np.zeros(num_slots, np.int32)
    for row, (slot, (_, prompt)) in enumerate(zip(slots, chosen, strict=True)):
        prompts[row, : len(prompt)] = tokens[slot, : len(prompt)] = prompt
        lengths[row], counts[slot] = len(prompt), len(prompt) - 1
    requests = js.empty_requests(LIMITS, num_slots)
    requests = admit(requests, np.asarray(slots, np.int32), params, stop, prompts, lengths, limits=LIMITS)
    cache = init_lookup_cache(num_slots, S)
    done = np.zeros_like(counts)
    chunk = chunk or 24
    for start in range(0, int(counts.max()), chunk):
        now = np.clip(counts - start, 0, chunk)
        piece = np.zeros((num_slots, chunk), np.int32)
        piece[:, : min(chunk, S - start)] = tokens[:, start : start + chunk]
        cache = prefill(WEIGHTS, cache, piece, done, now)
        done = done + now
    return requests, cache


def _run(requests, cache, num_steps=52):
    """All outputs of a run, by slot: tokens, logprobs, ranks, top ids, top logprobs, status."""
    outputs = [[] for _ in range(requests.status.shape[0])]
    status = np.asarray(requests.status)
    for _ in range(num_steps):
        requests, cache, record = step(WEIGHTS, requests, cache)
        told = js.unpack(record, FEATURES)
        status = told.status
        for slot, out in enumerate(outputs):
            for column in range(told.count[slot]):
                out.append(
                    (
                        int(told.tokens[slot, column]),
                        told.logprobs[slot, column].tobytes(),
                        int(told.ranks[slot, column]),
                        told.top_ids[slot, column].tobytes(),
                        told.top_logprobs[slot, column].tobytes(),
                    )
                )
        if not (status == js.RUNNING).any():
            break
    return outputs, status, requests, cache


@functools.cache
def _alone(index):
    outputs, status, _, cache = _run(*_admit_all(1, [0], [index]))
    return outputs[0], int(status[0]), np.asarray(cache.keys[:, 0])


@pytest.mark.parametrize("index", range(len(REQUESTS)))
def test_a_step_emits_what_a_plain_loop_around_sample_emits(index):
    asked, prompt = REQUESTS[index]
    params, stop = js.make_params(LIMITS, **asked)
    padded = np.asarray([prompt + [js.PAD] * (S - len(prompt))], np.int32)
    history = start(LIMITS, padded, np.asarray([len(prompt)], np.int32))
    static = {"limits": LIMITS, "features": FEATURES}
    text, out = list(prompt), []
    emitted, status, _ = _alone(index)
    for _ in emitted:
        previous = text[-2] if len(text) > 1 else -1
        logits = logits_of(WEIGHTS, *(np.full((1,), x, np.int32) for x in (previous, text[-1], 0)), V)
        position = np.asarray([len(text)], np.int32)
        sampled = sample(logits, params, position, stop=stop, history=history, **static)
        history = append(history, sampled.tokens[:, None], jnp.ones(1, jnp.int32))
        text.append(int(sampled.tokens[0]))
        out.append((int(sampled.tokens[0]), np.asarray(sampled.logprobs.token[0]).tobytes()))
    assert out == [entry[:2] for entry in emitted]
    assert js.finish_reason(status) in ("stop", "length")


def test_a_request_alone_equals_itself_in_a_full_batch_in_any_slot():
    rng = np.random.default_rng(0)
    num_slots = 64
    chosen = rng.integers(0, len(REQUESTS), 60)
    slots = rng.permutation(num_slots)[:60]
    outputs, status, _, cache = _run(*_admit_all(num_slots, slots, chosen))
    for slot, index in zip(slots, chosen, strict=True):
        alone, alone_status, keys = _alone(int(index))
        assert outputs[slot] == alone
        assert status[slot] == alone_status
        np.testing.assert_array_equal(np.asarray(cache.keys[:, slot]), keys)
    assert set(np.asarray(status)[np.setdiff1d(np.arange(num_slots), slots)]) == {js.IDLE}


def test_neighbours_with_nan_logits_change_nothing():
    emitted = {entry[0] for index in (2, 3) for entry in _alone(index)[0]}
    poison = min(set(range(V)) - emitted)
    poisoned = js.make_decode_step(
        forward,
        lambda weights, hidden: jnp.where(hidden[..., 1:2] == poison, jnp.nan, unembed(weights, hidden)),
        limits=LIMITS,
        features=TOKENS,
    )
    requests, cache = _admit_all(4, [2, 0], [2, 3])
    params, stop = js.make_params(LIMITS, seed=9)
    bad_prompt = np.asarray([[poison]], np.int32)
    requests = admit(
        requests, np.asarray([1], np.int32), params, stop, bad_prompt, np.ones(1, np.int32), limits=LIMITS
    )
    tokens = {0: [], 2: []}
    for index in range(15):
        requests, cache, record = poisoned(WEIGHTS, requests, cache)
        told = js.unpack(record, TOKENS)
        if index == 0:
            assert told.status[1] == js.ERROR
            assert told.count[1] == 0
        for slot, out in tokens.items():
            out += told.tokens[slot, : told.count[slot]].tolist()
    for slot, index in ((2, 2), (0, 3)):
        assert tokens[slot][:15] == [entry[0] for entry in _alone(index)[0]][:15]


def test_the_cache_holds_prompt_and_output_and_nothing_behind():
    outputs, _, requests, cache = _run(*_admit_all(1, [0], [0]))
    text = REQUESTS[0][1] + [entry[0] for entry in outputs[0]]
    keys = np.asarray(cache.keys)[0, 0, :, 0, 0]
    length = int(requests.length[0])
    assert length == len(text) - 1
    np.testing.assert_array_equal(keys[:length], np.asarray(text[:-1]) + 1)
    assert not keys[length:].any()


@pytest.mark.parametrize("chunk", [1, 7, 19])
def test_prefill_in_chunks_leaves_the_cache_of_one_prefill(chunk):
    _, whole = _admit_all(2, [1, 0], [6, 3])
    _, pieces = _admit_all(2, [1, 0], [6, 3], chunk=chunk)
    np.testing.assert_array_equal(np.asarray(whole.keys), np.asarray(pieces.keys))
    np.testing.assert_array_equal(np.asarray(whole.values), np.asarray(pieces.values))


def test_a_grammar_mask_given_to_the_step_holds():
    step = js.make_decode_step(forward, unembed, limits=LIMITS, features=TOKENS)
    requests, cache = _admit_all(1, [0], [0])
    allowed = np.zeros((1, LIMITS.num_words), np.uint32)
    allowed[0, 2] = 0b1010
    for _ in range(6):
        requests, cache, record = step(WEIGHTS, requests, cache, allowed)
        assert int(js.unpack(record, TOKENS).tokens[0, 0]) in (65, 67)


@functools.cache
def _compiled():
    """The step for all requests, compiled, and the bytes of its state."""
    requests, cache = _admit_all(len(REQUESTS), *[range(len(REQUESTS))] * 2)
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((requests, cache)))
    return step.lower(WEIGHTS, requests, cache).compile(), state_bytes


def test_the_program_holds_no_predicate_for_the_host():
    # A conditional, or a loop of unknown length, makes a GPU's host thread wait for the device.
    text = _compiled()[0].as_text()
    assert " conditional(" not in text
    loops = [line for line in text.splitlines() if " while(" in line]
    assert loops
    assert all("known_trip_count" in line for line in loops)


def test_state_is_updated_in_place_and_the_host_gets_one_array():
    compiled, state_bytes = _compiled()
    requests, cache = _admit_all(len(REQUESTS), *[range(len(REQUESTS))] * 2)
    assert compiled.memory_analysis().alias_size_in_bytes == state_bytes
    _, _, record = compiled(WEIGHTS, requests, cache)
    assert record.shape == (len(REQUESTS), 4 + 1 + 1 + 1 + 2 * 4)
    assert record.dtype == jnp.int32


def test_a_step_is_traced_once_whatever_the_requests():
    traces = []

    def counting(*arguments):
        traces.append(1)
        return forward(*arguments)

    counted = js.make_decode_step(
        counting, unembed, limits=LIMITS, features=js.Features("plain", full_rows=False)
    )
    for chosen in ([0, 1], [2, 3], [6, 7]):
        requests, cache = _admit_all(2, [0, 1], chosen)
        for _ in range(3):
            requests, cache, _ = counted(WEIGHTS, requests, cache)
    assert len(traces) == 1


def test_without_logprobs_the_record_holds_tokens_alone():
    features = js.Features("plain", full_rows=False)
    plain = js.make_decode_step(forward, unembed, limits=LIMITS, features=features)
    requests, cache = _admit_all(1, [0], [0])
    _, _, record = plain(WEIGHTS, requests, cache)
    told = js.unpack(record, features)
    assert told.tokens.tolist() == [[_alone(0)[0][0][0]]]
    assert told.count.tolist() == [1]
    assert told.logprobs.shape == (1, 0)
    assert told.top_ids.shape == (1, 0, 0)


def test_a_chunk_wider_than_the_cache_is_refused():
    _, cache = _admit_all(1, [0], [1])
    with pytest.raises(ValueError, match="max_length"):
        prefill(WEIGHTS, cache, np.zeros((1, S + 1), np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))


def test_many_steps_in_one_launch_are_the_steps_one_by_one():
    num_steps = 12
    many = js.make_decode_many(forward, unembed, num_steps, limits=LIMITS, features=FEATURES)
    slots = list(range(len(REQUESTS)))
    requests, cache = _admit_all(len(slots), slots, slots)
    records = []
    for _ in range(num_steps):
        requests, cache, record = _compiled()[0](WEIGHTS, requests, cache)
        records.append(np.asarray(record))
    again = many(WEIGHTS, *_admit_all(len(slots), slots, slots))
    np.testing.assert_array_equal(np.asarray(again[2]), np.stack(records))
    moved = lambda requests, cache: jax.tree.leaves(
        (requests.history, requests.length, requests.root, requests.status, requests.writes, cache)
    )
    for left, right in zip(moved(requests, cache), moved(*again[:2]), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
    assert (np.asarray(requests.status) != js.RUNNING).any(), "some row idled"
    with pytest.raises(ValueError, match="num_steps is 0"):
        js.make_decode_many(forward, unembed, 0, limits=LIMITS, features=FEATURES)
