"""The decode step: propose, forward, sample, verify, finish, commit, advance, as one jitted function.

The one file that knows all of the library. A model is two pure functions:

    forward(weights, tokens i32[B, N], positions i32[B, N], cache, mask bool[B, N, S + N]) -> (hidden, Staged)
    unembed(weights, hidden [B, N, W]) -> logits [B, N, Vp], Vp >= V

with hidden for each token and Staged keys and values [L, B, N, H, D]; the mask says which of the S committed
slots and N staged nodes each node sees. A `Head` in place of unembed says where its matrix is: there are no
logits then. A loop, B slots wide, with a cache of at least max_length slots:

    requests = admit(empty_requests(limits, B), slots, params, stop, prompts, lengths, limits=limits)
    cache = prefill(weights, cache, tokens, zeros, counts)      # in slots' order, all but the last token
    while running: requests, cache, record = step(weights, requests, cache); unpack(record, features)

State is donated, no value is looked at by the host, and what the host is told comes back as one small array.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxsample.draft import ROOT, Draft, Tree, chain
from jaxsample.head import Head
from jaxsample.head_sample import sample_head
from jaxsample.kvcache import Cache, attention_mask, commit
from jaxsample.logprobs import of_emitted
from jaxsample.nodes import logprobs_of_path, node_rows, node_target, plain_rows
from jaxsample.params import Features, Limits
from jaxsample.propose import Proposer, check_given
from jaxsample.record import pack
from jaxsample.requests import RUNNING, Requests, advance, finish
from jaxsample.row_draw import is_chosen
from jaxsample.sample import Sampled, draw_rows
from jaxsample.sharding import Axis, axis_size, check_axes, check_rows, keep_layout, map_rows, pad_columns
from jaxsample.target import Target
from jaxsample.verify import Verdict, accept_matching, verify_match


def make_decode_step(
    forward: Callable[..., Any],
    unembed: Callable[..., Any] | Head,
    *,
    limits: Limits,
    features: Features,
    proposer: Proposer | None = None,
    verify: Callable[..., Verdict] = verify_match,
    mesh: Any = None,
    axis: Axis | None = None,
    batch_axis: Axis = (),
    draw: Callable[..., Sampled] | None = None,
):
    """Build the jitted step: one token or more for every running slot.

    Args:
      forward, unembed: the model's two functions, see the module's text. A Head in place of unembed draws
        from hidden states, with the same tokens given equal logits, and serves verify_match and no
        transforms; on a GPU its loop over rows that need logits makes a step's launch wait for the model.
      limits: capacities.
      features: stages of this program; it serves rows that need these or fewer.
      proposer: where drafts come from; None decodes plainly.
      verify: (target, draft, tree) -> Verdict, one of the verify_* functions.
      mesh, axis, batch_axis: logits are split over the vocabulary along `axis`, rows beforehand along
        batch_axis, see `sharding.map_rows`: each device judges its own rows, and all devices get the verdict.
      draw: `sample_by_exchange` draws from split logits as they are, with less traffic and the same tokens,
        for verify_match with features that it serves. None: rows become whole to be judged.

    Returns:
      step(weights, requests, cache, allowed=None, transform_args=()) -> (requests, cache, record i32[B, R]).
      requests and cache are donated. `allowed` is the grammar mask, u32[B, W]; with a proposer its masks
      depend on the draft, so use `make_split_step`. With a proposer, weights is the pair (model's,
      proposer's) and cache the pair (model's, proposer's state), given and returned. Slots that do not run
      are left as they are. Read the record with `unpack`, best after the next step is launched.
    """
    placed = (mesh, axis, batch_axis)
    parts = step_parts(forward, unembed, limits, features, proposer, verify, *placed, draw=draw)

    def step(weights, requests: Requests, cache, allowed=None, transform_args=()):
        check_given(weights, cache, limits, proposer)
        return parts.step(weights, requests, cache, allowed, transform_args)

    return jax.jit(keep_layout(step, mesh, batch_axis), donate_argnums=(1, 2))


def make_split_step(
    forward: Callable[..., Any],
    unembed: Callable[..., Any] | Head,
    *,
    limits: Limits,
    features: Features,
    proposer: Proposer | None = None,
    verify: Callable[..., Verdict] = verify_match,
    mesh: Any = None,
    axis: Axis | None = None,
    batch_axis: Axis = (),
):
    """The step as two programs, for grammars: masks are made while the model runs.

    Args: as `make_decode_step`.

    Returns:
      (propose, forward, tail), all jitted:
      propose(weights, requests, cache) -> drafted, whose first entry is the Draft to make masks for;
      ahead(weights, requests, cache, drafted) -> ahead, the model's pass;
      tail(weights, requests, cache, drafted, ahead, allowed u32[B, N, W], transform_args=()) -> (requests,
      cache, record), with requests and cache donated. Launch ahead, read the draft's tokens i32[B, N], fill
      the masks, launch tail.
    """
    parts = step_parts(forward, unembed, limits, features, proposer, verify, mesh, axis, batch_axis)

    def ahead(weights, requests, cache, drafted):
        check_given(weights, cache, limits, proposer)
        return parts.forward(weights, requests, cache, drafted)

    def tail(weights, requests, cache, drafted, ahead, allowed=None, transform_args=()):
        return parts.tail(weights, requests, cache, drafted, ahead, allowed, transform_args)

    tail = jax.jit(keep_layout(tail, mesh, batch_axis), donate_argnums=(1, 2))
    return jax.jit(parts.propose), jax.jit(ahead), tail


def make_decode_many(
    forward: Callable[..., Any],
    unembed: Callable[..., Any] | Head,
    num_steps: int,
    *,
    limits: Limits,
    features: Features,
    proposer: Proposer | None = None,
    verify: Callable[..., Verdict] = verify_match,
):
    """Build a jitted run of many steps in one launch, for offline use: nothing is read between them.

    Rows that have ended idle until the last step.

    Args:
      forward, unembed, limits, features, proposer, verify: as `make_decode_step`.
      num_steps: T, at least 1.

    Returns:
      decode_many(weights, requests, cache, transform_args=()) -> (requests, cache, records i32[T, B, R]);
      requests and cache are donated. Read each record with `unpack`.

    Raises:
      ValueError: num_steps below 1.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}, allowed are integers from 1")
    parts = step_parts(forward, unembed, limits, features, proposer, verify)

    def decode_many(weights, requests: Requests, cache, transform_args=()):
        check_given(weights, cache, limits, proposer)

        def one(carry, _):
            requests, cache = carry
            requests, cache, record = parts.step(weights, requests, cache, None, transform_args)
            return (requests, cache), record

        # A loop of known length: the device does not ask the host how often.
        (requests, cache), records = jax.lax.scan(one, (requests, cache), length=num_steps)
        return requests, cache, records

    return jax.jit(decode_many, donate_argnums=(1, 2))


