"""The LM head as rows of a matrix, and its logits in chunks of columns.

Knows nothing about what becomes of a chunk: `head_summary` shapes it for sampling, `head_score` scores it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsample.params import TILE

SHARD_UNIT = 4  # tokens of one call of the noise generator, which a device has all of


class KernelBlocks(NamedTuple):
    """The portions of a program of `head_kernel`.

    Fields:
      rows: hidden states; a power of two from 16. inputs: of the width at a time; likewise.
      warps: of a program; a power of two. stages: loads under way, from 1.
    """

    rows: int
    inputs: int
    warps: int
    stages: int

    def check(self) -> None:
        """Refuse what no kernel can be made with."""
        for name, value in self._asdict().items():
            least = 16 if name in ("rows", "inputs") else 1
            kind = "integers" if name == "stages" else "powers of two"
            is_kind = isinstance(value, int) and (name == "stages" or value & (value - 1) == 0)
            if not is_kind or value < least:
                raise ValueError(f"kernel's {name} is {value!r}, allowed are {kind} from {least}")


@dataclasses.dataclass(frozen=True)
class Head:
    """How logits come from hidden states, and in what portions; static.

    Fields:
      weight_of: weights -> float [Vp, W], the head's rows (the embedding's where they are tied), for
        functions that are given a model's weights. None: what they are given is the matrix.
      logit_scale: multiplies the logits.
      softcap: c; logits then become c tanh(logits / c). None: they stay.
      unfiltered: the program can draw from whole rows. False is right only where each row is greedy or has a
        filter (`truncation.is_filtered`), and saves the noise of every token.
      chunk: columns whose logits exist at a time, a multiple of num_lanes.
      num_lanes, depth: L lanes keep their `depth` first tokens each; L a multiple of 128.
      num_recomputed: rows at a time whose logits are computed whole because their summaries do not suffice;
        8 times as many positions of a score. None: 8 where the program holds full rows, else one in 64 of the
        rows, so that they take little memory; one in 128 of the positions, 8 at least.
      kernel: whether sampling takes one kernel for product and lanes (`head_kernel`), not chunks, where it is
        made for that: a matrix in bfloat16 on one device, W a multiple of 64, depth at most 8, tiers "plain"
        and "filtered"; its lanes are V / 128. None: on the only GPU of a process, for 32,768 rows of the
        matrix and more. True: everywhere; interpreted, that is slowly, where there is no GPU. KernelBlocks:
        likewise, in these portions; W a multiple of their inputs. False: never.
    """

    weight_of: Callable[[Any], Any] | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    unfiltered: bool = True
    chunk: int = 4096
    num_lanes: int = 512
    depth: int = 4
    num_recomputed: int | None = None
    kernel: bool | KernelBlocks | None = None

    def __post_init__(self):
        for name, unit in (
            ("chunk", self.num_lanes),
            ("num_lanes", TILE),
            ("depth", 1),
            ("num_recomputed", 1),
        ):
            value = getattr(self, name)
            if name == "num_recomputed" and value is None:
                continue
            if not isinstance(value, int) or value < 1 or unit < 1 or value % unit:
                raise ValueError(f"{name} is {value!r}, allowed are multiples of {unit} from {unit}")
        if self.softcap is not None and not 0 < self.softcap < float("inf"):
            raise ValueError(f"softcap is {self.softcap!r}, allowed are None and finite numbers above 0")
        if isinstance(self.kernel, KernelBlocks):
            self.kernel.check()
        elif self.kernel not in (None, True, False):
            raise ValueError(f"kernel is {self.kernel!r}, allowed are None, True, False and KernelBlocks")
        if self.weight_of is not None and not callable(self.weight_of):
            raise ValueError(
                f"weight_of is {self.weight_of!r}, allowed are None and functions of the weights"
            )


def head_logits(hidden, weight, head: Head, product: str = "bw,nw->bn"):
    """Logits of some rows of the head: f32[B, n] of [B, W] and [n, W]; factors in weight's dtype, sums f32.

    Args:
      hidden: float [B, W]. weight: float [n, W]. head: Head, of which the scale and the cap are looked at.
      product: as `jnp.einsum` writes it.
    """
    # A GPU's default for float32 would round the factors to ten bits.
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    logits = jnp.einsum(
        product, hidden.astype(weight.dtype), weight, precision=precision, preferred_element_type=jnp.float32
    )
    return scale_logits(logits, head.logit_scale, head.softcap)


def scale_logits(logits, logit_scale: float, softcap: float | None):
    """Products with the head's rows as the logits that a model means: logits times logit_scale, then capped.

    Args:
      logits: f32[...].
      logit_scale: 1.0 leaves them. softcap: c of c tanh(logits / c); None leaves them.
    """
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    return logits


def over_chunks(add: Callable[..., Any], state, hidden, weight, head: Head):
    """`add(state, logits f32[B, n], at)` for every chunk of the head's rows, in order: the last state.

    Each chunk but the last has head.chunk columns; `at` is the first row's number.
    """
    num_columns, chunk = weight.shape[0], min(head.chunk, weight.shape[0])

    def step(state, at, size):
        rows = jax.lax.dynamic_slice_in_dim(weight, at, size, axis=0)
        # Written out once: both lanes and noise read them.
        return add(state, jax.lax.optimization_barrier(head_logits(hidden, rows, head)), at)

    num_whole = num_columns // chunk
    if num_whole > 1:
        starts = jnp.arange(num_whole, dtype=jnp.int32) * chunk
        state, _ = jax.lax.scan(lambda state, at: (step(state, at, chunk), None), state, starts)
    else:
        state = step(state, 0, chunk)
    rest = num_columns - num_whole * chunk
    return step(state, num_whole * chunk, rest) if rest else state


@jax.custom_jvp
def without_gradient(x):
    """x, which cannot be differentiated: a summary forgets what gradients need."""
    return x


@without_gradient.defjvp
def _refuse_gradient(primals, tangents):
    raise ValueError(
        "hidden or weight is differentiated, but a head worked through in chunks has no gradients: compute "
        "logits for a loss"
    )


def check_head(hidden, weight, vocab_size: int, num_shards: int = 1) -> None:
    """Refuse hidden states and a head that do not fit each other or the vocabulary."""
    for name, array in (("hidden", hidden), ("weight", weight)):
        if array.ndim != 2 or not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, expected floats [rows, W]")
        if array.shape[0] == 0:
            raise ValueError(f"{name} has no rows, expected at least one")
    if hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden is {hidden.shape[1]} wide and the head's rows {weight.shape[1]}, expected the same"
        )
    num_ids = weight.shape[0] * num_shards
    if num_ids < vocab_size:
        raise ValueError(f"the head has {num_ids} rows, expected at least the vocabulary's {vocab_size}")
    if num_shards > 1 and weight.shape[0] % SHARD_UNIT:
        raise ValueError(f"the head has {weight.shape[0]} rows a device, expected a multiple of {SHARD_UNIT}")


def filled(x, unit: int):
    """[B, n] with -inf behind, to a multiple of `unit` columns."""
    missing = -x.shape[1] % unit
    return jnp.pad(x, ((0, 0), (0, missing)), constant_values=-jnp.inf) if missing else x
