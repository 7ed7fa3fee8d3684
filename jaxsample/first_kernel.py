"""The first tokens of rows, their cut and their draw on a GPU, in two kernels.

`summarize_groups` reads the logits once, `draw_first` reads what the first tokens can lie in. Sums have an
order of their own, fixed by the row (contract, section 1). Selection works on logits as they are: to divide
them by a temperature keeps their order but for values that come out equal. Knows nothing about requests or
logprobs.

In Pallas' Triton dialect, a stop-gap; imported where it is used. Code is kept short, in loops: a kernel of a
few microseconds also waits for its instructions.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsample import rng
from jaxsample.candidates import tidy
from jaxsample.kernel_math import (
    LAST_ID,
    LOG2_E,
    TINY,
    kept_scale,
    pallas,
    row_of,
    whole_of,
    word_of,
    words_of,
)

GROUP = 64  # tokens of a group
_BLOCK = 32  # groups of a program of summarize_groups
_CHUNK = 512  # of what is put in order at a time
_SUMMARY_WARPS, _WARPS = 4, 8
_KEY_OF_MINUS_INF = -0x7F800001  # the integer that orders as -inf does


class Groups(NamedTuple):
    """What one read tells of the G groups of 64 neighbouring tokens in B rows.

    Fields:
      max: f32[B, G], the largest logit; -inf where a group has none that can be drawn.
      sum: f32[B, G], of exp((z - max) / temperature); NaN or +inf where a group holds one.
    """

    max: jax.Array
    sum: jax.Array


class First(NamedTuple):
    """What `draw_first` found of B rows.

    Fields:
      tokens: i32[B], drawn among the tokens kept.
      valid: bool[B], as in `sample`.
      max: f32[B], the row's largest logit, 0 where nothing can be drawn.
    """

    tokens: jax.Array
    valid: jax.Array
    max: jax.Array


def summarize_groups(logits, temperature, *, vocab_size: int, interpret: bool = False) -> Groups:
    """Maxima and sums of rows' groups.

    Args:
      logits: f32, bf16 or f16 [B, Vp], Vp >= V; columns at V and beyond are never looked at.
      temperature: f32[B]. vocab_size: V.
    """
    pl, plt = pallas()
    num_rows, width = logits.shape
    num_groups = -(-vocab_size // GROUP)
    out = jax.ShapeDtypeStruct((num_rows, num_groups), jnp.float32)
    found = pl.pallas_call(
        functools.partial(_summarize, vocab_size=vocab_size),
        grid=(-(-num_groups // _BLOCK), num_rows),
        in_specs=[row_of(pl, width, 1), whole_of(pl, num_rows)],
        out_specs=[row_of(pl, num_groups, 1)] * 2,
        out_shape=[out, out],
        compiler_params=plt.CompilerParams(num_warps=_SUMMARY_WARPS, num_stages=1),
        interpret=interpret,
        name="summarize_groups",
    )(logits, temperature)
    return Groups(*found)


def _summarize(x_ref, temperature_ref, max_ref, sum_ref, *, vocab_size):
    pl, plt = pallas()
    group = pl.program_id(0) * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
    token = group[:, None] * GROUP + jnp.arange(GROUP, dtype=jnp.int32)[None, :]
    x = plt.load(x_ref.at[token], mask=token < vocab_size, other=-jnp.inf).astype(jnp.float32)
    rate = LOG2_E / kept_scale(plt.load(temperature_ref.at[pl.program_id(1)]))
    # What cannot be drawn is left to the sum, which NaN and +inf make no number.
    highest = jnp.max(jnp.where(x < jnp.inf, x, -jnp.inf), axis=1)
    finite = jnp.where(highest > -jnp.inf, highest, 0)
    total = jnp.sum(jnp.exp2((x - finite[:, None]) * rate), axis=1)
    known = group < max_ref.shape[0]
    plt.store(max_ref.at[group], tidy(highest), mask=known)
    plt.store(sum_ref.at[group], total, mask=known)


def draw_first(
    logits,
    groups: Groups,
    temperature,
    seed,
    position,
    top_k,
    top_p,
    min_p,
    *,
    vocab_size: int,
    count: int,
    filter_order: str,
    interpret: bool = False,
) -> First:
    """Select each row's first `count` tokens, cut them by the filters and draw among what is kept.

    Every one of the first C tokens lies in one of the first C groups (`candidates.first_tokens`).

    Args:
      logits, temperature: as for `summarize_groups`, whose result `groups` is.
      seed: u32[B, 2]. position: i32[B]. top_k, top_p, min_p, filter_order: as in `cut_candidates`.
      count: C; the next power of two is at most the number of groups and at most 128.
    """
    pl, plt = pallas()
    num_rows, width = logits.shape
    num_groups = groups.max.shape[1]
    held = 1 << (count - 1).bit_length()
    each, some, many = whole_of(pl, num_rows), row_of(pl, held, 0), row_of(pl, num_groups, 0)
    words = jax.lax.bitcast_convert_type(seed, jnp.int32)
    settings = dict(count=count, held=held, vocab_size=vocab_size, order=filter_order)
    shape_of = lambda dtype, *more: jax.ShapeDtypeStruct((num_rows, *more), dtype)
    scratch = [shape_of(jnp.int32, held), shape_of(jnp.int32, held), shape_of(jnp.float32, held)]
    tokens, valid, highest, *_ = pl.pallas_call(
        functools.partial(_select, compiled=not interpret, **settings),
        grid=(num_rows,),
        in_specs=[row_of(pl, width, 0), many, many, each, row_of(pl, 2, 0), *[each] * 4],
        out_specs=[each, each, each, some, some, some],
        out_shape=[shape_of(jnp.int32), shape_of(jnp.int32), shape_of(jnp.float32), *scratch],
        compiler_params=plt.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="draw_first",
    )(logits, *groups, temperature, words, position, top_k, top_p, min_p)
    return First(tokens, valid != 0, highest)


def _select(
    x_ref,
    group_max_ref,
    group_sum_ref,
    temperature_ref,
    seed_ref,
    position_ref,
    top_k_ref,
    top_p_ref,
    min_p_ref,
    token_ref,
    valid_ref,
    highest_ref,
    group_ref,
    id_ref,
    value_ref,
    *,
    count,
    held,
    vocab_size,
    order,
    compiled,
):
    pl, plt = pallas()
    row = pl.program_id(0)
    of_row = lambda ref: plt.load(ref.at[row])
    wait = plt.debug_barrier if compiled else lambda: None
    temperature, top_k, top_p, min_p = map(of_row, (temperature_ref, top_k_ref, top_p_ref, min_p_ref))
    draws = of_row(position_ref), *(plt.load(seed_ref.at[jnp.int32(word)]) for word in range(2))
    greedy, scale = temperature < TINY, kept_scale(temperature)
    (num_groups,) = group_max_ref.shape

    def read_groups(group):
        return plt.load(group_max_ref.at[group], mask=group < num_groups, other=-jnp.inf), group

    def read_tokens(lane):
        token = plt.load(group_ref.at[lane // GROUP]) * GROUP + lane % GROUP
        x = plt.load(x_ref.at[token], mask=token < vocab_size, other=-jnp.inf).astype(jnp.float32)
        return tidy(x), token

    def put(read, threshold, num_lanes, id_ref, value_ref=None):
        """Store what reaches a threshold in the order of ids."""
        size = min(_CHUNK, 1 << (num_lanes - 1).bit_length())

        def chunk(index, start):
            lane = index.astype(jnp.int32) * size + jnp.arange(size, dtype=jnp.int32)
            z, name = read(lane)
            taken = _reaches(z, name, *threshold)
            ones = taken.astype(jnp.int32)
            in_order = jnp.cumsum(ones, axis=0, dtype=jnp.int32)
            # What is not taken has a place of its own too: interpreted, a masked store writes what it read.
            place = jnp.where(taken, start + in_order - 1, held + lane)
            plt.store(id_ref.at[place], name, mask=taken)
            if value_ref is not None:
                plt.store(value_ref.at[place], z, mask=taken)
            return start + jnp.sum(ones, axis=0, dtype=jnp.int32)

        jax.lax.fori_loop(0, -(-num_lanes // size), chunk, jnp.int32(0))
        wait()

    z, group = read_groups(jnp.arange(1 << (num_groups - 1).bit_length(), dtype=jnp.int32))
    group_sum = plt.load(group_sum_ref.at[group], mask=group < num_groups, other=0)
    largest = jnp.max(z, axis=0)
    highest = jnp.where(largest > -jnp.inf, largest, 0)
    total = jnp.sum(group_sum * jnp.exp2((z - highest) * (LOG2_E / scale)), axis=0)
    past = _key(largest) + 1
    threshold = _threshold(z, group, held, jnp.int32(_KEY_OF_MINUS_INF), past)
    put(read_groups, threshold, num_groups, group_ref)
    # As many tokens as groups reach the groups' threshold, or more.
    threshold = _threshold(*read_tokens(jnp.arange(held * GROUP, dtype=jnp.int32)), held, threshold[0], past)
    put(read_tokens, threshold, held * GROUP, id_ref, value_ref)

    lane = jnp.arange(held, dtype=jnp.int32)
    z, token = plt.load(value_ref.at[lane]), plt.load(id_ref.at[lane])
    z = jnp.where(scale == 1, z, tidy((z - highest) * (1 / scale)))
    below = z - jnp.where(scale == 1, highest, 0)
    up_to = (z[None, :] > z[:, None]) | ((z[None, :] == z[:, None]) & (token[None, :] <= token[:, None]))
    number = jnp.sum(up_to.astype(jnp.int32), axis=1, dtype=jnp.int32)  # from 1, in the order of tokens
    mass = jnp.sum(jnp.where(up_to, jnp.exp2(below * LOG2_E)[None, :], 0), axis=1)
    within = (number <= count) & (z > -jnp.inf)
    filters = jnp.where(greedy, 1, top_k), top_p, min_p
    num_kept = _num_kept(below, mass, number, within, total, count, *filters, vocab_size, order)
    noise = rng.gumbel_of_bits(word_of(words_of(token >> 2, *draws), token & 3))
    scores = jnp.where(within & (number <= num_kept), z + jnp.where(greedy, 0, noise), -jnp.inf)
    best = jnp.max(scores, axis=0)
    plt.store(token_ref.at[row], jnp.min(jnp.where(scores == best, token, LAST_ID), axis=0))
    plt.store(valid_ref.at[row], ((total > 0) & (total < jnp.inf)).astype(jnp.int32))
    plt.store(highest_ref.at[row], highest)


def _threshold(z, ids, count, low, past):
    """A key and an id: `count` of f32[n], i32[n] have a larger key, or this and no larger an id.

    The key is bisected until `count` reach it, by turns in values, which ends soon, and in keys, which ends
    surely; then, if more are equal, the id.

    Args:
      low: a key that `count` entries at least reach. past: a key above all.
    """
    keys = _key(z)
    number = lambda taken: jnp.sum(taken.astype(jnp.int32), axis=0, dtype=jnp.int32)
    apart = lambda one, other: (
        one.astype(jnp.uint32) - other.astype(jnp.uint32)
    )  # of i32, whatever their signs

    def halve(state):
        low, past, reached, turn = state
        by_value = _key(0.5 * _value(low) + 0.5 * _value(past))
        middle = low + (apart(past, low) >> 1).astype(jnp.int32)
        middle = jnp.where((turn & 1 == 0) & (by_value > low) & (by_value < past), by_value, middle)
        found = number(keys >= middle)
        enough = found >= count
        low, past = jnp.where(enough, middle, low), jnp.where(enough, past, middle)
        return low, past, jnp.where(enough, found, reached), turn + 1

    def goes_on(state):
        low, past, reached, _ = state
        return (reached > count) & (apart(past, low) > 1)

    state = (low, past, number(keys >= low), jnp.int32(0))
    low, _, reached, _ = jax.lax.while_loop(goes_on, halve, state)

    def halve_ids(state):
        least, most, _ = state
        middle = least + (apart(most, least) >> 1).astype(jnp.int32)
        found = number(_reaches(z, ids, low, middle))
        enough = found >= count
        return (
            jnp.where(enough, least, middle),
            jnp.where(enough, middle, most),
            jnp.where(enough, found, count + 1),
        )

    def too_many(state):
        least, most, reached = state
        return (reached > count) & (apart(most, least) > 1)

    state = (jnp.int32(-1), jnp.int32(LAST_ID), reached)
    return low, jax.lax.while_loop(too_many, halve_ids, state)[1]


def _reaches(z, ids, low, last_id):
    keys = _key(z)
    return (keys > low) | ((keys == low) & (ids <= last_id))


def _key(z):
    """The integers that order as float32 values do."""
    bits = jax.lax.bitcast_convert_type(z, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _value(key):
    return jax.lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)


def _num_kept(below, mass, number, within, total, count, top_k, top_p, min_p, vocab_size, order):
    """How many of the first C tokens the filters keep, by the rules of `truncation.cut_candidates`.

    Args:
      below: f32[n], logits less the largest. mass: of all up to each. number: its place in the order, from 1.
      within: which are among the first C and can be drawn.
    """
    beyond = count + 1
    num_finite = jnp.sum(within.astype(jnp.int32), axis=0, dtype=jnp.int32)
    complete = num_finite < count

    def length(inside, counted):
        return jnp.where(complete, jnp.minimum(counted, num_finite), jnp.where(inside, counted, beyond))

    k = jnp.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k)
    num_top_k = length(k <= count, k)
    floor = jnp.where(min_p >= TINY, rng.log(jnp.maximum(min_p, TINY)), -jnp.inf)
    num_min_p = jnp.sum((within & (below >= floor)).astype(jnp.int32), axis=0, dtype=jnp.int32)
    num_min_p = length(num_min_p < count, num_min_p)
    base = {"vllm": jnp.minimum(num_top_k, num_min_p), "hf": num_top_k, "joint": num_min_p}[order]
    at = jnp.clip(jnp.minimum(base, num_finite), 1, count)
    base_mass = jnp.sum(jnp.where(within & (number == at), mass, 0), axis=0)
    wanted = top_p * jnp.where(base <= count, base_mass, total)
    num_top_p = jnp.min(jnp.where(within & (mass >= wanted) & (top_p < 1), number, beyond), axis=0)
    return jnp.clip(jnp.minimum(jnp.minimum(num_top_k, num_min_p), num_top_p), 1, count)
