"""The part of a vLLM scheduler that times decode steps, with as many dummy draft tokens as it is told to verify.

Invariants: while it measures, drafts are of one fixed token, so nearly all are rejected and samples grow by one, and a
step verifies no more rows than any other (row_limit.py); else nothing is changed. Checked against vLLM 0.29.0
`v1/core/sched/scheduler.py`.
"""

from __future__ import annotations

import time
from typing import Any

from rhyme_openrlhf.rollout.row_limit import RowLimit
from rhyme_openrlhf.rollout.step_clock import DecodeStep, StepClock

# Any token of any vocabulary.
DUMMY = 1


class StepTiming(RowLimit):
    """Mixed into vLLM's scheduler."""

    CALLABLE: tuple[str, ...] = ("force_drafts", "take_steps", "row_limit")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.forced_drafts: int | None = None
        self._steps: list[DecodeStep] = []
        self._clock = StepClock()

    def force_drafts(self, each: int | None) -> None:
        """From the next step on every decoding sample verifies `each` dummy draft tokens; None: no measuring."""
        self.forced_drafts = each

    def take_steps(self) -> list[DecodeStep]:
        """Decode steps since the last call, of those measured."""
        taken, self._steps = self._steps, []
        self._clock.interrupted()
        return taken

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        now = time.perf_counter()
        output = super().schedule(*args, **kwargs)
        if not self.is_timed():
            self._clock.skipped()
            return output
        timed = self._clock.scheduled(output, self.requests, now)
        if timed is not None and self.forced_drafts is not None:
            self._steps.append(timed)
        self.on_scheduled(output, timed)
        return output

    def is_timed(self) -> bool:
        """Whether anybody asks how long steps take."""
        return self.forced_drafts is not None

    def on_scheduled(self, output: Any, before: DecodeStep | None) -> None:
        """Called for each step that was scheduled and is timed, with the one before it if that could be timed."""

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        if not self.requests:
            self._clock.interrupted()
        return outputs

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Dummy drafts for each request that is decoding."""
        asked = (self.requests.get(request_id) for request_id in draft_token_ids.req_ids)
        requests = [request for request in asked if request is not None and not request.is_finished()]
        each = [DUMMY] * (self.forced_drafts or 0)
        self.set_drafts(requests, [[] if request.is_prefill_chunk else list(each) for request in requests])
