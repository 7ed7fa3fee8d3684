"""Between text and token ids: tokenizer, chat template, incremental detokenising.

Knows nothing of files, weights or sampling.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported where text is met: models without a text side do without both packages
    import tokenizers

_REPLACEMENT = "\ufffd"  # what a decoder puts where bytes are no complete character


@dataclasses.dataclass(frozen=True)
class Text:
    """The text side of one model."""

    tokenizer: "tokenizers.Tokenizer"
    eos_token_ids: tuple[int, ...]  # ids that end a reply
    chat_template: str | None  # Jinja source
    special_tokens: dict[str, str]  # bos_token, eos_token and so on, for the template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` adds what the tokenizer puts around every text (BOS).

        ValueError where `check_unicode` refuses the text.
        """
        check_unicode(text)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out; incomplete characters become U+FFFD."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def name_of(self, token: int) -> str:
        """The text of one token alone, special tokens by name."""
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The chat as the model's template writes it, ready for the reply.

        Args:
          messages: dicts with "role" and "content".

        Raises:
          ValueError: no template, or one that fails or refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("the model has no chat template")
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment.globals["raise_exception"] = refuse
        try:
            template = environment.from_string(self.chat_template)
            return template.render(messages=list(messages), add_generation_prompt=True, **self.special_tokens)
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the chat template failed: {error}") from None


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """The text side of a model without a tokenizer: a text is its token ids in decimal."""

    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    chat_template: None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text like "12 7 900"; ValueError where that is no list of the vocabulary's ids."""
        try:
            ids = [int(word) for word in text.replace(",", " ").split()]
        except ValueError:
            raise ValueError(f"{text!r} is not a list of token ids, as 12 7 900") from None
        outside = [token for token in ids if not 0 <= token < self.vocab_size]
        if outside:
            raise ValueError(f"token id {outside[0]}, allowed is 0 ... {self.vocab_size - 1}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The ids with a space between any two."""
        return " ".join(str(token) for token in ids)

    def name_of(self, token: int) -> str:
        """The id."""
        return str(token)

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """Raises ValueError: there is no template."""
        raise ValueError("the model has no chat template")


class Detokenizer:
    """Text of one growing token sequence, piece by piece; never half a character.

    The pieces joined, with the flush, equal the text of the whole sequence. Decoding restarts at the last
    piece, not at its end, since some tokenizers drop the space before the first word of what they decode.
    """

    def __init__(self, text: Text | TokenIds):
        self._text = text
        self._window: list[int] = []  # ids of the last piece, then those whose text is held back
        self._num_done = 0  # leading ids of the window whose text is out

    def push(self, token: int) -> str:
        """The text that becomes certain with one more token; "" while a character is incomplete."""
        self._window.append(token)
        whole = self._text.decode(self._window)
        if whole.endswith(_REPLACEMENT):
            return ""
        piece = whole[len(self._done_text()) :]
        if piece:
            self._window = self._window[self._num_done :]
            self._num_done = len(self._window)
        elif self._num_done:  # a token without text, as a special one
            del self._window[self._num_done :]
        return piece

    def flush(self) -> str:
        """The text held back, at the end of the sequence."""
        piece = self._text.decode(self._window)[len(self._done_text()) :]
        self._window, self._num_done = [], 0
        return piece

    def _done_text(self) -> str:
        return self._text.decode(self._window[: self._num_done])


def check_unicode(text: str) -> None:
    """ValueError for half a surrogate pair, which an escape gives, or an argument that is not UTF-8."""
    for place, character in enumerate(text):
        if "\ud800" <= character <= "\udfff":
            raise ValueError(f"the text has {character!r} at {place}, allowed is text that UTF-8 can hold")
