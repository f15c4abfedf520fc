"""What an engine decided to draft since it was last asked, by running samples: sums for DraftBudget events.

Invariant: a decision counts once, with what its step really took and accepted; pure.
"""

from __future__ import annotations

from typing import Any

from rhyme_openrlhf.drafting.planner import Decision


class DecisionLog:
    """Sums over decode steps, by running samples."""

    def __init__(self) -> None:
        self._by_running: dict[int, list[float]] = {}

    def add(self, decision: Decision, seconds: float, accepted: int) -> None:
        """The step of `decision` took `seconds`, and accepted so many draft tokens."""
        new = (1, decision.drafts, decision.seconds, seconds, decision.expected_accepted, accepted)
        sums = self._by_running.setdefault(decision.running, [0.0] * len(new))
        for place, value in enumerate(new):
            sums[place] += value

    def take(self) -> dict[str, list[Any]]:
        """The fields of a DraftBudget event (telemetry/events.py), and begin anew; empty lists: nothing was decided."""
        taken, self._by_running = sorted(self._by_running.items()), {}
        steps = [int(sums[0]) for _, sums in taken]
        return {
            "running": [running for running, _ in taken],
            "decode_steps": steps,
            "draft_length": [sums[1] / sums[0] / running for running, sums in taken],
            "predicted_ms": [1000 * sums[2] / sums[0] for _, sums in taken],
            "real_ms": [1000 * sums[3] / sums[0] for _, sums in taken],
            "expected_accepted": [sums[4] / sums[0] for _, sums in taken],
            "accepted": [sums[5] / sums[0] for _, sums in taken],
        }
