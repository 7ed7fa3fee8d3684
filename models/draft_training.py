"""Training of draft heads: the base model's own laws, learnt along chains of the head's own outputs.

Position j of the head takes the base's hidden state h_j and the next token t_{j+1}; its output g_j stands
for h_{j+1}. In pass s of U the hidden states are the outputs of pass s - 1 one position earlier, and the keys
that position j sees are those of pass 1 up to j - s + 1 and then one of each pass, as when a chain of s
proposals is drawn. What is learnt is the law behind h_{j+1} over the draft vocabulary:

    loss = mean over s, weights decay^(s-1), and j of
           KL(p_{j+1} || q_{s,j}) + regression * smooth_l1(g_{s,j} - h_{j+1})

Embedding, LM head and base stay as they are. Knows nothing of files or of the order of batches.

Source: Li et al. 2024, "EAGLE" (arXiv 2401.15077), 2025, "EAGLE-3" (arXiv 2503.01840): training along chains.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxsample.kvcache import KVCache, Staged, init_cache
from models.attention import attend
from models.decoder import DecoderConfig, Weights, decoder_functions
from models.draft_batches import DraftBatch
from models.draft_head import draft_functions, head_config, head_shapes, narrow_logits
from models.random_weights import fill_randomly
from models.value_training import TrainState, attend_causally

_LARGEST_NORM = 1.0  # of a gradient
_DAMPING = 0.1
_LOGITS_BYTES = 2**28  # of one array of logits, at most: positions are taken in chunks


@dataclasses.dataclass(frozen=True)
class Aims:
    """What the loss is made of.

    Fields:
      num_passes: U, 1 or more: pass s learns what proposal s + 1 of a chain needs.
      decay: weight of each pass over that of the one before it, in (0, 1].
      regression: weight of the distance between hidden states, 0 or more.
    """

    num_passes: int = 3
    decay: float = 0.8
    regression: float = 0.0

    def __post_init__(self):
        if self.num_passes < 1:
            raise ValueError(f"passes are {self.num_passes}, allowed are integers from 1")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay is {self.decay}, allowed is (0, 1]")
        if not self.regression >= 0:
            raise ValueError(f"regression is {self.regression}, allowed is 0 and above")


def first_head(
    base: DecoderConfig, weights: Weights, num_layers: int, seed: int
) -> tuple[DecoderConfig, Weights]:
    """A head to begin with: the base's last layers, damped, and final norm, and a new projection in front.

    Damped, since the projection's outputs are much smaller than what those layers add to in the base.

    Args:
      base, weights: the decoder, with separate projections.
      num_layers: of the head, 1 ... L.
      seed: of the projection, which is the mean of its two inputs with a little noise.

    Returns:
      The head's configuration and weights, float32, copies.

    Raises:
      ValueError: num_layers out of range.
    """
    if not 1 <= num_layers <= base.num_layers:
        raise ValueError(f"num_layers is {num_layers}, allowed is 1 ... {base.num_layers}")
    config = head_config(base, num_layers)
    head = fill_randomly(head_shapes(config), seed, jnp.float32)
    last = range(base.num_layers - num_layers, base.num_layers)
    head["layers"] = {place: _damped(weights["layers"][index]) for place, index in enumerate(last)}
    head["norm"] = weights["norm"]
    eye = jnp.eye(config.width)
    head["join"]["weight"] = 0.5 * (jnp.concatenate([eye, eye], axis=1) + 0.2 * head["join"]["weight"])
    return config, jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), head)


def _damped(layer: Weights) -> Weights:
    damp = lambda part, name: {**part, name: jax.tree.map(lambda leaf: _DAMPING * leaf, part[name])}
    return {**layer, "attention": damp(layer["attention"], "output"), "mlp": damp(layer["mlp"], "down")}


def frozen_weights(base: Weights, ids: np.ndarray | None, dtype: Any) -> Weights:
    """What training reads and never changes: {"base", "output", "ids"}, the first two in `dtype`.

    Args:
      base: the base decoder's weights.
      ids: the draft vocabulary, i32[Vd]; None: all tokens.
    """
    base = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), base)
    whole = (base["head"] if "head" in base else base["embedding"])["weight"]
    if ids is None:
        return {"base": base, "output": whole, "ids": None}
    return {"base": base, "output": jnp.take(whole, jnp.asarray(ids), axis=0), "ids": jnp.asarray(ids)}


def hidden_states(config: DecoderConfig) -> Callable[..., jax.Array]:
    """The base on whole sequences: hidden(weights, tokens i32[B, N]) -> its final hidden states [B, N, W]."""
    forward, _ = decoder_functions(config, attend=attend_causally)

    def hidden(weights: Weights, tokens: jax.Array) -> jax.Array:
        B, N = tokens.shape
        dtype = weights["embedding"]["weight"].dtype
        nothing = init_cache(config.num_layers, B, 0, config.num_kv_heads, config.head_size, dtype)
        return forward(weights, tokens, _positions(tokens), nothing, jnp.zeros((B, N, N), bool))[0]

    return hidden


def chain_outputs(config: DecoderConfig) -> Callable[..., list[jax.Array]]:
    """The head on whole sequences, pass by pass.

    Args:
      config: the head's.

    Returns:
      outputs(head's weights, embedding [V, W], batch, hidden [B, N, W], num_passes) -> U arrays [B, N, W]: of
      pass s at j the estimate of h_{j+1} after a chain that began at j - s + 1. What lies outside
      `learnt_positions` means nothing.
    """
    forward, _ = draft_functions(config, attend=jax.checkpoint(attend))

    def outputs(weights: Weights, embedding, batch: DraftBatch, hidden, num_passes: int):
        tokens = jnp.pad(batch.tokens[:, 1:], ((0, 0), (0, 1)))
        parts = {"head": weights, "embedding": embedding}
        positions, dtype = _positions(tokens), embedding.dtype
        B, N = tokens.shape
        cache = init_cache(config.num_layers, B, 0, config.num_kv_heads, config.head_size, dtype)
        found = []
        for number in range(1, num_passes + 1):
            mask = _seen(batch.start, N, number)
            given, staged = forward(parts, tokens, hidden, positions, cache, mask)
            found.append(given)
            hidden = jnp.pad(given[:, :-1], ((0, 0), (1, 0), (0, 0)))
            cache = _with_keys(cache, staged)
        return found

    return outputs


def learnt_positions(batch: DraftBatch, number: int) -> jax.Array:
    """bool[B, N]: the positions j of a pass that are learnt from: t_{j+2} is a token of the output."""
    place = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None]
    first = jnp.maximum(jnp.maximum(batch.first - 1, batch.start), 0) + number - 1
    return (place >= first[:, None]) & (place < batch.length[:, None] - 2)


def make_draft_step(
    base: DecoderConfig,
    config: DecoderConfig,
    optimizer: optax.GradientTransformation,
    aims: Aims,
    dtype: Any,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """One step of training, compiled once for each width of batch; gradients are clipped to norm 1.

    The same step on the same device gives the same bits.

    Args:
      base, config: the base's architecture and the head's.
      optimizer: as `value_training.make_optimizer` makes it.
      aims: what the loss is made of.
      dtype: that base and head are computed in; the head's weights, gradients and the laws are float32.

    Returns:
      step(state, frozen, batch) -> (state, metrics): the state is donated, its `trained` are the head's
      weights; frozen is of `frozen_weights`. Metrics are f32[]: "loss"; of pass s "agreement_s", the share of
      positions whose first token is the base's, and "overlap_s", the mean of sum min(p, q), both within the
      draft vocabulary; "gradient_norm", before clipping; "tokens", learnt from in pass 1.
    """
    hidden_of, outputs_of = hidden_states(base), chain_outputs(config)
    weights_of_passes = np.array([aims.decay**number for number in range(aims.num_passes)], np.float32)
    weights_of_passes /= weights_of_passes.sum()

    def objective(head: Weights, frozen: Weights, batch: DraftBatch, hidden):
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), head)
        embedding = frozen["base"]["embedding"]["weight"]
        found = outputs_of(cast, embedding, batch, hidden, aims.num_passes)
        loss, metrics = jnp.float32(0), {}
        for number, outputs in enumerate(found, start=1):
            mask = learnt_positions(batch, number)
            sums = _compare(config, frozen["output"], outputs[:, :-1], hidden[:, 1:], mask[:, :-1])
            num_tokens = mask.sum().astype(jnp.float32)
            divergence, distance, same, overlap = sums / jnp.maximum(num_tokens, 1.0)
            loss += weights_of_passes[number - 1] * (divergence + aims.regression * distance)
            metrics |= {f"agreement_{number}": same, f"overlap_{number}": overlap}
            if number == 1:
                metrics["tokens"] = num_tokens
        return loss, metrics

    def step(state: TrainState, frozen: Weights, batch: DraftBatch):
        hidden = hidden_of(frozen["base"], batch.tokens)
        together = jax.value_and_grad(objective, has_aux=True)
        (value, metrics), gradient = together(state.trained, frozen, batch, hidden)
        norm = optax.tree.norm(gradient)
        gradient = jax.tree.map(lambda leaf: leaf / jnp.maximum(norm, _LARGEST_NORM), gradient)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer counts
            updates, moments = optimizer.update(gradient, state.optimizer, state.trained)
        trained: Any = optax.apply_updates(state.trained, updates)
        return TrainState(trained, moments), {"loss": value, **metrics, "gradient_norm": norm}

    return jax.jit(step, donate_argnums=0, compiler_options={"xla_gpu_deterministic_ops": True})


def make_judge(
    base: DecoderConfig, config: DecoderConfig, num_passes: int, dtype: Any
) -> Callable[[Weights, Weights, DraftBatch], dict[str, jax.Array]]:
    """How well a head foretells the base, over the whole vocabulary: sums over a batch, by pass.

    Args: as for `make_draft_step`.

    Returns:
      judge(head's weights, frozen, batch) -> f32[U] each: "positions"; "same", where the first tokens are
      equal; "chain", where they are along the whole chain up to here; "overlap", sum min(p, q).
    """
    hidden_of, outputs_of = hidden_states(base), chain_outputs(config)

    def judge(head: Weights, frozen: Weights, batch: DraftBatch):
        hidden = hidden_of(frozen["base"], batch.tokens)
        head = jax.tree.map(lambda leaf: leaf.astype(dtype), head)
        base_weights = frozen["base"]
        embedding = base_weights["embedding"]["weight"]
        whole = base_weights["head"]["weight"] if "head" in base_weights else embedding
        sums: dict[str, list[jax.Array]] = {"positions": [], "same": [], "chain": [], "overlap": []}
        chain = None
        for number, outputs in enumerate(outputs_of(head, embedding, batch, hidden, num_passes), start=1):
            mask = learnt_positions(batch, number)
            same, overlap = _agree(config, whole, frozen, outputs[:, :-1], hidden[:, 1:])
            same, overlap = (jnp.pad(x, ((0, 0), (0, 1))) for x in (same, overlap))
            chain = same if chain is None else same & jnp.pad(chain[:, :-1], ((0, 0), (1, 0)))
            for name, values in (("positions", mask), ("same", same), ("chain", chain), ("overlap", overlap)):
                sums[name].append(jnp.where(mask, values.astype(jnp.float32), 0.0).sum())
        return {name: jnp.stack(values) for name, values in sums.items()}

    return jax.jit(judge)


def _positions(tokens):
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)


def _seen(start, num_tokens: int, number: int):
    """What each position sees in a pass: bool[B, N, s N], the keys of pass 1, 2, ... and last its own."""
    query = np.arange(num_tokens)[:, None]
    key = np.arange(num_tokens)[None, :]
    blocks = [key <= query - number + 1]
    blocks += [key == query - number + earlier for earlier in range(2, number + 1)]
    inside = key[None] >= start[:, None, None]
    own = np.eye(num_tokens, dtype=bool)[None]
    last = number - 1
    seen = [jnp.asarray(block)[None] & inside for block in blocks]
    seen[last] |= own
    return jnp.concatenate(seen, axis=2)


def _with_keys(cache: KVCache, staged: Staged) -> KVCache:
    both = lambda old, new: jnp.concatenate([old, new], axis=2)
    return dataclasses.replace(
        cache, keys=both(cache.keys, staged.keys), values=both(cache.values, staged.values)
    )


def _compare(config: DecoderConfig, output, given, wanted, mask):
    """Sums over the positions of a mask: f32[4], divergence, distance, equal first tokens, overlap."""
    wanted = jax.lax.stop_gradient(wanted)

    @jax.checkpoint
    def one(given, wanted, mask):
        p, q = (jax.nn.log_softmax(narrow_logits(config, output, x[None])[0]) for x in (wanted, given))
        divergence = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
        error = given.astype(jnp.float32) - wanted.astype(jnp.float32)
        distance = optax.losses.huber_loss(error).mean(axis=-1)
        same = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
        overlap = jnp.minimum(jnp.exp(p), jnp.exp(q)).sum(axis=-1)
        each = jnp.stack([divergence, distance, same.astype(jnp.float32), overlap])
        return jnp.where(mask[None], each, 0.0).sum(axis=1)

    size = max(_LOGITS_BYTES // (4 * output.shape[0]), 1)
    chunks = _chunks(size, given, wanted, mask)
    sums, _ = jax.lax.scan(lambda sums, chunk: (sums + one(*chunk), None), jnp.zeros(4), chunks)
    return sums


def _agree(config: DecoderConfig, whole, frozen: Weights, given, wanted):
    """(bool[B, N], f32[B, N]): whether first tokens are equal, and sum min(p, q), over all tokens."""

    def one(chunk):
        given, wanted = chunk
        p = jax.nn.softmax(narrow_logits(config, whole, wanted[None])[0])
        q = jax.nn.softmax(narrow_logits(config, frozen["output"], given[None])[0])
        first, among = jnp.argmax(q, axis=-1), p
        if frozen["ids"] is not None:
            first, among = frozen["ids"][first], jnp.take(p, frozen["ids"], axis=-1)
        return jnp.argmax(p, axis=-1) == first, jnp.minimum(among, q).sum(axis=-1)

    size = max(_LOGITS_BYTES // (4 * whole.shape[0]), 1)
    same, overlap = jax.lax.map(one, _chunks(size, given, wanted))
    shape = given.shape[:2]
    back = lambda x: x.reshape(-1)[: shape[0] * shape[1]].reshape(shape)
    return back(same), back(overlap)


def _chunks(size: int, *arrays):
    """Arrays [B, N, ...] as [chunks, at most size, ...], zeros behind the last position."""
    total = arrays[0].shape[0] * arrays[0].shape[1]
    number = -(-total // min(size, total))
    each = -(-total // number)
    found = []
    for array in arrays:
        flat = array.reshape(total, *array.shape[2:])
        flat = jnp.pad(flat, ((0, number * each - total), *[(0, 0)] * (flat.ndim - 1)))
        found.append(flat.reshape(number, each, *flat.shape[1:]))
    return tuple(found)
