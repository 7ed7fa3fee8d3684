"""models/serving on the lookup model, exactly: requests alone and among others, cancelling, failing, back-pressure."""

import io
import json

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsample as js
from jaxsample.buckets import Buckets
from jaxsample.engine import Engine, EngineStats
from models.figures import progress_line
from models.line_reader import LineReader
from models.lookup import lookup_functions
from models.serving import Service
from models.stop_strings import StoppedText
from models.text import TokenIds
from scripts.serve import Progress, serve
from tests.test_serve import as_lines, joined
from tests.test_stop_strings import SPECIAL, STOPS, WORD_TEXT

V, S, PAGE, SLOTS, WAITING = 101, 64, 8, 4, 2
BAD = V - 1  # after this token the logits are NaN


@pytest.fixture(scope="module")
def engine():
    forward, unembed = lookup_functions(V)
    limits = js.Limits(V, max_length=S, num_logprobs=2)
    features = (js.Features(num_candidates=32, num_logprobs=2),)
    return Engine(
        forward,
        lambda weights, hidden: jnp.where(hidden[..., 1:2] == BAD, jnp.nan, unembed(weights, hidden)),
        jnp.asarray([7, 11], jnp.uint32),
        lambda num_pages, page_size, table: js.init_paged_cache(
            1, num_pages, page_size, 1, 1, jnp.float32, table
        ),
        limits=limits,
        buckets=Buckets((SLOTS,), (S,), ((2, 16),), features, updates=(SLOTS,), prompt_logprobs=2),
        num_pages=SLOTS * S // PAGE,
        page_size=PAGE,
        max_waiting=WAITING,
    )


@pytest.fixture
def serve_all(engine):
    """A function: requests as dicts -> what each sample got; `between` is called before each step."""

    def run(requests, between=lambda service, num_steps: None):
        events = []
        service = Service(engine, TokenIds(V), events.append, defaults={"max_tokens": 12})
        waiting = [
            service.read(number, json.dumps(fields)) for number, fields in enumerate(requests, start=1)
        ]
        num_steps = 0
        while waiting or not service.is_idle:
            while waiting and service.handle(waiting[0]):
                waiting.pop(0)
            between(service, num_steps)
            service.step()
            num_steps += 1
        while service.step():
            pass
        assert engine.stats.num_seated == 0 and engine.stats.num_free_pages == engine.stats.num_pages
        return joined(events)

    return run


def random_request(generator, number):
    chosen = generator.random(6)
    return {
        "id": {"number": number},
        "prompt_token_ids": generator.integers(V - 1, size=int(generator.integers(1, 30))).tolist(),
        "seed": number,
        "temperature": float(generator.choice([0.0, 0.8, 1.2])),
        "banned_token_ids": [BAD],
        "max_tokens": int(generator.integers(1, 30)),
        **(
            {"stop": [str(int(generator.integers(10, 99))), "7 5", f"{number % 10} "]}
            if chosen[0] < 0.5
            else {}
        ),
        **({"logprobs": 1} if chosen[1] < 0.3 else {}),
        **({"n": int(generator.integers(2, 4))} if chosen[2] < 0.3 else {}),
        **({"stop_token_ids": [3, 4, 5]} if chosen[3] < 0.3 else {}),
        **({"stop_sequences": [[10], [20], [30], [40]]} if chosen[4] < 0.4 else {}),
        **({"top_p": 0.9, "frequency_penalty": 0.3} if chosen[5] < 0.3 else {}),
    }


def test_a_request_gets_the_same_alone_and_among_others_in_any_order(serve_all):
    generator = np.random.default_rng(8)
    requests = [random_request(generator, number) for number in range(20)]
    together = serve_all(requests)
    assert len(together) == sum(request.get("n", 1) for request in requests) > 20
    assert {type(reply["stop_reason"]) for reply in together.values()} == {str, int, list, type(None)}
    assert serve_all([requests[place] for place in generator.permutation(20)]) == together
    alone = {}
    for request in requests:
        alone |= serve_all([request])
    assert alone == together


def test_a_stop_string_cuts_what_the_same_request_gives_without_it(serve_all):
    generator = np.random.default_rng(9)
    requests = [random_request(generator, number) for number in range(40)]
    cut = serve_all(requests)
    whole = serve_all(
        [{key: value for key, value in request.items() if key != "stop"} for request in requests]
    )
    num_stopped = 0
    for request in requests:
        for index in range(request.get("n", 1)):
            key = json.dumps(request["id"]), index
            reply, plain = cut[key], whole[key]
            ends = [
                (plain["text"].index(stop) + len(stop), -place)
                for place, stop in enumerate(request.get("stop", []))
                if stop in plain["text"]
            ]
            if not ends:
                assert reply == plain
                continue
            num_stopped += 1
            end, place = min(ends, key=lambda pair: (pair[0], -pair[1]))
            stop = request["stop"][-place]
            assert reply["text"] == plain["text"][: end - len(stop)] and reply["stop_reason"] == stop
            assert reply["finish_reason"] == "stop"
            num_kept = len(reply["token_ids"])
            assert reply["token_ids"] == plain["token_ids"][:num_kept]
            assert reply.get("logprobs", []) == plain.get("logprobs", [])[:num_kept]
            texts = [TokenIds(V).decode(plain["token_ids"][:count]) for count in range(num_kept + 1)]
            assert [text.startswith(reply["text"]) for text in texts] == [False] * num_kept + [True]
    assert num_stopped > 10


