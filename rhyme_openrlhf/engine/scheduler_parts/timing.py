"""The part of a vLLM scheduler that times decode steps, and says how many dummy draft tokens they are to verify.

Asynchronous scheduling runs a step ahead: from one scheduling to the next is then still what one step takes, because
the next one waits for the output of the one before.

Invariant: who asks for no measuring and times nothing else has vLLM's own steps. Checked against vLLM 0.29.0
`v1/core/sched/scheduler.py`, `v1/engine/core.py`.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from rhyme_openrlhf.engine.scheduler_parts.clock import DecodeStep, StepClock


class StepTiming(Scheduler):
    """Mixed into vLLM's schedulers, those that draft and those that do not."""

    CALLABLE: tuple[str, ...] = ("force_drafts", "take_steps")

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
