"""Training of value models: targets, losses and one jitted step of an optimizer.

The quantity trained is the value v = 1 - gamma^l of `models.value_head`, l the number of tokens after a
token, EOS counted. All is written in the nearness u = 1 - v = gamma^l, which is 1 at EOS and falls to 0:

    u_t = gamma * u_{t+1}

is the whole Bellman equation, the same as that of the return G = -v with reward -(1 - gamma) a token. Values
are trained on the last prompt token and on every output token, EOS with v = 0 among them. Knows nothing of
files or of the order of batches.

Source: Zhang et al., "Length Value Model", arXiv 2604.27039.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxsample.kvcache import init_cache
from models.attention import precision_of
from models.decoder import DecoderConfig, Weights
from models.random_weights import fill_randomly
from models.value_batches import Batch
from models.value_head import head_shapes, trunk_config, value_functions

ALL, LAYERS, LAST, HEAD = PARTS = ("all", "layers", "last", "head")  # what may be trained
_LARGEST_NORM = 1.0  # of a gradient


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step changes: the trained parts of the weights, float32, and the optimizer's state."""

    trained: Weights
    optimizer: Any


def first_layers(
    config: DecoderConfig, weights: Weights, num_layers: int, seed: int, value: float = 0.5
) -> tuple[DecoderConfig, Weights]:
    """A value model to begin with: a decoder's embedding, its first layers, its final norm, and a new head.

    Args:
      config, weights: the decoder; its LM head, if any, is left.
      num_layers: layers kept, 1 ... L.
      seed: of the head, whose matrices are normal with variance 1 / W and whose first bias is zero.
      value: what the head says on average before training, in (0, 1); its second bias is the logit of it.

    Returns:
      The trunk's configuration, and {"trunk", "head"} in float32, copies.

    Raises:
      ValueError: num_layers out of range.
    """
    if not 1 <= num_layers <= config.num_layers:
        raise ValueError(f"num_layers is {num_layers}, allowed is 1 ... {config.num_layers}")
    trunk = {name: part for name, part in weights.items() if name != "head"}
    trunk["layers"] = {index: weights["layers"][index] for index in range(num_layers)}
    head = fill_randomly(head_shapes(config.width), seed, jnp.float32)
    head["summary"]["bias"] = head["summary"]["bias"] + jnp.float32(np.log(value / (1 - value)))
    config = dataclasses.replace(trunk_config(config), num_layers=num_layers)
    return config, {"trunk": jax.tree.map(lambda x: jnp.array(x, jnp.float32), trunk), "head": head}


def split_weights(weights: Weights, train: str) -> tuple[Weights, Weights]:
    """(trained, frozen): a value model's weights, the head being trained always.

    Args:
      weights: {"trunk", "head"}.
      train: "all"; "layers", all but the embedding; "last:K", the last K layers and the final norm, "last"
        being "last:1"; "head", nothing of the trunk.

    Raises:
      ValueError: another word, or more layers than there are.
    """
    trunk = weights["trunk"]
    first = first_trained(train, len(trunk["layers"]))
    is_trained = {"embedding": train == ALL, "norm": train != HEAD}
    trained = {name: trunk[name] for name in is_trained if is_trained[name]}
    frozen = {name: trunk[name] for name in is_trained if not is_trained[name]}
    for part, chosen in ((trained, lambda index: index >= first), (frozen, lambda index: index < first)):
        layers = {index: layer for index, layer in trunk["layers"].items() if chosen(index)}
        part |= {"layers": layers} if layers else {}
    return {"trunk": trained, "head": weights["head"]}, {"trunk": frozen}


def first_trained(train: str, num_layers: int) -> int:
    """Index of the first layer that `split_weights` has trained; num_layers for none. Errors as there."""
    part, _, number = train.partition(":")
    if part == LAST and (train == LAST or number.isdecimal()):
        count = int(number or 1)
        if not 1 <= count <= num_layers:
            raise ValueError(f"train is {train!r}, allowed is last:1 ... last:{num_layers}")
        return num_layers - count
    if part not in (ALL, LAYERS, HEAD) or number or train.endswith(":"):
        raise ValueError(f"train is {train!r}, allowed are all, layers, last, last:K and head")
    return num_layers if train == HEAD else 0


def join_weights(trained: Weights, frozen: Weights) -> Weights:
    """{"trunk", "head"} of what `split_weights` returned."""
    layers = {**frozen["trunk"].get("layers", {}), **trained["trunk"].get("layers", {})}
    return {"trunk": {**frozen["trunk"], **trained["trunk"], "layers": layers}, "head": trained["head"]}


