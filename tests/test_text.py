"""Tokenizers, chat templates and incremental detokenising, on a tokenizer of 256 byte tokens made here."""

import json

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from models.load_gguf import text_from_gguf
from models.load_safetensors import text_from_folder
from models.text import Detokenizer, Text

# Byte-level BPE writes each byte as one printable character: printable bytes as themselves, the others as
# the code points from 256 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_TOKENS = [chr(byte) if byte in PRINTABLE else chr(256 + OTHERS.index(byte)) for byte in range(256)]
END = 256  # a special token


def byte_tokenizer():
    tokenizer = tokenizers.Tokenizer(BPE({token: index for index, token in enumerate(BYTE_TOKENS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<end>", special=True, normalized=False)])
    return tokenizer


def byte_text(template=None):
    return Text(byte_tokenizer(), (END,), template, {"eos_token": "<end>"})


def gguf_metadata(**changes):
    """A byte-level tokenizer with two merges, as GGUF metadata."""
    tokens = [*BYTE_TOKENS, "<end>", "12", "ab"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 1, 1],
        "tokenizer.ggml.merges": ["1 2", "a b"],
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.bos_token_id": END,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}{{ eos_token }}",
        **changes,
    }


@pytest.mark.parametrize("string", ["plain", "héllo wörld", "日本語 😀 done", "👩‍👩‍👧‍👦", "", "\ufffd kept"])
def test_pieces_join_to_the_text_and_hold_no_half_character(string):
    text = byte_text()
    stream = Detokenizer(text)
    pieces = [stream.push(token) for token in text.encode(string)]
    assert "".join(pieces) + stream.flush() == string
    if "\ufffd" not in string:
        assert not any("\ufffd" in piece for piece in pieces)
        assert [piece for piece in pieces if piece] == list(string)


@pytest.mark.parametrize(
    "data", [b"ab\xe6\x97", b"\xff", b"a\xffb", b"\xf0\x9f\x98", b"\x80\x80\x80\x80\x80x"]
)
def test_incomplete_and_invalid_bytes_come_out_by_the_flush(data):
    text = byte_text()
    stream = Detokenizer(text)
    pieces = [stream.push(byte) for byte in data]
    assert "".join(pieces) + stream.flush() == data.decode(errors="replace") == text.decode(list(data))


def test_special_tokens_are_not_shown_and_hold_nothing_back():
    text = byte_text()
    stream = Detokenizer(text)
    assert [stream.push(token) for token in (ord("a"), END, ord("b"))] == ["a", "", "b"]


def test_a_space_that_a_tokenizer_drops_at_the_beginning_is_kept_inside():
    tokenizer = tokenizers.Tokenizer(BPE({"▁one": 0, "▁two": 1}, []))
    tokenizer.decoder = decoders.Metaspace()
    text = Text(tokenizer, (), None, {})
    stream = Detokenizer(text)
    assert [stream.push(token) for token in (0, 1, 0)] == ["one", " two", " one"]


def test_a_template_gets_messages_special_tokens_and_a_generation_prompt():
    template = (
        "{% for m in messages %}\n<{{ m['role'] }}>{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [{"role": "system", "content": " a "}, {"role": "user", "content": "b"}]
    assert byte_text(template).render(messages) == "<system>a<end>\n<user>b<end>\n<assistant>"


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for %}",
        "{{ messages[0].missing.field }}",
        "{{ raise_exception('only one turn') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_is_missing_broken_refusing_or_reaching_out_is_an_error(template):
    with pytest.raises(ValueError, match="template"):
        byte_text(template).render([{"role": "user", "content": "x"}])


def test_gguf_metadata_give_tokenizer_template_and_end_token():
    text = text_from_gguf(gguf_metadata())
    assert text.eos_token_ids == (END,)
    assert text.encode("ab<end>") == [258, END]
    assert text.encode("12") == [ord("1"), ord("2")]  # the smollm rule splits digits before merging
    assert text_from_gguf(gguf_metadata(**{"tokenizer.ggml.pre": "gpt-2"})).encode("12") == [257]
    assert text.render([{"role": "user", "content": "x"}]) == "x<end>"
    assert text.decode([258, END, 257]) == "ab12"


def test_gguf_metadata_may_ask_for_a_first_token():
    text = text_from_gguf(gguf_metadata(**{"tokenizer.ggml.add_bos_token": True}))
    assert text.encode("a") == [END, ord("a")]
    assert text.encode("a", add_special_tokens=False) == [ord("a")]


def test_llama_3_splits_digits_by_three_takes_whole_words_and_begins_with_bos():
    words = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.merges": ["1 2"]}
    text = text_from_gguf(gguf_metadata(**words))
    byte = lambda text: [ord(letter) for letter in text]
    assert text.encode("ab") == [END, 258], "a token of its own, though nothing merges to it"
    assert text.encode("abc", add_special_tokens=False) == byte("abc")
    assert text.encode("12312", add_special_tokens=False) == [257, ord("3"), 257], "123, 12"
    assert text.encode("3312", add_special_tokens=False) == byte("3312"), "331, 2"
    assert text_from_gguf(gguf_metadata(**words, **{"tokenizer.ggml.add_bos_token": False})).encode(
        "a"
    ) == byte("a")


@pytest.mark.parametrize(
    ("key", "value"), [("tokenizer.ggml.model", "llama"), ("tokenizer.ggml.pre", "unheard-of")]
)
def test_gguf_tokenizers_of_another_kind_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=value):
        text_from_gguf(gguf_metadata(**{key: value}))


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ([{"name": "default", "template": "one"}, {"name": "tools", "template": "two"}], "one"),
        ([{"name": "tools", "template": "two"}, "three"], None),
        ([{"name": "default"}], None),
        ({"default": "one"}, ValueError),
    ],
)
def test_a_folder_may_hold_several_templates(tmp_path, template, wanted):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    if wanted is ValueError:
        with pytest.raises(ValueError, match="chat_template"):
            text_from_folder(tmp_path, {})
    else:
        assert text_from_folder(tmp_path, {}).chat_template == wanted


def test_a_folder_gives_tokenizer_template_and_end_tokens(tmp_path):
    assert text_from_folder(tmp_path, {}) is None
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    text = text_from_folder(tmp_path, {"eos_token_id": 7})
    assert (text.eos_token_ids, text.chat_template, text.special_tokens) == ((7,), None, {})
    settings = {"chat_template": "{{ eos_token }}", "eos_token": {"content": "<end>"}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, 3]}))
    text = text_from_folder(tmp_path, {"eos_token_id": 7})
    assert text.eos_token_ids == (END, 3)
    assert text.render([]) == "<end>"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert text_from_folder(tmp_path, {}).render([]) == "file"
    for token in ("7", True, [7]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [token]}))
        with pytest.raises(ValueError, match="eos_token_id holds"):
            text_from_folder(tmp_path, {})
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        text_from_folder(tmp_path, {})
