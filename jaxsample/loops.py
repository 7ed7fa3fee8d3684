"""Arrays and keys that a decoding loop carries, as this library takes them; a sampler for such loops.

Knows nothing of requests.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample.params import Features, Limits, SamplingParams, neutral_params, required_features
from jaxsample.sample import sample
from jaxsample.sharding import Axis

_SETTINGS = ("temperature", "top_k", "top_p", "min_p")


def as_allowed(bitmask: Any) -> np.ndarray | jax.Array:
    """Token bitmasks of xgrammar or llguidance as `sample(..., allowed=)` takes them: u32[B, W], not copied.

    Args:
      bitmask: int32 or uint32 [B, W] or [W], bit i % 32 of word i // 32 allows token i; NumPy, or anything
        that np.asarray takes without a copy, such as a torch tensor on the host; or an array of JAX's, also
        inside jit.

    Raises:
      ValueError: another dtype or rank.
    """
    words = bitmask if isinstance(bitmask, jax.Array) else np.asarray(bitmask)
    if words.dtype not in (np.int32, np.uint32) or words.ndim not in (1, 2):
        raise ValueError(
            f"bitmask is {words.dtype}{list(words.shape)}, expected int32 or uint32 [B, W] or [W]"
        )
    if isinstance(words, jax.Array):
        return jnp.atleast_2d(jax.lax.bitcast_convert_type(words, jnp.uint32))
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
      seed: u32[B, 2] as of `seeds_of_key`, low word first, or integers [B] or [B, 1], each the seed that
        `make_params` takes; says what B is.

    Returns:
      SamplingParams of B rows, neutral in all other fields.

    Raises:
      ValueError: an array that has not B rows, or seeds that are no integers.
    """
    seed = _seed_words(seed)
    num_rows = seed.shape[0]

    def row(name: str, value: Any, dtype: Any):
        if dtype == jnp.int32 and not isinstance(value, jax.Array):
            value = np.clip(value, -(2**31), 2**31 - 1)  # wider ones mean the same
        value = jnp.asarray(value, dtype)
        if value.ndim == 2 and value.shape[1] == 1:
            value = value[:, 0]
        if value.shape not in ((), (num_rows,)):
            raise ValueError(
                f"{name} has shape {list(value.shape)}, expected [{num_rows}], [{num_rows}, 1] or []"
            )
        return jnp.broadcast_to(value, (num_rows,))

    top_k = row("top_k", top_k, jnp.int32)
    return dataclasses.replace(
        jax.tree.map(jnp.asarray, neutral_params(limits, num_rows)[0]),
        temperature=jnp.maximum(row("temperature", temperature, jnp.float32), 0),
        top_k=jnp.where((top_k <= 0) | (top_k >= limits.vocab_size), 0, top_k),
        top_p=row("top_p", top_p, jnp.float32),
        min_p=row("min_p", min_p, jnp.float32),
        seed=seed,
    )


def _seed_words(seed: Any) -> jax.Array:
    """u32[B, 2], low word first, of such words or of integers [B] or [B, 1] of 32 or 64 bits with a sign."""
    array = seed if isinstance(seed, jax.Array) else np.asarray(seed)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"seed is {array.dtype}, allowed are integers")
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] not in (1, 2)):
        raise ValueError(f"seed has shape {list(array.shape)}, expected [B], [B, 1] or [B, 2]")
    if array.ndim == 2 and array.shape[1] == 2:
        return jnp.asarray(array.astype(np.uint32))
    array = array.reshape(-1)
    if array.dtype.itemsize == 8:
        low, high = array.astype(np.uint32), (array >> 32).astype(np.uint32)
    else:
        low, high = array.astype(np.uint32), (-(array < 0).astype(np.int32)).astype(np.uint32)
    return jnp.stack([jnp.asarray(low), jnp.asarray(high)], axis=1)


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

    Raises:
      ValueError: an unknown setting, one that is not a number, or one that the features do not serve, where
        its values are known; at the call, logits of another shape, or split ones without a mesh.
    """
    _check_settings(settings, limits, features)

    def sample_fn(logits, key, **own: Any) -> jax.Array:
        if own:
            _check_settings({**settings, **own}, limits, features)
        if logits.ndim not in (2, 3) or (logits.ndim == 3 and logits.shape[1] != 1):
            raise ValueError(f"logits have shape {list(logits.shape)}, expected [B, V] or [B, 1, V]")
        split = getattr(getattr(jax.typeof(logits), "sharding", None), "spec", None) or (None,)
        if mesh is None and len(split) == logits.ndim and split[-1] is not None:
            raise ValueError(f"logits are split over {split[-1]!r}: give as_sample_fn mesh= and axis=")
        logits = logits[:, 0] if logits.ndim == 3 else logits
        seed = seeds_of_key(key, logits.shape[0])
        params = from_arrays(limits, **{**settings, **own}, seed=seed)
        position = jnp.zeros(logits.shape[0], jnp.int32)
        where = {"mesh": mesh, "axis": axis, "batch_axis": batch_axis}
        return sample(logits, params, position, limits=limits, features=features, **where).tokens

    return sample_fn


def _check_settings(settings: Mapping[str, Any], limits: Limits, features: Features) -> None:
    """ValueError for settings that are unknown, or whose values the host knows and that are not served."""
    for name in settings:
        if name not in _SETTINGS:
            hint = "; seeds come from the key" if name == "seed" else ""
            raise ValueError(f"{name!r} is no setting, allowed are {', '.join(_SETTINGS)}{hint}")
    known = {name: np.asarray(x) for name, x in settings.items() if not isinstance(x, jax.Array)}
    for name, value in known.items():
        if not np.issubdtype(value.dtype, np.number) or np.isnan(value.astype(np.float64)).any():
            raise ValueError(f"{name} is {value}, allowed are numbers")
    num_rows = max((value.size for value in known.values()), default=1)
    params, _ = neutral_params(limits, num_rows)
    for name, value in known.items():
        if value.size not in (1, num_rows):
            return  # `from_arrays` says so
        column = getattr(params, name)
        column[:] = np.clip(value.reshape(-1), -(2**31), 2**31 - 1) if name == "top_k" else value.reshape(-1)
    needed = required_features(
        params, limits=limits, num_candidates=features.num_candidates, filter_order=features.filter_order
    )
    told = ", ".join(f"{name}={value}" for name, value in known.items())
    if needed.filters and not features.filters:
        raise ValueError(f"{told} needs filters, features have tier {features.tier!r}: use 'filtered'")
    if needed.filters and needed.full_rows and not features.full_rows:
        raise ValueError(f"{told} needs full_rows, features have full_rows=False")
