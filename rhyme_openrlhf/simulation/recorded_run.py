"""A real run to simulate: its lengths, its engines and their slowness, its trainer's speed, its drafts.

Read from the run directory (telemetry/run_directory.py). The run's record stands beside its simulation, so that the two
can be compared step by step. A profile is measured of an engine that does nothing else. In a run, engines also answer
their owner, others use the same cores, and the machine may be slower for a while. The record has the seconds that
engines were busy in each step; the simulation by the profile alone has those that the profile predicts.

So `replay` simulates the run three times:
- by the profile alone, which shows how far a profile carries;
- as a forecast, by what was known before each step began;
- with each step's own speed, which shows the error of everything except step times. Other features are compared with
  this one.

Invariants:
- Steps are those whose rollout stage is recorded whole, numbered anew from 1.
- Simulated rollout times are compared with the run's own. Of these, the simulation takes only the seconds of drafting
  in a decode step, the seconds that engines were busy, and the seconds around that in a stage.
- A forecast of a step looks neither at a later step nor at the step itself.
- Without anything known, steps take as long as the profile says.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.simulation.result import Result
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import AS_PROFILED, Cluster, Conditions, Features, Trainer
from rhyme_openrlhf.simulation.speculation import NO_SPECULATION, Rates
from rhyme_openrlhf.simulation.trace import drafting_of_step, kept_responses, parse_trace
from rhyme_openrlhf.simulation.workload import Workload, WorkloadError
from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.events import (
    EngineInterval,
    EngineStep,
    RankGroups,
    Recorded,
    RolloutFinished,
    RunStarted,
    TrainStep,
)
from rhyme_openrlhf.telemetry.metrics import EngineCounters, bubble_fraction
from rhyme_openrlhf.telemetry.run_directory import EVENTS_FILE, LENGTHS_FILE

# The weight of a step's slowness against all before it. The machine's speed lasts for a step or two, and a single step
# is off by as much as the speed changes.
NEW_WEIGHT = 0.5


@dataclass(frozen=True)
class Busy:
    """Seconds of one step: those that engines were busy, and those of the stage beside the busiest engine's."""

    seconds: float
    around: float


def conditions_of(busy: Sequence[Busy], simulated: Sequence[float]) -> tuple[Conditions, ...]:
    """Return the conditions of each step; `simulated`: busy seconds by the profile alone."""
    return tuple(
        Conditions(one.seconds / by_profile if by_profile and one.seconds else 1.0, one.around)
        for one, by_profile in zip(busy, simulated, strict=True)
    )


def known_before(steps: Sequence[Conditions]) -> tuple[Conditions, ...]:
    """Return the conditions that were known of each step when it began; `steps`: the steps' real conditions.

    The seconds around the first stage say nothing of the next. They can have work that a run does once: in older
    recordings a garbage collection in each engine's actor, which takes a second.
    """
    slowness = itertools.accumulate(
        (one.slowness for one in steps), lambda known, new: known + NEW_WEIGHT * (new - known)
    )
    found = [AS_PROFILED]
    for count, known in enumerate(slowness, start=1):
        around = [one.around for one in steps[1:count]]
        found.append(Conditions(known, statistics.median(around) if around else 0.0))
    return tuple(found[: len(steps)])


# A step's simulated time counts as right within this share of the real one.
TOLERANCE = 0.1
# Parts of a step (training/trainer.py::PARTS) that are the trainer's work on its batch, and the one behind it.
TRAINING_PARTS = ("experience", "train")
SYNC_PART = "sync"


@dataclass(frozen=True)
class RealStage:
    """A rollout stage as it was: `step` in the run's own count, seconds, and the share without work for an engine."""

    step: int
    seconds: float
    bubbles: float


@dataclass(frozen=True)
class RecordedRun:
    """A run to simulate, and the record of it; `rates`, `stages` and `busy` have an entry for each step of the
    workload."""

    workload: Workload
    cluster: Cluster
    features: Features
    rates: tuple[Rates, ...]
    stages: tuple[RealStage, ...]
    busy: tuple[Busy, ...]


