"""Engine kinds and jobs for tests, timed by the formula profile."""

from __future__ import annotations

from rhyme_openrlhf.latency.transfer_model import TransferModel
from rhyme_openrlhf.simulation.engine import EngineKind
from rhyme_openrlhf.simulation.job import Job
from rhyme_openrlhf.simulation.step_times import StepTimes
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
