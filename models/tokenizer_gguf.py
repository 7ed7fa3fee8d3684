"""A `tokenizers` tokenizer out of GGUF metadata: byte-level BPE with the file's own pre-tokenizer.

Knows nothing of chat templates or weights.
"""

from typing import Any

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types that are matched whole in the text

# Contractions, letters with at most one sign before them, digits, signs, line ends, spaces.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split_then_bytes(digits: str) -> pre_tokenizers.PreTokenizer:
    split = tokenizers.Regex(_SPLIT.replace("DIGITS", digits))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# How the text is split before byte-pair merging, by `tokenizer.ggml.pre`.
_PRE_TOKENIZERS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
    "qwen2": lambda: _split_then_bytes(r"\p{N}"),
    "llama-bpe": lambda: _split_then_bytes(r"\p{N}{1,3}"),
}
# A word that is one token is not merged from parts, and a text begins with BOS unless the file says no.
_LLAMA_3 = ("llama-bpe",)
# Pre-tokenizers whose models put the text into Unicode's composed form first.
_COMPOSED = ("qwen2",)


def tokenizer_from_gguf(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """Builds the tokenizer.

    Args:
      metadata: the file's keys and values.

    Raises:
      ValueError: a tokenizer that is not byte-level BPE, or an unknown pre-tokenizer.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ValueError(f"GGUF metadata: tokenizer.ggml.model {model!r} is not supported (gpt2 is)")
    split = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if split not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ValueError(f"GGUF metadata: tokenizer.ggml.pre {split!r} is not supported ({known} are)")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = BPE(vocabulary, merges, ignore_merges=split in _LLAMA_3)
    except Exception as error:  # the package raises bare Exception, and TypeError
        raise ValueError(f"GGUF metadata: tokenizer.ggml.merges do not fit the tokens ({error})") from None
    tokenizer = tokenizers.Tokenizer(model)
    if split in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    if metadata.get("tokenizer.ggml.add_bos_token", split in _LLAMA_3):
        begin = metadata.get("tokenizer.ggml.bos_token_id")
        if begin is None or not 0 <= begin < len(tokens):
            raise ValueError(f"GGUF metadata: tokenizer.ggml.bos_token_id = {begin!r} is no token")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[begin]} $A", special_tokens=[(tokens[begin], begin)]
        )
    return tokenizer


def special_tokens(metadata: dict[str, Any]) -> dict[str, str]:
    """The tokens that chat templates name: bos_token, eos_token, pad_token, unk_token, where given."""
    tokens = metadata["tokenizer.ggml.tokens"]
    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[token] for name, token in ids.items() if token is not None}
