"""How long decode steps take: from a step's scheduling to the next one's, when that follows at once.

So a step's time has in it all that surrounds the forward pass: sampling, drafting, vLLM's own work between two steps.
Whoever plans a step before it is scheduled gets the time of the one before it already then: from planning to planning,
in which there is just as much.

Invariants: only steps that decode and prefill nothing are timed; a step after which the engine had nothing to run has
no next one to be timed by, and is dropped. Checked against vLLM 0.29.0 `v1/core/sched/output.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rhyme_openrlhf.latency.pace import StepContent


class DecodeStep(NamedTuple):
    """A timed step: samples, tokens of context in all before it, draft tokens verified in all, seconds."""

    running: int
    context: int
    drafts: int
    seconds: float


class StepClock:
    """The steps of one engine."""

    def __init__(self) -> None:
        self._before: StepContent | None = None
        # When the next step was planned, and the one that was scheduled last; and whether one runs.
        self._next_planned: float | None = None
        self._planned: float | None = None
        self._runs = False

    def scheduled(self, output: Any, requests: Mapping[str, Any], now: float) -> DecodeStep | None:
        """A step was scheduled at `now` (seconds of a steady clock): returns the one before it, if that is to be timed.

        `output`: vLLM's SchedulerOutput; `requests`: the scheduler's, by id.
        """
        before, content = self._before, content_of(output, requests, now)
        self._before = content if content.running and not content.prefills else None
        self._planned, self._next_planned, self._runs = self._next_planned, None, True
        if before is None:
            return None
        return DecodeStep(before.running, before.context, before.drafts, now - before.started)

    def planned(self, now: float) -> DecodeStep | None:
        """The step after the one that was scheduled last is planned at `now`: returns that one, as `scheduled`."""
        step, begun = self._before, self._planned
        # What was timed here once is not timed again; and after a pause the next one does not follow at once.
        self._planned, self._next_planned = None, now if self._runs else None
        if step is None or begun is None:
            return None
        return DecodeStep(step.running, step.context, step.drafts, now - begun)

    def skipped(self) -> None:
        """A step was scheduled that is not timed."""
        self._before = self._planned = self._next_planned = None
        self._runs = True

    def interrupted(self) -> None:
        """Whatever comes next does not follow at once."""
        self.skipped()
        self._runs = False


def content_of(output: Any, requests: Mapping[str, Any], started: float) -> StepContent:
    """What a step computes that was scheduled at `started`; arguments as `StepClock.scheduled`."""
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
