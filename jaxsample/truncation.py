"""Top-k, top-p and min-p as one cut: the last token of the order that is kept, as a (value, id) pair.

All three keep a prefix of the order, so together they are the shortest prefix. Two routes find it: on the C
candidates of a row, and, where these do not suffice, by counting passes over the full row. Knows nothing
about randomness or about which request a row belongs to.

With m(A) the mass of a prefix A and n_k, n_m the lengths that top-k and min-p keep, top-p keeps the shortest
prefix whose mass reaches top_p * m(A), where A is what the other filters left:

    filter order "vllm"   A = the shorter of n_k and n_m     (min-p, top-k, top-p)
    filter order "hf"     A = n_k                            (top-k, top-p, min-p)
    filter order "joint"  A = n_m                            (min-p, then top-k and top-p together)
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample import rng
from jaxsample.candidates import Candidates, prefix_sum, row_max, tile_sum
from jaxsample.params import MAX_SERVED_TOP_K, TILE, Features, SamplingParams

# A crossing this close to top_p (relative to m(A)) is left to the full row, so that no two routes cut apart.
MARGIN = np.float32(2.0**-18)
_TINY = np.finfo(np.float32).tiny
_KEY_OF_MINUS_INF = -0x7F800001  # the integer that orders as -inf does


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cut:
    """The last token kept in each of B rows.

    Fields:
      value: f32[B]. -inf keeps every token that can be drawn.
      id: i32[B]. A token is kept when its value is larger, or equal and its id at most this.
      log_mass: f32[B], log of the sum of exp(z - max) over the kept tokens.
    """

    value: jax.Array
    id: jax.Array
    log_mass: jax.Array


def is_greedy(params: SamplingParams):
    """bool[B]: temperature 0, or subnormal, which counts as zero."""
    return params.temperature < _TINY


def is_filtered(params: SamplingParams, vocab_size: int):
    """bool[B]: rows that any filter or greed may cut."""
    has_top_k = (params.top_k > 0) & (params.top_k < vocab_size)
    return is_greedy(params) | has_top_k | (params.top_p < 1) | (params.min_p > 0)


def truncate(logits, candidates: Candidates, params: SamplingParams, *, vocab_size: int, features: Features):
    """The cut of every row by its own parameters; greedy rows keep their first token.

    Args:
      logits: f32[B, V'], shaped; read only if features.full_rows.
      candidates: their summary.
      params: SamplingParams.
      vocab_size: V.
      features: the program's stages.

    Returns:
      (Cut, num_kept i32[B] among the candidates). Where the candidates do not serve a row and the program
      holds full rows, the cut comes from the full row and num_kept means nothing.

    Candidates serve a row when their cut is exact, or when A is given by a top_k of at most 64: then every
    program decides on the same few sums, however close to top_p the crossing is. So a row's cut does not
    depend on the program, C >= 64 included.
    """
    top_k = jnp.where(is_greedy(params), 1, params.top_k)
    filters = (top_k, params.top_p, params.min_p)
    order = features.filter_order
    cut, num_kept, served = cut_candidates(candidates, *filters, vocab_size=vocab_size, filter_order=order)
    if features.full_rows:
        if order != "joint":
            few = min(candidates.values.shape[1], MAX_SERVED_TOP_K)
            served |= effective_top_k(top_k, vocab_size) <= few
        full = cut_rows(logits, *filters, vocab_size=vocab_size, filter_order=order)
        cut = jax.tree.map(lambda ours, theirs: jnp.where(served, ours, theirs), cut, full)
    return cut, num_kept


def kept(logits, cut: Cut):
    """Which tokens a cut keeps: bool[B, V']; a token of value -inf never."""
    return is_kept(logits, jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1), cut)


def is_kept(values, ids, cut: Cut):
    """Whether tokens of given values f32[B, n] and ids i32[B, n] are kept: bool[B, n]."""
    value = cut.value[:, None]
    return ((values > value) | ((values == value) & (ids <= cut.id[:, None]))) & (values > -jnp.inf)


def cut_candidates(
    candidates: Candidates, top_k, top_p, min_p, *, vocab_size: int, filter_order: str, margin=MARGIN
):
    """The cut from the C candidates of each row.

    Args:
      candidates: summary of shaped logits.
      top_k: i32[B] (0, -1, >= V: off). top_p: f32[B] (>= 1: off). min_p: f32[B] (0: off).
      vocab_size: V.
      filter_order: "vllm", "hf" or "joint", see the module's text.
      margin: how close to top_p a crossing may come, relative to m(A).

    Returns:
      (Cut, num_kept i32[B], exact bool[B]). exact: the full row would be cut at the same token. It holds when
      nothing is filtered; or C tokens provably hold the cut: the count of top-k is at most C, or the min-p
      cut lies above the smallest value kept, or that value is -inf, or the mass of all C tokens passes
      top_p * m(A); and m(A) is known; and no crossing lies within the margin, 2^-18, of top_p. Where exact
      is False the cut is the best that C tokens allow.
    """
    values = candidates.values
    count = values.shape[1]
    beyond = count + 1  # stands for "more than these candidates tell"
    weights = jnp.exp(values - candidates.max[:, None])
    mass = prefix_sum(weights)
    last = values[:, -1]
    complete = last == -jnp.inf
    if count >= vocab_size:
        complete = jnp.ones_like(complete)
    num_finite = jnp.sum(values > -jnp.inf, axis=1, dtype=jnp.int32)

    def length(inside, counted):
        """A prefix length: what was counted if the candidates show its end, else `beyond`."""
        return jnp.where(complete, jnp.minimum(counted, num_finite), jnp.where(inside, counted, beyond))

    k = effective_top_k(top_k, vocab_size)
    num_top_k = length(k <= count, k)
    num_min_p = jnp.sum(passes_min_p(values, candidates.max, min_p), axis=1, dtype=jnp.int32)
    num_min_p = length(num_min_p < count, num_min_p)

    num_base = {"vllm": jnp.minimum(num_top_k, num_min_p), "hf": num_top_k, "joint": num_min_p}[filter_order]
    no_top_k, no_min_p = k >= vocab_size, min_p <= 0
    base_is_row = {"vllm": no_top_k & no_min_p, "hf": no_top_k, "joint": no_min_p}[filter_order]
    base_known = (num_base <= count) | base_is_row
    base_mass = jnp.take_along_axis(mass, jnp.clip(num_base - 1, 0, count - 1)[:, None], axis=1)[:, 0]
    base_mass = jnp.where(num_base <= count, base_mass, candidates.sum)
    wanted = top_p * base_mass
    reached = mass >= wanted[:, None]
    num_top_p = jnp.where(reached[:, -1], 1 + jnp.argmax(reached, axis=1).astype(jnp.int32), beyond)
    near = jnp.any(jnp.abs(mass - wanted[:, None]) <= margin * base_mass[:, None], axis=1)
    has_top_p = top_p < 1
    num_top_p = jnp.where(has_top_p, num_top_p, beyond)

    num_kept = jnp.minimum(jnp.minimum(num_top_k, num_min_p), num_top_p)
    unfiltered = no_top_k & no_min_p & ~has_top_p
    exact = unfiltered | ((num_kept <= count) & (~has_top_p | (base_known & ~near)))
    num_kept = jnp.clip(num_kept, 1, count)
    at = (num_kept - 1)[:, None]
    kept_mass = jnp.take_along_axis(mass, at, axis=1)[:, 0]
    cut = Cut(
        value=jnp.where(unfiltered, -jnp.inf, jnp.take_along_axis(values, at, axis=1)[:, 0]),
        id=jnp.where(unfiltered, vocab_size, jnp.take_along_axis(candidates.ids, at, axis=1)[:, 0]),
        log_mass=rng.log(jnp.where(unfiltered, candidates.sum, kept_mass)),
    )
    return cut, num_kept, exact


def cut_rows(logits, top_k, top_p, min_p, *, vocab_size: int, filter_order: str) -> Cut:
    """The cut from full rows, by counting passes: a fixed number, whatever the values.

    Args:
      logits: f32[B, V'], shaped. The other arguments are those of `cut_candidates`.

    Returns:
      Cut.
    """
    highest = row_max(logits)

    def mass_of(mask):
        # The weights are computed anew in every pass: keeping them would double the memory.
        return tile_sum(jnp.where(mask, jnp.exp(logits - highest[:, None]), 0))

    passes = passes_min_p(logits, highest, min_p)
    lowest_passing = jnp.min(jnp.where(passes, logits, jnp.inf), axis=1)
    by_min_p = (lowest_passing, jnp.full_like(top_k, logits.shape[1]))
    by_top_k = _first_counted(logits, effective_top_k(top_k, vocab_size))
    shorter = _shorter(by_min_p, by_top_k)

    base = {"vllm": shorter, "hf": by_top_k, "joint": by_min_p}[filter_order]
    # Above zero, so that top_p = 0 keeps the first token; never reached where top_p is off.
    wanted = jnp.where(top_p < 1, jnp.maximum(top_p * mass_of(_prefix(logits, *base)), _TINY), jnp.inf)
    by_top_p = _first_weighing(logits, mass_of, wanted, highest)
    value, last_id = _shorter(shorter, by_top_p)
    return Cut(value, last_id, rng.log(mass_of(_prefix(logits, value, last_id))))


def effective_top_k(top_k, vocab_size: int):
    """How many tokens top_k keeps, V where it is off: i32[B]."""
    return jnp.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k)


