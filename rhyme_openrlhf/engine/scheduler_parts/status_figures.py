"""The figures of an engine's status that need counting: pure. What a scheduler adds to as it goes.

Invariant: cheap, because it is counted in every step: of TIMED_EACH steps one is timed, and what is counted of a sample
is counted only when a draft of it was accepted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rhyme_openrlhf.engine.scheduler_parts.clock import StepClock

# Reading what a step computes takes some 20 microseconds at 64 samples.
TIMED_EACH = 8


class StatusFigures:
    """Of one engine."""

    def __init__(self) -> None:
        self._clock = StepClock()
        self._steps = 0
        self._timed = 0
        self._sums = [0.0] * 4
        self._told_at = time.monotonic()
        self._told: Mapping[str, int | float] = {}
        # Draft tokens accepted here, and response tokens that a sample came with, by request.
        self._accepted: dict[str, int] = {}
        self._came_with: dict[str, int] = {}

    def scheduled(self, output: Any, requests: Mapping[str, Any], now: float) -> None:
        """A step was scheduled; arguments as `StepClock.scheduled`."""
        self._steps += 1
        if self._steps % TIMED_EACH > 1:
            return
        step = self._clock.scheduled(output, requests, now)
        if step is not None:
            self._timed += 1
            self._sums = [total + value for total, value in zip(self._sums, step, strict=True)]
        if self._steps % TIMED_EACH == 1:
            self._clock.interrupted()

    def interrupted(self) -> None:
        """Whatever comes next does not follow at once."""
        self._clock.interrupted()

    def came(self, request: str, tokens: int) -> None:
        """A sample has come with so many response tokens."""
        self._came_with[request] = tokens

    def accepted(self, request: str, tokens: int) -> None:
        """A step has accepted so many draft tokens of a sample."""
        if tokens:
            self._accepted[request] = self._accepted.get(request, 0) + tokens

    def accepted_per_step(self, request: str, generated: int) -> float:
        """Draft tokens accepted per decode step here, of a sample with so many response tokens."""
        accepted = self._accepted.get(request, 0)
        steps = generated - self._came_with.get(request, 0) - accepted
        return accepted / steps if steps > 0 else 0.0

    def forget(self, request: str) -> None:
        """A sample has ended here."""
        self._accepted.pop(request, None)
        self._came_with.pop(request, None)

    def take(self, counters: Mapping[str, int | float]) -> dict[str, Any]:
        """Figures since the last call; `counters`: the engine's totals (EngineCounters)."""
        now = time.monotonic()

        def since(name: str) -> float:
            return counters[name] - self._told.get(name, 0)

        sample_steps = since("sample_steps")
        figures = {
            "decode_steps": counters["decode_steps"],
            "tokens_per_second": since("response_tokens") / max(now - self._told_at, 1e-6),
            "tokens_per_step": since("decode_tokens") / sample_steps if sample_steps else 1.0,
            "decode": [total / self._timed for total in self._sums] if self._timed else None,
        }
        self._told, self._told_at = dict(counters), now
        self._timed, self._sums = 0, [0.0] * 4
        return figures
