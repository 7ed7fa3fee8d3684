"""Checkpoints in Hugging Face's layout: a folder with config.json, safetensors files, tokenizer.json.

The weights are in model.safetensors, or in shards that model.safetensors.index.json lists.

Reads config.json in both spellings: `rope_parameters` and `dtype` (transformers 5), or `rope_theta` and
`rope_scaling` (transformers 4).
"""

import json
import pathlib
from typing import Any

from jax.sharding import Mesh

from models.config_fields import check_heads, count, flag, positive
from models.decoder import DecoderConfig, Weights
from models.placement import weight_shardings
from models.rope import llama3_factors
from models.safetensors_file import SafetensorsFile
from models.text import Text
from models.weights import HUGGING_FACE, assemble

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def load_folder(
    folder: pathlib.Path, dtype: Any, mesh: Mesh | None = None
) -> tuple[DecoderConfig, Weights, Text | None]:
    """Loads a folder; the text side is None where it holds no tokenizer.json.

    Args:
      folder: holds config.json and model.safetensors, or model.safetensors.index.json and its shards.
      dtype: float dtype of the weights.
      mesh: where they are to lie, see `models.placement`; None: on the default device.

    Raises:
      ValueError: what `decoder_config` and `load_tensors` refuse, or a missing or damaged file.
    """
    fields = read_json(folder / "config.json")
    config = decoder_config(fields)
    weights = load_tensors(folder, config, dtype, mesh=mesh)
    return config, weights, text_from_folder(folder, fields)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError where there is none."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent}: no {path.name}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: not a JSON object")
    return fields