def passes_min_p(values, highest, min_p):
    """p >= min_p * max p in log space; min_p = 0 passes all that can be drawn."""
    floor = jnp.where(min_p >= _TINY, rng.log(jnp.maximum(min_p, _TINY)), -jnp.inf)
    return (values - highest[:, None] >= floor[:, None]) & (values > -jnp.inf)


def _count(mask):
    return jnp.sum(mask, axis=1, dtype=jnp.int32)


def _prefix(logits, value, last_id):
    """bool[B, V']: the tokens up to (value f32[B], id i32[B]) in the order."""
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    value = value[:, None]
    return (logits > value) | ((logits == value) & (ids <= last_id[:, None]))


def _shorter(one, other):
    """The shorter of two prefixes, each the (value f32[B], id i32[B]) of its last token."""
    first = (one[0] > other[0]) | ((one[0] == other[0]) & (one[1] < other[1]))
    return jax.tree.map(lambda ours, theirs: jnp.where(first, ours, theirs), one, other)


def _first_counted(logits, count):
    """The first `count` tokens of the order, as (value, id) of the last; all tokens if there are fewer."""
    value = _largest_value(logits, lambda mask: _count(mask) >= count)
    num_before = _count(logits > value[:, None])
    return value, _id_of_tie(logits, value, count - num_before)


