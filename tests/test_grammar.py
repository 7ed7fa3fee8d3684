"""Real grammars: llguidance masks drive generation to JSON that fits a schema."""

import json

import jax
import jax.numpy as jnp
import llguidance
import llguidance.numpy
import numpy as np
import tokenizers

import jaxsample as js
from models.lookup import init_lookup_cache, lookup_functions

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},  # random draws would fill the text with blanks
    }
)
NUM_SLOTS = 6
admit = jax.jit(js.admit, static_argnames="limits")


def _byte_tokenizer():
    """One token a byte, and an end token: a tokenizer that needs no file."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def generate(step, weights, requests, cache, features, matchers, num_steps):
    """Run a batch in which some slots follow a grammar; text ids by slot, and statuses."""
    num_slots = requests.status.shape[0]
    outputs = [[] for _ in range(num_slots)]
    status = np.asarray(requests.status)
    masks = np.full((num_slots, requests.params.allowed.shape[1]), -1, np.int32)
    for _ in range(num_steps):
        for slot, matcher in matchers.items():
            if status[slot] == js.RUNNING:
                llguidance.numpy.fill_next_token_bitmask(matcher, masks, slot)
        requests, cache, record = step(weights, requests, cache, masks.view(np.uint32))
        told = js.unpack(record, features)
        status = told.status
        for slot in np.flatnonzero(told.count):
            token = int(told.tokens[slot, 0])
            outputs[slot].append(token)
            if slot in matchers:
                assert matchers[slot].consume_token(token), matchers[slot].get_error()
        if not (status == js.RUNNING).any():
            break
    return outputs, status


def _admitted(limits, vocab_size, requests_of_slots):
    params, stop = js.stack_rows([js.make_params(limits, **asked) for asked in requests_of_slots])
    num_slots = len(requests_of_slots)
    prompts = np.ones((num_slots, 1), np.int32)
    lengths, slots = np.ones(num_slots, np.int32), np.arange(num_slots, dtype=np.int32)
    empty = js.empty_requests(limits, num_slots)
    requests = admit(empty, slots, params, stop, prompts, lengths, limits=limits)
    return requests, js.required_features(params, stop, limits=limits, grammar=True)


def test_rows_with_a_grammar_write_json_and_free_rows_are_what_they_are_alone():
    tokenizer = _byte_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    end = tokenizer.token_to_id("<end>")
    limits = js.Limits(vocab_size, max_length=200)
    # min_tokens asks for more than the grammar gives: a finished grammar outranks it.
    asked = [
        {
            "seed": slot,
            "eos_token_ids": [end],
            "temperature": 0.5 * slot,
            "min_tokens": 180,
            "max_tokens": 190,
        }
        for slot in range(NUM_SLOTS)
    ]
    requests, features = _admitted(limits, vocab_size, asked)
    forward, unembed = lookup_functions(vocab_size)
    weights = jnp.asarray([1, 2], jnp.uint32)
    step = js.make_decode_step(forward, unembed, limits=limits, features=features)
    ll_tokenizer = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=end)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA)
    matchers = {slot: llguidance.LLMatcher(ll_tokenizer, grammar) for slot in range(NUM_SLOTS - 1)}
    cache = init_lookup_cache(NUM_SLOTS, limits.max_length)
    outputs, status = generate(step, weights, requests, cache, features, matchers, 190)

    written = []
    for slot in matchers:
        assert status[slot] == js.STOP_EOS
        assert outputs[slot][-1] == end
        written.append(json.loads(tokenizer.decode(outputs[slot][:-1])))
    for value in written:
        assert set(value) == {"name", "age", "tags"}
        assert 0 <= value["age"] <= 150
        assert set(value["tags"]) <= {"red", "green", "blue"}
    assert len({json.dumps(value) for value in written}) > 1

    requests, _ = _admitted(limits, vocab_size, [{"seed": 99}] * (NUM_SLOTS - 1) + [asked[-1]])
    alone, _ = generate(step, weights, requests, init_lookup_cache(NUM_SLOTS, 200), features, {}, 190)
    assert outputs[-1] == alone[-1]
