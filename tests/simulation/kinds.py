"""Engine kinds, jobs, and the set-up of whole runs for tests, timed by the formula profile."""

from __future__ import annotations

import dataclasses

from rhyme_openrlhf.latency.profile import Profile, StepPoint
from rhyme_openrlhf.latency.transfer_model import TransferModel
from rhyme_openrlhf.simulation.engine import Job
from rhyme_openrlhf.simulation.engine_kinds import EngineKind, StepTimes
from rhyme_openrlhf.simulation.settings import Cluster
from rhyme_openrlhf.simulation.workload import Shape
from tests.latency import formula

PROFILE = formula.profile()
TIMES = StepTimes(PROFILE)
TRANSFER = TransferModel(PROFILE)


def kind(kv_tokens: int = 200_000, most_running: int = 64, step_tokens: int = 256) -> EngineKind:
    return EngineKind(TIMES, TRANSFER, TRANSFER.prefill_seconds, kv_tokens, most_running, step_tokens)


def jobs(lengths: list[tuple[int, int]], samples_each: int = 2) -> list[Job]:
    """Of (prompt tokens, response length)."""
    return [
        Job(sample, sample // samples_each, prompt_tokens, length)
        for sample, (prompt_tokens, length) in enumerate(lengths)
    ]


# Of whole runs.
SHAPE = Shape("test", "drawn", median=150.0, sigma=0.9, longest=2000, growth=1.1, prompt_tokens=50)
RUN_PROFILE = formula.profile(kv_cache_tokens=100_000)
CLUSTER = Cluster(nodes=2, devices=4, running=32, trainer_tokens_per_second=20_000.0, publish_seconds=0.1)


def wide(seconds: float) -> Profile:
    """TP 4: few samples are quicker, many slower."""
    steps = tuple(
        StepPoint(b, b * each, 0, seconds + b * 4e-4 + b * each * 1e-7, 0.0001, 20)
        for b in formula.RUNNING
        for each in formula.CONTEXTS
    )
    subject = dataclasses.replace(formula.SUBJECT, tensor_parallel_size=4)
    return formula.profile(subject=subject, steps=steps, kv_cache_tokens=400_000)


PROFILES = {1: RUN_PROFILE, 4: wide(0.003)}
