"""The sampling tail in slow float64 NumPy, a row at a time, written from the contract and the papers.

Knows nothing of jaxsample: parameters are plain Python values under the names users know, histories are lists of ids.
"""

import math

import numpy as np

NEGATIVE_INFINITY = float("-inf")
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)

# What a request that asks for nothing has, under the names of `make_params`.
NEUTRAL = dict(
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    logit_bias={},
    allowed_token_ids=None,
    banned_token_ids=(),
    bad_words_ids=(),
    min_tokens=0,
    eos_token_ids=(),
    stop_token_ids=(),
    ignore_eos=False,
    token_temperature_scale={},
)


# --- noise -----------------------------------------------------------------------------------------------------------


def philox4x32(counter, key, rounds=10):
    """Philox4x32 on Python integers (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (second >> 32) ^ c1 ^ k0,
            second & 0xFFFFFFFF,
            (first >> 32) ^ c3 ^ k1,
            first & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def noise_bits(seed, position, purpose, lane, node=0):
    """32 bits for one lane; seed is an integer below 2^64, four neighbouring lanes share one Philox call."""
    key = (seed & 0xFFFFFFFF, seed >> 32)
    return philox4x32((lane // 4, position, purpose, node), key)[lane % 4]


def uniform(bits):
    """(bits + 0.5) * 2^-32, at most 1 - 2^-24."""
    return min((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)


def gumbel(bits):
    return -math.log(-math.log1p(-uniform(bits)))


def gumbel_row(seed, position, purpose, num_lanes):
    return np.array([gumbel(noise_bits(seed, position, purpose, lane)) for lane in range(num_lanes)])


# --- order -----------------------------------------------------------------------------------------------------------


def normalised(values):
    """float64 copies in which subnormal float32 numbers and -0.0 are 0.0."""
    values = np.asarray(values, np.float64)
    return np.where(np.abs(values) < SMALLEST_NORMAL, 0.0, values)


def order(values):
    """All ids, value descending, then id ascending."""
    return np.lexsort((np.arange(len(values)), -normalised(values)))


def rank(values, token):
    """1 + the number of tokens before it in the order."""
    values = normalised(values)
    before = (values > values[token]) | ((values == values[token]) & (np.arange(len(values)) < token))
    return 1 + int(before.sum())


def log_sum_exp(values):
    values = np.asarray(values, np.float64)
    largest = values.max()
    return (
        largest + math.log(math.fsum(np.exp(values - largest))) if np.isfinite(largest) else NEGATIVE_INFINITY
    )


# --- shaping ---------------------------------------------------------------------------------------------------------


def penalize(logits, prompt, output, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0):
    """Repetition over prompt and output, then frequency and presence over output only."""
    logits = np.array(logits, np.float64)
    r, f, p = (float(np.float32(x)) for x in (repetition_penalty, frequency_penalty, presence_penalty))
    for token in set(prompt) | set(output):
        logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
    for token in set(output):
        logits[token] -= f * list(output).count(token)
        logits[token] -= p
    return logits


def banned_by_words(words, output):
    """Last ids of the words whose other ids are exactly the end of the output."""
    banned = set()
    for word in words:
        word = list(word)
        start = word[:-1]
        if len(start) <= len(output) and start == list(output)[len(output) - len(start) :]:
            banned.add(word[-1])
    return banned


def shape(logits, request, *, vocab_size, prompt=(), output=(), grammar=None):
    """Every stage up to the filters.

    Args:
      logits: the row, any float dtype, at least vocab_size long.
      request: a dict with (some of) the keys of NEUTRAL.
      grammar: the ids that the grammar allows at this step, None for no grammar.

    Returns:
      (shaped float64[V], raw float64[V], valid). Shaped values are z / T with nothing subtracted.
    """
    request = {**NEUTRAL, **request}
    raw = np.array(np.asarray(logits)[:vocab_size], np.float64)
    if np.isnan(raw).any() or (raw == np.inf).any():
        return np.full(vocab_size, NEGATIVE_INFINITY), raw, False
    z = raw.copy()
    for token, bias in (request["logit_bias"] or {}).items():
        z[token] += float(np.float32(bias))
    for token in request["banned_token_ids"]:
        z[token] = NEGATIVE_INFINITY
    if request["allowed_token_ids"] is not None:
        for token in set(range(vocab_size)) - set(request["allowed_token_ids"]):
            z[token] = NEGATIVE_INFINITY
    # Masks that leave nothing but tokens that end the request outrank min_tokens.
    ends = set(request["stop_token_ids"]) | (
        set() if request["ignore_eos"] else set(request["eos_token_ids"])
    )
    left = set(range(vocab_size)) if grammar is None else set(grammar)
    left -= set(request["banned_token_ids"])
    if request["allowed_token_ids"] is not None:
        left &= set(request["allowed_token_ids"])
    finished = left <= ends
    if len(output) < request["min_tokens"] and not finished:
        for token in ends:
            z[token] = NEGATIVE_INFINITY
    z = penalize(
        z,
        prompt,
        output,
        request["repetition_penalty"],
        request["frequency_penalty"],
        request["presence_penalty"],
    )
    for token in banned_by_words(request["bad_words_ids"], output):
        z[token] = NEGATIVE_INFINITY
    if grammar is not None:
        for token in set(range(vocab_size)) - set(grammar):
            z[token] = NEGATIVE_INFINITY
    temperature = float(np.float32(request["temperature"]))
    if temperature > 0:  # greedy rows have no temperature to scale
        z = z / temperature
        for token, scale in (request["token_temperature_scale"] or {}).items():
            z[token] *= float(np.float32(scale))
    return z, raw, bool(np.isfinite(z).any())


# --- filters ---------------------------------------------------------------------------------------------------------


def filters(logits, top_k=0, top_p=1.0, min_p=0.0, filter_order="vllm"):
    """The tokens kept by min-p, top-k and top-p.

    The three rules are prefixes of one order, so the kept set is the shortest of the prefixes; the presets differ in
    the tokens over which the mass of top-p is renormalised: "vllm" what min-p and top-k left, "hf" what top-k left,
    "joint" what min-p left.

    Args:
      logits: shaped float row, -inf for tokens that cannot be drawn; at least one finite value.

    Returns:
      (kept bool[V], margin). The margin is how far the closest decision is from flipping: mass for top-p, logits for
      min-p; top-k decides on given values and has none.
    """
    z = normalised(logits)
    ids = order(z)
    z = z[ids]
    num_finite = int(np.isfinite(z).sum())
    z = z[:num_finite]
    margin = math.inf

    after_min_p = num_finite
    min_p = float(np.float32(min_p))
    if min_p > 0:
        distance = z - (z[0] + math.log(min_p))
        if min_p == 1:  # the threshold is the maximum itself: nothing to round
            after_min_p = int((distance >= 0).sum())
            margin = min(margin, np.abs(distance[distance != 0]).min(initial=math.inf))
        else:
            after_min_p = int((distance >= 0).sum())
            margin = min(margin, np.abs(distance).min())

    after_top_k = num_finite if top_k <= 0 else min(int(top_k), num_finite)

    base = {
        "vllm": min(after_min_p, after_top_k),
        "hf": after_top_k,
        "joint": after_min_p,
    }[filter_order]
    after_top_p = base
    top_p = float(np.float32(top_p))
    if top_p < 1:
        mass = np.exp(z[:base] - z[0])
        prefix = np.cumsum(mass) / math.fsum(mass)
        reached = np.flatnonzero(prefix >= top_p)
        after_top_p = int(reached[0]) + 1 if len(reached) else base
        after_top_p = max(after_top_p, 1)
        # Prefixes that reach past the other cuts decide nothing.
        deciding = prefix[: max(min(after_min_p, after_top_k, base), 1)]
        distance = np.abs(deciding - top_p)
        if base == len(deciding):
            distance = distance[:-1]  # the whole mass is kept whichever way the last comparison goes
        margin = min(margin, distance.min(initial=math.inf))

    num_kept = min(after_min_p, after_top_k, after_top_p)
    kept = np.zeros(len(ids), bool)
    kept[ids[:num_kept]] = True
    return kept, float(margin)


# --- drawing and scoring ---------------------------------------------------------------------------------------------


def draw(logits, kept, noise):
    """(token, margin): the first of the order of z + noise over the kept tokens, and how far the next one is."""
    noisy = np.where(kept, np.asarray(logits, np.float64) + np.asarray(noise, np.float64), NEGATIVE_INFINITY)
    ids = order(noisy)
    token = int(ids[0])
    return token, float(noisy[token] - noisy[ids[1]]) if len(ids) > 1 else math.inf


def processed_logprobs(logits, kept, greedy):
    """Log of the distribution drawn from: the kept tokens renormalised; all on the first token for a greedy row."""
    z = np.where(kept, np.asarray(logits, np.float64), NEGATIVE_INFINITY)
    if greedy:
        result = np.full(len(z), NEGATIVE_INFINITY)
        result[order(logits)[0]] = 0.0
        return result
    return z - log_sum_exp(z)


def raw_logprobs(raw):
    raw = np.asarray(raw, np.float64)
    return raw - log_sum_exp(raw)


def score(logits, logprobs, token, num_top):
    """(logprob, rank, ids of the num_top first tokens, their logprobs); the order is that of the logits."""
    ids = order(logits)[:num_top]
    return logprobs[token], rank(logits, token), ids, logprobs[ids]


def sample(logits, request, *, vocab_size, noise, prompt=(), output=(), grammar=None, filter_order="vllm"):
    """One row from logits to token.

    Returns:
      a dict: token (-1 for a bad row), valid, kept, shaped, raw logprobs, processed logprobs, margin (the smallest
      distance of a decision from flipping: of a filter, of the draw, of the maximum for greedy rows).
    """
    request = {**NEUTRAL, **request}
    shaped, raw, valid = shape(
        logits, request, vocab_size=vocab_size, prompt=prompt, output=output, grammar=grammar
    )
    if not valid:
        return dict(token=-1, valid=False, margin=math.inf)
    greedy = request["temperature"] == 0
    if greedy:
        kept, margin = np.isfinite(shaped), math.inf
        ids = order(shaped)
        token = int(ids[0])
        if len(ids) > 1:
            gap = shaped[ids[0]] - shaped[ids[1]]
            margin = gap if gap > 0 else math.inf
    else:
        kept, margin = filters(shaped, request["top_k"], request["top_p"], request["min_p"], filter_order)
        token, gap = draw(shaped, kept, noise)
        margin = min(margin, gap)
    return dict(
        token=token,
        valid=True,
        kept=kept,
        shaped=shaped,
        margin=margin,
        raw=raw_logprobs(raw),
        processed=processed_logprobs(shaped, kept, greedy),
    )
