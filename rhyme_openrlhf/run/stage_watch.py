"""Decides whether a run still makes progress. Pure: it gets events with the time of their arrival.

Each kind of event declares whether it is progress (`telemetry/events.py`); RolloutProgress is only where tokens or
samples were gained. While only a rollout or an evaluation is under way, the (shorter) limit of rollouts holds;
everything else has the limit of stages. Times are seconds of one clock, which must not go back: the driver's monotonic
clock, never a node's.

Invariant: as long as no limit is passed, `overdue` is None; once one is passed, it stays passed until progress is made.
"""

from __future__ import annotations

from rhyme_openrlhf.settings.run import LimitSettings
from rhyme_openrlhf.telemetry.events import (
    CheckpointSaved,
    Evaluation,
    Event,
    RolloutFinished,
    RolloutProgress,
    RolloutStarted,
    StageStarted,
    TrainStep,
)

# What users read; `StageStarted.stage` is the key.
STAGE_NAMES = {
    "experience": "the experience",
    "train": "the training",
    "sync": "the weight sync",
    "check": "the weight check",
    "checkpoint": "the checkpoint",
    "evaluate": "the evaluation",
}
START_UP = "start-up (Ray, engines, models)"


class StageWatch:
    """Watches one run, from the time `started`. Trainer and rollout may be under way at the same time."""

    def __init__(self, limits: LimitSettings, started: float) -> None:
        self._limits = limits
        self._last_progress = started
        self._rollout = self._evaluation = ""
        self._trainer = START_UP
        self._rollout_at = (-1, -1)

    def observe(self, event: Event, at: float) -> None:
        """Take note of an event that arrived at the time `at`."""
        if not event.progress:
            return
        if isinstance(event, RolloutProgress):
            before = self._rollout_at
            reached = (max(event.response_tokens, before[0]), max(event.samples_done, before[1]))
            # Counts may go back when an engine is lost, and come again: only what was never reached is progress.
            if reached == before:
                return
            self._rollout_at = reached
        elif isinstance(event, RolloutStarted):
            self._rollout = f"the rollout of step {event.step}"
            # Also where an evaluation has been given up.
            self._evaluation = ""
            self._rollout_at = (-1, -1)
            if self._trainer == START_UP:
                self._trainer = ""
        elif isinstance(event, RolloutFinished):
            self._rollout = ""
        elif isinstance(event, StageStarted):
            doing = f"{STAGE_NAMES[event.stage]} of step {event.step}"
            # An evaluation generates, as a rollout does, and begins when none is under way.
            if event.stage == "evaluate":
                self._evaluation = doing
            else:
                self._trainer = doing
        elif isinstance(event, Evaluation):
            self._evaluation = ""
        elif isinstance(event, TrainStep | CheckpointSaved):
            self._trainer = ""
        self._last_progress = max(self._last_progress, at)

    @property
    def doing(self) -> str:
        """Return what is under way, for people."""
        return (
            " and ".join(filter(None, (self._rollout, self._evaluation, self._trainer)))
            or "the controller, between two stages"
        )

    def overdue(self, now: float) -> str | None:
        """Return one sentence if nothing has moved for longer than the limit at the time `now`, else None."""
        only_generates = bool(self._rollout or self._evaluation) and not self._trainer
        name = "rollout_s" if only_generates else "stage_s"
        limit = self._limits.rollout_s if only_generates else self._limits.stage_s
        waited = now - self._last_progress
        if waited <= limit:
            return None
        return (
            f"waited {waited:.0f} s for {self.doing} without any progress; if that can be right, raise "
            f"--limits.{name} (now {limit:g})"
        )
