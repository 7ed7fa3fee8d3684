"""Requests and arrays as other software spells them, as this library's own words.

    told = from_openai(body)                      # or from_vllm(params), from_hf_generation_config(config)
    params, stop = make_params(limits, **told.params, eos_token_ids=...)

What has no counterpart is refused by name unless it is at its neutral value, so that nothing is silently left
out. Knows nothing of text: strings that end a reply are handed back to whoever decodes it.

Sources: the OpenAI API reference (chat and completions), vllm.SamplingParams, transformers.GenerationConfig.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxsample.loops import as_allowed, as_sample_fn, from_arrays, seeds_of_key

__all__ = [
    "Translated",
    "as_allowed",
    "as_sample_fn",
    "from_arrays",
    "from_hf_generation_config",
    "from_openai",
    "from_vllm",
    "seeds_of_key",
]


@dataclasses.dataclass(frozen=True)
class Translated:
    """A request in this library's words.

    Fields:
      params: arguments of `make_params`, those that were given.
      stop_strings: texts that end the reply, for whoever decodes it.
      filter_order: what `Features.filter_order` must be for the filters to mean the same.
    """

    params: dict[str, Any]
    stop_strings: tuple[str, ...] = ()
    filter_order: str = "vllm"


# Fields of a request that do not concern which tokens are drawn.
_OPENAI_OTHER = (
    "model messages prompt stream stream_options user metadata store service_tier safety_identifier "
    "prompt_cache_key"
)
_VLLM_OTHER = (
    "detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind "
    "output_text_buffer_length skip_clone skip_reading_prefix_cache"
)
_HF_OTHER = (
    "pad_token_id bos_token_id decoder_start_token_id use_cache cache_implementation cache_config "
    "return_dict_in_generate output_attentions output_hidden_states output_scores output_logits "
    "transformers_version _from_model_config compile_config disable_compile generation_kwargs "
    "return_legacy_cache prefill_chunk_size low_memory trust_remote_code is_assistant "
    "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
    "assistant_early_exit assistant_lookbehind target_lookbehind prompt_lookup_num_tokens "
    "max_matching_ngram_size length_penalty early_stopping diversity_penalty num_beam_groups"
)
# Fields without a counterpart, and the values at which they ask for nothing; None always does.
_OPENAI_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "modalities": (["text"],),
}
_VLLM_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "logits_processors": ([],),
    "structured_outputs": (),
    "guided_decoding": (),
    "extra_args": ({},),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "flat_logprobs": (False,),
    "truncate_prompt_tokens": (-1,),
}
_HF_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "force_words_ids": ([],),
    "constraints": ([],),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "begin_suppress_tokens": ([],),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "token_healing": (False,),
    "max_time": (),
}


def from_openai(body: Mapping[str, Any]) -> Translated:
    """A body of the chat or the completions endpoint.

    Args:
      body: temperature, top_p, n, seed, frequency_penalty, presence_penalty, logit_bias (ids as strings; -100
        bans), max_tokens or max_completion_tokens, stop, logprobs with top_logprobs (chat) or as a number
        (completions); what concerns transport and the prompt is passed over. null stands for the default.

    Raises:
      ValueError: a field that is unknown or asks for what is not served, by name.
    """
    if not isinstance(body, Mapping):
        raise ValueError(f"body is {body!r}, expected a mapping of fields")
    given = _given(body)
    params = _taken(
        given, "temperature", "top_p", "n", "seed", "frequency_penalty", "presence_penalty", "max_tokens"
    )
    if "max_completion_tokens" in given:
        most = given.pop("max_completion_tokens")
        if params.setdefault("max_tokens", most) != most:
            raise ValueError(
                f"max_tokens is {params['max_tokens']}, max_completion_tokens {most}: allowed is one of them"
            )
    if "logit_bias" in given:
        bias = _openai_bias(given.pop("logit_bias"))
        params["logit_bias"] = {token: -np.inf if value <= -100 else value for token, value in bias.items()}
    logprobs, top = given.pop("logprobs", None), given.pop("top_logprobs", None)
    if isinstance(logprobs, bool):
        if top is not None and not logprobs:
            raise ValueError(f"top_logprobs is {top}, allowed is None where logprobs is False")
        params |= {"logprobs": top or 0} if logprobs else {}
    elif top is not None:
        raise ValueError(f"top_logprobs is {top}, allowed is None where logprobs is {logprobs}")
    elif logprobs is not None:
        params["logprobs"] = logprobs
    stops = _strings("stop", given.pop("stop", None))
    _refuse(given, _OPENAI_OTHER.split(), _OPENAI_NEUTRAL)
    return Translated(params, stops)


def _openai_bias(biases: Any) -> dict[int, float]:
    """Token id -> bias, of a mapping whose keys are ids or their decimal digits."""
    if not isinstance(biases, Mapping):
        raise ValueError(f"logit_bias is {biases!r}, expected a mapping from token id to number")
    found: dict[int, float] = {}
    for token, value in biases.items():
        is_id = isinstance(token, int | np.integer) and not isinstance(token, bool)
        if not is_id and not (isinstance(token, str) and re.fullmatch(r"[0-9]+", token)):
            raise ValueError(f"logit_bias has the key {token!r}, allowed are token ids")
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise ValueError(f"logit_bias[{token!r}] is {value!r}, allowed are numbers")
        if int(token) in found:
            raise ValueError(f"logit_bias has token {int(token)} twice, allowed is once")
        found[int(token)] = float(value)
    return found


def from_vllm(params: Any) -> Translated:
    """A vllm.SamplingParams, or its fields as a mapping; fields that are missing have vLLM's defaults.

    bad_words are strings there, which this library takes as ids: pass them to `make_params` as
    bad_words_ids. top_k and the rest mean the same; its max_tokens is 16 where nothing is said.

    Raises:
      ValueError: a field that is unknown or asks for what is not served, by name.
    """
    fields = _fields("params", params)
    given = _given(fields)
    if given.get("seed") == -1:  # none, as there
        del given["seed"]
    told = _taken(
        given,
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "prompt_logprobs"),
        *("stop_token_ids", "allowed_token_ids", "logit_bias"),
    )
    told["max_tokens"] = fields.get("max_tokens", 16)
    given.pop("max_tokens", None)
    for name in ("logprobs", "prompt_logprobs"):
        if told.get(name) == -1:
            raise ValueError(f"{name} is -1, allowed are None and the number of top logprobs")
    if given.pop("bad_words", None):
        raise ValueError("bad_words are strings, allowed are ids: give make_params bad_words_ids")
    stops = _strings("stop", given.pop("stop", None))
    _refuse(given, _VLLM_OTHER.split(), _VLLM_NEUTRAL, private=True)
    return Translated(told, stops)


def from_hf_generation_config(config: Any, prompt_length: int | None = None) -> Translated:
    """A transformers.GenerationConfig, or its fields as a mapping; fields that are missing have its defaults.

    Without do_sample it is greedy whatever else it says, and with it top_k is 50 where nothing or None is
    said (0 is off). Its filters are applied one after another: use `Features(filter_order="hf")`.

    Args:
      config: the configuration.
      prompt_length: tokens of the prompt, which max_length and min_length count too; only they need it, and
        max_new_tokens and min_new_tokens go before them.

    Raises:
      ValueError: a field that is unknown or asks for what is not served, by name.
    """
    given = _given(_fields("config", config))
    sampled = _taken(given, "temperature", "top_k", "top_p", "min_p")
    do_sample = given.pop("do_sample", False)
    if not isinstance(do_sample, bool | np.bool_):
        raise ValueError(f"do_sample is {do_sample!r}, allowed are True and False")
    params: dict[str, Any] = {"top_k": 50, **sampled} if do_sample else {"temperature": 0.0}
    params |= _taken(given, "repetition_penalty", "bad_words_ids")
    renamed = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "num_return_sequences": "n"}
    params |= {ours: given.pop(theirs) for theirs, ours in renamed.items() if theirs in given}
    if "eos_token_id" in given:
        params["eos_token_ids"] = _ids("eos_token_id", given.pop("eos_token_id"))
    if banned := _ids("suppress_tokens", given.pop("suppress_tokens", ())):
        params["banned_token_ids"] = banned
    if biases := _single_biases(given.pop("sequence_bias", ())):
        params["logit_bias"] = biases
    for name, ours, unset in (("max_length", "max_tokens", 20), ("min_length", "min_tokens", 0)):
        value = given.pop(name, unset)
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ValueError(f"{name} is {value!r}, allowed are integers")
        if value == unset or ours in params:  # transformers takes its default for nothing said
            continue
        if prompt_length is None:
            raise ValueError(f"{name} is {value} and counts the prompt: prompt_length is needed")
        params[ours] = max(value - prompt_length, 0)
    stops = _strings("stop_strings", given.pop("stop_strings", None))
    _refuse(given, _HF_OTHER.split(), _HF_NEUTRAL, private=True)
    return Translated(params, stops, "hf")


def _fields(name: str, source: Any) -> dict[str, Any]:
    """Fields of a mapping, of an object with to_dict, of a struct (vLLM's), or of any plain object."""
    if isinstance(source, Mapping):
        return dict(source)
    if hasattr(source, "to_dict"):
        return source.to_dict()
    names = getattr(source, "__struct_fields__", None)
    if names is None and not hasattr(source, "__dict__"):
        raise ValueError(f"{name} is {source!r}, expected a mapping of fields or an object with fields")
    fields = vars(source) if names is None else {name: getattr(source, name) for name in names}
    return {name: value for name, value in fields.items() if not name.startswith("_")}


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _taken(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """Move fields that mean the same here."""
    return {name: given.pop(name) for name in names if name in given}


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is not None and not isinstance(value, str | Sequence):
        raise ValueError(f"{name} is {value!r}, allowed are a string and a list of strings")
    values = [value] if isinstance(value, str) else list(value or ())
    for text in values:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} holds {text!r}, allowed are strings that are not empty")
    return tuple(values)


def _ids(name: str, value: Any) -> list[int]:
    """Token ids, of one or of a sequence or array of them."""
    values = np.atleast_1d(np.asarray(value, object)).tolist()
    for token in values:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise ValueError(f"{name} holds {token!r}, allowed are token ids")
    return [int(token) for token in values]


def _single_biases(biases: Any) -> dict[int, float]:
    """Token id -> bias, of a mapping or list of (ids, bias) whose sequences have one token each."""
    pairs = biases.items() if isinstance(biases, Mapping) else biases
    found = {}
    for ids, bias in pairs:
        tokens = _ids("sequence_bias", ids)
        if len(tokens) != 1:
            raise ValueError(f"sequence_bias has the sequence {tuple(tokens)}, allowed are single tokens")
        found[tokens[0]] = float(bias)
    return found


def _refuse(
    given: Mapping[str, Any],
    other: Sequence[str],
    neutral: Mapping[str, tuple[Any, ...]],
    *,
    private: bool = False,
) -> None:
    """Raise for what is left of a request, unless it asks for nothing; objects have private fields too."""
    for name, value in given.items():
        if name in other or (private and name.startswith("_")):
            continue
        if name not in neutral:
            raise ValueError(f"{name} is {value!r}, a field that is not known here")
        plain = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        if not any(plain == allowed for allowed in neutral[name]):
            allowed = ", ".join(["None", *map(repr, neutral[name])])
            raise ValueError(f"{name} is {value!r}, allowed is {allowed}: it has no counterpart here")
