"""Events of a synthetic run: what a large cluster could report, for tests and demonstrations of pages.

Nothing is measured or simulated. Engine times, lengths and rates are drawn from fixed distributions. Every kind of
event occurs, also those of features that this version does not have. The run's name, its configuration and the note of
its first event say so.

Invariants: the same settings give the same events; intervals of an engine do not overlap; every event has the
form of its kind.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rhyme_openrlhf.settings.control import UID_DIGITS
from rhyme_openrlhf.telemetry.event_json import to_json
from rhyme_openrlhf.telemetry.events import (
    SCHEMA_VERSION,
    CheckpointSaved,
    DraftBudget,
    DraftGain,
    EngineInterval,
    EngineSample,
    EngineStep,
    Evaluation,
    Event,
    HistoryState,
    LayoutSwitched,
    MoveCarrier,
    Note,
    OffPolicyness,
    RankGroups,
    RankStability,
    Recorded,
    RolloutFinished,
    RolloutStarted,
    RunFinished,
    RunStarted,
    SampleMoved,
    SystemSample,
    TrainStep,
    WeightsPublished,
)
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.telemetry.run_directory import CONFIG_FILE, EVENTS_FILE, write_json

LABEL = "synthetic events: no such run was made"
ENGINES_PER_NODE = 8
SAMPLES_PER_PROMPT = 8
# Mean response lengths in tokens of the prompt groups that rank-based scheduling would make.
GROUP_LENGTHS = (300, 800, 1800, 4200)
# Mean response lengths by off-policyness: longer responses are used later.
LENGTHS_BY_AGE = (1000, 2200, 4000)
RUNNING = (1, 2, 4, 8, 16, 32)
GIGABYTE = 1024**3


@dataclass(frozen=True)
class SyntheticRun:
    """Settings: `steps` steps of `engines` engines (one or more), from unix time `start`; `seed` selects the draw.

    `looks`: EngineSamples of each engine per step. A real run has one per second, which is most of its events.
    """

    steps: int = 5000
    engines: int = 64
    steps_per_epoch: int = 50
    looks: int = 1
    seed: int = 1
    start: float = 1_760_000_000.0
    name: str = "synthetic"

    @property
    def nodes(self) -> int:
        """Number of machines with ENGINES_PER_NODE engines each; the last one may have fewer."""
        return -(-self.engines // ENGINES_PER_NODE)


def write_run_directory(path: Path, run: SyntheticRun) -> None:
    """Write a run directory with config and events that can be imported. Raises OSError."""
    path.mkdir(parents=True)
    # The same run always has the same ids, on any machine and with shifted times.
    run_uid, attempt_uid = (
        hashlib.blake2b(f"{kind} {run}".encode(), digest_size=UID_DIGITS // 2).hexdigest()
        for kind in ("run", "attempt")
    )
    settings = {"run": {"name": run.name}, "control": {"run_uid": run_uid, "attempt_uid": attempt_uid}}
    write_json(path / CONFIG_FILE, {"command": [LABEL], "settings": settings, "arguments": {"synthetic": vars(run)}})
    with (path / EVENTS_FILE).open("w", encoding="ascii") as file:
        for one in synthetic_events(run):
            file.write(json.dumps(to_json(one.event, one.time, one.source, one.sequence)) + "\n")


def synthetic_events(run: SyntheticRun) -> Iterator[Recorded]:
    """Yield the events in the order of recording; a step takes about 50 seconds."""
    sequences: dict[str, int] = {}
    for at, source, event in _Draw(run).events():
        sequence = sequences.get(source, 0)
        sequences[source] = sequence + 1
        yield Recorded(event, at, source, sequence)


Timed = tuple[float, str, Event]


class _Draw:
    """The state that one step passes to the next."""

    def __init__(self, run: SyntheticRun) -> None:
        self._run = run
        self._random = random.Random(run.seed)
        self._now = run.start
        # Time at which each engine became idle in the previous step.
        self._idle_since = [run.start] * run.engines

    def events(self) -> Iterator[Timed]:
        run = self._run
        epochs = -(-run.steps // run.steps_per_epoch)
        started = RunStarted(
            SCHEMA_VERSION, run.name, [LABEL], run.engines, 1, epochs, run.steps_per_epoch, 2 * run.engines,
            SAMPLES_PER_PROMPT, True,
        )  # fmt: skip
        yield run.start, "driver", started
        yield run.start, "driver", Note("warning", LABEL)
        self._now += 30
        for step in range(1, run.steps + 1):
            yield from self._step(step)
        yield self._now, "driver", RunFinished("succeeded", LABEL, self._now - run.start)

    def _step(self, step: int) -> Iterator[Timed]:
        run, epoch = self._run, (step - 1) // self._run.steps_per_epoch + 1
        progress = step / run.steps
        begin = self._now
        samples = 2 * run.engines * SAMPLES_PER_PROMPT
        yield begin, "rollout", RolloutStarted(step, epoch, 2 * run.engines, samples)
        groups = [engine * len(GROUP_LENGTHS) // run.engines for engine in range(run.engines)]
        planned = [self._engine_seconds(group) for group in groups]
        moves, ends = self._moves(step, begin, planned)
        seconds = max(ends)
        yield from moves
        switched = self._switched_node(step, seconds)
        if switched is not None:
            node, at, took = switched
            last = sum(end > at for end in ends[node * ENGINES_PER_NODE : (node + 1) * ENGINES_PER_NODE])
            yield begin + at + took, "rollout", LayoutSwitched(step, f"node-{node}", 1, 2, 3 * last, took)
        counters = [self._counters(group, progress, end) for group, end in zip(groups, ends, strict=True)]
        for look in range(run.looks):
            second = seconds * (look + 0.5) / run.looks
            for engine, (mine, end) in enumerate(zip(counters, ends, strict=True)):
                left = max(0.0, 1 - second / end)
                tokens = int(mine.response_tokens / end) if left else 0
                yield (
                    begin + second,
                    "rollout",
                    EngineSample(
                        step, engine, math.ceil(16 * left), 1.0, tokens, int(mine.drafted / end) if left else 0,
                        int(mine.accepted / end) if left else 0, 0.8 * left,
                    ),
                )  # fmt: skip
        over = begin + seconds
        for engine in range(run.engines):
            yield over, "rollout", EngineStep(step, engine, counters[engine], step - 1)
            for interval in self._intervals(step, engine, begin, ends[engine], over, switched):
                yield over, "rollout", interval
        tokens = sum(mine.response_tokens for mine in counters)
        mean = tokens / samples
        reward = 0.9 - 0.6 * math.exp(-3 * progress) + self._random.gauss(0, 0.01)
        longest = int(GROUP_LENGTHS[-1] * 1.9)
        yield (
            over,
            "rollout",
            RolloutFinished(
                step, epoch, seconds, samples, tokens, reward, mean, 0.7 * mean, 2.6 * mean, longest, samples // 90
            ),
        )
        yield from self._scheduling(step, over, groups, progress)
        yield from self._training(step, epoch, over, seconds, reward, progress)

    def _engine_seconds(self, group: int) -> float:
        usual = 26 + 3 * group + self._random.gauss(0, 1.2)
        return usual * (1.7 if self._random.random() < 0.04 else 1.0)

    def _moves(self, step: int, begin: float, planned: list[float]) -> tuple[list[Timed], list[float]]:
        """Move samples of the slowest engines to the engines that finish first; return the moves and new end times."""
        ends = list(planned)
        usual = sorted(ends)[len(ends) * 3 // 4]
        found: list[Timed] = []
        for engine, end in enumerate(planned):
            if end < 1.3 * usual:
                continue
            target = min(range(len(ends)), key=ends.__getitem__)
            near = engine // ENGINES_PER_NODE == target // ENGINES_PER_NODE
            failed = self._random.random() < 0.1
            carrier: MoveCarrier = "recompute" if failed else "kv_transfer"
            for sample in range(self._random.randint(1, 4)):
                at = begin + usual * self._random.uniform(0.7, 0.95)
                took, tokens = self._random.uniform(0.01, 0.3), self._random.randint(500, 6000)
                found.append(
                    (
                        at,
                        "rollout",
                        SampleMoved(
                            step, f"s{step}-{engine}-{sample}", engine, target,
                            "outlier_intra" if near else "outlier_inter", carrier, "cancelled" if failed else "moved",
                            took, tokens, None if failed else 0.4 * took, 0.36 * took,
                        ),
                    )
                )  # fmt: skip
            if not failed:
                ends[engine] = 1.15 * usual
                ends[target] = max(ends[target] + 4, 0.9 * usual)
        return sorted(found, key=lambda one: one[0]), ends

    def _switched_node(self, step: int, seconds: float) -> tuple[int, float, float] | None:
        """Return a node that changes its layout, with start (after the stage began) and duration, in every third
        step.
        """
        if step % 3:
            return None
        return self._random.randrange(self._run.nodes), 0.75 * seconds, self._random.uniform(0.8, 1.6)

    def _intervals(
        self, step: int, engine: int, begin: float, end: float, over: float, switched: tuple[int, float, float] | None
    ) -> Iterator[EngineInterval]:
        version = step - 1
        sync = begin + self._random.uniform(0.2, 0.5)
        first = sync + self._random.uniform(0.1, 0.6)
        finished = max(begin + end, first + 1)
        yield EngineInterval(engine, "idle", self._idle_since[engine], begin, step, version, "trainer")
        yield EngineInterval(engine, "sync", begin, sync, step, version)
        yield EngineInterval(engine, "idle", sync, first, step, version, "weights")
        at = first
        if switched is not None and engine // ENGINES_PER_NODE == switched[0] and begin + switched[1] < finished - 2:
            change = begin + switched[1]
            yield EngineInterval(engine, "generate", first, change, step, version)
            yield EngineInterval(engine, "switch", change, change + switched[2], step, version)
            at = change + switched[2]
        yield EngineInterval(engine, "generate", at, finished, step, version)
        if over > finished:
            yield EngineInterval(engine, "idle", finished, over, step, version, "tail")
        self._idle_since[engine] = max(over, finished)

    def _counters(self, group: int, progress: float, end: float) -> EngineCounters:
        tokens = int(2 * SAMPLES_PER_PROMPT * GROUP_LENGTHS[group] * self._random.uniform(0.9, 1.1))
        accepted = int(tokens * (0.25 + 0.4 * min(1.0, 3 * progress)))
        drafted = int(accepted / (0.5 + 0.2 * progress))
        decode = tokens - 2 * SAMPLES_PER_PROMPT
        steps = max(1, decode // 9)
        return EngineCounters(
            tokens, decode, steps, max(1, decode - accepted), 400 * SAMPLES_PER_PROMPT, drafted // 6, drafted, accepted,
            end * 0.97, end * 0.02, 2 * SAMPLES_PER_PROMPT, accepted // 5, accepted // 4,
        )  # fmt: skip

    def _scheduling(self, step: int, at: float, groups: list[int], progress: float) -> Iterator[Timed]:
        error = 0.25 * (1 - 0.7 * progress)
        engines = [groups.count(group) for group in range(len(GROUP_LENGTHS))]
        real = [float(round(length * self._random.uniform(0.9, 1.1))) for length in GROUP_LENGTHS]
        predicted = [float(round(length * (1 + self._random.gauss(0, error)))) for length in real]
        yield at, "scheduler", RankGroups(step, [2 * count for count in engines], engines, predicted, real)
        for engine in range(0, self._run.engines, ENGINES_PER_NODE):
            ms = [8 + 0.35 * running for running in RUNNING]
            yield (
                at,
                "scheduler",
                DraftBudget(
                    step, engine, list(RUNNING), [self._random.randint(5, 60) for _ in RUNNING],
                    [round(64 / (running + 6), 2) for running in RUNNING], ms,
                    [value * self._random.uniform(0.9, 1.15) for value in ms],
                    [round(50 * running / (running + 6), 1) for running in RUNNING],
                    [round(50 * running / (running + 6) * self._random.uniform(0.95, 1.05), 1) for running in RUNNING],
                ),
            )  # fmt: skip
            gain, spread = 1 + 0.8 * progress + self._random.gauss(0, 0.02), 0.3 / math.sqrt(step)
            yield at, "scheduler", DraftGain(step, engine, gain, gain - spread, gain + spread, min(step, 128), True)

    def _training(
        self, step: int, epoch: int, over: float, rollout: float, reward: float, progress: float
    ) -> Iterator[Timed]:
        run = self._run
        train = 14 + self._random.uniform(-1, 1)
        done = over + train + 1
        samples = 2 * run.engines * SAMPLES_PER_PROMPT
        late = samples // self._random.randint(8, 20)
        by_age = [samples - late - late // 4, late, late // 4]
        tokens = [count * length for count, length in zip(by_age, LENGTHS_BY_AGE, strict=True)]
        yield over + 1, "trainer", OffPolicyness(step, [0, 1, 2], by_age, tokens)
        yield done, "trainer", WeightsPublished(step, 0.8, 16 * GIGABYTE, 32)
        metrics = {
            "reward": reward,
            "policy_loss": 0.02 * math.exp(-progress) + self._random.gauss(0, 0.004),
            "kl": 0.03 * progress + abs(self._random.gauss(0, 0.002)),
            "actor_grad_norm": 0.4 + abs(self._random.gauss(0, 0.1)),
            "entropy_loss": 0.9 - 0.4 * progress,
        }
        parts = {"rollout": rollout, "experience": 3.0, "train": train - 3, "sync": 1.0}
        yield done, "trainer", TrainStep(step, epoch, parts, metrics)
        of_step, in_epoch = 2 * run.engines, (step - 1) % run.steps_per_epoch + 1
        prompts = of_step * (run.steps_per_epoch if epoch > 1 else in_epoch)
        hits = of_step if epoch > 1 else 0
        yield (
            done,
            "history",
            HistoryState(step, 0, prompts, prompts, 0, 10**6 * prompts, 0, hits=hits, late=0, misses=of_step - hits),
        )
        if step % run.steps_per_epoch == 0:
            if epoch > 1:
                alike = 0.9 - 0.4 / epoch + self._random.gauss(0, 0.02)
                up = 0.3 * (1 - alike)
                yield (
                    done,
                    "history",
                    RankStability(
                        epoch,
                        alike,
                        prompts,
                        8,
                        samples * run.steps_per_epoch,
                        1 - up,
                        0.8 * up,
                        0.9 * up,
                        0.04 * up,
                        0.06 * up,
                    ),
                )
            yield done, "trainer", Evaluation(step, {"pass1": min(1.0, max(0.0, reward - 0.05))})
            yield done, "trainer", CheckpointSaved(step, f"checkpoints/global_step{step}")
        for node in range(run.nodes):
            yield done, "system", self._system(node)
        self._now = done + 0.5

    def _system(self, node: int) -> SystemSample:
        draw = self._random.uniform
        gpus = range(ENGINES_PER_NODE)
        return SystemSample(
            f"node-{node}", draw(0.1, 0.4), draw(10, 40), int(draw(200, 400) * GIGABYTE), 1024 * GIGABYTE,
            int(draw(2000, 3000) * GIGABYTE), int(draw(30, 40) * GIGABYTE), int(draw(20, 30) * GIGABYTE),
            [draw(0.6, 1.0) for _ in gpus], [int(draw(60, 75) * GIGABYTE) for _ in gpus], [80 * GIGABYTE for _ in gpus],
            {"engine": draw(2, 8)}, {"engine": int(draw(20, 30) * GIGABYTE)},
        )  # fmt: skip
