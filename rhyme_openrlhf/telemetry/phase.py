"""The phases a run is in, how far each is, and the seconds each usually takes. Pure: computed from events alone.

A run usually is in one phase. It is in several while engines and policy model start together, and while it generates a
step and trains on another one.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rhyme_openrlhf.telemetry import wording
from rhyme_openrlhf.telemetry.events import (
    POLICY,
    CheckpointSaved,
    Evaluation,
    Event,
    Measuring,
    ProcessReady,
    Recorded,
    RolloutFinished,
    RolloutProgress,
    RolloutStarted,
    RunFinished,
    RunStarted,
    StageStarted,
    TrainStep,
    WeightsLoaded,
)

# Digits of a prompt's key: enough to tell the prompts of a run apart.
KEY_SHOWN = 8
# What `phases` reads. Kinds that occur several times a step are apart, because the store has no index of them.
RARE_EVENTS: tuple[type[Event], ...] = (
    RunStarted, ProcessReady, Measuring, RolloutStarted, RolloutFinished, TrainStep, CheckpointSaved, Evaluation,
    RunFinished,
)  # fmt: skip
FREQUENT_EVENTS: tuple[type[Event], ...] = (StageStarted, RolloutProgress, WeightsLoaded)

RAY, PREPARING = "starting Ray and the driver", "preparing the first rollout"
ENGINES, MODEL, MEASURING, GENERATING = "starting engines", f"loading the {POLICY}", "measuring", "generating"
TRAINING, SYNC, CHECK, CHECKPOINT = "training", "loading weights", "checking weights", "saving a checkpoint"
EVALUATION = "evaluating"
STAGES = {
    "experience": "making experiences", "train": TRAINING, "sync": SYNC, "check": CHECK, "checkpoint": CHECKPOINT,
    "evaluate": EVALUATION,
}  # fmt: skip
_START = (ENGINES, MODEL, MEASURING, PREPARING)
# The trainer is in one of these at a time. An asynchronous run evaluates beside them.
_TRAINER = tuple(name for name in STAGES.values() if name != EVALUATION)
_COUNTED = {ENGINES: "", SYNC: "engines", MEASURING: "points", GENERATING: "samples"}


@dataclass(frozen=True)
class Phase:
    """A phase since `since` (unix seconds); `done` of `total` are None where nothing is counted.

    `step`: the training step it belongs to, None before the first. `slowest`: the longest sample that is still
    generated, "" if not known. `usual_seconds`: the median of earlier runs, None without any.
    """

    name: str
    since: float
    step: int | None = None
    done: int | None = None
    total: int | None = None
    slowest: str = ""
    usual_seconds: float | None = None

    @property
    def label(self) -> str:
        """Return `generating step 3: 40 of 96 samples`."""
        said = self.name if self.step is None else f"{self.name}{_OF_STEP.get(self.name, ', step')} {self.step}"
        if self.done is None or self.total is None:
            return said
        return f"{said}: {self.done:,} of {self.total:,} {_COUNTED[self.name]}".rstrip()

    def text(self, now: float) -> str:
        """Return `generating step 3: 40 of 96 samples, for 12.0 s, usually 31.0 s (slowest: ...)`."""
        said = f"{self.label}, for {wording.duration(max(0.0, now - self.since))}"
        if self.usual_seconds is not None:
            said += f", usually {wording.duration(self.usual_seconds)}"
        return f"{said} (slowest: {self.slowest})" if self.slowest else said


_OF_STEP = {GENERATING: " step", TRAINING: " on step"}


def phases(events: Sequence[Recorded], earlier: Iterable[Sequence[Recorded]] = (), begun: float = 0.0) -> list[Phase]:
    """Return the phases after these events, with the usual seconds of each from the events of `earlier` runs.

    `begun`: when an attempt without any event was started.
    """
    if not events:
        return [Phase(RAY, begun)]
    walk = _Walk(events)
    usual = usual_seconds(earlier) if walk.open else {}
    return [replace(phase, usual_seconds=usual.get(phase.name)) for phase in walk.open.values()]


def usual_seconds(runs: Iterable[Sequence[Recorded]]) -> dict[str, float]:
    """Return the median seconds of each phase over all its occurrences in these runs."""
    found: dict[str, list[float]] = defaultdict(list)
    for events in runs:
        for name, seconds in _Walk(events).seconds:
            found[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


class _Walk:
    """The open phases by name after some events, and the seconds of those that have ended."""

    def __init__(self, events: Iterable[Recorded]) -> None:
        self.open: dict[str, Phase] = {}
        self.seconds: list[tuple[str, float]] = []
        self._engines = 0
        self._ready: set[str] = set()
        self._trained = 0
        for recorded in events:
            self._take(recorded)

    def _take(self, recorded: Recorded) -> None:
        event, at = recorded.event, recorded.time
        if isinstance(event, RunStarted):
            # A resumed attempt starts anew.
            self._engines, self._ready = event.engines, set()
            self.open = {ENGINES: Phase(ENGINES, at, None, 0, event.engines), MODEL: Phase(MODEL, at)}
        elif isinstance(event, ProcessReady):
            self._process_ready(event.name, at)
        elif isinstance(event, Measuring):
            # Engines are measured when all have started; their own events come with the next look at them.
            self._end(at, ENGINES)
            self._drop(PREPARING)
            phase = self.open.get(MEASURING, Phase(MEASURING, at))
            self.open[MEASURING] = replace(phase, done=event.done, total=event.total)
            if event.done >= event.total:
                self._end(at, MEASURING)
        elif isinstance(event, RolloutStarted):
            self._end(at, PREPARING)
            # Records of older writers lack the ends of what starts.
            self._drop(*_START, GENERATING)
            self.open[GENERATING] = Phase(GENERATING, at, event.step, 0, event.samples)
        elif isinstance(event, RolloutProgress):
            self._generated(event)
        elif isinstance(event, RolloutFinished):
            self.open.pop(GENERATING, None)
            self.seconds.append((GENERATING, event.seconds))
            if not any(name in self.open for name in _TRAINER):
                self.open[TRAINING] = Phase(TRAINING, at, self._trained + 1 if self._trained else event.step)
        elif isinstance(event, StageStarted):
            self._begin_stage(event, at)
        elif isinstance(event, WeightsLoaded):
            sync = self.open.get(SYNC)
            if sync is not None and sync.done is not None and event.version == sync.step:
                self.open[SYNC] = replace(sync, done=min(sync.done + 1, self._engines))
        elif isinstance(event, TrainStep):
            self._trained = event.step
            self._end_trainer(event.step, at)
            parts = event.seconds_by_part.items()
            self.seconds += [(STAGES[part], seconds) for part, seconds in parts if part in STAGES]
        elif isinstance(event, CheckpointSaved):
            self._end(at, CHECKPOINT)
        elif isinstance(event, Evaluation):
            self._end(at, EVALUATION)
        elif isinstance(event, RunFinished):
            self.open = {}

    def _process_ready(self, name: str, at: float) -> None:
        if name == POLICY:
            self._end(at, MODEL)
            return
        self._ready.add(name)
        # A run with several layouts has more engines than its first event says.
        up = min(len(self._ready), self._engines)
        if ENGINES in self.open:
            self.open[ENGINES] = replace(self.open[ENGINES], done=up)
            if up == self._engines:
                self._end(at, ENGINES)

    def _generated(self, event: RolloutProgress) -> None:
        phase = self.open.get(GENERATING)
        if phase is None or phase.step != event.step:
            return
        slowest = ""
        if event.slowest_engine is not None:
            tokens = wording.counted(event.slowest_tokens, "token")
            slowest = f"prompt {event.slowest_prompt[:KEY_SHOWN]} on engine {event.slowest_engine}, {tokens}"
        self.open[GENERATING] = replace(phase, done=event.samples_done, total=event.samples_total, slowest=slowest)

    def _begin_stage(self, event: StageStarted, at: float) -> None:
        name = STAGES[event.stage]
        if name != EVALUATION:
            self._end_trainer(event.step, at)
        counted = (0, self._engines) if name == SYNC and self._engines else (None, None)
        self.open[name] = Phase(name, at, event.step, *counted)

    def _end_trainer(self, step: int, at: float) -> None:
        """End the trainer's phase at its next event, of `step`. A weight check's seconds are in no event."""
        check = self.open.get(CHECK)
        # If the steps differ, events between them were not read.
        if check is not None and check.step == step:
            self._end(at, CHECK)
        self._drop(*_TRAINER)

    def _end(self, at: float, name: str) -> None:
        phase = self.open.pop(name, None)
        if phase is None:
            return
        self.seconds.append((name, at - phase.since))
        if name in (ENGINES, MODEL, MEASURING) and not self.open:
            self.open[PREPARING] = Phase(PREPARING, at)

    def _drop(self, *names: str) -> None:
        """Forget phases whose seconds the trainer reports itself, or nobody needs."""
        for name in names:
            self.open.pop(name, None)