def value_logits(config: DecoderConfig, dtype: Any = jnp.float32) -> Callable[..., jax.Array]:
    """The value model on whole sequences: logits(weights, tokens i32[B, N]) -> z f32[B, N].

    Args:
      config: the trunk's architecture.
      dtype: float dtype that the trunk's weights are cast to and computed in; the head stays in float32.
    """
    forward, value = value_functions(config, attend=attend_causally)

    def logits(weights: Weights, tokens: jax.Array) -> jax.Array:
        B, N = tokens.shape
        trunk = jax.tree.map(lambda leaf: leaf.astype(dtype), weights["trunk"])
        positions = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32)[None], (B, N))
        nothing = init_cache(config.num_layers, B, 0, config.num_kv_heads, config.head_size, dtype)
        hidden, _ = forward({"trunk": trunk}, tokens, positions, nothing, jnp.zeros((B, N, N), bool))
        return value(weights, hidden)

    return logits


def attend_causally(query, keys, values, staged_keys, staged_values, mask) -> jax.Array:
    """Attention of `models.attention` where each staged token sees itself, those before it, and no slots.

    The mask and the committed slots are not looked at. Scores are computed again for the gradient rather than
    kept.
    """
    del keys, values, mask
    B, N, H, D = query.shape
    grouped = query.reshape(B, N, staged_keys.shape[2], -1, D)
    precision = precision_of(query.dtype)

    @jax.checkpoint
    def mix(query, keys, values):
        scores = jnp.einsum(
            "bngqd,bsgd->bgqns", query, keys, precision=precision, preferred_element_type=jnp.float32
        )
        seen = jnp.tril(jnp.ones((N, N), bool))[None, None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores * D**-0.5, -jnp.inf), axis=-1)
        return jnp.einsum("bgqns,bsgd->bngqd", weights.astype(query.dtype), values, precision=precision)

    return mix(grouped, staged_keys, staged_values).reshape(B, N, H * D)


def lambda_returns(old: jax.Array, batch: Batch, gamma: float, lam: float) -> jax.Array:
    """The nearness to train towards, TD(lambda) over a whole rollout:

        u_T = its end,    u_t = gamma * ((1 - lam) * old_{t+1} + lam * u_{t+1})

    This is V_old + A with A_t = delta_t + gamma lam A_{t+1}, in v = -V. At the last token kept, T, stands
    what is known, gamma^l (1 at EOS, also in place of old_T), or else old_T. With lam = 1, the default of
    training, it is gamma^l of the true l, whatever old is, where the end is known.

    Args:
      old: f32[B, N], nearness of the model itself, in [0, 1].
      batch: of `make_batch`.
      gamma: in (0, 1).
      lam: in [0, 1].

    Returns:
      f32[B, N]; what lies outside `target_mask` means nothing. Gradients pass through to old.
    """
    N = old.shape[1]
    place = jnp.arange(N, dtype=jnp.int32)[None]
    to_end = batch.length[:, None] - 1 - place  # tokens between this one and the last one kept
    at_end = to_end == 0
    end = jnp.where(batch.known, batch.end, jnp.where(at_end, old, 0.0).sum(axis=1))[:, None]
    old = jnp.where(at_end, end, old)
    successor = jnp.pad(old[:, 1:], ((0, 0), (0, 1)))
    added = jnp.where(to_end > 0, gamma * (1 - lam) * successor, 0.0)
    decay = jnp.full_like(added, gamma * lam)

    def join(later, earlier):
        return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

    _, mixed = jax.lax.associative_scan(join, (decay, added), reverse=True, axis=1)
    # Powers come from float64: thousands of float32 factors would add up their rounding.
    powers = jnp.asarray(np.power(gamma * lam, np.arange(N)), jnp.float32)
    return mixed + powers[jnp.clip(to_end, 0, N - 1)] * end


def target_mask(batch: Batch) -> jax.Array:
    """bool[B, N]: the tokens trained on, from the last prompt token to the last one kept.

    Where the end is unknown that last one is left out: its target would be its own value.
    """
    place = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None]
    stop = batch.length - jnp.where(batch.known, 0, 1)
    return (place >= batch.first[:, None]) & (place < stop[:, None])


def squared_error(z: jax.Array, nearness: jax.Array) -> jax.Array:
    """(sigmoid(-z) - u)^2 / 2: the paper's loss, and Huber's with delta 1, since no difference exceeds 1."""
    return 0.5 * jnp.square(jax.nn.sigmoid(-z) - nearness)


