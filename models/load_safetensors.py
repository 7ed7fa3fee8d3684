"""Checkpoints in Hugging Face's layout: a folder with config.json, model.safetensors, tokenizer.json.

Reads config.json in both spellings: `rope_parameters` and `dtype` (transformers 5), or `rope_theta` and
`rope_scaling` (transformers 4).
"""

import json
import pathlib
from typing import Any

import safetensors
import tokenizers

from models.decoder import DecoderConfig, Weights
from models.rope import llama3_factors
from models.text import Text
from models.weights import HUGGING_FACE, assemble


def load_folder(folder: pathlib.Path, dtype: Any) -> tuple[DecoderConfig, Weights, Text | None]:
    """Loads a folder; the text side is None where it holds no tokenizer.json.

    Args:
      folder: holds config.json and model.safetensors.
      dtype: float dtype of the weights.

    Raises:
      ValueError: what `decoder_config` and `load_tensors` refuse, or a missing or damaged file.
    """
    fields = read_json(folder / "config.json")
    config = decoder_config(fields)
    weights = load_tensors(folder / "model.safetensors", config, dtype)
    return config, weights, text_from_folder(folder, fields)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError where there is none."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent}: no {path.name}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: not a JSON object")
    return fields


def decoder_config(fields: dict[str, Any]) -> DecoderConfig:
    """The architecture that a config.json describes.

    Args:
      fields: the file's object, in either spelling.

    Raises:
      ValueError: a missing field, or a model type, activation, rotary scaling, sliding window or bias that
        the decoder does not have.
    """

    def need(name: str) -> Any:
        if fields.get(name) is None:
            raise ValueError(f"config.json: no {name!r}")
        return fields[name]

    kind = need("model_type")
    if kind not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"config.json: model_type {kind!r} is not supported (llama, qwen2, qwen3 are)")
    _refuse(fields, "hidden_act", ("silu",), default="silu")
    _refuse(fields, "use_sliding_window", (False,), default=False)
    _refuse(fields, "attention_bias", (False,), default=False)
    _refuse(fields, "mlp_bias", (False,), default=False)
    num_heads = need("num_attention_heads")
    head_size = fields.get("head_dim") or need("hidden_size") // num_heads
    theta, factors = _rotary(fields, head_size)
    return DecoderConfig(
        vocab_size=need("vocab_size"),
        width=need("hidden_size"),
        num_layers=need("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads") or num_heads,
        head_size=head_size,
        mlp_width=need("intermediate_size"),
        norm_eps=need("rms_norm_eps"),
        rope_theta=theta,
        rope_factors=factors,
        tied_embeddings=fields.get("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        max_length=need("max_position_embeddings"),
    )


def load_tensors(path: pathlib.Path, config: DecoderConfig, dtype: Any) -> Weights:
    """The decoder's weights from one safetensors file.

    Tied models store the one matrix as model.embed_tokens.weight or, some of them, as lm_head.weight.

    Raises:
      ValueError: no such file, a damaged one, or tensors that are missing, unexpected or misshapen.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent}: no {path.name} (checkpoints in several files are not supported)")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            names = file.keys()
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            spelling = dict(HUGGING_FACE)
            ignored = [name for name in shapes if name.endswith(".rotary_emb.inv_freq")]
            if (
                config.tied_embeddings
                and "model.embed_tokens.weight" not in shapes
                and "lm_head.weight" in shapes
            ):
                spelling["embedding"] = spelling["head"]
            elif config.tied_embeddings:
                ignored.append("lm_head.weight")
            return assemble(
                config, spelling, shapes, file.get_tensor, dtype, source=str(path), ignored=ignored
            )
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: damaged or truncated ({error})") from None


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
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    eos = optional("generation_config.json").get("eos_token_id")
    eos = config.get("eos_token_id") if eos is None else eos
    eos = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    return Text(tokenizer, eos, template, specials)


def _refuse(fields: dict[str, Any], name: str, supported: tuple[Any, ...], *, default: Any) -> None:
    value = fields.get(name, default)
    if value not in supported:
        raise ValueError(f"config.json: {name} = {value!r} is not supported (only {supported[0]!r} is)")


def _rotary(fields: dict[str, Any], head_size: int) -> tuple[float, tuple[float, ...] | None]:
    # transformers 4 puts the base beside the scaling, which is null when there is none, and once named
    # "rope_type" plain "type".
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or fields.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"config.json: rope type {kind!r} is not supported (default and llama3 are)")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [name for name in names if name not in scaling]
    if missing:
        raise ValueError(f"config.json: rope type 'llama3' without {', '.join(missing)}")
    return theta, llama3_factors(head_size, theta, **{name: scaling[name] for name in names})
