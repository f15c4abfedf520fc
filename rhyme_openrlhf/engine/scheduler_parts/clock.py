"""How long decode steps take: from a step's scheduling to the next one's, when that follows at once.

So a step's time has in it all that surrounds the forward pass: sampling, drafting, vLLM's own work between two steps.
Whoever plans a step before it is scheduled gets the time of the one before it already then: from planning to planning,
in which there is just as much. Asynchronous scheduling runs a step ahead: from one scheduling to the next is then still
what one step takes, because the next one waits for the output of the one before.

Two parts of the scheduler live by the clock. `Timing` notes the steps of an engine that is measured. `Pacing` makes
steps as long as a profile says (--emulate.profile), so that engines with another machine's timing run on this one:
tokens, acceptance and control flow are real.

Invariants: only steps that decode and prefill nothing are timed; a step after which the engine had nothing to run has
no next one to be timed by, and is dropped; who asks for no time has vLLM's own steps. A paced step never ends before
the profile's time for it is over, counted from its own begin or from the end of the one before, whichever is later;
where this machine is slower than the profile, that is counted (`late_seconds`). Checked against vLLM 0.29.0
`v1/core/sched/scheduler.py`, `v1/core/sched/output.py`, `v1/engine/core.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rhyme_openrlhf.engine.calls import SchedulerTiming
from rhyme_openrlhf.engine.scheduler_parts import DecodeStep, Part
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.pace import Pace, StepContent


class StepClock:
    """The steps of one engine."""

    def __init__(self) -> None:
        self.last: StepContent | None = None
        """What the step computes that was scheduled last; None if nobody asked for its time."""
        # That, if the step is to be timed.
        self._before: StepContent | None = None
        # When the next step was planned, and the one that was scheduled last; and whether one runs.
        self._next_planned: float | None = None
        self._planned: float | None = None
        self._runs = False

    def scheduled(self, content: StepContent) -> DecodeStep | None:
        """Note a step that was scheduled now; returns the one before it, if that is to be timed."""
        before, self.last = self._before, content
        self._before = content if content.running and not content.prefills else None
        self._planned, self._next_planned, self._runs = self._next_planned, None, True
        if before is None:
            return None
        return DecodeStep(before.running, before.context, before.drafts, content.started - before.started)

    def planned(self, now: float) -> DecodeStep | None:
        """Note that the next step is planned at `now`; returns the one that was scheduled last, as `scheduled`."""
        step, begun = self._before, self._planned
        # What was timed here once is not timed again; and after a pause the next one does not follow at once.
        self._planned, self._next_planned = None, now if self._runs else None
        if step is None or begun is None:
            return None
        return DecodeStep(step.running, step.context, step.drafts, now - begun)

    def skipped(self) -> None:
        """Note a step that was scheduled and is not timed."""
        self.last = self._before = self._planned = self._next_planned = None
        self._runs = True

    def interrupted(self) -> None:
        """Note that whatever comes next does not follow at once."""
        self.skipped()
        self._runs = False


def content_of(output: Any, requests: Mapping[str, Any], started: float) -> StepContent:
    """Return what a step computes that was scheduled at `started` (seconds of a steady clock).

    `output`: vLLM's SchedulerOutput; `requests`: the scheduler's, by id.
    """
    prefills: list[int] = []
    running = context = drafts = 0
    drafted = output.scheduled_spec_decode_tokens
    for request_id, tokens in output.num_scheduled_tokens.items():
        request = requests[request_id]
        draft = len(drafted[request_id]) if request_id in drafted else 0
        # A sample's first token is of its prefill, also where that has one token left to compute; and what a sample
        # lost to a preemption is prefilled again.
        if tokens != 1 + draft or not request.num_output_tokens:
            prefills.append(tokens)
            continue
        running += 1
        # Scheduling has counted this step's tokens as computed already.
        context += request.num_computed_tokens - tokens
        drafts += draft
    return StepContent(started, running, context, drafts, tuple(prefills))


class Timing(Part):
    """Decode steps that are measured: each verifies as many dummy draft tokens as asked for, and is timed."""

    calls = SchedulerTiming

    def __init__(self, clock: StepClock) -> None:
        self.forced_drafts: int | None = None
        """Dummy draft tokens of each sample; None: nothing is measured."""
        self._clock = clock
        self._steps: list[DecodeStep] = []

    def force_drafts(self, each: int | None) -> None:
        """Verify `each` dummy draft tokens of every decoding sample from the next step on; None: measure nothing."""
        self.forced_drafts = each

    def take_steps(self) -> list[DecodeStep]:
        """Return the decode steps that were measured since the last call."""
        taken, self._steps = self._steps, []
        self._clock.interrupted()
        return taken

    def is_timed(self) -> bool:
        return self.forced_drafts is not None

    def scheduled(self, output: Any, before: DecodeStep | None) -> None:
        if before is not None and self.forced_drafts is not None:
            self._steps.append(before)


class Pacing(Part):
    """Steps that are as long as a profile says."""

    def __init__(self, clock: StepClock, path: str) -> None:
        """`path`: the profile's file."""
        self._clock = clock
        self._pace = Pace(profiles.read(Path(path)))
        self._contents: dict[int, StepContent] = {}

    @property
    def late_seconds(self) -> float:
        """By how much steps took longer than the profile says, in all."""
        return self._pace.late_seconds

    def is_timed(self) -> bool:
        return True

    def scheduled(self, output: Any, before: DecodeStep | None) -> None:
        if self._clock.last is not None:
            self._contents[id(output)] = self._clock.last

    def finished_step(self, output: Any, results: Any) -> None:
        content = self._contents.pop(id(output), None)
        if content is not None:
            time.sleep(self._pace.wait(content, time.perf_counter()))