def read_run(directory: Path, cluster: Cluster, features: Features) -> RecordedRun:
    """Read the run of a run directory; `cluster` and `features` give what it does not record. Raises WorkloadError."""
    path = directory / LENGTHS_FILE
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        raise WorkloadError(f"{directory} has no {LENGTHS_FILE}: it is no run directory, or of an older version")
    rows = _rows(path)
    events = list(read_events(directory / EVENTS_FILE))
    stages = _stages(events)
    steps = sorted({row["step"] for row in rows} & stages.keys())
    if not steps:
        raise WorkloadError(f"{directory} has no finished rollout stage")
    numbers = {step: number for number, step in enumerate(steps, start=1)}
    lines = [json.dumps({**row, "step": numbers[row["step"]]}) for row in rows if row["step"] in numbers]
    workload = replace(parse_trace(lines, str(path)), name=directory.name, source="a recorded run")
    parts = [one.event.seconds_by_part for one in events if isinstance(one.event, TrainStep)]
    if not parts:
        raise WorkloadError(f"{directory} has no finished training step: how fast its trainer is, is not known")
    rates = _rates(events)
    workload = _with_drafts(workload, rows, numbers, rates, kept_responses(directory))
    started = next((one.event for one in events if isinstance(one.event, RunStarted)), None)
    if started is None:
        raise WorkloadError(f"{directory} has no start of its run: with which engines, is not known")
    drafted = any(rates[step].drafts_per_step for step in steps)
    pipeline = any(isinstance(one.event, RankGroups) for one in events)
    trainer: Trainer = "pipeline" if pipeline else "async" if started.asynchronous else "sync"
    return RecordedRun(
        workload,
        replace(
            cluster,
            nodes=1,
            devices=started.engines * started.tensor_parallel_size,
            tensor_parallel=started.tensor_parallel_size,
            trainer_tokens_per_second=_trained_per_second(parts, workload),
            # Where steps are stretched to a profile's times, lookups are in these.
            lookup_seconds=0.0 if started.emulated else _lookup_seconds(events),
            publish_seconds=statistics.fmean(one.get(SYNC_PART, 0.0) for one in parts),
        ),
        replace(
            features,
            trainer=trainer,
            dispatch=True,
            # The pipeline's rank groups are planned, not read.
            as_placed=not pipeline,
            speculation="measured" if drafted else features.speculation,
        ),
        tuple(rates[step] for step in steps),
        tuple(stages[step] for step in steps),
        _busy(events, [stages[step] for step in steps], pipeline),
    )


def _with_drafts(
    workload: Workload,
    rows: Sequence[Mapping[str, Any]],
    numbers: Mapping[int, int],
    rates: Mapping[int, Rates],
    kept: Mapping[tuple[int, str], list[dict[str, Any]]],
) -> Workload:
    """Return the workload with each sample's recorded drafting; `numbers`: of the run's steps in the workload."""
    found = []
    for step, number in numbers.items():
        load = workload.steps[number - 1]
        keys = list(dict.fromkeys(str(row["prompt"]) for row in rows if row["step"] == step))
        own = {key: kept[step, key] for key in keys if (step, key) in kept}
        found.append(replace(load, prompts=drafting_of_step(load.prompts, keys, own, rates[step])))
    return replace(workload, steps=tuple(found))


