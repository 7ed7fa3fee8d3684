"""jaxsample: the sampling tail of LLM decoding for JAX.

Everything between a model's logits and its next step: shaping, filters, the draw, logprobs, KV-cache commit,
finish detection, as pure functions for jitted loops. `sample` is the one call a plain loop needs;
`make_decode_step` is the whole step.
"""

from jaxsample.admission import make_params
from jaxsample.candidates import Candidates, log_sum_exp, summarize
from jaxsample.decode import StepOutput, make_decode_step, make_prefill, unpack
from jaxsample.draft import ROOT, Draft, Tree, chain, from_paths
from jaxsample.draw import draw_candidates, draw_rows
from jaxsample.history import History, append, start
from jaxsample.kvcache import KVCache, Staged, attention_mask, commit, init_cache
from jaxsample.logprobs import Logprobs, score
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
from jaxsample.truncation import Cut, cut_candidates, cut_rows, kept
from jaxsample.verify import Verdict, verify_match

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
    "Candidates",
    "Cut",
    "Draft",
    "Features",
    "History",
    "KVCache",
    "Limits",
    "Logprobs",
    "Requests",
    "Sampled",
    "SamplingParams",
    "Shaped",
    "Staged",
    "StepOutput",
    "StopRule",
    "Tree",
    "Verdict",
    "admit",
    "advance",
    "append",
    "attention_mask",
    "bad_word_bans",
    "cancel",
    "chain",
    "commit",
    "cut_candidates",
    "cut_rows",
    "draw_candidates",
    "draw_rows",
    "empty_requests",
    "finish",
    "finish_reason",
    "from_paths",
    "init_cache",
    "kept",
    "log_sum_exp",
    "make_decode_step",
    "make_params",
    "make_prefill",
    "neutral_params",
    "penalize",
    "release",
    "required_features",
    "sample",
    "score",
    "set_rows",
    "shape",
    "stack_rows",
    "start",
    "summarize",
    "unpack",
    "verify_match",
]
