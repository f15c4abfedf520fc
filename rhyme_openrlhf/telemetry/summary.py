"""The summary of a run, in one record (`summary.json`) and in one table (the end of the run on the terminal).

Computed from the events alone, so it can be made again at any time, also for a run that was killed. `RunState` folds
the events one by one and keeps none longer than its step. So a run that folds while it goes on need not read them again
at its end. All that was done counts, including a step that had to be done again.
Figures that cannot be computed are None.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rhyme_openrlhf.telemetry import metrics, wording
from rhyme_openrlhf.telemetry.events import (
    REWARD_METRIC,
    CheckpointSaved,
    DraftGain,
    EngineInterval,
    EngineStep,
    Note,
    Recorded,
    RolloutFinished,
    RolloutStarted,
    RunFinished,
    RunStarted,
    TrainStep,
    WeightsPublished,
)
from rhyme_openrlhf.telemetry.metrics import EngineCounters, EnginesGain, engines_gain

UNFINISHED = "unfinished"

# The table stays on one screen: of more epochs, the first and the last are shown.
_FIRST_EPOCHS_SHOWN = 3
_LAST_EPOCHS_SHOWN = 4


@dataclass(frozen=True)
class EpochSummary:
    """One epoch's figures; `reward` is the mean over its samples, `steps` those that were trained on.

    `earlier_share`: the part of its response tokens that was drafted from earlier runs' responses alone.
    """

    epoch: int
    steps: int
    reward: float | None
    tokens_per_second: float | None
    speculation_rate: float | None
    tokens_per_step: float | None
    decode_step_ms: float | None
    mean_response_length: float | None
    earlier_share: float | None


@dataclass(frozen=True)
class RunSummary:
    """A run's figures, as `metrics.py` defines them.

    `status` is a RunStatus or UNFINISHED; `seconds` is the run's length (so far); `rollout_seconds` the sum over its
    rollout stages; `bubble_seconds` engine seconds by cause; `weight_versions` how many were published;
    `draft_gain` what drafts gained at last, None where it was not measured; `earlier_share` as an epoch's;
    `last_checkpoint` a path; `emulated` the machine whose step times it was stretched to ("": its own); `warnings` what
    it warned of, each text once.
    """

    name: str
    status: str
    message: str
    steps: int
    steps_planned: int | None
    seconds: float
    rollout_seconds: float
    response_tokens: int
    mean_response_length: float | None
    reward_first_epoch: float | None
    reward_last_epoch: float | None
    tokens_per_second: float | None
    speculation_rate: float | None
    acceptance_rate: float | None
    tokens_per_step: float | None
    decode_step_ms: float | None
    draft_gain: EnginesGain | None
    earlier_share: float | None
    bubble_fraction: float | None
    bubble_seconds: dict[str, float]
    weight_versions: int
    last_checkpoint: str | None
    epochs: tuple[EpochSummary, ...]
    emulated: str
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Nested dictionary for `summary.json`."""
        return dataclasses.asdict(self)


def summarize(events: Iterable[Recorded]) -> RunSummary:
    """Return the summary of a run's events, in any state of the run; without events, of a run that did nothing."""
    run = RunState()
    for recorded in events:
        run.apply(recorded)
    return run.summary()


@dataclass
class _Epoch:
    """Sums over one epoch."""

    trained: set[int] = field(default_factory=set)
    rollout_seconds: float = 0.0
    samples: int = 0
    response_tokens: int = 0
    reward_sum: float = 0.0
    rewarded_samples: int = 0
    counters: EngineCounters = field(default_factory=EngineCounters)

    def add_reward(self, reward: float | None, samples: int) -> None:
        # A reward that is not a number would make the epoch's mean one, and says nothing about the other steps.
        if reward is not None and math.isfinite(reward):
            self.reward_sum += reward * samples
            self.rewarded_samples += samples

    def summary(self, number: int) -> EpochSummary:
        return EpochSummary(
            epoch=number,
            steps=len(self.trained),
            reward=_mean(self.reward_sum, self.rewarded_samples),
            tokens_per_second=metrics.tokens_per_second(self.response_tokens, self.rollout_seconds),
            speculation_rate=metrics.speculation_rate(self.counters),
            tokens_per_step=metrics.tokens_per_step(self.counters),
            decode_step_ms=metrics.decode_step_ms(self.counters),
            mean_response_length=_mean(self.response_tokens, self.samples),
            earlier_share=metrics.earlier_share(self.counters),
        )


