"""What a request asks for, as arrays of B rows, and the static facts a program is built from.

Knows nothing about logits; validation is in `admission`. Every field is always present and "off" is a neutral
value, so that mixed batches share one program and no row changes the shape of another. `Limits` holds
capacities, `Features` says which stages a program contains.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PAD = -1
TILE = 128  # ids a tile of the vocabulary: the unit of ordered sums and of shards
_NUM_CANDIDATES = 128
MAX_SERVED_TOP_K = 64  # rows with a top_k up to this are cut on candidates in every program
FILTER_ORDERS = ("vllm", "hf", "joint")
TIERS = ("plain", "filtered", "full")
LOGPROBS_MODES = ("raw", "processed")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Static capacities. Requests that need more are refused at admission.

    Fields:
      vocab_size: V, real tokens; logits may be wider (padding columns are never looked at).
      max_length: S, cache slots a request has; a request holds at most S + 1 tokens.
      num_logit_bias, num_bad_words, bad_word_length, num_eos, num_stop_ids, num_stop_sequences,
      stop_sequence_length, num_scales: entries a request may have in each list.
      num_logprobs: the most top logprobs a request may ask for.
      num_guided: G, the most candidates a guided request may have, its top_k.
    """

    vocab_size: int
    max_length: int = 2048
    num_logit_bias: int = 32
    num_bad_words: int = 8
    bad_word_length: int = 8
    num_eos: int = 4
    num_stop_ids: int = 8
    num_stop_sequences: int = 4
    stop_sequence_length: int = 8
    num_scales: int = 8
    num_logprobs: int = 20
    num_guided: int = 16

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not _is_integer(value) or value < (field.name == "vocab_size"):
                raise ValueError(f"{field.name} is {value!r}, allowed are integers from 0 (vocab_size: 1)")
            object.__setattr__(self, field.name, int(value))

    @property
    def num_words(self) -> int:
        """W: 32-bit words of a bit mask over the vocabulary."""
        return -(-self.vocab_size // 32)


@dataclasses.dataclass(frozen=True)
class Features:
    """Which stages a program contains; results are bit-equal under any superset, see contract 2 for a GPU.

    Fields:
      tier: "plain" has temperature and greedy rows; "filtered" adds top-k, top-p, min-p; "full" adds bias,
        bans, penalties, bad words, masks, min_tokens, temperature scales and transforms.
      full_rows: the program contains the counting path for rows whose candidates do not suffice. False is
        right only where parameters guarantee that they do (`required_features` knows).
      num_candidates: C.
      filter_order: "vllm" (min-p, top-k, top-p), "hf" (top-k, top-p, min-p) or "joint" (min-p, then top-k and
        top-p both measured on what min-p left). Holds for the whole program.
      num_logprobs: -1 for no logprobs, else the number n of top columns beside the token's own.
      logprobs_mode: "raw" (the model's) or "processed" (of the distribution drawn from).
      transforms: pure functions (logits f32[B, V'], argument, position i32[B]) -> logits, applied in order
        after penalties and before bans and masks; `argument` is a pytree with B rows. Columns past V
        hold -inf.
    """

    tier: str = "full"
    full_rows: bool = True
    num_candidates: int = _NUM_CANDIDATES
    filter_order: str = "vllm"
    num_logprobs: int = -1
    logprobs_mode: str = "raw"
    transforms: tuple[Callable[..., Any], ...] = ()

    def __post_init__(self):
        for name, allowed in (
            ("tier", TIERS),
            ("filter_order", FILTER_ORDERS),
            ("logprobs_mode", LOGPROBS_MODES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, allowed are {', '.join(map(repr, allowed))}"
                )
        if not _is_integer(self.num_candidates) or self.num_candidates < 1:
            raise ValueError(f"num_candidates is {self.num_candidates}, allowed are integers from 1")
        if not _is_integer(self.num_logprobs) or self.num_logprobs < -1:
            raise ValueError(f"num_logprobs is {self.num_logprobs}, allowed are -1 (none), 0, 1, ...")
        if self.num_logprobs > self.num_candidates:
            raise ValueError(
                f"num_logprobs is {self.num_logprobs}, allowed is at most num_candidates = "
                f"{self.num_candidates}"
            )
        if self.transforms and self.tier != "full":
            raise ValueError(f"transforms need tier 'full', got {self.tier!r}")

    @property
    def filters(self) -> bool:
        return self.tier != "plain"

    @property
    def shapes(self) -> bool:
        """Whether stages before the temperature exist."""
        return self.tier == "full"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Per-request sampling numbers; the first axis of every field is the request.

    Fields (neutral value):
      temperature: f32[B] (1). 0 is greedy.
      top_k: i32[B] (0; -1 and >= V are off too).
      top_p: f32[B] (1; 0 keeps the top token only).
      min_p: f32[B] (0).
      repetition_penalty: f32[B] (1), > 0, over prompt and output.
      frequency_penalty: f32[B] (0), over the output's counts.
      presence_penalty: f32[B] (0), over the output.
      seed: u32[B, 2], low and high word.
      num_logprobs: i32[B] (-1: none), top logprobs asked for beside the token's own.
      bias_ids: i32[B, NB] (PAD). bias_values: f32[B, NB]; -inf bans.
      allowed: u32[B, W] (all ones), bit i % 32 of word i // 32 allows token i.
      bad_words: i32[B, NW, LW] (PAD). bad_word_lengths: i32[B, NW] (0).
      scale_ids: i32[B, NT] (PAD). scale_values: f32[B, NT], LenVM's per-token logit multipliers.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    repetition_penalty: Any
    frequency_penalty: Any
    presence_penalty: Any
    seed: Any
    num_logprobs: Any
    bias_ids: Any
    bias_values: Any
    allowed: Any
    bad_words: Any
    bad_word_lengths: Any
    scale_ids: Any
    scale_values: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StopRule:
    """When a request ends; the first axis of every field is the request.

    Fields (neutral value):
      eos_ids: i32[B, NE] (PAD), the model's end tokens. stop_ids: i32[B, NS] (PAD), the request's own.
      stop_sequences: i32[B, NQ, LQ] (PAD). stop_sequence_lengths: i32[B, NQ] (0).
      ignore_eos: bool[B] (False), makes eos_ids ordinary tokens; stop_ids still end.
      min_tokens: i32[B] (0), emitted tokens before which EOS and stop ids are banned.
      max_tokens: i32[B] (2^31 - 1), emitted tokens at which the request ends.
    """

    eos_ids: Any
    stop_ids: Any
    stop_sequences: Any
    stop_sequence_lengths: Any
    ignore_eos: Any
    min_tokens: Any
    max_tokens: Any


def _is_integer(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def neutral_params(limits: Limits, num_rows: int) -> tuple[SamplingParams, StopRule]:
    """Rows with every feature off (temperature 1, seed 0), as NumPy arrays."""
    full = lambda shape, value, dtype: np.full((num_rows, *shape), value, dtype)
    params = SamplingParams(
        temperature=full((), 1, np.float32),
        top_k=full((), 0, np.int32),
        top_p=full((), 1, np.float32),
        min_p=full((), 0, np.float32),
        repetition_penalty=full((), 1, np.float32),
        frequency_penalty=full((), 0, np.float32),
        presence_penalty=full((), 0, np.float32),
        seed=full((2,), 0, np.uint32),
        num_logprobs=full((), -1, np.int32),
        bias_ids=full((limits.num_logit_bias,), PAD, np.int32),
        bias_values=full((limits.num_logit_bias,), 0, np.float32),
        allowed=full((limits.num_words,), 0xFFFFFFFF, np.uint32),
        bad_words=full((limits.num_bad_words, limits.bad_word_length), PAD, np.int32),
        bad_word_lengths=full((limits.num_bad_words,), 0, np.int32),
        scale_ids=full((limits.num_scales,), PAD, np.int32),
        scale_values=full((limits.num_scales,), 1, np.float32),
    )
    stop = StopRule(
        eos_ids=full((limits.num_eos,), PAD, np.int32),
        stop_ids=full((limits.num_stop_ids,), PAD, np.int32),
        stop_sequences=full((limits.num_stop_sequences, limits.stop_sequence_length), PAD, np.int32),
        stop_sequence_lengths=full((limits.num_stop_sequences,), 0, np.int32),
        ignore_eos=full((), False, np.bool_),
        min_tokens=full((), 0, np.int32),
        max_tokens=full((), 2**31 - 1, np.int32),
    )
    return params, stop


def stack_rows(trees: Sequence[Any]) -> Any:
    """Join the rows of several pytrees of NumPy arrays, in order. An empty sequence is refused."""
    if not trees:
        raise ValueError("trees is empty, at least one is needed")
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *trees)


def set_rows(batch: Any, rows, values: Any) -> Any:
    """Write rows of one pytree into another, by index: batch[rows[i]] = values[i] in every leaf.

    Args:
      batch: pytree of arrays with B rows.
      rows: i32[n], distinct; a row below 0 or at B or above is dropped (padding).
      values: the same pytree with n rows.
    """
    rows = jnp.asarray(rows)

    def write(leaf, new):
        leaf = jnp.asarray(leaf)
        index = jnp.where(rows < 0, leaf.shape[0], rows)
        return leaf.at[index].set(jnp.asarray(new).astype(leaf.dtype), mode="drop")

    return jax.tree.map(write, batch, values)


def required_features(
    params: SamplingParams,
    stop: StopRule | None = None,
    *,
    limits: Limits,
    num_candidates: int | None = None,
    filter_order: str = "vllm",
    logprobs_mode: str = "raw",
    transforms: tuple[Callable[..., Any], ...] = (),
    grammar: bool = False,
) -> Features:
    """The smallest `Features` that serve these rows, read from their values on the host.

    Args:
      params: SamplingParams with NumPy leaves (all live rows of a batch).
      stop: StopRule with NumPy leaves, for min_tokens.
      limits: capacities; its num_logprobs is the width of top logprobs if any row asks for some.
      num_candidates: as in `Features`; None: 64 where so many serve all rows, which is faster, else 128.
      filter_order, logprobs_mode, transforms: as in `Features`.
      grammar: whether steps come with a bit mask.
    """
    sampled = np.asarray(params.temperature) >= np.finfo(np.float32).tiny
    top_k = np.asarray(params.top_k)
    has_top_k = (top_k > 0) & (top_k < limits.vocab_size)
    has_mass_filter = (np.asarray(params.top_p) < 1) | (np.asarray(params.min_p) > 0)
    wants_logprobs = bool((np.asarray(params.num_logprobs) >= 0).any())
    filters = bool((sampled & (has_top_k | has_mass_filter)).any())

    wanted = limits.num_logprobs if wants_logprobs else 0

    def all_served(num_candidates: int) -> bool:
        """Whether candidates serve each row, see `truncation.truncate`."""
        by_count = has_top_k & (top_k <= num_candidates)
        by_sums = has_top_k & (top_k <= min(num_candidates, MAX_SERVED_TOP_K)) & (filter_order != "joint")
        no_mass = by_count & (np.asarray(params.top_p) >= 1)
        return bool((~sampled | ~(has_top_k | has_mass_filter) | no_mass | by_sums).all())

    if num_candidates is None:
        few = max(wanted, limits.num_guided) <= MAX_SERVED_TOP_K and all_served(MAX_SERVED_TOP_K)
        num_candidates = MAX_SERVED_TOP_K if few else _NUM_CANDIDATES
    full_rows = not all_served(num_candidates)

    shaped = bool(transforms) or grammar or _uses_shaping(params, stop, limits)
    tier = "full" if shaped else "filtered" if filters or wants_logprobs else "plain"
    return Features(
        tier=tier,
        full_rows=full_rows,
        num_candidates=num_candidates,
        filter_order=filter_order,
        num_logprobs=min(wanted, num_candidates) if wants_logprobs else -1,
        logprobs_mode=logprobs_mode,
        transforms=transforms,
    )


def _uses_shaping(params: SamplingParams, stop: StopRule | None, limits: Limits) -> bool:
    allowed = np.asarray(params.allowed)
    last_bits = limits.vocab_size % 32
    last_word = (1 << last_bits) - 1 if last_bits else 0xFFFFFFFF
    masked = (allowed[:, :-1] != 0xFFFFFFFF).any() or ((allowed[:, -1] & last_word) != last_word).any()
    return bool(
        masked
        or (np.asarray(params.repetition_penalty) != 1).any()
        or (np.asarray(params.frequency_penalty) != 0).any()
        or (np.asarray(params.presence_penalty) != 0).any()
        or (np.asarray(params.bias_ids) >= 0).any()
        or (np.asarray(params.bad_word_lengths) > 0).any()
        or (np.asarray(params.scale_ids) >= 0).any()
        or (stop is not None and (np.asarray(stop.min_tokens) > 0).any())
    )
