"""An engine's report at a set interval: its samples, its free room, its speed and its weights. Pure.

Invariants: a status costs an engine one look at its scheduler between two decode steps, and holds for that moment.
Figures over time (`tokens_per_second`, `decode`) are of the time since the status before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rhyme_openrlhf.latency.predictor import Predictor


@dataclass(frozen=True)
class SampleStatus:
    """An unfinished sample. `place`: its name at this engine; `context`: prompt and response tokens so far.

    `accepted`: draft tokens accepted per decode step, in the mean of its steps here; `waiting`: it has no seat yet.
    """

    place: str
    context: int
    accepted: float = 0.0
    waiting: bool = False


@dataclass(frozen=True)
class DecodeMean:
    """The mean decode step of those that were timed: samples, tokens of context and draft tokens in all, seconds."""

    running: float
    context: float
    drafts: float
    seconds: float


@dataclass(frozen=True)
class EngineStatus:
    """One engine. `free_tokens`: KV cache that no sample holds; `free_seats`: samples it could run beside.

    `open`: it takes part in moves (it does not while it loads weights); `decode_steps`: since it started;
    `step_tokens`: the most that one step computes;
    `tokens_per_second`: response tokens; `tokens_per_step`: response tokens per sample and decode step; `decode`: None
    without a timed step.
    """

    engine: int
    samples: tuple[SampleStatus, ...]
    free_tokens: int
    free_seats: int
    weight_version: int
    open: bool
    decode_steps: int
    step_tokens: int
    tokens_per_second: float = 0.0
    tokens_per_step: float = 1.0
    decode: DecodeMean | None = None


def speculation(decode_steps: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Return tokens and draft tokens of a sample's decode step, in the mean of engines; (1, 0) without a decode step.

    `decode_steps`: of each engine its mean decode step, as samples, tokens of one sample, and draft tokens in all.
    """
    known = list(decode_steps)
    decoding = sum(running for running, _, _ in known)
    if not decoding:
        return 1.0, 0.0
    gained = sum(running * tokens for running, tokens, _ in known) / decoding
    # Counters of steps and of tokens are read some steps apart: a step gives a token at least.
    return max(gained, 1.0), sum(drafts for _, _, drafts in known) / decoding


def reported_speculation(statuses: Iterable[EngineStatus]) -> tuple[float, float]:
    """Return the `speculation` of what engines report."""
    return speculation(
        (status.decode.running, status.tokens_per_step, status.decode.drafts)
        for status in statuses
        if status.decode is not None
    )


def learn(predictor: Predictor, status: EngineStatus) -> None:
    """Correct step times by the decode steps that an engine has timed."""
    mean = status.decode
    if mean is not None and mean.running >= 1:
        predictor.observe(round(mean.running), round(mean.context), round(mean.drafts), mean.seconds)