def make_prefill(forward: Callable[..., Any], limits: Limits):
    """Build the jitted prefill: commit chunks of known tokens, one compilation a chunk width.

    Args:
      forward: the model's function.
      limits: capacities; a slot at max_length and beyond is dropped.

    Returns:
      prefill(weights, cache, tokens i32[B, N], lengths i32[B], counts i32[B]) -> cache. The cache is donated.
      tokens[b, :counts[b]] are committed at slots lengths[b] and on, what lies behind may be anything; a row
      of count 0 idles. Commit all
      prompt tokens but the last: that one is the root of the first step.
    """

    def prefill(weights, cache: Cache, tokens, lengths, counts):
        if tokens.shape[1] > limits.max_length:
            raise ValueError(
                f"tokens are {tokens.shape[1]} wide, allowed is at most max_length = {limits.max_length}"
            )
        return commit_tokens(forward, weights, cache, tokens, lengths, counts)[1]

    return jax.jit(prefill, donate_argnums=(1,))


def commit_tokens(forward: Callable[..., Any], weights, cache, tokens, lengths, counts, rows=None) -> Any:
    """Run known tokens through the model and commit their keys and values: the body of `make_prefill`.

    With rows, i32[b], tokens, lengths and counts are of these rows alone. Returns (hidden [b, N, W], cache).
    """
    num_rows, num_tokens = tokens.shape
    view = cache if rows is None else cache.take(rows)
    order = jnp.arange(num_tokens, dtype=jnp.int32)[None, :]
    mask = attention_mask(lengths, chain(num_tokens - 1), view.num_slots)
    hidden, staged = forward(weights, jnp.maximum(tokens, 0), lengths[:, None] + order, view, mask)
    path = jnp.broadcast_to(order, (num_rows, num_tokens))
    return hidden, commit(cache, staged, lengths, path, counts, rows)


