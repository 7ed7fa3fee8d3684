"""The numbers of an architecture as a file says them, checked before anything is made of them.

Knows nothing of the files' formats or of where a format keeps a number.
"""

import dataclasses
from typing import Any

from models.decoder import DecoderConfig

_COUNTS = (
    "vocab_size",
    "width",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "mlp_width",
    "max_length",
)
_FLAGS = ("tied_embeddings", "qkv_bias", "output_bias", "qk_norm", "joined_projections")


def count(name: str, value: Any) -> int:
    """The value where it is a whole number from 1; else ValueError with the name of the field."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} = {value!r}, allowed is a whole number from 1")
    return value


def positive(name: str, value: Any) -> float:
    """The value where it is a finite number above 0; else ValueError with the name of the field."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{name} = {value!r}, allowed is a number above 0")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """The value where it is true or false; else ValueError with the name of the field."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}, allowed are true and false")
    return value


def check_heads(source: str, num_heads: int, num_kv_heads: int, head_size: int) -> None:
    """ValueError where key-value heads do not divide the query heads, or a head's size is odd."""
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{source}: {num_heads} query heads are no multiple of {num_kv_heads} key-value heads"
        )
    if head_size % 2:
        raise ValueError(f"{source}: heads of size {head_size}, allowed is an even size")


def config_of_fields(source: str, fields: Any) -> DecoderConfig:
    """The configuration whose `dataclasses.asdict` went through JSON.

    Args:
      source: the file, for messages.
      fields: the object.

    Raises:
      ValueError: no such object, or a field that is missing, unknown or no such value.
    """
    try:
        factors = fields["rope_factors"]
        config = DecoderConfig(**{**fields, "rope_factors": None if factors is None else tuple(factors)})
    except (TypeError, KeyError) as error:
        raise ValueError(f"{source}: not a decoder's configuration ({error})") from None
    for field, value in dataclasses.asdict(config).items():
        name = f"{source}: {field}"
        if field in _COUNTS:
            count(name, value)
        elif field in _FLAGS:
            flag(name, value)
        elif field == "rope_factors":
            for factor in value or ():
                positive(name, factor)
        elif value is not None or field != "final_logit_softcapping":
            positive(name, value)
    check_heads(source, config.num_heads, config.num_kv_heads, config.head_size)
    check_factors(source, config.rope_factors, config.head_size)
    return config


def check_factors(source: str, factors: tuple[float, ...] | None, head_size: int) -> None:
    """ValueError where there are not as many divisors of rotary frequencies as a head has frequencies."""
    if factors is not None and len(factors) != head_size // 2:
        raise ValueError(
            f"{source}: {len(factors)} divisors of rotary frequencies for heads of size {head_size}, "
            f"expected {head_size // 2}"
        )
