"""The models' answer to a known text: logits of what comes next, and values of candidates for it.

A text is one pass; of a long one all but the last tokens are committed before, in chunks. Knows nothing of
sampling.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample import Limits, attention_mask, candidate_mask, chain, init_cache, make_prefill
from models.decoder import DecoderConfig, Weights, decoder_functions
from models.kernels import kernels_of
from models.programs import power_of_two
from models.value_head import value_functions

_CHUNK, _SMALLEST_PASS = 512, 16  # tokens in one pass


def next_logits(config: DecoderConfig, weights: Weights, tokens: Sequence[int]) -> jax.Array:
    """The logits behind a text.

    Args:
      config, weights: a decoder.
      tokens: at least one id.

    Returns:
      f32[1, Vp].
    """
    forward, unembed = decoder_functions(config, kernels=kernels_of())
    cache, length, rest, count = _begun(forward, config, weights, weights, tokens)

    @jax.jit
    def last(weights, cache, length, rest, count):
        width = rest.shape[1]
        mask = attention_mask(length, chain(width - 1), cache.num_slots)
        positions = length[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
        hidden, _ = forward(weights, rest, positions, cache, mask)
        return unembed(weights, jnp.take(hidden, count - 1, axis=1))[:, 0]

    return last(weights, cache, length, rest, count)


def candidate_scorer(
    config: DecoderConfig, weights: Weights, tokens: Sequence[int]
) -> Callable[[jax.Array], jax.Array]:
    """A value model over the candidates for the token behind a text.

    Args:
      config, weights: a value model, see `models.value_head`.
      tokens: at least one id.

    Returns:
      score(ids i32[1, G]) -> z f32[1, G], the value's logit at each candidate's own position.
    """
    forward, value = value_functions(config, kernels=kernels_of())

    @jax.jit
    def behind(weights, cache, length, rest, count, ids):
        width = rest.shape[1]
        positions, mask = candidate_mask(length, count, width, ids.shape[1], cache.num_slots)
        hidden, _ = forward(weights, jnp.concatenate([rest, ids], axis=1), positions, cache, mask)
        return value(weights, hidden[:, width:])

    def score(ids: jax.Array) -> jax.Array:
        return behind(weights, *_begun(forward, config, weights, weights["trunk"], tokens), ids)

    return score


def _begun(forward: Callable, config: DecoderConfig, weights: Weights, trunk: Weights, tokens: Sequence[int]):
    """All but the last 1 ... 512 tokens in a cache: (cache, length i32[1], rest i32[1, N], count i32[1])."""
    num_done = (len(tokens) - 1) // _CHUNK * _CHUNK
    num_slots = power_of_two(max(num_done, 1))
    dtype = jax.tree.leaves(trunk)[0].dtype
    cache = init_cache(config.num_layers, 1, num_slots, config.num_kv_heads, config.head_size, dtype)
    one = lambda number: jnp.asarray([number], jnp.int32)
    if num_done > 0:
        prefill = make_prefill(forward, Limits(config.vocab_size, max_length=num_slots))
        for done in range(0, num_done, _CHUNK):
            chunk = jnp.asarray([tokens[done : done + _CHUNK]], jnp.int32)
            cache = prefill(weights, cache, chunk, one(done), one(_CHUNK))
    count = len(tokens) - num_done
    rest = np.zeros((1, power_of_two(max(count, _SMALLEST_PASS))), np.int32)
    rest[0, :count] = tokens[num_done:]
    return cache, one(num_done), jnp.asarray(rest), one(count)
