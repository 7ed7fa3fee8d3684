"""What an engine counts: what it holds now, and what it has done since it was made.

Knows nothing of who counts.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counts; those of tokens are totals since the engine was made.

    Fields:
      num_waiting, num_seated: samples' tickets in the queue, samples in slots. num_slots: B.
      num_free_pages, num_pages. num_tokens: emitted. num_windows: row steps that emitted.
      num_drafted, num_accepted: proposals. num_preempted: times a sample had to give up its pages.
    """

    num_waiting: int
    num_seated: int
    num_slots: int
    num_free_pages: int
    num_pages: int
    num_tokens: int
    num_windows: int
    num_drafted: int
    num_accepted: int
    num_preempted: int
