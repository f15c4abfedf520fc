"""Turns of several arms at the same work: their speeds, and one arm's against another's with an interval.

A repeat is the work of one load in parts. At each part every arm has a turn, in another order each time. There are two
figures of the same turns:

- By the means of all turns, disturbances of the machine count in full. On a machine that is slowed tenfold for seconds
  now and then, no number of repeats makes that figure settle.
- By the median turn of each part, the figure settles: every part of the work counts as long as its usual turn takes, in
  all arms alike.

Intervals are by resampling whole repeats, of both arms the same ones, because neighbours met the same machine.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

RESAMPLES = 1000


class Turn(NamedTuple):
    """An arm's tokens and seconds in a turn."""

    tokens: int
    seconds: float


# The turns of each repeat, by part.
Repeats = Sequence[Sequence[Turn]]
Speed = Callable[[Repeats], float]


def usual_speed(repeats: Repeats) -> float:
    """Tokens per second of the whole work, if every part took what its median turn does."""
    return _speed(repeats, statistics.median)


def _speed(repeats: Repeats, of: Callable[[Sequence[float]], float]) -> float:
    tokens = seconds = 0.0
    for turns in zip(*repeats, strict=True):
        mean = statistics.fmean(turn.tokens for turn in turns)
        tokens += mean
        seconds += mean * of([turn.seconds / turn.tokens for turn in turns])
    return tokens / seconds


def mean_speed(repeats: Repeats) -> float:
    """Tokens per second of all turns."""
    turns = [turn for parts in repeats for turn in parts]
    return sum(turn.tokens for turn in turns) / sum(turn.seconds for turn in turns)


class Ratio(NamedTuple):
    """One arm's speed / another's, and its 95 % interval."""

    value: float
    low: float
    high: float


def ratio(pairs: Sequence[tuple[Repeats, Repeats]], speed: Speed) -> Ratio:
    """Return the first arm of each pair against the second, as the geometric mean over the pairs.

    The repeats of a pair were measured together. One repeat has no interval: it is not a number.
    """

    def of(chosen: Sequence[tuple[Repeats, Repeats]]) -> float:
        return statistics.geometric_mean(speed(ours) / speed(theirs) for ours, theirs in chosen)

    if any(len(ours) < 2 for ours, _ in pairs):
        return Ratio(of(pairs), float("nan"), float("nan"))
    chance, found = random.Random(0), []
    for _ in range(RESAMPLES):
        picks = [chance.choices(range(len(ours)), k=len(ours)) for ours, _ in pairs]
        found.append(
            of(
                [
                    ([ours[at] for at in pick], [theirs[at] for at in pick])
                    for pick, (ours, theirs) in zip(picks, pairs, strict=True)
                ]
            )
        )
    bounds = statistics.quantiles(found, n=40)
    return Ratio(of(pairs), bounds[0], bounds[-1])