def _first_weighing(logits, mass_of, wanted, highest):
    """The shortest prefix of the order whose mass reaches `wanted`; all tokens if none does.

    Tokens of one value weigh the same, so which of the tied ones is the last follows by division.
    """
    value = _largest_value(logits, lambda mask: mass_of(mask) >= wanted)
    missing = wanted - mass_of(logits > value[:, None])
    weight = jnp.exp(value - highest)
    num_tied = _count(logits == value[:, None])
    needed = jnp.where(weight > 0, jnp.ceil(missing / weight), jnp.inf)
    # Clipped as a float: a float past the int32 range has no defined conversion.
    needed = jnp.clip(needed, 1, jnp.maximum(num_tied, 1).astype(jnp.float32)).astype(jnp.int32)
    return value, _id_of_tie(logits, value, needed)


def _largest_value(logits, reached):
    """The largest value t for which `reached(logits >= t)` holds, a monotone predicate; -inf if none does.

    Bisection, from the top bit down, on the integers that order as float32 values do: 32 passes.
    """

    def step(index, last_key):
        # The first step adds 2^31, which wraps from the least key to 0: the middle.
        trial = last_key + (jnp.int32(1) << (31 - index))
        return jnp.where(reached(logits >= _value_of_key(trial)[:, None]), trial, last_key)

    # Made from the data: in a caller's shard_map it then varies over the mesh as the loop's result does.
    least = jnp.where(logits[:, 0] < jnp.inf, jnp.int32(np.iinfo(np.int32).min), jnp.int32(0))
    return _value_of_key(jax.lax.fori_loop(0, 32, step, least))


def _value_of_key(key):
    """The value of an order key, -inf for keys below its own; subnormals count as 0."""
    key = jnp.maximum(key, _KEY_OF_MINUS_INF)
    value = jax.lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)
    return jnp.where(jnp.abs(value) < _TINY, 0, value)


def _id_of_tie(logits, value, number):
    """The id of the number-th token (from 1) of a value; V' - 1 if there are fewer: i32[B]."""
    num_rows, width = logits.shape
    tied = (logits == value[:, None]).reshape(num_rows, width // TILE, TILE)
    until = jnp.cumsum(jnp.sum(tied, axis=2, dtype=jnp.int32), axis=1)
    number = number[:, None]
    tile = jnp.argmax(until >= number, axis=1).astype(jnp.int32)[:, None]
    tiles = logits.reshape(num_rows, width // TILE, TILE)
    in_tile = jnp.take_along_axis(tiles, tile[:, :, None], axis=1, mode="clip")[:, 0] == value[:, None]
    in_tile = in_tile.astype(jnp.int32)
    before = jnp.take_along_axis(until, tile, axis=1, mode="clip") - jnp.sum(in_tile, axis=1, keepdims=True)
    place = jnp.argmax(jnp.cumsum(in_tile, axis=1) >= number - before, axis=1).astype(jnp.int32)
    return jnp.where(until[:, -1] >= number[:, 0], tile[:, 0] * TILE + place, width - 1)
