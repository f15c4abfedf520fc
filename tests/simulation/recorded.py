"""A run directory as a simulated run would have left it, for what reads recorded runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from rhyme_openrlhf.simulation.result import Result
from rhyme_openrlhf.simulation.settings import Cluster, Features
from rhyme_openrlhf.simulation.speculation import Rates
from rhyme_openrlhf.simulation.workload import Shape, Workload
from rhyme_openrlhf.telemetry.event_log import EventLog
from rhyme_openrlhf.telemetry.events import EngineInterval, EngineStep, RolloutFinished, RunStarted, TrainStep
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from tests.latency import formula

SHAPE = Shape("test", "drawn", median=100.0, sigma=0.8, longest=1000, prompt_tokens=40)
PROFILE = formula.profile()
CLUSTER = Cluster(devices=2, running=64, trainer_tokens_per_second=5000.0, publish_seconds=0.5)
FEATURES = Features(trainer="sync", dispatch=True, as_placed=True, speculation="measured")
# Each step drafts a little more than the one before; the first nothing.
RATES = [Rates(1 + step / 2, float(step), 4.0 * bool(step)) for step in range(4)]


def record(path: Path, workload: Workload, result: Result) -> None:
    """Write what a run like the simulated one leaves in its directory, from step 7 on."""
    path.mkdir()
    lines = []
    with EventLog(path / "events.jsonl") as log:
        log.write(RunStarted(1, "r", [], 2, 1, 2, 2, 6, 4, False), "driver")
        for number, (load, times) in enumerate(zip(workload.steps, result.steps, strict=True)):
            step, seconds = 7 + number, times.completed - times.generating
            for prompt in load.prompts:
                row = {"step": step, "epoch": load.epoch, "prompt": str(prompt.prompt), "prompt_tokens": 40}
                lines.append(
                    json.dumps({**row, "lengths": prompt.lengths, "engines": [prompt.engine] * len(prompt.lengths)})
                )
            rates = RATES[number]
            decoded, drafted = round(100 * rates.tokens_per_step), round(100 * rates.drafts_per_step)
            counters = EngineCounters(decode_tokens=decoded, sample_steps=100, drafts=drafted // 4, drafted=drafted)
            # The busiest engine is busy for all of the stage.
            busy = (seconds, times.busy - seconds)
            for engine, own in enumerate((counters, EngineCounters())):
                own = dataclasses.replace(own, busy_seconds=busy[engine])
                log.write(EngineStep(step, engine, own, step - 1), "rollout")
            began = 1000.0 * step
            # Before the stage it waited for the trainer, too.
            log.write(EngineInterval(1, "idle", began - 9, began, step, cause="trainer"), "rollout")
            log.write(EngineInterval(1, "idle", began, began + seconds / 4, step, cause="tail"), "rollout")
            log.write(
                RolloutFinished(step, load.epoch, seconds, 24, times.tokens, None, 1.0, 1.0, 1.0, 9, 0),
                "rollout",
                began + seconds,
            )
            parts = {
                "train": times.tokens / 5000 / 2,
                "experience": times.tokens / 5000 / 2,
                "sync": 0.5,
                "rollout": 9.0,
            }
            log.write(TrainStep(step, load.epoch, parts, {}), "trainer")
    (path / "lengths.jsonl").write_text("\n".join(lines) + "\n")


def placed(workload: Workload) -> Workload:
    """Return the workload with each prompt on the next engine, without any policy."""
    return dataclasses.replace(
        workload,
        steps=tuple(
            dataclasses.replace(
                step, prompts=tuple(dataclasses.replace(p, engine=n % 2) for n, p in enumerate(step.prompts))
            )
            for step in workload.steps
        ),
    )