@dataclass
class RunState:
    """Sums over the run so far, and what is needed to tell which epoch and which rollout stage an event belongs to."""

    started: RunStarted | None = None
    finished: RunFinished | None = None
    start: float | None = None
    """Unix seconds of the first event; `end` is that of the latest."""
    end: float = 0.0
    epochs: dict[int, _Epoch] = field(default_factory=dict)
    epoch_of_step: dict[int, int] = field(default_factory=dict)
    rollout_start: dict[int, float] = field(default_factory=dict)
    rollouts: dict[int, RolloutFinished] = field(default_factory=dict)
    intervals: dict[int, list[EngineInterval]] = field(default_factory=dict)
    """Those of steps whose rollout stage has not ended."""
    bubbles: dict[int, dict[str, float]] = field(default_factory=dict)
    """Engine seconds of bubbles by cause, for each step that has ended and has intervals."""
    counters: EngineCounters = field(default_factory=EngineCounters)
    gains: dict[int, DraftGain] = field(default_factory=dict)
    weight_versions: int = 0
    last_checkpoint: str | None = None
    warnings: dict[str, None] = field(default_factory=dict)

    def apply(self, recorded: Recorded) -> None:
        """Take the next event."""
        event = recorded.event
        if self.start is None:
            self.start = self.end = recorded.time
        self.end = max(self.end, recorded.time)
        if isinstance(event, RunStarted):
            self.started = event
        elif isinstance(event, RunFinished):
            self.finished = event
        elif isinstance(event, RolloutStarted):
            self._epoch(event.epoch, event.step)
            self.rollout_start[event.step] = recorded.time
            # Where it is done again, its last rollout stage is the one that counts.
            self.rollouts.pop(event.step, None)
            self.bubbles.pop(event.step, None)
        elif isinstance(event, RolloutFinished):
            self._add_rollout(event)
        elif isinstance(event, TrainStep):
            self._add_train_step(event)
        elif isinstance(event, EngineStep):
            self.counters += event.counters
            if event.step in self.epoch_of_step:
                self.epochs[self.epoch_of_step[event.step]].counters += event.counters
        elif isinstance(event, DraftGain):
            self.gains[event.engine] = event
        elif isinstance(event, EngineInterval):
            self._add_interval(event)
        elif isinstance(event, WeightsPublished):
            self.weight_versions += 1
        elif isinstance(event, CheckpointSaved):
            self.last_checkpoint = event.path
        elif isinstance(event, Note) and event.level == "warning":
            self.warnings[event.text] = None

    def summary(self) -> RunSummary:
        """Return the summary of the events so far."""
        epochs = tuple(self.epochs[number].summary(number) for number in sorted(self.epochs))
        rewards = [epoch.reward for epoch in epochs if epoch.reward is not None]
        rollout_seconds = sum(epoch.rollout_seconds for epoch in self.epochs.values())
        response_tokens = sum(epoch.response_tokens for epoch in self.epochs.values())
        planned = None
        if self.started is not None and self.started.steps_per_epoch is not None:
            planned = self.started.epochs * self.started.steps_per_epoch
        bubble_fraction, bubble_seconds = self._bubbles()
        return RunSummary(
            name="" if self.started is None else self.started.name,
            emulated="" if self.started is None else self.started.emulated,
            status=UNFINISHED if self.finished is None else self.finished.status,
            message="" if self.finished is None else self.finished.message,
            steps=sum(epoch.steps for epoch in epochs),
            steps_planned=planned,
            seconds=self._seconds() if self.finished is None else self.finished.seconds,
            rollout_seconds=rollout_seconds,
            response_tokens=response_tokens,
            mean_response_length=_mean(response_tokens, sum(epoch.samples for epoch in self.epochs.values())),
            reward_first_epoch=rewards[0] if rewards else None,
            reward_last_epoch=rewards[-1] if rewards else None,
            tokens_per_second=metrics.tokens_per_second(response_tokens, rollout_seconds),
            speculation_rate=metrics.speculation_rate(self.counters),
            acceptance_rate=metrics.acceptance_rate(self.counters),
            tokens_per_step=metrics.tokens_per_step(self.counters),
            decode_step_ms=metrics.decode_step_ms(self.counters),
            draft_gain=engines_gain(self.gains.values()),
            earlier_share=metrics.earlier_share(self.counters),
            bubble_fraction=bubble_fraction,
            bubble_seconds=bubble_seconds,
            weight_versions=self.weight_versions,
            last_checkpoint=self.last_checkpoint,
            epochs=epochs,
            warnings=tuple(self.warnings),
        )

    def _epoch(self, number: int, step: int) -> _Epoch:
        self.epoch_of_step[step] = number
        return self.epochs.setdefault(number, _Epoch())

    def _add_rollout(self, event: RolloutFinished) -> None:
        epoch = self._epoch(event.epoch, event.step)
        self.rollouts[event.step] = event
        epoch.rollout_seconds += event.seconds
        epoch.samples += event.samples
        epoch.response_tokens += event.response_tokens
        epoch.add_reward(event.reward_mean, event.samples)
        for interval in self.intervals.pop(event.step, ()):
            self._add_interval(interval)

    def _add_interval(self, interval: EngineInterval) -> None:
        step = interval.step
        start, rollout = self.rollout_start.get(step), self.rollouts.get(step)
        if start is None or rollout is None:
            self.intervals.setdefault(step, []).append(interval)
            return
        of_step = self.bubbles.setdefault(step, {})
        part = interval.within(start, start + rollout.seconds)
        for cause, seconds in metrics.bubble_seconds([part] if part else []).items():
            of_step[cause] = of_step.get(cause, 0.0) + seconds

    def _add_train_step(self, event: TrainStep) -> None:
        epoch = self._epoch(event.epoch, event.step)
        epoch.trained.add(event.step)
        rollout = self.rollouts.get(event.step)
        if rollout is not None and rollout.reward_mean is None:
            epoch.add_reward(event.metrics.get(REWARD_METRIC), rollout.samples)

    def _seconds(self) -> float:
        return 0.0 if self.start is None else self.end - self.start

    def _bubbles(self) -> tuple[float | None, dict[str, float]]:
        """Bubble fraction and bubble seconds by cause, over the finished rollout stages that have intervals."""
        causes: dict[str, float] = {}
        for of_step in self.bubbles.values():
            for cause, seconds in of_step.items():
                causes[cause] = causes.get(cause, 0.0) + seconds
        engines = 0 if self.started is None else self.started.engines
        seconds = sum(self.rollouts[step].seconds for step in self.bubbles)
        return metrics.bubble_share(sum(causes.values()), engines, seconds), causes


