"""Decides whether a run still makes progress. Pure: it gets events, and answers for a time.

What counts as progress is an event of the run itself: a stage that begins or ends, tokens or samples that a rollout
gained. Notes and telemetry that repeats itself do not count. While only a rollout is under way, its own (shorter)
limit holds; everything else has the limit of stages.

Invariant: as long as no limit is passed, `overdue` is None; once one is passed, it stays passed until progress is made.
"""

from __future__ import annotations

from rhyme_openrlhf.settings.run import LimitSettings
from rhyme_openrlhf.telemetry.events import (
    CheckpointSaved,
    Evaluation,
    Event,
    Note,
    ProcessDied,
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
    """Watches one run, from unix time `started`. Trainer and rollout may be under way at the same time."""

    def __init__(self, limits: LimitSettings, started: float) -> None:
        self._limits = limits
        self._last_progress = started
        self._rollout = ""
        self._trainer = START_UP
        self._rollout_at = (-1, -1)

    def observe(self, event: Event, at: float) -> None:
        """Take note of an event of unix time `at`."""
        if isinstance(event, Note | ProcessDied):
            return
        if isinstance(event, RolloutProgress):
            reached = (event.response_tokens, event.samples_done)
            if reached == self._rollout_at:
                return
            self._rollout_at = reached
        elif isinstance(event, RolloutStarted):
            self._rollout = f"the rollout of step {event.step}"
            self._rollout_at = (-1, -1)
            if self._trainer == START_UP:
                self._trainer = ""
        elif isinstance(event, RolloutFinished):
            self._rollout = ""
        elif isinstance(event, StageStarted):
            self._trainer = f"{STAGE_NAMES[event.stage]} of step {event.step}"
        elif isinstance(event, TrainStep | CheckpointSaved | Evaluation):
            self._trainer = ""
        self._last_progress = max(self._last_progress, at)

    @property
    def doing(self) -> str:
        """Return what is under way, for people."""
        return " and ".join(filter(None, (self._rollout, self._trainer))) or "the controller, between two stages"

    def overdue(self, now: float) -> str | None:
        """Return one sentence if nothing has moved for longer than the limit at unix time `now`, else None."""
        only_rollout = bool(self._rollout) and not self._trainer
        name = "rollout_s" if only_rollout else "stage_s"
        limit = self._limits.rollout_s if only_rollout else self._limits.stage_s
        waited = now - self._last_progress
        if waited <= limit:
            return None
        return (
            f"waited {waited:.0f} s for {self.doing} without any progress; if that can be right, raise "
            f"--limits.{name} (now {limit:g})"
        )
