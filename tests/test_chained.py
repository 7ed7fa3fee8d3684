"""A draft head that goes on from its own output: what it is given, what it keeps, that text stays as it is.

The head is the lookup model on a cache of its own, which checks that it is handed the target's hidden states: where
all is as it should be its outputs are the target's next hidden states, and every proposal is right.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsample as js
from jaxsample import rng
from jaxsample.chained import forget_rows
from models.lookup import init_lookup_cache, lookup_forward
from tests.test_speculation import (
    FEATURES,
    LIMITS,
    REQUESTS,
    WEIGHTS,
    S,
    _admitted,
    _greedy,
    _plain,
    _run,
    _sharp,
    forward,
)

NUM_DRAFTS = 2


def head_forward(weights, tokens, hidden, positions, cache, mask):
    """The hidden state's token, the token behind it, and a fault where the head's cache has another token there."""
    outputs, staged = lookup_forward(weights, tokens, positions, cache, mask)
    wrong = (hidden[..., 1] != outputs[..., 0]) & (positions > 0)  # slot 0 has none before it
    fault = outputs[..., 2] + wrong.astype(jnp.int32)
    return jnp.stack([hidden[..., 1], tokens, fault], axis=-1), staged


def proposer_for(pick):
    tree = js.chain(NUM_DRAFTS)
    return js.chained_head_proposer(head_forward, _sharp, tree, limits=LIMITS, features=FEATURES, pick=pick)


def step_with(verify, purpose):
    proposer = proposer_for(js.draw_proposals(purpose))
    return js.make_decode_step(
        forward, _sharp, limits=LIMITS, features=FEATURES, proposer=proposer, verify=verify
    )


match_step = step_with(js.verify_match, rng.TARGET)


def new_state(num_rows):
    return js.empty_head_state(init_lookup_cache(num_rows, S), 3, jnp.int32)


@functools.partial(jax.jit, donate_argnums=0)
def observe(state, tokens, successors, counts, seed):
    """The prompt in two chunks, with the hidden states that the target's prefill would have there."""
    previous = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    hidden = jnp.stack([previous, tokens, jnp.zeros_like(tokens)], axis=-1)
    for chunk in (slice(0, 3), slice(3, None)):
        lengths = jnp.minimum(counts, chunk.start)
        here = jnp.clip(counts - chunk.start, 0, tokens[:, chunk].shape[1])
        given = hidden[:, chunk], successors[:, chunk], lengths, here
        state = js.observe_prompt(head_forward, WEIGHTS, state, *given, seed)
    return state


def observed(requests, asked):
    """The head's state once it has seen all prompts."""
    tokens, successors = np.zeros((2, len(asked), 20), np.int32)
    counts = np.asarray([len(prompt) - 1 for _, prompt in asked], np.int32)
    for row, (_, prompt) in enumerate(asked):
        tokens[row, : len(prompt) - 1], successors[row, : len(prompt) - 1] = prompt[:-1], prompt[1:]
    return observe(new_state(len(asked)), tokens, successors, counts, requests.params.seed)


def test_a_head_that_is_right_has_all_its_proposals_accepted_and_text_is_that_of_plain_decoding():
    requests, cache = _admitted(REQUESTS)
    state = observed(requests, REQUESTS)
    outputs, requests, (_, state), sums = _run(
        match_step, (WEIGHTS, WEIGHTS), requests, (cache(WEIGHTS), state)
    )
    assert outputs == _plain()[0]
    # Not accepted is only what lies behind a request's end. Of a prompt of one token there is nothing to observe:
    # its first step proposes nothing.
    first = [int(len(prompt) == 1) for _, prompt in REQUESTS]
    num_steps = sum(plain + -(-(len(out) - plain) // (NUM_DRAFTS + 1)) for plain, out in zip(first, outputs))
    assert sums[1] == sum(map(len, outputs)) - num_steps > 50
    assert np.asarray(state.start).tolist() == [0] * len(REQUESTS)


def test_a_slot_of_another_tenant_or_of_nobody_proposes_nothing_at_first_and_text_stays():
    requests, cache = _admitted(REQUESTS)
    outputs, _, (_, left), _ = _run(
        match_step, (WEIGHTS, WEIGHTS), requests, (cache(WEIGHTS), new_state(len(REQUESTS)))
    )
    assert outputs == _plain()[0]
    for state in (left, forget_rows(observed(_admitted(REQUESTS)[0], REQUESTS), jnp.arange(6))):
        requests, cache = _admitted(REQUESTS)
        requests, _, record = match_step((WEIGHTS, WEIGHTS), requests, (cache(WEIGHTS), state))
        told = js.unpack(record, FEATURES)
        assert told.drafted.tolist() == [0] * len(REQUESTS) and (told.count == 1).all()
        assert told.tokens[:, 0].tolist() == [out[0][0] for out in outputs]


@pytest.mark.large
@pytest.mark.parametrize("verify", [js.verify_rejection, js.verify_block])
def test_greedy_text_is_that_of_plain_decoding_where_laws_are_weighed(verify):
    asked = _greedy(REQUESTS)
    requests, cache = _admitted(asked)
    state = observed(requests, asked)
    step = step_with(verify, rng.DRAFT)
    outputs, _, _, sums = _run(step, (WEIGHTS, WEIGHTS), requests, (cache(WEIGHTS), state))
    assert outputs == _plain(greedy=True)[0]
    assert sums[1] > 20


def test_what_is_no_chain_and_a_cache_that_does_not_fit_are_refused():
    options = dict(limits=LIMITS, features=FEATURES, pick=js.first_proposals)
    for tree in (js.from_paths([(0,), (1,)]), js.chain(0)):
        with pytest.raises(ValueError, match="no chain of proposals"):
            js.chained_head_proposer(head_forward, _sharp, tree, **options)
    requests, cache = _admitted(REQUESTS[:1])
    state = js.empty_head_state(init_lookup_cache(1, S - 1), 3, jnp.int32)
    with pytest.raises(ValueError, match=f"1 rows of {S - 1} slots, expected 1 of at least max_length = {S}"):
        match_step((WEIGHTS, WEIGHTS), requests, (cache(WEIGHTS), state))
