"""How well a profile predicts what it was not shown: each inner point from all others; and the noise beside it.

Invariant: no point takes part in its own prediction.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from dataclasses import dataclass

from rhyme_openrlhf.latency.profile import Profile, StepPoint
from rhyme_openrlhf.latency.step_model import StepModel


@dataclass(frozen=True)
class Quality:
    """`held_out_error`: mean |predicted / measured - 1| over `points` held out one at a time; `noise`: the median over
    all points of spread / seconds, which no model can be better than. None: no inner points."""

    held_out_error: float | None
    points: int
    noise: float


def assess(profile: Profile) -> Quality:
    """The quality of a profile's step points."""
    noise = statistics.median(point.spread / point.seconds for point in profile.steps)
    errors = []
    for point in _inner(profile):
        others = tuple(other for other in profile.steps if other is not point)
        model = StepModel(dataclasses.replace(profile, steps=others))
        predicted = model.seconds(point.running, point.context, point.drafts)
        errors.append(abs(predicted / point.seconds - 1))
    return Quality(statistics.fmean(errors) if errors else None, len(errors), noise)


def _inner(profile: Profile) -> list[StepPoint]:
    """Points that lie between two others of their curve over the context."""
    curves: dict[tuple[int, int], list[StepPoint]] = defaultdict(list)
    for point in profile.steps:
        curves[(point.running, point.drafts)].append(point)
    return [point for curve in curves.values() for point in sorted(curve, key=lambda p: p.context)[1:-1]]