class StepParts(NamedTuple):
    """The step in three pure parts, not jitted, for programs that put something of their own around them.

    Fields:
      propose: (weights, requests, cache) -> drafted, whose first entry is the Draft.
      forward: (weights, requests, cache, drafted) -> ahead.
      tail: (weights, requests, cache, drafted, ahead, allowed, transform_args) -> (requests, cache, record).
    """

    propose: Callable[..., Any]
    forward: Callable[..., Any]
    tail: Callable[..., Any]

    def step(self, weights, requests: Requests, cache, allowed, transform_args):
        """All three, one after another."""
        drafted = self.propose(weights, requests, cache)
        ahead = self.forward(weights, requests, cache, drafted)
        return self.tail(weights, requests, cache, drafted, ahead, allowed, transform_args)


def step_parts(
    forward: Callable[..., Any],
    unembed: Callable[..., Any] | Head,
    limits: Limits,
    features: Features,
    proposer: Proposer | None,
    verify: Callable[..., Verdict],
    mesh: Any = None,
    axis: Axis | None = None,
    batch_axis: Axis = (),
    join_axis: Axis = (),
    draw: Callable[..., Sampled] | None = None,
) -> StepParts:
    """The parts of `make_decode_step`; the caller sees to it that the cache has room for what they write.

    With join_axis = batch_axis verdicts are given to all devices: see `sharding.map_rows`.
    """
    if proposer is not None and not isinstance(proposer, Proposer):
        raise ValueError(
            f"proposer is {proposer!r}, expected a Proposer (ngram_proposer, model_proposer, ...)"
        )
    if not callable(verify):
        raise ValueError(f"verify is {verify!r}, expected a verifier (verify_match, verify_rejection, ...)")
    tree: Tree = ROOT if proposer is None else proposer.tree

    def propose(weights, requests: Requests, cache):
        if proposer is None:
            return Draft(requests.root[:, None], jnp.zeros_like(requests.length)), ()
        with jax.named_scope("propose"):
            return proposer.propose(weights[1], cache[1], requests)

    def forward_pass(weights, requests: Requests, cache, drafted):
        if proposer is not None:
            weights, cache = weights[0], cache[0]
        # PAD has no embedding; what its row says is never looked at.
        tokens = jnp.maximum(drafted[0].tokens, 0)
        positions = requests.length[:, None] + jnp.asarray(tree.depth)[None, :]
        mask = attention_mask(requests.length, tree, cache.num_slots)
        with jax.named_scope("forward"):
            hidden, staged = forward(weights, tokens, positions, cache, mask)
        if isinstance(unembed, Head):
            return hidden, staged, ()
        with jax.named_scope("unembed"):
            logits = unembed(weights, hidden)
        if mesh is not None:  # a program that ends here leaves columns that the devices divide
            logits = pad_columns(logits, axis_size(mesh, axis or ()), limits.vocab_size)
        return hidden, staged, logits

    def judge(logits, requests: Requests, draft, allowed, transform_args):
        """What each row emits, why it ended, and its logprobs; of some rows or of all."""
        plainly = verify is verify_match and allowed is None and not transform_args
        if plainly and (mesh is not None or axis is None) and is_chosen(features, limits, mesh is not None):
            with jax.named_scope("sample"):
                params, position = plain_rows(requests.params, requests.length + 1, tree)
                rows = logits.reshape(-1, logits.shape[-1]), params, position
                sampled = draw_rows(*rows, limits=limits, features=features)
            return judge_sampled(sampled, requests, draft), ()
        with jax.named_scope("sample"):
            target = node_target(
                logits,
                requests.params,
                requests.stop,
                requests.history,
                requests.length + 1,
                draft.tokens,
                tree,
                limits=limits,
                features=features,
                allowed=allowed,
                transform_args=transform_args,
                law=verify is not verify_match,
            )
        return judge_target(target, requests, draft, tree, verify, limits), ()

    def judge_draw(logits, requests: Requests, draft, allowed, transform_args):
        """The same of tokens that `draw` gives all devices."""
        assert draw is not None
        if allowed is not None or transform_args:
            raise ValueError("draw is given, and with it neither masks nor arguments of transforms")
        options = dict(limits=limits, features=features, mesh=mesh, axis=axis, batch_axis=batch_axis)
        with jax.named_scope("sample"):
            check_rows(mesh, draft.tokens.shape[0], batch_axis)  # nodes may be divided where rows are not
            params, position = plain_rows(requests.params, requests.length + 1, tree)
            sampled = draw(logits.reshape(-1, logits.shape[-1]), params, position, **options)
            if join_axis:  # else a compiler may split histories like the tokens, and join them again
                whole = NamedSharding(mesh, PartitionSpec())
                sampled = jax.lax.with_sharding_constraint(sampled, whole)
        return judge_sampled(sampled, requests, draft), ()

    def judge_sampled(sampled: Sampled, requests: Requests, draft):
        """The same of tokens drawn at every node."""
        with jax.named_scope("sample"):
            by_node = lambda array: array.reshape(draft.tokens.shape)
            verdict = accept_matching(by_node(sampled.tokens), by_node(sampled.valid), draft, tree)
        with jax.named_scope("finish"):
            verdict, status = finish(requests, verdict, limits=limits)
        first = jnp.arange(verdict.path.shape[0], dtype=jnp.int32)[:, None] * tree.num_nodes
        return verdict, status, of_emitted(sampled.logprobs, verdict.tokens, first + verdict.path)

    def judge_hidden(weights, hidden, requests: Requests, draft, allowed, transform_args):
        """The same from hidden states, of all rows."""
        if transform_args:
            raise ValueError("unembed is a Head, and with it there are no arguments of transforms")
        options: Any = dict(limits=limits, features=features, head=unembed, mesh=mesh, axis=axis)
        with jax.named_scope("sample"):
            given = (requests.params, requests.stop, requests.history, requests.length + 1, draft.tokens)
            params, position, shaping = node_rows(*given, tree, limits=limits, allowed=allowed)
            hidden = hidden.reshape(-1, hidden.shape[-1])
            sampled = sample_head(
                hidden, weights, params, position, **shaping, **options, batch_axis=batch_axis
            )
        return judge_sampled(sampled, requests, draft)

    if isinstance(unembed, Head) and (verify is not verify_match or draw is not None or features.transforms):
        raise ValueError(
            f"unembed is a Head with verify {getattr(verify, '__name__', verify)}, draw {draw} and "
            f"{len(features.transforms)} transforms; it serves verify_match, no draw and no transforms"
        )
    if draw is None:
        judge_rows = map_rows(judge, mesh, axis, batch_axis, join_axis)
    elif verify is not verify_match or axis is None or features.shapes:
        raise ValueError(
            f"draw is given with verify {getattr(verify, '__name__', verify)}, axis {axis!r} and tier "
            f"{features.tier!r}; it serves verify_match, needs an axis, and tier 'plain' or 'filtered'"
        )
    else:
        if mesh is not None:
            check_axes(mesh, axis, batch_axis)
        judge_rows = judge_draw

    def tail(weights, requests: Requests, cache, drafted, ahead, allowed, transform_args):
        given = requests, drafted[0], allowed, transform_args
        if isinstance(unembed, Head):
            judged = judge_hidden(weights if proposer is None else weights[0], ahead[0], *given)
        else:
            judged, _ = judge_rows(ahead[2], *given)
        return take_verdict(proposer, weights, requests, cache, drafted, ahead, judged)

    return StepParts(propose, forward_pass, tail)


