"""How slow the engines of a recorded run were, beside a profile: learnt from the run's own busy times.

A profile is of an engine that does nothing else, on the machine as it was then. In a run engines answer their owner,
others use the same cores, and the machine itself may be slower for a while. The record says how long engines were busy
in each step; the run simulated by the profile alone says how long they should have been.

Two ways to use it: a step with what was known before it began (a forecast, what a planner could have said), or with
what the step itself was like (a replay: what if other features had run under the same conditions).

Invariants: without anything known steps take what the profile says; a forecast of a step looks at no later one and not
at itself; of a run's times only those inside engines, and what surrounds them in a stage, are used.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# A step's slowness weighs so much against all before it: the machine's speed lasts for a step or two, and a single step
# is off by as much as the speed changes.
NEW_WEIGHT = 0.5


@dataclass(frozen=True)
class Conditions:
    """Of one step. `slowness`: seconds of engine steps by those of the profile; `around`: seconds of a stage in which
    an engine waits for its first requests or its last answers are handed over."""

    slowness: float = 1.0
    around: float = 0.0


AS_PROFILED = Conditions()


@dataclass(frozen=True)
class Busy:
    """Of one step of a run: seconds that all its engines were busy, and of the stage beside the busiest engine's."""

    seconds: float
    around: float


def recorded(busy: Sequence[Busy], simulated: Sequence[float]) -> tuple[Conditions, ...]:
    """What each step was like; `simulated`: busy seconds by the profile alone."""
    return tuple(
        Conditions(one.seconds / by_profile if by_profile and one.seconds else 1.0, one.around)
        for one, by_profile in zip(busy, simulated, strict=True)
    )


def known_before(steps: Sequence[Conditions]) -> tuple[Conditions, ...]:
    """What was known of each step when it began; `steps`: what they then were like.

    Around its first stage there can be what a run starts once (in older recordings a garbage collection in each
    engine's actor, a second of it): that says nothing of the next.
    """
    slowness = itertools.accumulate(
        (one.slowness for one in steps), lambda known, new: known + NEW_WEIGHT * (new - known)
    )
    found = [AS_PROFILED]
    for count, known in enumerate(slowness, start=1):
        around = [one.around for one in steps[1:count]]
        found.append(Conditions(known, statistics.median(around) if around else 0.0))
    return tuple(found[: len(steps)])
