"""The shapes of published models, for random weights: no file, no weights, no tokenizer is needed.

Each entry says what the model's own config.json says.
"""

import dataclasses

from models.decoder import DecoderConfig
from models.rope import llama3_factors

_QWEN2_5 = DecoderConfig(
    vocab_size=151_936,
    width=896,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_size=64,
    mlp_width=4864,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    tied_embeddings=True,
    qkv_bias=True,
    max_length=32_768,
)
_QWEN3 = DecoderConfig(
    vocab_size=151_936,
    width=1024,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_size=128,
    mlp_width=3072,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    tied_embeddings=True,
    qk_norm=True,
    max_length=40_960,
)
_LLAMA_3 = DecoderConfig(
    vocab_size=128_256,
    width=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    mlp_width=14_336,
    norm_eps=1e-5,
    rope_theta=500_000.0,
    max_length=131_072,
)


def _llama3_rope(head_size: int, factor: float) -> tuple[float, ...]:
    return llama3_factors(
        head_size,
        _LLAMA_3.rope_theta,
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


PRESETS: dict[str, DecoderConfig] = {
    "qwen2.5-0.5b": _QWEN2_5,
    "qwen2.5-1.5b": dataclasses.replace(
        _QWEN2_5, width=1536, num_layers=28, num_heads=12, head_size=128, mlp_width=8960
    ),
    "qwen2.5-7b": dataclasses.replace(
        _QWEN2_5,
        vocab_size=152_064,
        width=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_size=128,
        mlp_width=18_944,
        tied_embeddings=False,
    ),
    "qwen3-0.6b": _QWEN3,
    "qwen3-1.7b": dataclasses.replace(_QWEN3, width=2048, mlp_width=6144),
    "qwen3-8b": dataclasses.replace(
        _QWEN3, width=4096, num_layers=36, num_heads=32, mlp_width=12_288, tied_embeddings=False
    ),
    "llama-3.2-1b": dataclasses.replace(
        _LLAMA_3,
        width=2048,
        num_layers=16,
        head_size=64,
        mlp_width=8192,
        rope_factors=_llama3_rope(64, 32.0),
        tied_embeddings=True,
    ),
    "llama-3.1-8b": dataclasses.replace(_LLAMA_3, rope_factors=_llama3_rope(128, 8.0)),
    "smollm2-135m": DecoderConfig(
        vocab_size=49_152,
        width=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        mlp_width=1536,
        norm_eps=1e-5,
        rope_theta=100_000.0,
        tied_embeddings=True,
        max_length=8192,
    ),
}


def preset(name: str) -> DecoderConfig:
    """The configuration of a published model.

    Args:
      name: one of PRESETS.

    Raises:
      ValueError: an unknown name; the message lists all.
    """
    if name not in PRESETS:
        raise ValueError(
            f"no shapes are known for {name!r}; they are for {', '.join(PRESETS)}, and for any config.json"
        )
    return PRESETS[name]