def render(summary: RunSummary, run_dir: str) -> str:
    """Return the summary as about 15 lines of plain text, ending with a newline, and where the run's files are."""
    lines = [_headline(summary)]
    if summary.message:
        lines.append(f"  {' '.join(summary.message.splitlines())}")
    lines += [f"  {label:<13}{text}" for label, text in _totals(summary)]
    if summary.epochs:
        lines += ["", *_epoch_table(summary.epochs)]
    lines += ["", f"Files in {run_dir}:"]
    lines += [f"  {name:<14}{what}" for name, what in _files(summary)]
    return "\n".join(lines) + "\n"


def _headline(summary: RunSummary) -> str:
    steps = f"{summary.steps}" if summary.steps_planned is None else f"{summary.steps} of {summary.steps_planned}"
    rollout = wording.duration(summary.rollout_seconds)
    return (
        f"Run {summary.name or '(unnamed)'} {summary.status}: {steps} steps in {wording.duration(summary.seconds)}"
        f" ({rollout} of it rollout)" + (f", emulated: step times of {summary.emulated}" if summary.emulated else "")
    )


def _totals(summary: RunSummary) -> list[tuple[str, str]]:
    bubble = wording.percent(summary.bubble_fraction)
    total = sum(summary.bubble_seconds.values())
    if summary.bubble_fraction and total:
        by_size = sorted(summary.bubble_seconds.items(), key=lambda item: -item[1])
        shares = (f"{cause} {wording.percent(summary.bubble_fraction * s / total)}" for cause, s in by_size)
        bubble += f" ({', '.join(shares)})"
    first, last = (wording.number(r, 3) for r in (summary.reward_first_epoch, summary.reward_last_epoch))
    return [
        ("reward", f"{first} -> {last} (first -> last epoch)"),
        (
            "rollout",
            f"{wording.number(summary.tokens_per_second, 0)} tokens/s, "
            f"{wording.number(summary.mean_response_length, 1)} tokens per response, bubbles {bubble}",
        ),
        (
            "speculation",
            f"rate {wording.percent(summary.speculation_rate)}, "
            f"acceptance {wording.percent(summary.acceptance_rate)}, "
            f"{wording.number(summary.tokens_per_step, 2)} tokens/step, "
            f"{wording.number(summary.decode_step_ms, 1)} ms per decode step",
        ),
        *_gain(summary.draft_gain),
        *_earlier(summary),
        ("weights", wording.counted(summary.weight_versions, "version") + " published"),
    ]