def _rows(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's lengths. Raises WorkloadError, also for a line that a killed run left torn."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WorkloadError(f"{path}, line {number}: no JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise WorkloadError(f"{path}, line {number}: lacks its step")
        found.append(row)
    return found


def _stages(events: Iterable[Recorded]) -> dict[int, RealStage]:
    engines, intervals, ended = 1, defaultdict(list), {}
    for one in events:
        match one.event:
            case RunStarted():
                engines = one.event.engines
            case EngineInterval():
                intervals[one.event.step].append(one.event)
            case RolloutFinished():
                ended[one.event.step] = (one.time, one.event.seconds)
    found = {}
    for step, (end, seconds) in ended.items():
        # An engine's waiting for the trainer, before the stage, is recorded with the step too.
        inside = [part for one in intervals[step] if (part := one.within(end - seconds, end))]
        found[step] = RealStage(step, seconds, bubble_fraction(inside, engines, seconds) or 0.0)
    return found


def _rates(events: Iterable[Recorded]) -> dict[int, Rates]:
    """Return the gain of drafts in each step, over all engines."""
    counters: dict[int, EngineCounters] = defaultdict(EngineCounters)
    for one in events:
        if isinstance(one.event, EngineStep):
            counters[one.event.step] += one.event.counters
    found: dict[int, Rates] = defaultdict(lambda: NO_SPECULATION)
    for step, sums in counters.items():
        if sums.sample_steps:
            window = sums.drafted / sums.drafts if sums.drafts else 0.0
            found[step] = Rates(sums.decode_tokens / sums.sample_steps, sums.drafted / sums.sample_steps, window)
    return found


def _busy(events: Iterable[Recorded], stages: Sequence[RealStage], pipeline: bool) -> tuple[Busy, ...]:
    """Return each step's busy seconds and, except in the pipeline, where engines share no stage, those around them."""
    of_step: dict[int, list[float]] = defaultdict(list)
    for one in events:
        if isinstance(one.event, EngineStep):
            of_step[one.event.step].append(one.event.counters.busy_seconds)
    found = []
    for stage in stages:
        seconds = of_step[stage.step] or [0.0]
        found.append(Busy(sum(seconds), 0.0 if pipeline else max(stage.seconds - max(seconds), 0.0)))
    return tuple(found)


def _lookup_seconds(events: Iterable[Recorded]) -> float:
    """Return the seconds of drafting in a decode step: the median of engines and steps."""
    counters = [one.event.counters for one in events if isinstance(one.event, EngineStep)]
    found = [one.draft_seconds / one.decode_steps for one in counters if one.decode_steps]
    return statistics.median(found) if found else 0.0


def _trained_per_second(parts: Sequence[Mapping[str, float]], workload: Workload) -> float:
    """Response tokens that the trainer took in a second, over the whole run."""
    seconds = sum(one.get(name, 0.0) for one in parts for name in TRAINING_PARTS)
    tokens = sum(sum(prompt.lengths) for step in workload.steps[: len(parts)] for prompt in step.prompts)
    return tokens / seconds


@dataclass(frozen=True)
class Comparison:
    """One step: the rollout stage's seconds, real and simulated (weights are loaded before), the real bubbles."""

    step: int
    real: float
    simulated: float
    bubbles: float

    @property
    def error(self) -> float:
        """Return the error of the simulated seconds, as a share of the real ones."""
        return self.simulated / self.real - 1


def compare(run: RecordedRun, result: Result) -> list[Comparison]:
    """Step by step; `result` is of the run's own cluster and features."""
    return [
        Comparison(stage.step, stage.seconds, step.completed - step.generating, stage.bubbles)
        for stage, step in zip(run.stages, result.steps, strict=True)
    ]


def summary(compared: Sequence[Comparison], result: Result) -> str:
    """Return a sentence on the simulator's error for the run as it was."""
    right = sum(abs(one.error) <= TOLERANCE for one in compared)
    ratio = statistics.median(one.simulated / one.real for one in compared)
    seconds = result.accounts.seconds
    busy = seconds["rollout"] + seconds["tail"]
    simulated = seconds["tail"] / busy if busy else 0.0
    real = sum(one.bubbles * one.real for one in compared) / sum(one.real for one in compared)
    return (
        f"{right} of {len(compared)} rollout stages are simulated within {TOLERANCE:.0%} of their real time "
        f"(simulated / real, median {ratio:.2f}); bubbles of the stages {simulated:.1%}, really {real:.1%}"
    )


Way = Literal["by the profile", "forecast", "own speed"]
WAYS: tuple[Way, ...] = ("by the profile", "forecast", "own speed")


@dataclass(frozen=True)
class Replay:
    """`conditions`: what each step was like; `results` and `compared`: of each way, compared step by step."""

    conditions: tuple[Conditions, ...]
    results: Mapping[Way, Result]
    compared: Mapping[Way, Sequence[Comparison]]

    def lines(self) -> list[str]:
        """Return a table of the stages, and a sentence for each way."""
        head = f"{'step':>4}  {'rollout s, real':>15}  {'slowness':>8}"
        lines = [head + "".join(f"  {way:>14}  {'error':>7}" for way in WAYS)]
        for place, condition in enumerate(self.conditions):
            stages = [self.compared[way][place] for way in WAYS]
            line = f"{stages[0].step:4d}  {stages[0].real:15.2f}  {condition.slowness:8.2f}"
            lines.append(line + "".join(f"  {one.simulated:14.2f}  {one.error:+7.1%}" for one in stages))
        return lines + [f"{way}: {summary(self.compared[way], self.results[way])}" for way in WAYS]


def replay(run: RecordedRun, profiles: Mapping[int, Profile], crowds: Mapping[int, Profile]) -> Replay:
    """Simulate the run of a run directory again."""

    def simulated(conditions: Sequence[Conditions] = ()) -> Result:
        return Run(run.workload, run.cluster, run.features, profiles, run.rates, crowds, conditions).go()

    plain = simulated()
    own = conditions_of(run.busy, [step.busy for step in plain.steps])
    results: dict[Way, Result] = {
        "by the profile": plain,
        "forecast": simulated(known_before(own)),
        "own speed": simulated(own),
    }
    return Replay(own, results, {way: compare(run, result) for way, result in results.items()})