def cross_entropy(z: jax.Array, nearness: jax.Array) -> jax.Array:
    """-(1 - u) log v - u log(1 - v): the same minimum, E[u]; its gradient does not vanish at v = 0 and 1."""
    return jax.nn.softplus(-z) + nearness * z


LOSSES = {"squared": squared_error, "cross-entropy": cross_entropy}


def predicted_length(z: jax.Array | np.ndarray, gamma: float) -> np.ndarray:
    """l = ln(1 - v) / ln gamma = -softplus(z) / ln gamma, float64 of z's shape; below E[l] if v is a mean."""
    return np.logaddexp(0, np.asarray(z, np.float64)) / -np.log(gamma)


def make_optimizer(
    learning_rate: float, warmup: int, steps: int, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """AdamW; the rate rises linearly and then falls to 0 by a cosine.

    Args:
      learning_rate: at its highest, above 0.
      warmup: steps until then, 0 ... steps - 1.
      steps: all of them.
      weight_decay: 0: none.

    Raises:
      ValueError: a warm-up that leaves no step, or a rate that is not positive.
    """
    if not learning_rate > 0:
        raise ValueError(f"learning rate is {learning_rate}, allowed is above 0")
    if not 0 <= warmup < steps:
        raise ValueError(f"warm-up is {warmup} steps of {steps}, allowed is 0 ... {steps - 1}")
    start = learning_rate / (warmup + 1)
    schedule = optax.warmup_cosine_decay_schedule(start, learning_rate, warmup, steps)
    # All weights as one vector: a fraction of the operations to compile.
    return optax.flatten(optax.adamw(schedule, weight_decay=weight_decay))


def make_train_step(
    config: DecoderConfig,
    optimizer: optax.GradientTransformation,
    *,
    gamma: float,
    lam: float = 1.0,
    loss: Callable[[jax.Array, jax.Array], jax.Array] = squared_error,
    dtype: Any = jnp.float32,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """One step of training, compiled once for each width of batch; gradients are clipped to norm 1.

    The loss is the mean over all trained tokens of the batch, whichever rollouts they are in: averaging by
    rollout would weigh a token by what is still to come and so move the minimum. The same step on the same
    device gives the same bits: sums that depend on the order of threads are not used.

    Args:
      config: the trunk's architecture.
      optimizer: as `make_optimizer` makes it.
      gamma, lam: as for `lambda_returns`.
      loss: (z, nearness) -> loss, of each token.
      dtype: that the trunk is computed in; weights and gradients stay in float32.

    Returns:
      step(state, frozen, batch) -> (state, metrics): the state is donated; it and frozen hold the two parts
      of `split_weights`. Metrics are f32[]: "loss"; "value_error", mean |v - target|; "gradient_norm", before
      clipping; "tokens", trained on.

    Raises:
      ValueError: lam outside [0, 1].
    """
    if not 0 <= lam <= 1:
        raise ValueError(f"lam is {lam}, allowed is [0, 1]")
    logits = value_logits(config, dtype)

    def objective(trained: Weights, frozen: Weights, batch: Batch):
        z = logits(join_weights(trained, frozen), batch.tokens)
        nearness = jax.nn.sigmoid(-z)
        target = jax.lax.stop_gradient(lambda_returns(nearness, batch, gamma, lam))
        mask = target_mask(batch)
        num_tokens = mask.sum().astype(jnp.float32)
        mean = lambda x: jnp.where(mask, x, 0.0).sum() / jnp.maximum(num_tokens, 1.0)
        return mean(loss(z, target)), (mean(jnp.abs(nearness - target)), num_tokens)

    def step(state: TrainState, frozen: Weights, batch: Batch):
        together = jax.value_and_grad(objective, has_aux=True)
        (value, (error, num_tokens)), gradient = together(state.trained, frozen, batch)
        norm = optax.tree.norm(gradient)
        gradient = jax.tree.map(lambda leaf: leaf / jnp.maximum(norm, _LARGEST_NORM), gradient)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer counts
            updates, moments = optimizer.update(gradient, state.optimizer, state.trained)
        metrics = {
            "loss": value,
            "value_error": error,
            "gradient_norm": norm,
            "tokens": num_tokens,
        }
        trained: Any = optax.apply_updates(state.trained, updates)
        return TrainState(trained, moments), metrics

    return jax.jit(step, donate_argnums=0, compiler_options={"xla_gpu_deterministic_ops": True})
