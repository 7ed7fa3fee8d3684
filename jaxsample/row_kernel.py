"""Kernels of the sampling tail on a GPU: what a row's token takes, in at most three launches.

`summarize_groups` reads the logits once; `draw_first` selects a row's first tokens, cuts and draws among them;
`draw_whole` draws from rows that nothing cuts, in one read of its own. What a row does not need it does not pay
for: its programs leave at once. Sums have an order of their own, fixed by the row (contract, section 1). Knows
nothing about requests, logprobs or meshes.

In Pallas' Triton dialect, a stop-gap; imported where it is used. XLA's twin is `target.draw_target`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsample import rng
from jaxsample.candidates import tidy

GROUP = 64  # tokens of a group
_TINY = np.finfo(np.float32).tiny
_LAST_ID = np.iinfo(np.int32).max
_KEY_OF_MINUS_INF = -0x7F800001  # the integer that orders as -inf does
_CHUNK = 512  # of what is put in order at a time
_LOG2_E = np.float32(1 / np.log(2))
# Bounds of the quick noise's error, in units of log 2: of itself, and of the scores it is part of.
_NOISE_ERROR, _SCORE_ERROR = np.float32(6e-5), np.float32(2.0**-21)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of the kernels' programs; static, powers of two.

    Fields:
      groups: in a program of `summarize_groups`.
      calls: of the noise generator, four tokens each, at a time in `draw_whole`; chunks: so many times.
      warps: of each kernel, in the order of their names.
    """

    groups: int = 32
    calls: int = 256
    chunks: int = 8
    warps: tuple[int, int, int] = (4, 8, 4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """What one read tells of the G groups of 64 neighbouring tokens in B rows.

    Fields:
      max: f32[B, G], the largest logit; -inf where a group has none that can be drawn.
      sum: f32[B, G], of exp((z - max) / temperature); NaN where a group holds NaN or +inf.
    """

    max: jax.Array
    sum: jax.Array


def summarize_groups(logits, temperature, *, vocab_size: int, blocks: Blocks, interpret: bool = False) -> Groups:
    """Maxima and sums of rows' groups.

    Args:
      logits: f32, bf16 or f16 [B, Vp], Vp >= V; columns at V and beyond are never looked at.
      temperature: f32[B]. vocab_size: V.
    """
    pl, plt = _pallas()
    num_rows, width = logits.shape
    num_groups = -(-vocab_size // GROUP)
    out = jax.ShapeDtypeStruct((num_rows, num_groups), jnp.float32)
    highest, total = pl.pallas_call(
        functools.partial(_summarize, groups=blocks.groups, vocab_size=vocab_size),
        grid=(-(-num_groups // blocks.groups), num_rows),
        in_specs=[_row(pl, width, 1), _all(pl, num_rows)],
        out_specs=[_row(pl, num_groups, 1)] * 2,
        out_shape=[out, out],
        compiler_params=plt.CompilerParams(num_warps=blocks.warps[0], num_stages=1),
        interpret=interpret,
        name="summarize_groups",
    )(logits, temperature)
    return Groups(highest, total)


def _summarize(x_ref, temperature_ref, max_ref, sum_ref, *, groups, vocab_size):
    pl, plt = _pallas()
    group = pl.program_id(0) * groups + jnp.arange(groups, dtype=jnp.int32)
    token = group[:, None] * GROUP + jnp.arange(GROUP, dtype=jnp.int32)[None, :]
    x = plt.load(x_ref.at[token], mask=token < vocab_size, other=-jnp.inf).astype(jnp.float32)
    rate = _LOG2_E / _kept_scale(plt.load(temperature_ref.at[pl.program_id(1)]))
    # A maximum passes over NaN; the sum does not, and +inf makes it one.
    highest = jnp.max(x, axis=1)
    finite = jnp.where(highest > -jnp.inf, highest, 0)
    total = jnp.sum(jnp.exp2((x - finite[:, None]) * rate), axis=1)
    known = group < max_ref.shape[0]
    plt.store(max_ref.at[group], tidy(highest), mask=known)
    plt.store(sum_ref.at[group], total, mask=known)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class First:
    """What `draw_first` found of B rows.

    Fields:
      tokens: i32[B], drawn among the tokens kept.
      valid: bool[B], as in `sample`.
      max: f32[B], the row's largest logit, 0 where nothing can be drawn.
    """

    tokens: jax.Array
    valid: jax.Array
    max: jax.Array


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
    blocks: Blocks,
    interpret: bool = False,
) -> First:
    """Select each row's first `count` tokens, cut them by the filters and draw among what is kept.

    Every one of the first C tokens lies in one of the first C groups (`candidates.first_tokens`). A few groups
    and tokens more than C are taken where that ends the search for the last of them early.

    Args:
      logits, temperature: as for `summarize_groups`, whose result `groups` is.
      seed: u32[B, 2]. position: i32[B]. top_k, top_p, min_p: as in SamplingParams.
      count: C, of which there are at least as many groups.
    """
    pl, plt = _pallas()
    num_rows, width = logits.shape
    num_groups = groups.max.shape[1]
    held = 1 << (count - 1).bit_length()
    each = _all(pl, num_rows)
    row = lambda size: _row(pl, size, 0)
    i32, f32 = (functools.partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.int32, jnp.float32))
    scalars, arrays = (num_rows,), (num_rows, 2 * held)
    settings = dict(count=count, held=held, vocab_size=vocab_size, order=filter_order)
    tokens, valid, highest, *_ = pl.pallas_call(
        functools.partial(_select, compiled=not interpret, **settings),
        grid=(num_rows,),
        in_specs=[row(width), row(num_groups), row(num_groups), each, row(2), each, each, each, each],
        out_specs=[each] * 3 + [row(2 * held)] * 3,
        out_shape=[i32(scalars), i32(scalars), f32(scalars), i32(arrays), i32(arrays), f32(arrays)],
        compiler_params=plt.CompilerParams(num_warps=blocks.warps[1], num_stages=1),
        interpret=interpret,
        name="draw_first",
    )(logits, groups.max, groups.sum, temperature, _signed(seed), position, top_k, top_p, min_p)
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
    pl, plt = _pallas()
    wait = plt.debug_barrier if compiled else lambda: None
    row, most = pl.program_id(0), held
    temperature = plt.load(temperature_ref.at[row])
    filters = plt.load(top_k_ref.at[row]), plt.load(top_p_ref.at[row]), plt.load(min_p_ref.at[row])
    draws = plt.load(position_ref.at[row]), *(plt.load(seed_ref.at[jnp.int32(word)]) for word in range(2))
    greedy, scale = temperature < _TINY, _kept_scale(temperature)
    (num_groups,) = group_max_ref.shape

    def read_groups(group):
        known = group < num_groups
        return plt.load(group_max_ref.at[group], mask=known, other=-jnp.inf), known

    group = jnp.arange(1 << (num_groups - 1).bit_length(), dtype=jnp.int32)
    z, known = read_groups(group)
    group_sum = plt.load(group_sum_ref.at[group], mask=known, other=0)
    largest = jnp.max(z, axis=0)
    highest = jnp.where(largest > -jnp.inf, largest, 0)
    total = jnp.sum(group_sum * jnp.exp2((z - highest) * (_LOG2_E / scale)), axis=0)
    past = _key(largest) + 1
    reached = _threshold(z, group, held, most, jnp.int32(_KEY_OF_MINUS_INF), past)

    def scatter(read, reached, size, num_chunks, *outputs):
        """Store what reaches a threshold, in the order of ids; returns how much."""

        def chunk(index, start):
            lane = index * size + jnp.arange(size, dtype=jnp.int32)
            z, name = read(lane)
            taken = _reaches(z, name, *reached)
            ones = taken.astype(jnp.int32)
            # What is not taken has a place of its own too: interpreted, a masked store writes back what it read.
            place = jnp.where(taken, start + jnp.cumsum(ones, axis=0) - 1, most + lane)
            for output, values in zip(outputs, (name, z)):
                plt.store(output.at[place], values, mask=taken)
            return start + jnp.sum(ones, axis=0)

        return jax.lax.fori_loop(0, num_chunks, chunk, jnp.int32(0))

    size = min(_CHUNK, group.shape[0])
    num_taken = scatter(lambda lane: (read_groups(lane)[0], lane), reached, size, -(-num_groups // size), group_ref)
    wait()

    def read_tokens(lane):
        known = lane // GROUP < num_taken
        token = plt.load(group_ref.at[lane // GROUP], mask=known, other=0) * GROUP + lane % GROUP
        x = plt.load(x_ref.at[token], mask=known & (token < vocab_size), other=-jnp.inf).astype(jnp.float32)
        return jnp.where(jnp.abs(x) < _TINY, 0, x), jnp.where(known, token, _LAST_ID - lane)

    # At least so many tokens reach the groups' threshold as groups do.
    z, token = read_tokens(jnp.arange(most * GROUP, dtype=jnp.int32))
    reached = _threshold(z, token, held, most, reached[0], past)
    size = min(_CHUNK, most * GROUP)
    num_taken = scatter(read_tokens, reached, size, most * GROUP // size, id_ref, value_ref)
    wait()

    lane = jnp.arange(most, dtype=jnp.int32)
    known = lane < num_taken
    z = plt.load(value_ref.at[lane], mask=known, other=-jnp.inf)
    token = jnp.where(known, plt.load(id_ref.at[lane], mask=known, other=0), _LAST_ID - lane)
    z = jnp.where(scale == 1, z, (z - highest) * (1 / scale))
    largest_z = jnp.where(scale == 1, highest, 0)
    weight = jnp.exp2((z - largest_z) * _LOG2_E)
    up_to = (z[None, :] > z[:, None]) | ((z[None, :] == z[:, None]) & (token[None, :] <= token[:, None]))
    number = jnp.sum(up_to.astype(jnp.int32), axis=1)  # from 1, in the order of tokens
    mass = jnp.sum(jnp.where(up_to, weight[None, :], 0), axis=1)

    filters = jnp.where(greedy, 1, filters[0]), *filters[1:]
    within = (number <= count) & (z > -jnp.inf)
    num_kept = _num_kept(z - largest_z, mass, number, within, total, count, *filters, vocab_size, order)
    noise = rng.gumbel_of_bits(_word_of(_words(token >> 2, *draws), token & 3))
    scores = jnp.where(within & (number <= num_kept), z + jnp.where(greedy, 0, noise), -jnp.inf)
    best = jnp.max(scores, axis=0)
    plt.store(token_ref.at[row], jnp.min(jnp.where(scores == best, token, _LAST_ID), axis=0))
    plt.store(valid_ref.at[row], ((total > 0) & (largest > -jnp.inf)).astype(jnp.int32))
    plt.store(highest_ref.at[row], highest)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole:
    """What `draw_whole` found in S parts of B rows; nothing of rows that were not asked for.

    Fields:
      max: f32[B, S], the largest logit; +inf where a part holds NaN or +inf.
      value, noise, id: f32[B, S], f32[B, S], i32[B, S], logit, noise (0 for greedy rows) and id of its winner.
    """

    max: jax.Array
    value: jax.Array
    noise: jax.Array
    id: jax.Array


def draw_whole(
    logits, temperature, asked, seed, position, *, vocab_size: int, blocks: Blocks, interpret: bool = False
) -> Whole:
    """The winners of z / temperature + noise in parts of rows, one read.

    A quick noise, with two logarithms of the hardware, finds each part's winner; where the runner-up comes closer
    than that can tell apart, the part is gone through again with `rng`'s.

    Args:
      logits, temperature, seed, position: as for `draw_first`. asked: bool[B].
    """
    pl, plt = _pallas()
    num_rows, width = logits.shape
    num_parts = -(-vocab_size // (4 * blocks.calls * blocks.chunks))
    each, part = _all(pl, num_rows), _row(pl, num_parts, 1)
    found = lambda dtype: jax.ShapeDtypeStruct((num_rows, num_parts), dtype)
    sizes = dict(calls=blocks.calls, chunks=blocks.chunks, vocab_size=vocab_size)
    results = pl.pallas_call(
        functools.partial(_draw, compiled=not interpret, **sizes),
        grid=(num_parts, num_rows),
        in_specs=[_row(pl, width, 1), each, each, _row(pl, 2, 1), each],
        out_specs=[part] * 4,
        out_shape=[found(jnp.float32)] * 3 + [found(jnp.int32)],
        compiler_params=plt.CompilerParams(num_warps=blocks.warps[2], num_stages=1),
        interpret=interpret,
        name="draw_whole",
    )(logits, temperature, asked.astype(jnp.int32), _signed(seed), position)
    return Whole(*results)


def _draw(
    x_ref,
    temperature_ref,
    asked_ref,
    seed_ref,
    position_ref,
    max_ref,
    value_ref,
    noise_ref,
    id_ref,
    *,
    calls,
    chunks,
    vocab_size,
    compiled,
):
    pl, plt = _pallas()
    part, row = pl.program_id(0), pl.program_id(1)

    @pl.when(plt.load(asked_ref.at[row]) != 0)
    def _():
        temperature = plt.load(temperature_ref.at[row])
        greedy, scale = temperature < _TINY, _kept_scale(temperature)
        rate, weight = _LOG2_E / scale, jnp.where(greedy, 0, jnp.float32(1))
        position, low, high = (
            plt.load(position_ref.at[row]),
            *(plt.load(seed_ref.at[jnp.int32(word)]) for word in range(2)),
        )
        column = jnp.arange(4, dtype=jnp.int32)[None, :]
        call_of = lambda chunk: (part * chunks + chunk) * calls + jnp.arange(calls, dtype=jnp.int32)
        token_of = lambda chunk: call_of(chunk)[:, None] * 4 + column

        def read(chunk):
            """(x f32[calls, 4], its random words)."""
            token = token_of(chunk)
            x = plt.load(x_ref.at[token], mask=token < vocab_size, other=-jnp.inf).astype(jnp.float32)
            words = _words(call_of(chunk), position, low, high)
            return x, _word_of([word[:, None] for word in words], column)

        def quick(chunk, state):
            best, second, at, top = state
            x, bits = read(chunk)
            score = x * rate - weight * _log2_of_exponential(bits, compiled)
            at = jnp.where(score > best, chunk, at)
            second = jnp.maximum(second, jnp.minimum(best, score))
            top = jnp.maximum(top, jnp.where(x == x, x, jnp.inf))
            return jnp.maximum(best, score), second, at, top

        lowest = jnp.full((calls, 4), -jnp.inf, jnp.float32)
        nowhere = jnp.zeros((calls, 4), jnp.int32)
        best, second, at, top = jax.lax.fori_loop(0, chunks, quick, (lowest, lowest, nowhere, lowest))
        top = _over_both(jnp.max, top)
        finite = jnp.where((top > -jnp.inf) & (top < jnp.inf), top, 0)

        def exact(chunk, state):
            best, at = state
            x, bits = read(chunk)
            score = _divided(tidy(x), finite, scale) + weight * rng.gumbel_of_bits(bits)
            return jnp.maximum(best, score), jnp.where(score > best, chunk, at)

        def winner(best, at):
            token = ((part * chunks + at) * calls + jnp.arange(calls, dtype=jnp.int32)[:, None]) * 4 + column
            highest = _over_both(jnp.max, best)
            return highest, token, _over_both(jnp.min, jnp.where(best == highest, token, _LAST_ID))

        highest, token, first = winner(best, at)
        runner_up = _over_both(jnp.max, jnp.where(token == first, second, best))
        clear = highest - runner_up > _NOISE_ERROR + _SCORE_ERROR * jnp.abs(highest)

        def again():
            return winner(*jax.lax.fori_loop(0, chunks, exact, (lowest, nowhere)))[2]

        first = jax.lax.cond(clear | (highest == -jnp.inf), lambda: first, again)
        bits = _word_of(_words(first >> 2, position, low, high), first & 3)
        plt.store(max_ref.at[part], top)
        plt.store(value_ref.at[part], tidy(plt.load(x_ref.at[first])))
        plt.store(noise_ref.at[part], weight * rng.gumbel_of_bits(bits))
        plt.store(id_ref.at[part], first)


def _log2_of_exponential(bits, compiled):
    """log2(-log(1 - u)) within _NOISE_ERROR / 2: Gumbel noise is -log 2 times it."""
    u = jnp.minimum(bits.astype(jnp.float32) * np.float32(2.0**-32) + np.float32(2.0**-33), 1 - 2.0**-24)
    small = u * (1 + u * (np.float32(1 / 2) + u * np.float32(1 / 3)))
    return _log2(jnp.where(u < 2.0**-6, small, -_log2(1 - u, compiled) / _LOG2_E), compiled)


def _log2(x, compiled):
    """Within 2^-22 of it, absolutely within [1/2, 2] and relatively elsewhere."""
    if not compiled:
        return jnp.log2(x)
    _, plt = _pallas()
    return plt.elementwise_inline_asm(
        "lg2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )[0]


def _kept_scale(temperature):
    """What logits are divided by; 1 for greedy rows."""
    return jnp.where(temperature < _TINY, 1, temperature)


def _divided(z, highest, scale):
    """Logits as they are drawn from: `shaping.divide`, tidied, of one row."""
    z = jnp.where(scale == 1, z, (z - highest) / scale)
    return jnp.where(jnp.abs(z) < _TINY, 0, z)


def _key(z):
    """The integers that order as float32 values do."""
    bits = jax.lax.bitcast_convert_type(z, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _value(key):
    return jax.lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)


def _threshold(z, ids, count, most, low, past):
    """A key and an id: at least `count` and at most `most` of f32[n], i32[n] have a larger key, or it and at most
    the id; among them are the first of the order.

    The key is bisected, by turns in values, which ends soon, and in keys, which ends surely; then, if too many
    are equal, the id.

    Args:
      low: a key that `count` entries at least reach. past: a key above all.
    """
    keys = _key(z)
    number = lambda taken: jnp.sum(taken.astype(jnp.int32), axis=0)

    def halve(state):
        low, past, reached, turn = state
        span = past.astype(jnp.uint32) - low.astype(jnp.uint32)
        by_value = _key(0.5 * _value(low) + 0.5 * _value(past))
        middle = low + (span >> 1).astype(jnp.int32)
        middle = jnp.where((turn & 1 == 0) & (by_value > low) & (by_value < past), by_value, middle)
        found = number(keys >= middle)
        enough = found >= count
        low, past = jnp.where(enough, middle, low), jnp.where(enough, past, middle)
        return low, past, jnp.where(enough, found, reached), turn + 1

    def too_many(state):
        low, past, reached, _ = state
        return (reached > most) & (past.astype(jnp.uint32) - low.astype(jnp.uint32) > 1)

    state = (low, past, number(keys >= low), jnp.int32(0))
    low, _, reached, _ = jax.lax.while_loop(too_many, halve, state)

    def halve_ids(state):
        least, most_id, _ = state
        middle = least + ((most_id.astype(jnp.uint32) - least.astype(jnp.uint32)) >> 1).astype(jnp.int32)
        found = number(_reaches(z, ids, low, middle))
        enough = found >= count
        return jnp.where(enough, least, middle), jnp.where(enough, middle, most_id), jnp.where(enough, found, most + 1)

    state = (jnp.int32(-1), jnp.int32(_LAST_ID), reached)
    _, last_id, _ = jax.lax.while_loop(lambda state: state[2] > most, halve_ids, state)
    return low, last_id


def _reaches(z, ids, low, last_id):
    keys = _key(z)
    return (keys > low) | ((keys == low) & (ids <= last_id))


def _num_kept(z, mass, number, within, total, count, top_k, top_p, min_p, vocab_size, order):
    """How many of the first C tokens the filters keep, by the rules of `truncation.cut_candidates`.

    Args:
      z: f32[n], logits less the largest. mass: of all up to each. number: its place in the order, from 1.
      within: which are among the first C and can be drawn.
    """
    beyond = count + 1
    num_finite = jnp.sum(within.astype(jnp.int32), axis=0)
    complete = num_finite < count

    def length(inside, counted):
        return jnp.where(complete, jnp.minimum(counted, num_finite), jnp.where(inside, counted, beyond))

    k = jnp.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k)
    num_top_k = length(k <= count, k)
    floor = jnp.where(min_p >= _TINY, rng.log(jnp.maximum(min_p, _TINY)), -jnp.inf)
    num_min_p = jnp.sum((within & (z >= floor)).astype(jnp.int32), axis=0)
    num_min_p = length(num_min_p < count, num_min_p)
    base = {"vllm": jnp.minimum(num_top_k, num_min_p), "hf": num_top_k, "joint": num_min_p}[order]
    at = jnp.clip(jnp.minimum(base, num_finite), 1, count)
    base_mass = jnp.sum(jnp.where(within & (number == at), mass, 0), axis=0)
    wanted = top_p * jnp.where(base <= count, base_mass, total)
    num_top_p = jnp.min(jnp.where(within & (mass >= wanted) & (top_p < 1), number, beyond), axis=0)
    return jnp.clip(jnp.minimum(jnp.minimum(num_top_k, num_min_p), num_top_p), 1, count)


def _words(call, position, low, high):
    """Four random words of each generator call, as `rng.philox4x32` makes them of a row's seed."""
    word = lambda x: jax.lax.convert_element_type(x, jnp.uint32)
    zero = jnp.zeros_like(call).astype(jnp.uint32)
    counter = (word(call), zero + word(position), zero + np.uint32(rng.TARGET), zero)
    return rng.philox4x32(counter, (word(low), word(high)), _multiply_wide)


def _multiply_wide(x, constant: int):
    """High and low word of a product, which takes one instruction as a product of 64 bits."""
    with jax.enable_x64(True):
        wide = x.astype(jnp.uint64) * np.uint64(constant)
        return (wide >> np.uint64(32)).astype(jnp.uint32), wide.astype(jnp.uint32)


def _word_of(words, index):
    first = jnp.where(index == 0, words[0], words[1])
    return jnp.where(index < 2, first, jnp.where(index == 2, words[2], words[3]))


def _over_both(reduce, x):
    return reduce(reduce(x, axis=1), axis=0)


def _signed(seed):
    return jax.lax.bitcast_convert_type(seed, jnp.int32)


def _pallas():
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    return pallas, triton


def _row(pl: Any, size: int, axis: int):
    """The row of the program along `axis` of the grid."""
    return pl.BlockSpec((None, size), lambda *at: (at[axis], 0))


def _all(pl: Any, size: int):
    return pl.BlockSpec((size,), lambda *_: (0,))