def test_cancelling_ends_the_samples_of_one_request_where_they_are(serve_all):
    fields = {"prompt_token_ids": [5], "seed": 1, "max_tokens": 40, "n": 2, "banned_token_ids": [BAD]}
    requests = [{"id": name, **fields} for name in "ab"]
    plain = serve_all(requests)

    def cancel(service, num_steps):
        if num_steps == 10:
            service.handle(service.read(9, '{"cancel": "a"}'))

    cut = serve_all(requests, cancel)
    for index in range(2):
        assert cut['"b"', index] == plain['"b"', index]
        reply, whole = cut['"a"', index], plain['"a"', index]
        assert (reply["finish_reason"], whole["finish_reason"]) == ("cancelled", "length")
        assert reply["token_ids"] == whole["token_ids"][: reply["num_tokens"]]
        assert 0 < reply["num_tokens"] < 40 and whole["text"].startswith(reply["text"])


def test_the_prompts_logprobs_come_once_before_any_text(engine):
    events: list = []
    service = Service(engine, TokenIds(V), events.append)
    prompt, fields = list(range(1, 41)), {"seed": 1, "max_tokens": 3, "n": 2}
    for number, asked in ((1, {"prompt_logprobs": 2}), (2, {}), (3, {"prompt_logprobs": 0})):
        line = service.read(
            number, json.dumps({"prompt_token_ids": prompt[: 41 - number], **fields, **asked})
        )
        while not service.handle(line):
            service.step()
    while not service.is_idle:
        service.step()
    for number, num_top in ((1, 2), (3, 0)):
        first, *rest = [event for event in events if event["id"] == number]
        assert sorted(first) == ["id", "prompt_logprobs"] and all("index" in event for event in rest)
        head, *entries = first["prompt_logprobs"]
        assert head is None and [entry["token_id"] for entry in entries] == prompt[1 : 41 - number]
        assert all(len(entry["top"]) == num_top and entry["rank"] >= 1 for entry in entries)
    assert not any("prompt_logprobs" in event for event in events if event["id"] == 2)


def test_a_request_that_fails_says_why_and_touches_no_others(serve_all):
    good = [
        {"id": seed, "prompt_token_ids": [seed], "seed": seed, "banned_token_ids": [BAD]} for seed in range(6)
    ]
    bad = {"id": "bad", "prompt_token_ids": [1], "allowed_token_ids": [BAD]}
    plain, mixed = serve_all(good), serve_all([*good[:3], bad, *good[3:]])
    failed = mixed.pop(('"bad"', 0))
    assert (failed["finish_reason"], failed["text"], failed["num_tokens"]) == ("error", str(BAD), 1)
    assert "NaN" in failed["error"]
    assert mixed == plain


def test_no_more_lines_are_read_than_the_queue_has_room_for(engine):
    class Counting(io.BytesIO):
        num_read = 0

        def __next__(self):
            self.num_read += 1
            return super().__next__()

    class Watched(Service):
        most = 0

        def step(self):
            ended = sum("finish_reason" in event for event in events)
            self.most = max(self.most, source.num_read - ended)
            return super().step()

    fields = {"banned_token_ids": [BAD], "max_tokens": 4}
    source = Counting(as_lines([{"prompt_token_ids": [seed], "seed": seed, **fields} for seed in range(40)]))
    events = []
    service = Watched(engine, TokenIds(V), events.append)
    with LineReader(source) as lines:
        assert serve(service, lines, io.StringIO(), Progress(engine, False), []) == 0
    assert len(joined(events)) == 40
    # In slots, in the queue, one for which it has no room, two read ahead and one in the reader's hand.
    assert SLOTS < service.most <= SLOTS + WAITING + 4


@hypothesis.settings(max_examples=200)
@hypothesis.given(st.lists(st.integers(0, SPECIAL), max_size=16), STOPS)
def test_tokens_given_out_are_never_taken_back(ids, stop_strings):
    for include_stop in (False, True):
        reply = StoppedText(WORD_TEXT, stop_strings, include_stop=include_stop)
        text, certain = "", [0]
        for token in ids:
            text += reply.push([token])
            certain.append(reply.num_certain)
            assert WORD_TEXT.decode(ids[: certain[-1]]).startswith(text)
        text += reply.flush()
        assert certain == sorted(certain) and certain[-1] <= reply.num_kept == reply.num_certain


def test_tokens_wait_for_their_text_and_no_longer():
    reply = StoppedText(TokenIds(100), [" 3 4", "9 8"])
    pieces = [(reply.push([token]), reply.num_certain) for token in (1, 3, 5, 29, 3, 3)]
    assert pieces == [("1", 1), ("", 1), (" 3 5", 3), (" 2", 4), ("9", 4), (" 3", 5)]


def test_the_figures_say_what_runs_and_how_fast():
    before = EngineStats(0, 0, 8, 10, 10, 100, 50, 0, 0, 0)
    now = EngineStats(3, 7, 8, 2, 10, 160, 80, 40, 30, 0)
    assert progress_line(before, now, 2.0) == (
        "7 of 8 slots, 3 waiting, 30.0 tokens/s, 75% of drafts accepted"
    )
