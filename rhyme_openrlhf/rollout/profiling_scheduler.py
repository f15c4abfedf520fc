"""vLLM scheduler plug-in of `rhyme profile`: decode steps verify as many draft tokens as told, and are timed.

A step's time is from its `schedule` to the next one's, when that follows at once: so it has in it all that surrounds
the forward pass, as a run's steps have. Invariants: only steps that decode and prefill nothing are kept; the last step
of a burst has no next one and is dropped; drafts are of one fixed token, so nearly all are rejected and samples grow by
one. Checked against vLLM 0.29.0 `v1/core/sched/scheduler.py`.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from rhyme_openrlhf.rollout.scheduler import Metering

# Any token of any vocabulary.
DUMMY = 1


class ProfilingScheduler(Metering, Scheduler):
    """vLLM's scheduler with dummy drafts and a stopwatch."""

    CALLABLE = (*Metering.CALLABLE, "force_drafts", "take_steps")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._drafts_each = 0
        self._steps: list[tuple[int, int, int, float]] = []
        # (running, context, drafts, start) of the step before, if it was one to keep.
        self._before: tuple[int, int, int, float] | None = None

    def force_drafts(self, each: int) -> None:
        """From the next step on every decoding sample verifies `each` dummy draft tokens."""
        self._drafts_each = each

    def take_steps(self) -> list[tuple[int, int, int, float]]:
        """Decode steps since the last call: (running samples, context in tokens, draft tokens, seconds)."""
        taken, self._steps, self._before = self._steps, [], None
        return taken

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        now = time.perf_counter()
        if self._before is not None:
            *shape, started = self._before
            self._steps.append((*shape, now - started))  # type: ignore[arg-type]
            self._before = None
        output = super().schedule(*args, **kwargs)
        self._before = self._decode_step(output, now)
        return output

    def _decode_step(self, output: Any, now: float) -> tuple[int, int, int, float] | None:
        scheduled = output.num_scheduled_tokens
        drafts = {request: len(tokens) for request, tokens in output.scheduled_spec_decode_tokens.items()}
        if not scheduled or any(tokens != 1 + drafts.get(request, 0) for request, tokens in scheduled.items()):
            return None
        # A sample's first token is of its prefill, also where that has one token left to compute.
        if any(self.requests[request].num_output_tokens == 0 for request in scheduled):
            return None
        # Scheduling has counted this step's tokens as computed already.
        computed = sum(self.requests[request].num_computed_tokens for request in scheduled) - sum(scheduled.values())
        return len(scheduled), computed, sum(drafts.values()), now

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        if not self.requests:
            # Whatever comes next does not follow at once.
            self._before = None
        return outputs

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Dummy drafts for each request that is decoding."""
        for request_id in draft_token_ids.req_ids:
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                request.spec_token_ids = [] if request.is_prefill_chunk else [DUMMY] * self._drafts_each
