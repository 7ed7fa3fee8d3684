"""jaxsample: the sampling tail of LLM decoding for JAX.

Everything between a model's logits and its next step: shaping, filters, the draw, logprobs, KV-cache commit,
finish detection, as pure functions for jitted loops. `sample` is the one call a plain loop needs;
`make_decode_step` is the whole step.
"""

from jaxsample.adaptive import DraftLength, adaptive, draft_length_of, new_draft_length, update_draft_length
from jaxsample.admission import make_params
from jaxsample.buckets import Buckets, make_buckets
from jaxsample.candidates import Candidates, log_sum_exp, summarize
from jaxsample.chained import HeadState, chained_head_proposer, empty_head_state, observe_prompt
from jaxsample.counts import EngineStats
from jaxsample.decode import make_decode_many, make_decode_step, make_prefill, make_split_step
from jaxsample.draft import ROOT, Draft, Tree, chain, from_paths
from jaxsample.draw import draw_candidates, draw_rows
from jaxsample.engine import Engine, QueueFull
from jaxsample.exchange import sample_by_exchange
from jaxsample.grammar import Matcher
from jaxsample.guidance import Shortlist, add_scores, ends_row, guided_target, shortlist
from jaxsample.guidance_modes import guide
from jaxsample.guidance_rows import Guidance, make_guidance, needs_guidance, neutral_guidance
from jaxsample.guided import (
    CatchUp,
    GuidedState,
    Scorer,
    admit_guided,
    init_guided,
    make_guided_step,
    make_value_prefill,
    num_catch_up_steps,
)
from jaxsample.head import Head, head_logits
from jaxsample.head_sample import sample_head
from jaxsample.head_score import score_head
from jaxsample.head_summary import HeadSummary, summarize_head
from jaxsample.history import History, append, start
from jaxsample.intake import Request
from jaxsample.kvcache import (
    KVCache,
    Staged,
    WriteMetrics,
    as_stored,
    attention_mask,
    bytes_per_row,
    candidate_mask,
    commit,
    count_writes,
    gather_layer,
    init_cache,
    init_write_metrics,
    read_staged,
    stage,
)
from jaxsample.law import Law, log_probs, residual
from jaxsample.logprobs import Logprobs, score
from jaxsample.lossless import GivenNoise, accept_prefix, verify_block, verify_rejection
from jaxsample.lossless_tree import verify_tree_distinct, verify_tree_points, verify_tree_replaced
from jaxsample.paged import PagedKVCache, init_paged_cache
from jaxsample.params import (
    PAD,
    Features,
    Limits,
    SamplingParams,
    StopRule,
    neutral_params,
    required_features,
    set_rows,
    stack_rows,
)
from jaxsample.penalties import bad_word_bans, penalize
from jaxsample.propose import (
    Proposer,
    draw_proposals,
    first_proposals,
    head_proposer,
    model_proposer,
    ngram_proposer,
    propose_ngram,
    widen,
)
from jaxsample.quantize import dequantize, quantize
from jaxsample.record import StepOutput, unpack
from jaxsample.requests import (
    CANCELLED,
    ERROR,
    IDLE,
    LENGTH,
    RUNNING,
    STOP_EOS,
    STOP_SEQUENCE,
    STOP_TOKEN,
    Requests,
    admit,
    advance,
    cancel,
    empty_requests,
    finish,
    finish_reason,
    release,
)
from jaxsample.sample import Sampled, sample
from jaxsample.shaping import Shaped, shape
from jaxsample.sharding import join_batch, map_rows, own_rows, split_batch
from jaxsample.streams import Sample, Stream, Tokens
from jaxsample.target import Target, draw_target, law_of, logprobs_of, make_target
from jaxsample.truncation import Cut, cut_candidates, cut_rows, kept
from jaxsample.verify import Verdict, accept_matching, verify_match

__version__ = "0.1.0"
__all__ = [
    "CANCELLED",
    "ERROR",
    "IDLE",
    "LENGTH",
    "PAD",
    "ROOT",
    "RUNNING",
    "STOP_EOS",
    "STOP_SEQUENCE",
    "STOP_TOKEN",
    "Buckets",
    "Candidates",
    "CatchUp",
    "Cut",
    "Draft",
    "DraftLength",
    "Engine",
    "EngineStats",
    "Features",
    "GivenNoise",
    "Guidance",
    "GuidedState",
    "Head",
    "HeadState",
    "HeadSummary",
    "History",
    "KVCache",
    "Law",
    "Limits",
    "Logprobs",
    "Matcher",
    "PagedKVCache",
    "Proposer",
    "QueueFull",
    "Request",
    "Requests",
    "Sample",
    "Sampled",
    "SamplingParams",
    "Scorer",
    "Shaped",
    "Shortlist",
    "Staged",
    "StepOutput",
    "StopRule",
    "Stream",
    "Target",
    "Tokens",
    "Tree",
    "Verdict",
    "WriteMetrics",
    "accept_matching",
    "accept_prefix",
    "adaptive",
    "add_scores",
    "admit",
    "admit_guided",
    "advance",
    "append",
    "as_stored",
    "attention_mask",
    "bad_word_bans",
    "bytes_per_row",
    "cancel",
    "candidate_mask",
    "chain",
    "chained_head_proposer",
    "commit",
    "count_writes",
    "cut_candidates",
    "cut_rows",
    "dequantize",
    "draft_length_of",
    "draw_candidates",
    "draw_proposals",
    "draw_rows",
    "draw_target",
    "empty_head_state",
    "empty_requests",
    "ends_row",
    "finish",
    "finish_reason",
    "first_proposals",
    "from_paths",
    "gather_layer",
    "guide",
    "guided_target",
    "head_logits",
    "head_proposer",
    "init_cache",
    "init_guided",
    "init_paged_cache",
    "init_write_metrics",
    "join_batch",
    "kept",
    "law_of",
    "log_probs",
    "log_sum_exp",
    "logprobs_of",
    "make_buckets",
    "make_decode_many",
    "make_decode_step",
    "make_guidance",
    "make_guided_step",
    "make_params",
    "make_prefill",
    "make_split_step",
    "make_target",
    "make_value_prefill",
    "map_rows",
    "model_proposer",
    "needs_guidance",
    "neutral_guidance",
    "neutral_params",
    "new_draft_length",
    "ngram_proposer",
    "num_catch_up_steps",
    "observe_prompt",
    "own_rows",
    "penalize",
    "propose_ngram",
    "quantize",
    "read_staged",
    "release",
    "required_features",
    "residual",
    "sample",
    "sample_by_exchange",
    "sample_head",
    "score",
    "score_head",
    "set_rows",
    "shape",
    "shortlist",
    "split_batch",
    "stack_rows",
    "stage",
    "start",
    "summarize",
    "summarize_head",
    "unpack",
    "update_draft_length",
    "verify_block",
    "verify_match",
    "verify_rejection",
    "verify_tree_distinct",
    "verify_tree_points",
    "verify_tree_replaced",
    "widen",
]
