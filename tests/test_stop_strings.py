"""Stop strings on streamed text: against decoding the whole reply and cutting it, on tokens that split characters."""

import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers
from tokenizers import decoders
from tokenizers.models import BPE

from models.stop_strings import StoppedText
from models.text import Text, TokenIds
from tests.test_text import BYTE_TOKENS, END, byte_text

# Tokens of several bytes, as a trained byte-level tokenizer has them: whole characters before the beginning of
# another (" \xf0\x9f", "b\xc3"), the rest of one before more text, bytes that belong to no character, no text.
WORDS = [b"a", b"b", b"ab", b"aab", b"?\n", b"\n", b" \xf0\x9f", b"\x98\x80", b"\x80b", b"\xe6\x97", b"\xa5"]
WORDS += [b"\xc3", b"\xa9", b"b\xc3", b"\xa9a", b"\xff", "\ufffd".encode()]
SPECIAL = len(WORDS)


def word_text():
    vocab = {"".join(BYTE_TOKENS[byte] for byte in word): index for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<end>", special=True, normalized=False)])
    return Text(tokenizer, (SPECIAL,), None, {})


WORD_TEXT, BYTE_TEXT = word_text(), byte_text()
SHORT = st.sampled_from(["a", "b", "ab", "aab", "?", "\n", "é", "😀", "\ufffd"])
STOPS = st.lists(SHORT | st.text("aab ?\né😀日\ufffd", min_size=1, max_size=5), max_size=4)
BYTES = st.sampled_from([*b"aab ?\n", *"é😀".encode(), 0xFF, END])


def ids_of(*words):
    return [SPECIAL if word is None else WORDS.index(word) for word in words]


def stream(text, pushes, stop_strings, *, include_stop=False):
    """What one reply gives: its pieces, the flush as the last; num_kept; the stop string found."""
    reply = StoppedText(text, stop_strings, include_stop=include_stop)
    pieces = [reply.push(token_ids) for token_ids in pushes]
    pieces.append(reply.flush())
    assert reply.flush() == ""
    return pieces, reply.num_kept, reply.stopped


def whole(text, ids, stop_strings, *, include_stop=False):
    """The same with the whole text in hand: the first place where a stop string ends, the fewest ids for the text."""
    everything = text.decode(ids)
    for end in range(1, len(everything) + 1):
        for stop in stop_strings:
            if everything[:end].endswith(stop):
                kept = everything[: end if include_stop else end - len(stop)]
                needed = (n for n in range(len(ids) + 1) if text.decode(ids[:n]).startswith(kept))
                return kept, next(needed), stop
    return everything, len(ids), None


def check(text, pushes, stop_strings):
    ids = [token for token_ids in pushes for token in token_ids]
    for include_stop in (False, True):
        pieces, num_kept, stopped = stream(text, pushes, stop_strings, include_stop=include_stop)
        assert ("".join(pieces), num_kept, stopped) == whole(
            text, ids, stop_strings, include_stop=include_stop
        )


@hypothesis.settings(max_examples=200)
@hypothesis.given(st.lists(st.lists(st.integers(0, SPECIAL), max_size=4), max_size=8), STOPS)
def test_streaming_words_in_any_chunks_equals_cutting_the_whole_text(pushes, stop_strings):
    check(WORD_TEXT, pushes, stop_strings)


@hypothesis.settings(max_examples=200)
@hypothesis.given(st.lists(st.lists(BYTES, max_size=8), max_size=6), STOPS)
def test_streaming_bytes_in_any_chunks_equals_cutting_the_whole_text(pushes, stop_strings):
    check(BYTE_TEXT, pushes, stop_strings)


@hypothesis.settings(max_examples=150)
@hypothesis.given(st.lists(BYTES, max_size=16), STOPS)
def test_text_waits_only_where_more_text_would_take_it_back(ids, stop_strings):
    reply = StoppedText(BYTE_TEXT, stop_strings)
    out = ""
    for count, token in enumerate(ids, start=1):
        out += reply.push([token])
        if reply.stopped is not None:
            break
        certain = BYTE_TEXT.decode(ids[:count]).rstrip("\ufffd")
        complete = certain == BYTE_TEXT.decode(ids[:count])
        assert certain.startswith(out)
        waiting = certain[len(out) :]
        assert len(waiting) <= max(map(len, stop_strings), default=1) - 1
        if waiting and complete:
            rests = [stop[len(waiting) :] for stop in stop_strings if stop.startswith(waiting)]
            ends = [stream(BYTE_TEXT, [ids[:count], BYTE_TEXT.encode(rest)], stop_strings) for rest in rests]
            assert out in ["".join(pieces) for pieces, _, stopped in ends if stopped]


@hypothesis.settings(max_examples=150)
@hypothesis.given(st.lists(st.lists(st.integers(0, SPECIAL), max_size=4), max_size=8), STOPS, st.booleans())
def test_the_tokens_certain_are_those_that_the_text_given_out_needs(pushes, stop_strings, include_stop):
    reply = StoppedText(WORD_TEXT, stop_strings, include_stop=include_stop)
    ids, out, certain = [], "", []
    for token_ids in pushes:
        ids += token_ids
        out += reply.push(token_ids)
        certain.append(reply.num_certain)
        assert certain[-1] == next(
            n for n in range(len(ids) + 1) if WORD_TEXT.decode(ids[:n]).startswith(out)
        )
    reply.flush()
    assert reply.num_certain == reply.num_kept
    assert [*certain, reply.num_kept] == sorted([*certain, reply.num_kept])


# Fault report B49: the text just before the stop string was lost.
@pytest.mark.parametrize(("words", "pieces"), [([b"?\n"], ["?", ""]), ([b"a", b"?\n"], ["a", "?", ""])])
def test_the_text_before_a_stop_string_in_the_last_token_is_shown(words, pieces):
    ids = ids_of(*words)
    assert stream(WORD_TEXT, [[token] for token in ids], ["\n"]) == (pieces, len(ids), "\n")
    assert whole(WORD_TEXT, ids, ["\n"]) == ("".join(pieces), len(ids), "\n")


# Fault report B49 again: text that only looked like a stop string comes out at the end.
def test_text_held_back_comes_out_by_the_flush():
    ids = BYTE_TEXT.encode("one\nUs")
    pieces, num_kept, stopped = stream(BYTE_TEXT, [[token] for token in ids], ["\nUser:"])
    assert pieces == ["o", "n", "e", "", "", "", "\nUs"]
    assert (num_kept, stopped) == (len(ids), None)


# Fault report B53: text, ids and logprobs of one step are cut alike.
def test_a_stop_string_early_in_a_push_of_several_tokens_drops_the_rest():
    ids = ids_of(b"a", b"b", b"?\n", b"ab", b"a", b"b")
    reply = StoppedText(WORD_TEXT, ["\n"])
    assert reply.push(ids) == "ab?"
    assert (reply.num_kept, reply.stopped) == (3, "\n")
    assert reply.push(ids) == reply.flush() == reply.push(ids) == ""
    assert (reply.num_kept, reply.stopped) == (3, "\n")


@pytest.mark.parametrize(
    ("words", "stop", "text", "num_kept", "num_kept_with_stop"),
    [
        ([b"a", b"aab"], "aab", "a", 1, 2),  # "aaab": the stop begins at the second a, not at the first
        ([b"aab", b"a"], "aab", "", 0, 1),
        ([b"aab"], "a", "", 0, 1),  # ends inside the token
        ([b"ab", b"ab"], "ba", "a", 1, 2),  # begins and ends inside tokens
        ([b"a", b"a", b"b", b"?\n", b"a"], "ab?", "a", 1, 4),  # one string, many tokens
        ([b"ab", None, b"\n"], "\n", "ab", 1, 3),  # a token without text before the stop is not needed
        ([b"a", None, b"b", b"\n"], "\n", "ab", 3, 4),  # before kept text it is
        ([b" \xf0\x9f", b"\x98\x80", b"a"], "😀", " ", 1, 2),  # a character over two tokens, with text before
        ([b" \xf0\x9f", b"\x98\x80", b"a"], "a", " 😀", 2, 3),
        ([b" \xf0\x9f", b"\x98\x80"], " ", "", 0, 1),
        ([b"b\xc3", b"\xa9a"], "a", "bé", 2, 2),  # kept up to the middle of a token
        ([b"a", b"\xff", b"b"], "b", "a\ufffd", 2, 3),  # a broken character is text like any other
        ([b"a", b"\xff"], "\ufffd", "a", 1, 2),  # found by the flush
        ([b" \xf0\x9f"], " ", "", 0, 1),  # found by the flush
    ],
)
def test_tokens_are_kept_as_far_as_the_text_needs_them(words, stop, text, num_kept, num_kept_with_stop):
    ids = ids_of(*words)
    for pushes in ([ids], [[token] for token in ids]):
        pieces, count, stopped = stream(WORD_TEXT, pushes, [stop])
        assert ("".join(pieces), count, stopped) == (text, num_kept, stop)
        pieces, count, stopped = stream(WORD_TEXT, pushes, [stop], include_stop=True)
        assert ("".join(pieces), count, stopped) == (text + stop, num_kept_with_stop, stop)


@pytest.mark.parametrize(
    ("stop_strings", "stopped", "text"),
    [
        (["cd", "bcdx"], "cd", "ab"),  # complete first, although the other began before it
        (["bcde", "bcd", "bc"], "bc", "a"),  # of those that begin at one place the shorter
        (["d", "bcd"], "d", "abc"),  # of those that end at one place the first in the list
        (["bcd", "d"], "bcd", "a"),
        (["bcd", "bcd"], "bcd", "a"),
    ],
)
def test_of_several_stop_strings_the_one_complete_first_wins(stop_strings, stopped, text):
    ids = BYTE_TEXT.encode("abcde")
    for pushes in ([ids], [[token] for token in ids]):
        pieces, num_kept, found = stream(BYTE_TEXT, pushes, stop_strings)
        assert ("".join(pieces), num_kept, found) == (text, len(text), stopped)


def test_the_order_of_stop_strings_in_one_token_is_that_of_their_ends():
    assert stream(WORD_TEXT, [ids_of(b"aab")], ["b", "a"]) == (["", ""], 0, "a")
    assert stream(WORD_TEXT, [ids_of(b"a", b"?\n")], ["?\n", "\n", "a?\n"]) == (["a", ""], 1, "?\n")


def test_a_stop_string_that_another_always_forestalls_holds_nothing_back():
    assert stream(BYTE_TEXT, [b"a", b"b"], ["b", "abc", "ab"]) == (["a", "", ""], 1, "b")


def test_a_stop_string_that_is_shown_holds_nothing_back():
    pieces, num_kept, stopped = stream(BYTE_TEXT, [[byte] for byte in b"xaaab!"], ["aab"], include_stop=True)
    assert pieces == ["x", "a", "a", "a", "b", "", ""]
    assert (num_kept, stopped) == (5, "aab")


def test_a_space_that_a_tokenizer_drops_at_the_beginning_belongs_to_its_token():
    tokenizer = tokenizers.Tokenizer(BPE({"▁one": 0, "▁two": 1}, []))
    tokenizer.decoder = decoders.Metaspace()
    text = Text(tokenizer, (), None, {})
    assert stream(text, [[0], [1], [0]], [" o"]) == (["one", " two", "", ""], 2, " o")
    assert stream(text, [[0], [1], [0]], ["wo"]) == (["one", " t", "", ""], 2, "wo")


def test_without_a_tokenizer_stop_strings_are_parts_of_lists_of_ids():
    assert stream(TokenIds(100), [[1, 23], [4, 5]], ["3 4"]) == (["1 2", "", ""], 2, "3 4")


def test_without_stop_strings_all_text_and_all_tokens_are_kept():
    ids = [*BYTE_TEXT.encode("é!"), END]
    assert stream(BYTE_TEXT, [ids[:1], [], ids[1:]], []) == (["", "", "é!", ""], 4, None)
    assert stream(BYTE_TEXT, [], ["a"]) == ([""], 0, None)


def test_tokens_after_the_flush_are_an_error():
    reply = StoppedText(BYTE_TEXT, ["a"])
    reply.flush()
    with pytest.raises(ValueError, match="push after flush"):
        reply.push([ord("b")])


@pytest.mark.parametrize(
    ("stop_strings", "named"),
    [("ab", "stop_strings is 'ab'"), (None, "is None"), (["a", ""], "holds ''"), ((b"a",), "holds b'a'")],
)
def test_what_is_no_stop_string_is_refused_by_name(stop_strings, named):
    with pytest.raises(ValueError, match=named) as error:
        StoppedText(BYTE_TEXT, stop_strings)
    assert "stop_strings" in str(error.value) and "at least one character" in str(error.value)


@pytest.mark.parametrize("string", ["word ", "aaab", "é😀"])
@pytest.mark.parametrize("stop_strings", [[], ["aaaaac", "stop"]])
def test_the_cost_of_a_token_and_what_is_remembered_do_not_grow_with_the_reply(string, stop_strings):
    class Counting:
        num_decoded = 0

        def decode(self, ids):
            self.num_decoded += len(ids)
            return BYTE_TEXT.decode(ids)

    text = Counting()
    reply = StoppedText(text, stop_strings)
    costs = []
    for token in BYTE_TEXT.encode(200 * string):
        before = text.num_decoded
        reply.push([token])
        costs.append(text.num_decoded - before)
        assert all(len(held) <= 16 for held in vars(reply).values() if hasattr(held, "__len__"))
    assert max(costs[100:]) <= max(costs[:100])
