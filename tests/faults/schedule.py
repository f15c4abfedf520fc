"""Seeded schedules of faults: at which await points of a scenario something goes wrong, and what.

A scenario is run once without faults to count its await points, which are the same each time, because it runs in
virtual time. A schedule then chooses some of them.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from ray.exceptions import ActorUnavailableError, RayTaskError

from rhyme_openrlhf.engine_errors import EngineCoreError


def unreachable() -> Exception:
    """Return what Ray raises for a call over a broken connection."""
    return ActorUnavailableError("the connection broke", b"\0" * 16)


def of_task(error: Exception) -> Exception:
    """Return an actor's error as Ray raises it for its caller."""
    raised: Exception = RayTaskError("method", "", error).as_instanceof_cause()
    return raised


def core_dead() -> Exception:
    """Return what an actor answers whose vLLM process is gone."""
    return of_task(EngineCoreError("the vLLM engine core of the engine died"))


@dataclass
class Schedule:
    """`faults` by await point; `hit`: those that happened, by kind."""

    faults: dict[int, str] = field(default_factory=dict)
    points: int = 0
    hit: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, seed: int, points: int, kinds: tuple[str, ...], most: int = 4) -> Schedule:
        """Return the schedule of this seed over a scenario of that many await points."""
        chance = random.Random(seed)
        count = chance.randint(1, most)
        return cls({chance.randrange(points): chance.choice(kinds) for _ in range(count)})

    def next(self) -> str:
        """Return what goes wrong at the next await point, or ""."""
        fault = self.faults.get(self.points, "")
        self.points += 1
        self.hit.update([fault] if fault else [])
        return fault
