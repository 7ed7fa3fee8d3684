"""Requests and log-probabilities as fields of JSON objects, the form in which scripts read and write them.

Knows nothing of where lines come from, nor of what runs a request.
"""

import inspect
import json
from collections.abc import Collection, Mapping
from typing import Any

from jaxsample import Limits, make_params
from models.generation import TokenLogprobs
from models.guiding import check_words, guidance_of
from models.text import Text, TokenIds, check_unicode

# What make_params takes by name and a request may therefore hold.
PARAMS = tuple(
    name
    for name in inspect.signature(make_params).parameters
    if name not in ("limits", "eos_token_ids", "prompt_length")
)

_DEEPEST = 32  # arrays and objects within one another in a line


def read_fields(
    line: str | bytes, prompts: Collection[str] = ("prompt", "messages"), others: Collection[str] = ()
) -> dict[str, Any]:
    """The fields of one line of JSON, a request; what only `make_params` can judge is not looked at.

    Args:
      line: text, or bytes in UTF-8.
      prompts: which of "prompt", "messages" and "prompt_token_ids" are allowed; a request has one of them.
      others: names that are allowed beside those of `make_params`, "bad_words" and "guidance".

    Raises:
      ValueError: what is wrong with the line.
    """
    return check_fields(read_object(line), prompts, others)


def read_object(line: str | bytes) -> dict[str, Any]:
    """One line of JSON that holds an object; ValueError where it does not."""
    try:
        fields = json.loads(line if isinstance(line, str) else line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    _check_depth(fields)
    return fields


def _check_depth(fields: dict[str, Any]) -> None:
    """Refuse what is nested so deeply that writing it again could fail."""
    level: list[Any] = [fields]
    for _ in range(_DEEPEST + 1):
        nested = [x for x in level if isinstance(x, dict | list)]
        if not nested:
            return
        level = [y for x in nested for y in (x.values() if isinstance(x, dict) else x)]
    raise ValueError(f"nested more than {_DEEPEST} deep")


def check_fields(
    fields: Mapping[str, Any], prompts: Collection[str], others: Collection[str] = ()
) -> dict[str, Any]:
    """The fields of a request with integer keys where token ids are meant; otherwise as `read_fields`."""
    unknown = sorted(set(fields) - {*PARAMS, *prompts, *others, "bad_words", "guidance"})
    if unknown:
        raise ValueError(f"unknown keys {', '.join(unknown)}")
    if sum(name in fields for name in prompts) != 1:
        raise ValueError(f"needs either {' or '.join(map(repr, prompts))}")
    if not isinstance(fields.get("prompt", ""), str):
        raise ValueError(f"prompt is {fields['prompt']!r}, expected text")
    if not _is_chat(fields.get("messages", [{"role": "", "content": ""}])):
        raise ValueError(f"messages is {fields['messages']!r}, expected a list of role and content")
    if not _is_ids(fields.get("prompt_token_ids", [])):
        raise ValueError(f"prompt_token_ids is {fields['prompt_token_ids']!r}, expected a list of token ids")
    words = fields.get("bad_words", [])
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise ValueError(f"bad_words is {words!r}, expected a list of texts")
    check_words(fields.get("guidance"))
    fields = dict(fields)
    for name in ("logit_bias", "token_temperature_scale"):
        try:  # JSON has no integer keys
            if name in fields:
                fields[name] = {int(token): value for token, value in fields[name].items()}
        except (ValueError, AttributeError):
            raise ValueError(f"{name} is {fields[name]!r}, expected token ids with a number each") from None
    return fields


def check_numbers(fields: Mapping[str, Any]) -> None:
    """Refuses what needs no model to be seen wrong: ValueError that names what is wrong."""
    check_unicode(fields.get("prompt", ""))
    lists = ("logit_bias", "token_temperature_scale", "allowed_token_ids", "banned_token_ids")
    lists += ("bad_words_ids", "stop_token_ids", "stop_sequences", "seed", "n")
    numbers = {name: fields[name] for name in PARAMS if name in fields and name not in lists}
    limits = Limits(vocab_size=1024)
    params, _ = make_params(limits, **numbers)
    guidance_of(limits, params, fields.get("guidance"))


def prepare(
    fields: Mapping[str, Any], text: Text | TokenIds, *, raw: bool
) -> tuple[list[int], dict[str, Any]]:
    """Token ids and parameters of one request.

    A plain prompt becomes the user's turn of a chat, unless raw. Bad words are banned both at the beginning
    of the text and after a space, which are different tokens.

    Args:
      fields: of `read_fields`, defaults added.
      text: the model's text side.
      raw: whether a prompt is encoded as it is.

    Returns:
      (the prompt's ids, arguments of `make_params`, the model's EOS among them).

    Raises:
      ValueError: what the model's text side cannot do.
    """
    params = {name: value for name, value in fields.items() if name in PARAMS}
    if fields.get("bad_words") and isinstance(text, TokenIds):
        raise ValueError("bad_words need a tokenizer, use banned_token_ids or bad_words_ids")
    words = [spelling for word in fields.get("bad_words", ()) for spelling in (word, " " + word)]
    spellings = [text.encode(word, add_special_tokens=False) for word in words]
    if spellings:
        given = params.get("bad_words_ids", [])
        if not isinstance(given, list | tuple):
            raise ValueError(f"bad_words_ids is {given!r}, expected a list of lists of token ids")
        params["bad_words_ids"] = [*given, *spellings]
    params["eos_token_ids"] = text.eos_token_ids
    if "prompt_token_ids" in fields:
        return fields["prompt_token_ids"], params
    if isinstance(text, TokenIds) and "messages" in fields:
        raise ValueError("messages need a tokenizer, this model has token ids for prompts")
    raw = raw or isinstance(text, TokenIds)
    if raw and "prompt" in fields:
        return text.encode(fields["prompt"]), params
    if text.chat_template is None:
        raise ValueError("the model has no chat template: use --raw, and prompts rather than messages")
    messages = fields.get("messages") or [{"role": "user", "content": fields["prompt"]}]
    return text.encode(text.render(messages), add_special_tokens=False), params


def logprob_fields(entry: TokenLogprobs, text: Text | TokenIds) -> dict[str, Any]:
    """One token's log-probability as JSON; minus infinity, which JSON lacks, becomes null."""

    def finite(value: float) -> float | None:
        return value if value > float("-inf") else None

    return {
        "token_id": entry.token_id,
        "token": text.name_of(entry.token_id),
        "logprob": finite(entry.logprob),
        "rank": entry.rank,
        "top": [
            {"token_id": token, "token": text.name_of(token), "logprob": finite(value)}
            for token, value in entry.top
        ],
    }


def _is_chat(messages: Any) -> bool:
    """Whether a value is a list of at least one message with a role and a content, both text."""
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(isinstance(message, dict) for message in messages)
        and all(isinstance(message.get(key), str) for message in messages for key in ("role", "content"))
    )


def _is_ids(tokens: Any) -> bool:
    return isinstance(tokens, list) and all(
        isinstance(token, int) and not isinstance(token, bool) for token in tokens
    )
