"""Result of a simulation: the steps' times, counts, and the states in which devices spent their time.

Every device is in exactly one state at any moment: `rollout` (something to run), and the bubbles of
docs/architecture.md: `tail` (others still run), `weights` (the pipeline waits for a version), `sync` (loading it),
`switch`, `trainer` (waiting for the training step).

Invariant: the states' device seconds add up to devices x length of the run.
"""

from __future__ import annotations

import math
import statistics
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
        """Return the part of all device time that is `state`, or all bubbles together."""
        whole = sum(self.seconds.values())
        bubbles = whole - self.seconds["rollout"] if state is None else self.seconds[state]
        return bubbles / whole if whole else 0.0


@dataclass
class StepTimesOf:
    """A step's times, in seconds from the start of the run, and what it generated.

    `begun`: its first engine turned to it; `generating`: an engine had the weights for it. `busy`: seconds that its
    engines had something to run, in all.
    """

    epoch: int
    samples: int
    tokens: int
    begun: float = 0.0
    generating: float = math.inf
    completed: float = 0.0
    trained: float = 0.0
    busy: float = 0.0


@dataclass
class Result:
    """Results of one simulated run. `moves` by cause; `decode_steps` of all engines, `sample_steps` of all
    their samples, `drafts`: draft tokens verified."""

    steps: list[StepTimesOf]
    accounts: Accounts = field(default_factory=Accounts)
    moves: dict[str, int] = field(default_factory=dict)
    switches: int = 0
    preemptions: int = 0
    decode_steps: int = 0
    drafts: float = 0.0
    tokens_generated: float = 0.0
    sample_steps: float = 0.0

    def count_moves(self, cause: str, samples: int) -> None:
        """Count moved samples, for this cause."""
        if samples:
            self.moves[cause] = self.moves.get(cause, 0) + samples

    @property
    def tokens_per_sample_step(self) -> float:
        """Response tokens of a sample's decode step, in the mean: 1 without speculation."""
        return self.tokens_generated / self.sample_steps if self.sample_steps else 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds from the first prompt to the end of the last training step."""
        return self.steps[-1].trained

    @property
    def samples_per_second(self) -> float:
        return sum(step.samples for step in self.steps) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return sum(step.tokens for step in self.steps) / self.seconds

    @property
    def step_seconds(self) -> float:
        """Mean time from one trained step to the next."""
        return self.seconds / len(self.steps)

    @property
    def rollout_seconds(self) -> float:
        """Mean time from a step's first sample to its last."""
        return statistics.fmean(step.completed - step.begun for step in self.steps)