def judge_target(target: Target, requests: Requests, draft: Draft, tree: Tree, verify, limits: Limits):
    """(Verdict, status i32[B], Logprobs [B, M] or None): what each row emits from its nodes' targets."""
    with jax.named_scope("sample"):
        verdict = verify(target, draft, tree)
    with jax.named_scope("finish"):
        verdict, status = finish(requests, verdict, limits=limits)
        return verdict, status, logprobs_of_path(target, verdict.path, verdict.tokens, tree)


def take_verdict(proposer: Proposer | None, weights, requests: Requests, cache, drafted, ahead, judged):
    """Commit what `judge_target` found and move the rows on: (requests, cache, record)."""
    (draft, draft_staged), (hidden, staged, _), (verdict, status, logprobs) = drafted, ahead, judged
    with jax.named_scope("update"):
        num_drafted = jnp.where(requests.status == RUNNING, draft.num_live, 0)
        record = pack(verdict, status, num_drafted, logprobs)
        committed = cache if proposer is None else cache[0]
        committed = commit(committed, staged, requests.length, verdict.path, verdict.count)
        if proposer is not None:
            state = proposer.settle(weights[1], cache[1], draft_staged, requests, verdict, hidden)
            committed = (committed, state)
        return advance(requests, verdict, status, num_drafted), committed, record
