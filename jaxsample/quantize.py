"""Keys and values in one byte a number: int8, or float8_e4m3fn kept as uint8, with a scale a token and head.

    scale = max |x| over the head / largest code, rounded to 17 significant bits
    code = the code nearest to x / scale
    what is read = code * scale

A code has at most 7 significant bits, so the product is exact in float32, and rounding what was read once
more gives the same code and the same scale, however the compiler divides. Knows nothing about caches.
"""

import jax
import jax.numpy as jnp
import numpy as np

_LARGEST_INT8, _LARGEST_FP8 = 127.0, 448.0
# Scales below this would make subnormals, which XLA flushes to zero on some devices.
_SMALLEST_SCALE = 2.0**-100
_SCALE_MANTISSA_BITS = 16  # stored bits; 17 significant ones


def storage_dtype(dtype):
    """The dtype that an array of a cache has: fp8 is kept as uint8, everything else as it is.

    Args:
      dtype: a float dtype of two bytes or more, int8, or float8_e4m3fn.

    Raises:
      ValueError: any other dtype.
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.float8_e4m3fn:
        return jnp.dtype(jnp.uint8)
    if dtype == jnp.int8 or (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1):
        return dtype
    raise ValueError(f"dtype is {dtype}, allowed are float16, bfloat16, float32, int8 and float8_e4m3fn")


def is_quantized(storage) -> bool:
    """Whether an array of this dtype holds codes that need scales: int8, or uint8 for float8_e4m3fn."""
    return jnp.dtype(storage) in (jnp.dtype(jnp.int8), jnp.dtype(jnp.uint8))


def empty_storage(shape: tuple[int, ...], dtype):
    """Zeros for numbers [..., H, D], and their scales f32[..., H], None where the dtype needs none."""
    storage = storage_dtype(dtype)
    scales = jnp.zeros(shape[:-1], jnp.float32) if is_quantized(storage) else None
    return jnp.zeros(shape, storage), scales


def quantize(x, storage):
    """Codes and scales of x.

    The error of a number is at most 0.502 scale in int8; in fp8 the larger of 2^-4 of the number and
    2^-10 scale, with 1 % on top. A head that holds NaN or an infinity gets codes 0 and a scale that is not
    finite: it reads as NaN.

    Args:
      x: float[..., D].
      storage: int8, or uint8 for float8_e4m3fn.

    Returns:
      codes [..., D] of that dtype, scales f32[...].
    """
    x = x.astype(jnp.float32)
    # A product, since XLA makes one of a division by a constant on some devices and not on others.
    scales = jnp.max(jnp.abs(x), axis=-1) * jnp.float32(1 / _largest_code(storage))
    scales = jax.lax.reduce_precision(scales, exponent_bits=8, mantissa_bits=_SCALE_MANTISSA_BITS)
    scales = jnp.maximum(scales, jnp.float32(_SMALLEST_SCALE))
    return encode(x, scales, storage), scales


def encode(x, scales, storage):
    """The codes nearest to x / scale.

    Args:
      x: float[..., D].
      scales: f32[...], of `quantize`.
      storage: int8, or uint8 for float8_e4m3fn.

    Returns:
      [..., D] of that dtype.
    """
    largest = _largest_code(storage)
    ratio = jnp.clip(x.astype(jnp.float32) / scales[..., None], -largest, largest)
    ratio = jnp.where(jnp.isfinite(scales)[..., None], ratio, 0.0)
    if jnp.dtype(storage) == jnp.int8:
        return jnp.round(ratio).astype(jnp.int8)
    return jax.lax.bitcast_convert_type(_rounded_to_fp8(ratio).astype(jnp.float8_e4m3fn), jnp.uint8)


def _rounded_to_fp8(x):
    """The float8_e4m3fn number nearest to each float32 within its range, ties to even, as float32.

    In float32 arithmetic, so that the conversion that follows is exact: XLA on GPUs drops a conversion to a
    narrow float and back, and would leave the staged rows unrounded.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    kept_bit = (bits >> 20) & 1  # the last of three mantissa bits
    normal = jax.lax.bitcast_convert_type((bits + 0x7FFFF + kept_bit) & ~0xFFFFF, jnp.float32)
    # Below 2^-6 the numbers are multiples of 2^-9.
    return jnp.where(jnp.abs(x) < 2.0**-6, jnp.round(x * 512) * np.float32(2.0**-9), normal)


def dequantize(codes, scales):
    """code * scale, exact in float32.

    Args:
      codes: int8[..., D], or uint8[..., D] for float8_e4m3fn.
      scales: f32[...].

    Returns:
      f32[..., D].
    """
    if codes.dtype == jnp.uint8:
        codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return codes.astype(jnp.float32) * scales[..., None]


def _largest_code(storage) -> float:
    return _LARGEST_INT8 if jnp.dtype(storage) == jnp.int8 else _LARGEST_FP8
