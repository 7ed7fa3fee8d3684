"""Requests and arrays as other software spells them, as this library's own words.

    told = from_openai(body)                      # or from_vllm(params), from_hf_generation_config(config)
    params, stop = make_params(limits, **told.params, eos_token_ids=...)

What has no counterpart is refused by name unless it is at its neutral value, so that nothing is silently left
out. Knows nothing of text: strings that end a reply are handed back to whoever decodes it.

Sources: the OpenAI API reference (chat and completions), vllm.SamplingParams, transformers.GenerationConfig.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample.params import Features, Limits, SamplingParams, neutral_params
from jaxsample.sample import sample
from jaxsample.sharding import Axis


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
    "truncate_prompt_tokens output_text_buffer_length skip_clone skip_reading_prefix_cache"
)
_HF_OTHER = (
    "pad_token_id bos_token_id decoder_start_token_id use_cache cache_implementation cache_config "
    "return_dict_in_generate output_attentions output_hidden_states output_scores output_logits "
    "transformers_version _from_model_config compile_config disable_compile generation_kwargs "
    "return_legacy_cache prefill_chunk_size max_time low_memory trust_remote_code is_assistant "
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
    given = _given(body)
    params = _taken(
        given, "temperature", "top_p", "n", "seed", "frequency_penalty", "presence_penalty", "max_tokens"
    )
    if "max_completion_tokens" in given:
        params["max_tokens"] = given.pop("max_completion_tokens")
    if "logit_bias" in given:
        bias = {int(token): float(value) for token, value in given.pop("logit_bias").items()}
        params["logit_bias"] = {token: -np.inf if value <= -100 else value for token, value in bias.items()}
    logprobs, top = given.pop("logprobs", None), given.pop("top_logprobs", None)
    if isinstance(logprobs, bool):
        if top is not None and not logprobs:
            raise ValueError(f"top_logprobs is {top}, allowed is None where logprobs is False")
        params |= {"logprobs": top or 0} if logprobs else {}
    elif logprobs is not None:
        params["logprobs"] = logprobs
    elif top is not None:
        raise ValueError(f"top_logprobs is {top}, allowed is None where logprobs is not set")
    stops = _strings("stop", given.pop("stop", None))
    _refuse(given, _OPENAI_OTHER.split(), _OPENAI_NEUTRAL)
    return Translated(params, stops)


def from_vllm(params: Any) -> Translated:
    """A vllm.SamplingParams, or its fields as a mapping; fields that are missing have vLLM's defaults.

    bad_words are strings there, which this library takes as ids: pass them to `make_params` as
    bad_words_ids. top_k and the rest mean the same; its max_tokens is 16 where nothing is said.

    Raises:
      ValueError: a field that is unknown or asks for what is not served, by name.
    """
    given = _given(_fields(params))
    told = _taken(
        given,
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "prompt_logprobs"),
        *("stop_token_ids", "allowed_token_ids", "logit_bias"),
    )
    told["max_tokens"] = _fields(params).get("max_tokens", 16)
    given.pop("max_tokens", None)
    for name in ("logprobs", "prompt_logprobs"):
        if told.get(name) == -1:
            raise ValueError(f"{name} is -1, allowed are None and the number of top logprobs")
    if given.pop("bad_words", None):
        raise ValueError("bad_words are strings, allowed are ids: give make_params bad_words_ids")
    stops = _strings("stop", given.pop("stop", None))
    _refuse(given, _VLLM_OTHER.split(), _VLLM_NEUTRAL)
    return Translated(told, stops)


def from_hf_generation_config(config: Any, prompt_length: int | None = None) -> Translated:
    """A transformers.GenerationConfig, or its fields as a mapping; fields that are missing have its defaults.

    Without do_sample it is greedy whatever else it says, and with it top_k is 50 where nothing is said. Its
    filters are applied one after another: use `Features(filter_order="hf")`.

    Args:
      config: the configuration.
      prompt_length: tokens of the prompt, which max_length and min_length count too; only they need it, and
        max_new_tokens and min_new_tokens go before them.

    Raises:
      ValueError: a field that is unknown or asks for what is not served, by name.
    """
    given = _given(_fields(config))
    sampled = _taken(given, "temperature", "top_k", "top_p", "min_p")
    do_sample = given.pop("do_sample", False)
    params: dict[str, Any] = {"top_k": 50, **sampled} if do_sample else {"temperature": 0.0}
    params |= _taken(given, "repetition_penalty", "bad_words_ids")
    renamed = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "num_return_sequences": "n"}
    params |= {ours: given.pop(theirs) for theirs, ours in renamed.items() if theirs in given}
    if "eos_token_id" in given:
        end = given.pop("eos_token_id")
        params["eos_token_ids"] = [end] if isinstance(end, int | np.integer) else list(end)
    if given.get("suppress_tokens"):
        params["banned_token_ids"] = list(given["suppress_tokens"])
    given.pop("suppress_tokens", None)
    if given.get("sequence_bias"):
        params["logit_bias"] = _single_biases(given["sequence_bias"])
    given.pop("sequence_bias", None)
    for name, ours, unset in (("max_length", "max_tokens", 20), ("min_length", "min_tokens", 0)):
        value = given.pop(name, unset)
        if value == unset or ours in params:  # transformers takes its default for nothing said
            continue
        if prompt_length is None:
            raise ValueError(f"{name} is {value} and counts the prompt: prompt_length is needed")
        params[ours] = max(value - prompt_length, 0)
    stops = _strings("stop_strings", given.pop("stop_strings", None))
    _refuse(given, _HF_OTHER.split(), _HF_NEUTRAL)
    return Translated(params, stops, "hf")


def as_allowed(bitmask: Any) -> np.ndarray:
    """Token bitmasks of xgrammar or llguidance as `sample(..., allowed=)` takes them: u32[B, W], not copied.

    Args:
      bitmask: int32 or uint32 [B, W] or [W], bit i % 32 of word i // 32 allows token i; NumPy, or anything
        that np.asarray takes without a copy, such as a torch tensor on the host.

    Raises:
      ValueError: another dtype or rank.
    """
    words = np.asarray(bitmask)
    if words.dtype not in (np.int32, np.uint32) or words.ndim not in (1, 2):
        raise ValueError(
            f"bitmask is {words.dtype}{list(words.shape)}, expected int32 or uint32 [B, W] or [W]"
        )
    return np.atleast_2d(words).view(np.uint32)


def from_arrays(
    limits: Limits, *, temperature: Any = 1.0, top_k: Any = 0, top_p: Any = 1.0, min_p: Any = 0.0, seed: Any
) -> SamplingParams:
    """Rows from the arrays that a serving loop carries, inside or outside jit; nothing is checked but shapes.

    Args:
      limits: capacities.
      temperature: f32 [B], [B, 1] or one number for all; 0 and below (-1 is common) are greedy.
      top_k: i32 likewise; 0 and below, V and above (2^30 is common) are off.
      top_p, min_p: f32 likewise; 1 and 0 are off.
      seed: u32[B, 2] as of `seeds_of_key`, or i32[B]; says what B is.

    Returns:
      SamplingParams of B rows, neutral in all other fields.

    Raises:
      ValueError: an array that has not B rows.
    """
    seed = jnp.asarray(seed)
    if seed.ndim == 1:
        seed = jnp.stack([seed.astype(jnp.uint32), jnp.zeros_like(seed, jnp.uint32)], axis=1)
    if seed.ndim != 2 or seed.shape[1] != 2:
        raise ValueError(f"seed has shape {list(seed.shape)}, expected [B] or [B, 2]")
    num_rows = seed.shape[0]

    def row(name: str, value: Any, dtype: Any):
        value = jnp.asarray(value)
        if value.ndim == 2 and value.shape[1] == 1:
            value = value[:, 0]
        if value.shape not in ((), (num_rows,)):
            raise ValueError(
                f"{name} has shape {list(value.shape)}, expected [{num_rows}], [{num_rows}, 1] or []"
            )
        return jnp.broadcast_to(value.astype(dtype), (num_rows,))

    top_k = row("top_k", top_k, jnp.int32)
    return dataclasses.replace(
        jax.tree.map(jnp.asarray, neutral_params(limits, num_rows)[0]),
        temperature=jnp.maximum(row("temperature", temperature, jnp.float32), 0),
        top_k=jnp.where((top_k <= 0) | (top_k >= limits.vocab_size), 0, top_k),
        top_p=row("top_p", top_p, jnp.float32),
        min_p=row("min_p", min_p, jnp.float32),
        seed=seed.astype(jnp.uint32),
    )


def seeds_of_key(key: jax.Array, num_rows: int) -> jax.Array:
    """A seed of its own for each row, from the one key a loop carries: u32[B, 2]. The key may be of any kind.

    Seeds of one key are those of a batch of that size: rows keep their noise as long as the key and the row's
    place stay. A loop that splits its key every step may pass position 0.
    """
    return jax.random.bits(key, (num_rows, 2), jnp.uint32)


def as_sample_fn(
    limits: Limits,
    features: Features,
    *,
    mesh: Any = None,
    axis: Axis | None = None,
    batch_axis: Axis = (),
    **settings: Any,
) -> Callable[..., jax.Array]:
    """A sampler for loops that take a function of logits and a key.

    Args:
      limits, features, mesh, axis, batch_axis: as in `sample`; features must serve the settings.
      settings: temperature, top_k, top_p, min_p as in `from_arrays`: numbers, or arrays of B rows.

    Returns:
      sample_fn(logits [B, Vp] or [B, 1, Vp], key, **settings) -> tokens i32[B], PAD for bad rows. Settings of
      the call go before those given here. Works under jit, scan and while_loop.
    """

    def sample_fn(logits, key, **own: Any) -> jax.Array:
        logits = logits[:, 0] if logits.ndim == 3 else logits
        seed = seeds_of_key(key, logits.shape[0])
        params = from_arrays(limits, **{**settings, **own}, seed=seed)
        position = jnp.zeros(logits.shape[0], jnp.int32)
        where = {"mesh": mesh, "axis": axis, "batch_axis": batch_axis}
        return sample(logits, params, position, limits=limits, features=features, **where).tokens

    return sample_fn


def _fields(source: Any) -> dict[str, Any]:
    """Fields of a mapping, of an object with to_dict, of a struct (vLLM's), or of any plain object."""
    if isinstance(source, Mapping):
        return dict(source)
    if hasattr(source, "to_dict"):
        return source.to_dict()
    names = getattr(source, "__struct_fields__", None)
    fields = vars(source) if names is None else {name: getattr(source, name) for name in names}
    return {name: value for name, value in fields.items() if not name.startswith("_")}


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _taken(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """Move fields that mean the same here."""
    return {name: given.pop(name) for name in names if name in given}


def _strings(name: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else list(value or ())
    for text in values:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} holds {text!r}, allowed are strings that are not empty")
    return tuple(values)


def _single_biases(biases: Any) -> dict[int, float]:
    """Token id -> bias, of a mapping or list of (ids, bias) whose sequences have one token each."""
    pairs = biases.items() if isinstance(biases, Mapping) else biases
    found = {}
    for ids, bias in pairs:
        if len(ids) != 1:
            raise ValueError(f"sequence_bias has the sequence {tuple(ids)}, allowed are single tokens")
        found[int(ids[0])] = float(bias)
    return found


def _refuse(given: Mapping[str, Any], other: Sequence[str], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise for what is left of a request, unless it asks for nothing."""
    for name, value in given.items():
        if name in other or name.startswith("_"):
            continue
        if name not in neutral:
            raise ValueError(f"{name} is {value!r}, a field that is not known here")
        if value not in neutral[name]:
            allowed = ", ".join(["None", *map(repr, neutral[name])])
            raise ValueError(f"{name} is {value!r}, allowed is {allowed}: it has no counterpart here")
