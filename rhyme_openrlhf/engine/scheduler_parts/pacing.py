"""Real engines on another machine's clock: a step lasts as long as a profile says (--emulate.profile).

Tokens, acceptance and control flow are real; only time is another machine's, so that four or eight engines with a GPU's
timing fit on two cores.

Invariants: a step never ends before the profile's time for it is over, counted from its own begin or from the end of
the one before, whichever is later; where this machine is slower than the profile, the step is as slow as it is, and
that is counted (`late_seconds`). Checked against vLLM 0.29.0 `v1/core/sched/scheduler.py`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from rhyme_openrlhf.engine.scheduler_parts.clock import content_of
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.pace import Pace, StepContent

# Key of the profile's path in vLLM's additional_config.
PACE_KEY = "rhyme_emulate"


class Pacing(Scheduler):
    """Mixed into vLLM's scheduler classes; without a profile it changes nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        path = self.vllm_config.additional_config.get(PACE_KEY)
        self._pace = Pace(profiles.read(Path(path))) if path else None
        self._contents: dict[int, StepContent] = {}

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        output = super().schedule(*args, **kwargs)
        if self._pace is not None:
            self._contents[id(output)] = content_of(output, self.requests, started)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        content = self._contents.pop(id(scheduler_output), None)
        if self._pace is not None and content is not None:
            time.sleep(self._pace.wait(content, time.monotonic()))
        return outputs
