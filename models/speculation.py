"""Speculation for one run of generation: where drafts come from, and how they are judged.

Knows nothing of requests' values or of text.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxsample import (
    Features,
    Limits,
    Proposer,
    Tree,
    chain,
    chained_head_proposer,
    draw_proposals,
    empty_head_state,
    from_paths,
    init_cache,
    model_proposer,
    ngram_proposer,
    observe_prompt,
    rng,
    verify_block,
    verify_match,
    verify_rejection,
    verify_tree_distinct,
    verify_tree_points,
)
from models.decoder import DecoderConfig, Weights, decoder_functions
from models.draft_head import draft_functions
from models.kernels import kernels_of
from models.placement import cache_sharding, place_model

VERIFIERS = ("match", "rejection", "block", "tree")
_MAX_DRAFTS = 16


@dataclasses.dataclass(frozen=True)
class Speculation:
    """What the user asked for.

    Fields:
      num_drafts: K, proposals a step.
      verify: one of VERIFIERS.
      draft: config and weights of a draft model over the target's vocabulary; None proposes n-grams.
      head: config and weights (`draft_head.join_base`) of a draft head in place of either; None: there is
        none.
    """

    num_drafts: int
    verify: str
    draft: tuple[DecoderConfig, Weights] | None = None
    head: tuple[DecoderConfig, Weights] | None = None


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A Speculation made ready for one set of capacities.

    Fields:
      proposer, verify: for make_decode_step.
      weights: the draft model's, or ().
      new_state: number of rows -> the proposer's state.
      forward: the draft model's, for its prefill; None where there is none.
      layout: number of rows -> how the state lies on the mesh; () where there is no state or no mesh.
      observe: (weights, state, hidden, successors, lengths, counts, seed) -> state, takes in a chunk of the
        prompt with the target's hidden states, see `jaxsample.observe_prompt`; None: prompts tell nothing.
    """

    proposer: Proposer
    verify: Callable[..., Any]
    weights: Any
    new_state: Callable[[int], Any]
    forward: Callable[..., Any] | None
    layout: Callable[[int], Any]
    observe: Callable[..., Any] | None = None


def prepare(
    asked: Speculation, vocab_size: int, limits: Limits, features: Features, **sampled: Any
) -> Drafting:
    """Checks a Speculation and builds its proposer.

    Args:
      asked: the Speculation.
      vocab_size: V. limits, features: as in make_decode_step.
      sampled: mesh, axis and batch_axis of make_decode_step, or nothing: the draft model is placed likewise.

    Raises:
      ValueError: an unknown verifier, a number of proposals out of range, a draft model of another
        vocabulary, or a draft head on a mesh or with the verifier of trees.
    """
    if asked.verify not in VERIFIERS:
        raise ValueError(f"verify is {asked.verify!r}, allowed are {', '.join(VERIFIERS)}")
    if not 1 <= asked.num_drafts <= _MAX_DRAFTS:
        raise ValueError(f"num_drafts is {asked.num_drafts}, allowed is 1 ... {_MAX_DRAFTS}")
    if asked.head is not None:
        return _prepare_head(asked, asked.head, limits, features, **sampled)
    if asked.draft is None:
        verify = {"match": verify_match, "rejection": verify_rejection, "block": verify_block}
        proposer = ngram_proposer(chain(asked.num_drafts))
        none = lambda rows: ()
        return Drafting(proposer, verify.get(asked.verify, verify_tree_points), (), none, None, none)

    config, weights = asked.draft
    if config.vocab_size != vocab_size:
        raise ValueError(
            f"the draft model has {config.vocab_size} tokens, the model {vocab_size}: they must be the same"
        )
    mesh = sampled.get("mesh")
    if mesh is not None:
        config, weights = place_model(config, weights, mesh)
    tree = spread_tree(asked.num_drafts) if asked.verify == "tree" else chain(asked.num_drafts)
    purpose = rng.TARGET if asked.verify == "match" else rng.DRAFT
    verify = {
        "match": verify_match,
        "rejection": verify_rejection,
        "block": verify_block,
        "tree": verify_tree_distinct,
    }[asked.verify]
    forward, unembed = decoder_functions(config, kernels=kernels_of(mesh))
    pick = draw_proposals(purpose)
    proposer = model_proposer(forward, unembed, tree, limits=limits, features=features, pick=pick, **sampled)

    def new_state(num_rows: int):
        dtype = jax.tree.leaves(weights)[0].dtype
        shape = (config.num_layers, num_rows, limits.max_length, config.num_kv_heads, config.head_size)
        return init_cache(*shape, dtype)

    def layout(num_rows: int):
        return () if mesh is None else cache_sharding(config, num_rows, mesh)

    return Drafting(proposer, verify, weights, new_state, forward, layout)


def _prepare_head(
    asked: Speculation,
    head: tuple[DecoderConfig, Weights],
    limits: Limits,
    features: Features,
    **sampled: Any,
) -> Drafting:
    verify = {"match": verify_match, "rejection": verify_rejection, "block": verify_block}
    if asked.verify not in verify:
        raise ValueError(f"verify is {asked.verify!r}, allowed with a draft head are {', '.join(verify)}")
    if sampled.get("mesh") is not None:
        raise ValueError("a draft head and a mesh are given, allowed is one of them: a head is on one device")
    config, weights = head
    pick = draw_proposals(rng.TARGET if asked.verify == "match" else rng.DRAFT)
    forward, unembed = draft_functions(config, kernels=kernels_of())
    tree = chain(asked.num_drafts)
    proposer = chained_head_proposer(forward, unembed, tree, limits=limits, features=features, pick=pick)
    dtype = weights["embedding"].dtype

    def new_state(num_rows: int):
        shape = (config.num_layers, num_rows, limits.max_length, config.num_kv_heads, config.head_size)
        return empty_head_state(init_cache(*shape, dtype), config.width, dtype)

    observe = functools.partial(observe_prompt, forward)
    return Drafting(proposer, verify[asked.verify], weights, new_state, None, lambda rows: (), observe)


def spread_tree(num_drafts: int) -> Tree:
    """A chain of about two thirds of the proposals, the rest second choices along it from the root on."""
    depth = -(-2 * num_drafts // 3)
    paths = [(0,) * depth]
    paths += [(0,) * level + (1,) for level in range(num_drafts - depth)]
    return from_paths(paths)
