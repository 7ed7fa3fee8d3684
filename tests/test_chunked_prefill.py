"""Prompts prefilled in chunks between the decode steps of other rows: no token of anyone changes.

On the lookup model, whose logits show any token in a wrong slot, and exactly.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsample
from models.lookup import init_lookup_cache, lookup_functions

LIMITS = jaxsample.Limits(vocab_size=61, max_length=40)
WEIGHTS = jnp.array([4, 2], jnp.uint32)
PROMPTS = [[5, 6, 7, 8], [9, 1], [3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9, 3], [17, 20, 17, 20, 17, 20, 17]]
NUM_TOKENS = 14
WIDTH = 4  # of a chunk


def make_programs():
    forward, unembed = lookup_functions(LIMITS.vocab_size)
    # Seeded draws at temperature 0.9 from the whole vocabulary: any change of a logit shows in the tokens.
    rows = [
        jaxsample.make_params(LIMITS, temperature=0.9, seed=row, max_tokens=NUM_TOKENS)
        for row in range(len(PROMPTS))
    ]
    features = jaxsample.required_features(*jaxsample.stack_rows(rows), limits=LIMITS)
    step = jaxsample.make_decode_step(forward, unembed, limits=LIMITS, features=features)
    admit = jax.jit(jaxsample.admit, static_argnames="limits")
    return rows, features, jaxsample.make_prefill(forward, LIMITS), step, admit


ROWS, FEATURES, PREFILL, STEP, ADMIT = make_programs()


class Run:
    """A batch of as many slots as there are prompts; a request keeps its slot."""

    def __init__(self):
        self.requests = jaxsample.empty_requests(LIMITS, len(PROMPTS))
        self.cache = init_lookup_cache(len(PROMPTS), LIMITS.max_length)
        self.done = np.zeros(len(PROMPTS), np.int32)  # prompt tokens committed
        self.tokens = [[] for _ in PROMPTS]

    def prefill_chunk(self, rows):
        """One call over all slots, with a count of 0 for all that are not in `rows`."""
        tokens = np.full((len(PROMPTS), WIDTH), jaxsample.PAD, np.int32)
        counts = np.zeros(len(PROMPTS), np.int32)
        for row in rows:
            part = PROMPTS[row][:-1][self.done[row] : self.done[row] + WIDTH]
            tokens[row, : len(part)], counts[row] = part, len(part)
        self.cache = PREFILL(WEIGHTS, self.cache, tokens, self.done.copy(), counts)
        self.done += counts

    def admit(self, row):
        assert self.done[row] == len(PROMPTS[row]) - 1
        prompt = np.full((1, 16), jaxsample.PAD, np.int32)
        prompt[0, : len(PROMPTS[row])] = PROMPTS[row]
        slot, length = np.array([row], np.int32), np.array([len(PROMPTS[row])], np.int32)
        self.requests = ADMIT(self.requests, slot, *ROWS[row], prompt, length, limits=LIMITS)

    def prefill_all(self, row):
        while self.done[row] < len(PROMPTS[row]) - 1:
            self.prefill_chunk([row])
        self.admit(row)

    def step(self, num_steps=1):
        for _ in range(num_steps):
            self.requests, self.cache, record = STEP(WEIGHTS, self.requests, self.cache)
            output = jaxsample.unpack(record, FEATURES)
            for row, count in enumerate(output.count):
                self.tokens[row] += output.tokens[row, :count].tolist()


@pytest.fixture(scope="module")
def alone():
    """The tokens of each request in a batch that holds no other."""
    tokens = []
    for row in range(len(PROMPTS)):
        run = Run()
        run.prefill_all(row)
        run.step(NUM_TOKENS)
        tokens.append(run.tokens[row])
    assert [len(row) for row in tokens] == [NUM_TOKENS] * len(PROMPTS)
    return tokens


def test_rows_prefilled_in_chunks_while_others_decode_give_the_same_tokens_as_alone(alone):
    run = Run()
    run.prefill_all(0)
    run.prefill_all(1)
    run.step(2)
    run.prefill_chunk([2])
    run.step()
    run.prefill_chunk([2, 3])
    run.step(3)
    run.prefill_chunk([2, 3])
    run.admit(2)
    run.admit(3)
    run.step(NUM_TOKENS)
    assert run.tokens == alone


def test_a_chunk_leaves_the_slots_of_idle_rows_as_they_are():
    run = Run()
    run.prefill_all(0)
    run.step(2)
    before = jax.tree.map(np.array, run.cache)
    run.prefill_chunk([2])
    after = jax.tree.map(np.array, run.cache)
    others = [0, 1, 3]
    assert (before.keys[:, others] == after.keys[:, others]).all()
    assert (before.values[:, others] == after.values[:, others]).all()
    assert (before.keys[:, 2] != after.keys[:, 2]).any()
