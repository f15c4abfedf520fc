"""The state of a running run, computed from its events, and the sentences that tell it.

Both displays (bars, lines) feed this and print what it says, so they show the same figures in the same words.

Invariants: the state depends on the events alone, never on the clock. Events of several steps may interleave: an
asynchronous run generates step n+1 while it trains on step n. So all about a step is kept by its number, until the step
is finished.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rhyme_openrlhf.telemetry import metrics, wording
from rhyme_openrlhf.telemetry.events import (
    POLICY,
    REWARD_METRIC,
    ROLLOUT_PART,
    CheckpointSaved,
    EngineStep,
    Evaluation,
    Note,
    Recorded,
    RolloutFinished,
    RolloutProgress,
    RolloutStarted,
    RunFinished,
    RunStarted,
    TrainStep,
    WeightsPublished,
)
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.telemetry.phase import ENGINES, MODEL, RARE_EVENTS, phases

# An evaluation can have dozens of scores (one per data set); more of them would wrap the line several times.
_MAX_SCORES = 6


@dataclass
class StepState:
    """The state of a step that is not finished yet."""

    rollout: RolloutFinished | None = None
    counters: EngineCounters = field(default_factory=EngineCounters)


class ProgressState:
    """Feed every event to `apply`, then ask for sentences."""

    def __init__(self) -> None:
        self.run: RunStarted | None = None
        self.steps: dict[int, StepState] = {}
        self.steps_done = 0
        self.step = 0
        """The newest step that was begun; 0 before the first."""
        self._epoch = 1
        self._first_reward: float | None = None
        self._reward: float | None = None
        self._version: int | None = None
        self._start: float | None = None
        self._start_events: list[Recorded] = []

    def apply(self, recorded: Recorded) -> None:
        """Take in one event. A step's own data stays readable until `forget`."""
        if self._start is None:
            self._start = recorded.time
        event = recorded.event
        if isinstance(event, RARE_EVENTS) and not self.step:
            self._start_events.append(recorded)
        if isinstance(event, RunStarted):
            self.run = event
        elif isinstance(event, RolloutStarted):
            self._begin(event.step, event.epoch)
        elif isinstance(event, RolloutFinished):
            self._begin(event.step, event.epoch).rollout = event
            self._set_reward(event.reward_mean)
        elif isinstance(event, EngineStep):
            step = self.steps.setdefault(event.step, StepState())
            step.counters += event.counters
        elif isinstance(event, WeightsPublished):
            self._version = event.version
        elif isinstance(event, TrainStep):
            self._begin(event.step, event.epoch)
            self.steps_done = max(self.steps_done, event.step)
            self._set_reward(self._reward_of(event))

    def forget(self, step: int) -> None:
        """Drop a finished step's data."""
        self.steps.pop(step, None)

    def elapsed(self, recorded: Recorded) -> float:
        """Seconds from the first event seen to this one."""
        return 0.0 if self._start is None else recorded.time - self._start

    def total_steps(self) -> int | None:
        """Steps of the whole run, None if not known beforehand."""
        if self.run is None or self.run.steps_per_epoch is None:
            return None
        return self.run.epochs * self.run.steps_per_epoch

    def step_label(self, step: int) -> str:
        """`step 3/24`, of an emulated run `emulated step 3/24`"""
        total = self.total_steps()
        emulated = "emulated " if self.run is not None and self.run.emulated else ""
        return f"{emulated}step {step}" if total is None else f"{emulated}step {step}/{total}"

    def epoch_label(self, epoch: int) -> str:
        """`epoch 1/6`"""
        return f"epoch {epoch}" if self.run is None else f"epoch {epoch}/{self.run.epochs}"

    def run_line(self) -> str:
        """`epoch 2/6 · step 7/24 · reward 0.43 (first 0.31) · version 6`, as far as known."""
        if not self.step:
            return self.start_line()
        parts = [self.epoch_label(self._epoch), self.step_label(self.step)]
        if self._reward is not None:
            parts.append(f"reward {wording.number(self._reward, 2)} (first {wording.number(self._first_reward, 2)})")
        if self._version is not None:
            parts.append(f"version {self._version}")
        return " · ".join(parts)

    def start_line(self) -> str:
        """Return `starting: policy model ready, 1 of 2 engines ready`; "" once the first rollout was begun."""
        if self.step:
            return ""
        if self.run is None:
            return "starting: Ray and the driver"
        found = {phase.name: phase for phase in phases(self._start_events)}
        if not found.keys() & {ENGINES, MODEL}:
            return f"starting: all engines and the {POLICY} ready, first rollout next"
        up = (found[ENGINES].done or 0) if ENGINES in found else self.run.engines
        model = "loading" if MODEL in found else "ready"
        return f"starting: {POLICY} {model}, {up} of {self.run.engines} engines ready"

    def run_start_line(self, event: RunStarted) -> str:
        """Return what the run is going to do."""
        steps = "" if event.steps_per_epoch is None else f" of {wording.counted(event.steps_per_epoch, 'step')}"
        prompts = wording.counted(event.prompts_per_step, "prompt")
        return (
            f"run {event.name}: {wording.counted(event.epochs, 'epoch')}{steps}, "
            f"{prompts} x {wording.counted(event.samples_per_prompt, 'sample')} a step, "
            f"{wording.counted(event.engines, 'engine')} (tensor parallel {event.tensor_parallel_size})"
            + (f", emulated: step times of {event.emulated}" if event.emulated else "")
        )

    def rollout_start_line(self, event: RolloutStarted) -> str:
        """`step 3/24 (epoch 1/6)  generating 96 samples of 12 prompts`"""
        return (
            f"{self.step_label(event.step)} ({self.epoch_label(event.epoch)})  generating "
            f"{wording.counted(event.samples, 'sample')} of {wording.counted(event.prompts, 'prompt')}"
        )

    def rollout_line(self, event: RolloutProgress) -> str:
        """`samples 61/96 · 3,214 tok/s · acceptance 71% · speculation 48%`; the last two only if it drafted."""
        counters = EngineCounters(response_tokens=event.response_tokens, drafted=event.drafted, accepted=event.accepted)
        speed = metrics.tokens_per_second(event.response_tokens, event.seconds)
        parts = [f"samples {event.samples_done}/{event.samples_total}", f"{wording.number(speed, 0)} tok/s"]
        return " · ".join(parts + _speculation(counters))

    def step_line(self, event: TrainStep) -> str:
        """Return what a finished step did: reward, rollout, then the seconds of its other parts, as far as known."""
        step = self.steps.get(event.step, StepState())
        sections = [f"{self.step_label(event.step)} ({self.epoch_label(event.epoch)})"]
        reward = self._reward_of(event)
        if reward is not None:
            sections.append(f"reward {wording.number(reward, 2)}")
        if step.rollout is not None:
            speed = metrics.tokens_per_second(step.rollout.response_tokens, step.rollout.seconds)
            parts = [f"rollout {wording.duration(step.rollout.seconds)}", f"{wording.number(speed, 0)} tok/s"]
            per_step = metrics.tokens_per_step(step.counters)
            if per_step is not None:
                parts.append(f"{wording.number(per_step, 1)} tokens/step")
            sections.append(", ".join(parts + _speculation(step.counters)))
        others = [(part, seconds) for part, seconds in event.seconds_by_part.items() if part != ROLLOUT_PART]
        if others:
            sections.append(", ".join(f"{part} {wording.duration(seconds)}" for part, seconds in others))
        return "  ".join(sections)

    def message(self, recorded: Recorded) -> str | None:
        """Return the line for an event that is told as it comes (note, evaluation, checkpoint, end), else None."""
        event = recorded.event
        if isinstance(event, Note):
            return event.text if event.level == "info" else f"{event.level}: {event.text}"
        if isinstance(event, Evaluation):
            scores = [f"{name} {value:.4g}" for name, value in event.metrics.items()]
            more = f", and {len(scores) - _MAX_SCORES} more" if len(scores) > _MAX_SCORES else ""
            return f"evaluation after {self.step_label(event.step)}: {', '.join(scores[:_MAX_SCORES])}{more}"
        if isinstance(event, CheckpointSaved):
            return f"checkpoint of {self.step_label(event.step)} saved: {event.path}"
        if isinstance(event, RunFinished):
            reason = f": {event.message}" if event.message else ""
            return f"run {event.status} after {wording.duration(event.seconds)}{reason}"
        return None

    def _begin(self, step: int, epoch: int) -> StepState:
        if step > self.step:
            self.step, self._epoch = step, epoch
        return self.steps.setdefault(step, StepState())

    def _reward_of(self, event: TrainStep) -> float | None:
        """Return the mean reward of a step's samples: from its rollout if that knew it, else from the trainer."""
        rollout = self.steps.get(event.step, StepState()).rollout
        if rollout is not None and rollout.reward_mean is not None:
            return rollout.reward_mean
        return event.metrics.get(REWARD_METRIC)

    def _set_reward(self, reward: float | None) -> None:
        if reward is None:
            return
        if self._first_reward is None:
            self._first_reward = reward
        self._reward = reward


def _speculation(counters: EngineCounters) -> list[str]:
    acceptance = metrics.acceptance_rate(counters)
    if acceptance is None:
        return []
    speculation = metrics.speculation_rate(counters)
    return [f"acceptance {wording.percent(acceptance)}", f"speculation {wording.percent(speculation)}"]