def decoder_config(fields: dict[str, Any]) -> DecoderConfig:
    """The architecture that a config.json describes.

    Args:
      fields: the file's object, in either spelling.

    Raises:
      ValueError: a missing field, one that is no such number, or a model type, activation, rotary scaling,
        sliding window, quantisation or MLP bias that the decoder does not have.
    """

    def need(name: str) -> Any:
        if fields.get(name) is None:
            raise ValueError(f"config.json: no {name!r}")
        return fields[name]

    def size(name: str) -> int:
        return count(f"config.json: {name}", need(name))

    kind = need("model_type")
    if kind not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"config.json: model_type {kind!r} is not supported (llama, qwen2, qwen3 are)")
    _refuse(fields, "hidden_act", ("silu",))
    _refuse(fields, "use_sliding_window", (False,))
    _refuse(fields, "mlp_bias", (False,))
    if fields.get("quantization_config") is not None:
        raise ValueError("config.json: quantization_config is not supported: weights are read as floats")
    num_heads = size("num_attention_heads")
    num_kv_heads = size("num_key_value_heads") if _given(fields, "num_key_value_heads") else num_heads
    head_size = size("head_dim") if _given(fields, "head_dim") else size("hidden_size") // num_heads
    check_heads("config.json", num_heads, num_kv_heads, head_size)
    theta, factors = _rotary(fields, head_size)
    # Qwen2 has biases on three of the four projections whatever its file says; for the others it is a field.
    attention_bias = kind != "qwen2" and _flag(fields, "attention_bias")
    return DecoderConfig(
        vocab_size=size("vocab_size"),
        width=size("hidden_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        mlp_width=size("intermediate_size"),
        norm_eps=positive("config.json: rms_norm_eps", need("rms_norm_eps")),
        rope_theta=theta,
        rope_factors=factors,
        tied_embeddings=_flag(fields, "tie_word_embeddings"),
        qkv_bias=kind == "qwen2" or attention_bias,
        output_bias=attention_bias,
        qk_norm=kind == "qwen3",
        logit_scale=_number(fields, "logit_scale", 1.0),
        final_logit_softcapping=_number(fields, "final_logit_softcapping", None),
        max_length=size("max_position_embeddings"),
    )


def load_tensors(
    folder: pathlib.Path,
    config: DecoderConfig,
    dtype: Any,
    ignored: tuple[str, ...] = (),
    mesh: Mesh | None = None,
) -> Weights:
    """The decoder's weights from one safetensors file or from shards, tensor by tensor.

    Tied models store the one matrix as model.embed_tokens.weight or, some of them, as lm_head.weight.

    Args:
      folder: as for `open_tensors`.
      config: the architecture.
      dtype: float dtype of the weights.
      ignored: names of tensors that are no part of the decoder.
      mesh: where the weights are to lie; None: on the default device.

    Raises:
      ValueError: no such file, a missing or damaged shard, or tensors that are missing, unexpected or
        misshapen.
    """
    source, holders = open_tensors(folder)
    shapes = {name: file.shapes[name] for name, file in holders.items()}
    spelling = dict(HUGGING_FACE)
    ignored = (*ignored, *(name for name in shapes if name.endswith(".rotary_emb.inv_freq")))
    if config.tied_embeddings and "model.embed_tokens.weight" not in shapes and "lm_head.weight" in shapes:
        spelling["embedding"] = spelling["head"]
    elif config.tied_embeddings:
        ignored = (*ignored, "lm_head.weight")
    read = lambda name: holders[name].read(name, dtype)
    shardings = weight_shardings(config, mesh)
    return assemble(config, spelling, shapes, read, source=str(source), ignored=ignored, shardings=shardings)


def open_tensors(folder: pathlib.Path) -> tuple[pathlib.Path, dict[str, SafetensorsFile]]:
    """The file that says which tensors a folder holds, and the open file of each by the tensor's name.

    Args:
      folder: holds model.safetensors, or model.safetensors.index.json and the shards it names. Where both
        are there, the one file is read.

    Raises:
      ValueError: neither is there, or what `open_shards` refuses.
    """
    if (folder / SINGLE).is_file():
        single = SafetensorsFile(folder / SINGLE)
        return folder / SINGLE, dict.fromkeys(single.shapes, single)
    if (folder / INDEX).is_file():
        return folder / INDEX, open_shards(folder / INDEX)
    raise ValueError(f"{folder}: no {SINGLE} and no {INDEX}")


def open_shards(index: pathlib.Path) -> dict[str, SafetensorsFile]:
    """The shard that holds each tensor, by the tensor's name; every shard's header is read and checked.

    Args:
      index: the file whose weight_map says in which file beside it each tensor is.

    Raises:
      ValueError: a damaged index, a missing or damaged shard, or a tensor that is not where the index says,
        each by name.
    """
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ValueError(f"{index}: no weight_map of file names")
    files = sorted(set(places.values()))
    outside = [file for file in files if pathlib.PurePath(file).name != file]
    if outside:
        raise ValueError(f"{index}: shards outside the folder: {', '.join(outside)}")
    missing = [file for file in files if not (index.parent / file).is_file()]
    if missing:
        raise ValueError(f"{index}: missing shards: {', '.join(missing)}")
    shards = {file: SafetensorsFile(index.parent / file) for file in files}
    for name, file in places.items():
        if name not in shards[file].shapes:
            raise ValueError(f"{index}: missing tensors: {name} is not in {file}")
    unlisted = [name for shard in shards.values() for name in shard.shapes if name not in places]
    if unlisted:
        raise ValueError(f"{index}: unexpected tensors: {', '.join(unlisted)}, in a shard, not in the index")
    for file, shard in shards.items():
        for name in shard.shapes:
            if places[name] != file:
                raise ValueError(
                    f"{index}: unexpected tensors: {name} is in {file}, the index says {places[name]}"
                )
    return {name: shards[file] for name, file in places.items()}


def text_from_folder(folder: pathlib.Path, config: dict[str, Any]) -> Text | None:
    """The text side of a Hugging Face folder; None where it holds no tokenizer.json.

    Args:
      folder: holds tokenizer.json and, optionally, tokenizer_config.json, chat_template.jinja and
        generation_config.json (whose eos_token_id outranks config.json's).
      config: the object in config.json.

    Raises:
      ValueError: a damaged file.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise ValueError(f"{path}: not a tokenizer ({error})") from None

    def optional(name: str) -> dict[str, Any]:
        return read_json(folder / name) if (folder / name).is_file() else {}

    settings = optional("tokenizer_config.json")
    specials = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            specials[name] = value
    template = settings.get("chat_template")
    if isinstance(template, list):  # of templates by name
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{folder / 'tokenizer_config.json'}: chat_template is no text")
    eos = optional("generation_config.json").get("eos_token_id")
    eos = config.get("eos_token_id") if eos is None else eos
    eos = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    for token in eos:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValueError(f"{folder}: eos_token_id holds {token!r}, allowed are token ids")
    return Text(tokenizer, eos, template, specials)


def _given(fields: dict[str, Any], name: str) -> bool:
    return fields.get(name) is not None


def _refuse(fields: dict[str, Any], name: str, supported: tuple[Any, ...]) -> None:
    value = fields.get(name)
    if value is not None and value not in supported:
        raise ValueError(f"config.json: {name} = {value!r} is not supported (only {supported[0]!r} is)")


def _flag(fields: dict[str, Any], name: str) -> bool:
    return _given(fields, name) and flag(f"config.json: {name}", fields[name])


def _number(fields: dict[str, Any], name: str, absent: float | None) -> float | None:
    return positive(f"config.json: {name}", fields[name]) if _given(fields, name) else absent


def _rotary(fields: dict[str, Any], head_size: int) -> tuple[float, tuple[float, ...] | None]:
    # transformers 4 puts the base beside the scaling, which is null when there is none, and once named
    # "rope_type" plain "type".
    spellings = {name: _scaling(fields, name) for name in ("rope_parameters", "rope_scaling")}
    kinds = {name: _rope_kind(name, scaling) for name, scaling in spellings.items() if scaling}
    if len(set(kinds.values())) > 1:
        raise ValueError(f"config.json: {' and '.join(kinds)} have types {' and '.join(kinds.values())}")
    scaling = spellings["rope_parameters"] or spellings["rope_scaling"]
    base = scaling if _given(scaling, "rope_theta") else fields
    theta = _number(base, "rope_theta", 10000.0)
    kind = next(iter(kinds.values()), "default")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"config.json: rope type {kind!r} is not supported (default and llama3 are)")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [name for name in names if not _given(scaling, name)]
    if missing:
        raise ValueError(f"config.json: rope type 'llama3' without {', '.join(missing)}")
    numbers = {name: _number(scaling, name, None) for name in names}
    if not numbers["low_freq_factor"] < numbers["high_freq_factor"]:
        raise ValueError("config.json: rope type 'llama3' with low_freq_factor not below high_freq_factor")
    return theta, llama3_factors(head_size, theta, **numbers)


def _scaling(fields: dict[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name) or {}
    if not isinstance(value, dict) or any(isinstance(part, dict) for part in value.values()):
        raise ValueError(f"config.json: {name} = {value!r}, allowed is one object of numbers and a type")
    return value


def _rope_kind(name: str, scaling: dict[str, Any]) -> str:
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind is None and _given(scaling, "factor"):
        raise ValueError(f"config.json: {name} has a factor, but no rope_type")
    return str(kind or "default")