def _gain(gain: EnginesGain | None) -> list[tuple[str, str]]:
    if gain is None:
        return []
    text = ". ".join(filter(None, (gain.text, gain.advice)))
    return [("drafts", text)] if text else []


def _earlier(summary: RunSummary) -> list[tuple[str, str]]:
    if not summary.earlier_share:
        return []
    first = next(iter(summary.epochs), None)
    text = f"{wording.percent(summary.earlier_share)} of the response tokens were drafted from their responses"
    if first is not None and len(summary.epochs) > 1:
        text += f", {wording.percent(first.earlier_share)} in epoch {first.epoch}"
    return [("earlier runs", text)]


def _epoch_table(epochs: tuple[EpochSummary, ...]) -> list[str]:
    header = ("epoch", "steps", "reward", "tokens/s", "tokens/step", "speculation", "ms/decode", "length")
    rows = [
        (
            str(epoch.epoch),
            str(epoch.steps),
            wording.number(epoch.reward, 3),
            wording.number(epoch.tokens_per_second, 0),
            wording.number(epoch.tokens_per_step, 2),
            wording.percent(epoch.speculation_rate),
            wording.number(epoch.decode_step_ms, 1),
            wording.number(epoch.mean_response_length, 1),
        )
        for epoch in epochs
    ]
    if len(rows) > _FIRST_EPOCHS_SHOWN + _LAST_EPOCHS_SHOWN:
        gap = ("...", "", "", "", "", "", "", "")
        rows = [*rows[:_FIRST_EPOCHS_SHOWN], gap, *rows[-_LAST_EPOCHS_SHOWN:]]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    return [
        ("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in [header, *rows]
    ]


def _files(summary: RunSummary) -> list[tuple[str, str]]:
    checkpoint = "none was saved" if summary.last_checkpoint is None else f"last: {summary.last_checkpoint}"
    return [
        ("config.json", "every setting of this run"),
        ("events.jsonl", "everything it reported, one event a line"),
        ("summary.json", "these figures"),
        ("logs/", "what each process printed"),
        ("checkpoints/", checkpoint),
    ]


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None
