"""Where the devices' time goes: every device is in exactly one state at any moment.

States: `rollout` (something to run), and the bubbles of docs/architecture.md: `tail` (others still run), `weights`
(the pipeline waits for a version), `sync` (loading it), `switch`, `trainer` (waiting for the training step).

Invariant: the states' device seconds add up to devices x length of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

State = Literal["rollout", "tail", "weights", "sync", "switch", "trainer"]
STATES: tuple[State, ...] = ("rollout", "tail", "weights", "sync", "switch", "trainer")


@dataclass
class Accounts:
    """Device seconds by state."""

    seconds: dict[State, float] = field(default_factory=lambda: dict.fromkeys(STATES, 0.0))

    def add(self, state: State, devices: int, begin: float, end: float) -> None:
        """`devices` devices were in `state` from `begin` to `end`. Raises ValueError for time that goes back."""
        if end < begin - 1e-6:
            raise ValueError(f"{state} from {begin} to {end}")
        self.seconds[state] += devices * max(end - begin, 0.0)

    def bubble_fraction(self, state: State | None = None) -> float:
        """The part of all device time that is `state`, or all bubbles together."""
        whole = sum(self.seconds.values())
        bubbles = whole - self.seconds["rollout"] if state is None else self.seconds[state]
        return bubbles / whole if whole else 0.0
