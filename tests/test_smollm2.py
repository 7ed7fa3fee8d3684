"""SmolLM2-135M, the real weights: transformers' text and logprobs through drafts, and JSON under a schema."""

import json

import jax
import llguidance
import numpy as np
import pytest

import jaxsample as js
from models.command_line import COMPANIONS
from models.decoder import decoder_functions
from models.fetch import fetch_smollm2
from models.generation import Request, generate
from models.load import load
from models.load_value import load_value_model
from models.speculation import Speculation
from models.value_training import predicted_length, value_logits
from tests import test_grammar
from tests.test_models import DATA, tolerance

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    return load(fetch_smollm2(), np.float32)


@pytest.mark.large
def test_greedy_text_and_logprobs_with_ngram_drafts_are_those_of_transformers(model):
    expected = json.loads((DATA / "smollm2_expected.json").read_text())
    requests = []
    for prompt in expected:
        text = prompt["text"] if prompt["kind"] == "plain" else model.text.render(prompt["messages"])
        assert text == prompt["text"]
        ids = model.text.encode(text)
        assert ids == prompt["ids"]
        assert (
            model.text.tokenizer.decode(prompt["greedy_ids"], skip_special_tokens=False)
            == prompt["greedy_text"]
        )
        requests.append(
            Request(ids, {"temperature": 0.0, "max_tokens": 48, "logprobs": 20, "prompt_logprobs": 20})
        )
    drafts = Speculation(3, "match")
    replies, timing = generate(model.config, model.weights, requests, speculation=drafts)
    assert sum(timing.accepted_at) > 10
    with np.load(DATA / "smollm2_expected.npz") as file:
        vectors = dict(file)
    for index, reply in enumerate(replies):
        top_ids, top = vectors[f"top20_ids_{index}"], vectors[f"top20_logprobs_{index}"]
        error = tolerance(model.config, top)
        entries = [*reply.prompt_logprobs[1:], reply.samples[0].logprobs[0]]
        for position, entry in enumerate(entries):
            actual = dict(entry.top)
            for token, value in zip(top_ids[position].tolist(), top[position]):
                # The last of the twenty may be another token where two are nearly equal.
                assert abs(actual.get(token, top[position, -1]) - value) <= error
        clear = np.cumprod(vectors[f"greedy_top2_gap_{index}"] > 2 * error) > 0
        assert clear.mean() > 0.9
        sample = reply.samples[0]
        assert (np.array(sample.token_ids) == vectors[f"greedy_ids_{index}"])[clear].all()
        logprobs = np.array([entry.logprob for entry in sample.logprobs])
        assert np.abs(logprobs - vectors[f"greedy_logprobs_{index}"])[clear].max() <= error


@pytest.mark.large
def test_json_under_a_schema(model):
    forward, unembed = decoder_functions(model.config)
    tokenizer = model.text.tokenizer
    end = model.text.eos_token_ids[0]
    limits = js.Limits(model.config.vocab_size, max_length=160)
    prompt = tokenizer.encode("A person in JSON, with name, age and tags: ", add_special_tokens=False).ids
    asked = {"eos_token_ids": [end], "max_tokens": 80, "top_k": 40}
    params, stop = js.stack_rows(
        [js.make_params(limits, temperature=t, seed=s, **asked) for s, t in enumerate((0.0, 0.8))]
    )
    features = js.required_features(params, stop, limits=limits, grammar=True)
    prompts, lengths = np.asarray([prompt, prompt], np.int32), np.full(2, len(prompt), np.int32)
    slots = np.arange(2, dtype=np.int32)
    admit = jax.jit(js.admit, static_argnames="limits")
    requests = admit(js.empty_requests(limits, 2), slots, params, stop, prompts, lengths, limits=limits)
    shape = model.config
    cache = js.init_cache(
        shape.num_layers, 2, limits.max_length, shape.num_kv_heads, shape.head_size, np.float32
    )
    cache = js.make_prefill(forward, limits)(
        model.weights, cache, prompts[:, :-1], np.zeros(2, np.int32), lengths - 1
    )
    step = js.make_decode_step(forward, unembed, limits=limits, features=features)
    ll_tokenizer = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=limits.vocab_size, eos_token=end)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(test_grammar.SCHEMA)
    matchers = {slot: llguidance.LLMatcher(ll_tokenizer, grammar) for slot in range(2)}
    outputs, status = test_grammar.generate(step, model.weights, requests, cache, features, matchers, 81)
    for slot in range(2):
        assert status[slot] == js.STOP_EOS
        value = json.loads(tokenizer.decode(outputs[slot][:-1]))
        assert set(value) == {"name", "age", "tags"}


def test_the_value_model_that_comes_with_it_expects_more_of_an_essay_than_of_a_number(model):
    guide = load_value_model(COMPANIONS["smollm2"], np.float32, model)
    asked = (
        "Write an essay of several paragraphs about trains.",
        "Which is larger, 7 or 9? Only the number.",
    )
    prompts = [model.text.encode(model.text.render([{"role": "user", "content": x}])) for x in asked]
    tokens = np.zeros((2, 64), np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = ids
    z = np.asarray(jax.jit(value_logits(guide.config))(guide.weights, tokens))
    essay, digit = (predicted_length(z[row, len(ids) - 1], guide.gamma) for row, ids in enumerate(prompts))
    assert essay > 100 > 30 > digit
