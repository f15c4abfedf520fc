"""The TP switch: unfinished samples of a node go on with more tensor parallelism (PAT 4.2, algorithm 1).

Few samples decode faster on many devices together, many on few devices each. Each time samples have finished, the time
that remains under the current layout is compared with what it would be after a switch, the switch included.

Two rules predict what remains:
- `by_maximum`, the paper's: everything runs to the longest response allowed. The switch is made when it beats staying.
- `by_history`: the lengths that the prompts' history makes likely. Samples then end on the way, and switching now is
  also compared with switching later, when fewer are left. A rule without "later" switches as soon as it pays at all,
  which is too early.

The rest of a stage is a sum of decode steps until the next sample ends, each with the samples that then run. In the
current layout each engine goes on with its own samples, and the stage waits for the last engine. After a switch they
are spread evenly over the layout's engines. With several larger layouts, the value of one includes a later switch to a
larger one.

A later switch finds what each engine has left by then. The longest samples are often together, on the engine that is
slowest because of them, so they are further from their ends than the mean. A rule that forgets this always finds later
better than now.

Invariants:
- A switch is ordered only if its predicted total, with its cost, is smaller than staying.
- Never to the current layout or a smaller one: of a step's samples ever fewer are left.
- Without samples nothing is ordered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.latency.transfer_model import TransferModel, carrying_seconds
from rhyme_openrlhf.scheduling.stage_course import (
    Course,
    Layout,
    Unfinished,
    UnfinishedSamples,
    by_history,
    by_maximum,
    evenly,
    spread,
)

# A sample's part of a switch beside its KV cache: messages and decode steps. A move takes about as long with decode
# steps of some milliseconds.
EACH_SECONDS = 0.02
# Weight of one switch in the learnt factor.
RATE = 0.5
# Later moments of a switch that are looked at together: of some thousand samples, so in some MB.
_AT_ONCE = 16


@dataclass(frozen=True)
class Switch:
    """The order to go on in `layouts[target]`, with what was predicted for the rest of the stage, in seconds."""

    target: int
    seconds_stay: float
    seconds_switched: float


# Seconds (none below 0) to switch from one layout to another with samples of these contexts: (from, to, contexts),
# layouts by place.
SwitchSeconds = Callable[[int, int, Sequence[int]], float]


class SwitchCost:
    """The predicted cost of a switch: PAT's equations 1 to 4 and `each_s` for each sample, times a learnt factor.

    The factor follows what switches really cost. `fixed_s`: seconds of every switch beside its samples.
    """

    def __init__(self, each_s: float = EACH_SECONDS, fixed_s: float = 0.0) -> None:
        self._each_s = each_s
        self._fixed_s = fixed_s
        self._factor = 1.0

    def between(self, layouts: Sequence[TransferModel | None]) -> SwitchSeconds:
        """Return the `SwitchSeconds` of `decide` for layouts with these models; None: nothing was measured."""
        return lambda current, target, contexts: self.seconds(layouts[current], layouts[target], contexts)

    def seconds(self, source: TransferModel | None, target: TransferModel | None, contexts: Sequence[int]) -> float:
        """Return the seconds of a switch of samples with these contexts."""
        return self._fixed_s + self._factor * self._predicted(source, target, contexts)

    def learn(
        self, lost: float, source: TransferModel | None, target: TransferModel | None, contexts: Sequence[int]
    ) -> None:
        """Learn from a switch of samples with these contexts that had no token for up to `lost` seconds."""
        real = max(lost - self._fixed_s, 0.0) / self._predicted(source, target, contexts)
        self._factor += RATE * (real - self._factor)

    def _predicted(self, source: TransferModel | None, target: TransferModel | None, contexts: Sequence[int]) -> float:
        return carrying_seconds(source, target, contexts) + self._each_s * len(contexts)


def in_turn(lengths: Sequence[int], engines: int) -> list[tuple[int, int]]:
    """Return which sample goes to which engine of a layout, as places: longest first, to each engine in turn."""
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    return [(place, turn % engines) for turn, place in enumerate(order)]


def larger(current: int, layouts: Sequence[object]) -> range:
    """Return the places of the layouts that a switch may go to; empty if there is nothing to decide."""
    return range(current + 1, len(layouts))


def decide(
    current: int,
    layouts: Sequence[Layout],
    samples: Sequence[Unfinished] | UnfinishedSamples,
    longest_allowed: int,
    switch_seconds: SwitchSeconds,
    from_history: bool = True,
    engines: Sequence[int] | None = None,
) -> Switch | None:
    """Return the layout to switch to now; None to stay (decide again when samples have finished).

    `layouts`: smaller tensor-parallel sizes first; only those behind `current` are switched to.
    `engines`: which engine of the current layout each sample is on, by any number; None: they are spread evenly.
    """
    if not len(samples) or not larger(current, layouts):
        return None
    if not isinstance(samples, UnfinishedSamples):
        samples = UnfinishedSamples.of(samples)
    if engines is None:
        engines = [place % layouts[current].engines for place in range(len(samples))]
    if from_history:
        return _by_stopping(current, layouts, samples, longest_allowed, switch_seconds, engines)
    remaining, contexts = by_maximum(samples, longest_allowed), samples.contexts
    stay = Course(layouts[current], contexts, remaining, engines).last
    best: Switch | None = None
    for place in larger(current, layouts):
        total = spread(layouts[place], contexts, remaining)
        total += switch_seconds(current, place, contexts.tolist())
        if total < (best.seconds_switched if best else stay):
            best = Switch(place, stay, total)
    return best


def least_seconds(
    current: int,
    layouts: Sequence[Layout],
    contexts: NDArray[np.int64],
    remaining: NDArray[np.int64],
    engines: Sequence[int],
    switch_seconds: SwitchSeconds,
) -> float:
    """Return the predicted seconds of samples that begin in the current layout, with the best later switch or none.

    `contexts`, `remaining`, `engines`: as `Course` takes them.
    """
    course = Course(layouts[current], contexts, remaining, engines)
    later = _Later(course, current, layouts, switch_seconds)
    return later.least(larger(current, layouts), 0.0, course.last)


def _by_stopping(
    current: int,
    layouts: Sequence[Layout],
    samples: UnfinishedSamples,
    longest_allowed: int,
    switch_seconds: SwitchSeconds,
    engines: Sequence[int],
) -> Switch | None:
    remaining, contexts = by_history(samples, longest_allowed), samples.contexts
    course = Course(layouts[current], contexts, remaining, engines)
    stay = course.last
    best: Switch | None = None
    for place in larger(current, layouts):
        further = larger(place, layouts)
        limit = best.seconds_switched if best is not None else stay
        cost = switch_seconds(current, place, contexts.tolist())
        total = now = cost + spread(layouts[place], contexts, remaining)
        later = _Later(course, current, layouts, switch_seconds)
        if (now >= limit and not further) or later.is_less([place], now):
            continue
        if further and len(samples) > 1:
            # There they are spread evenly.
            turns = [turn % layouts[place].engines for turn in range(len(samples))]
            there = Course(layouts[place], contexts, remaining, turns)
            total = min(now, _Later(there, place, layouts, switch_seconds).least(further, cost, now))
        # Nor may it be better to wait for one of the larger ones.
        if total < limit and not later.is_less(further, total):
            best = Switch(place, stay, total)
    return best


@dataclass(frozen=True)
class _Later:
    """The rest of the stage in the layout `current`, which goes on by `course`, with a switch when fewer are left."""

    course: Course
    current: int
    layouts: Sequence[Layout]
    switch_seconds: SwitchSeconds

    def is_less(self, targets: Sequence[int], seconds: float) -> bool:
        """Return whether the stage takes less than `seconds` with a later switch to one of these layouts."""
        # What follows a switch takes time: where its moment is not before, nothing is less.
        lefts = [left for left, moment in self.course.fewer if moment < seconds]
        # Where waiting is better at all, the next sample's end is most times a better moment than now.
        parts = itertools.chain((lefts[:1],), _parts(lefts[1:])) if lefts else ()
        return any(self._seconds(place, part, seconds) < seconds for part in parts for place in targets)

    def least(self, targets: Sequence[int], before: float, limit: float) -> float:
        """Return the least seconds of the stage, after `before` seconds, with a later switch to one of these layouts.

        Totals from `limit` on are not told apart.
        """
        lefts = [left for left, moment in self.course.fewer if before + moment < limit]
        least = limit
        for part in _parts(lefts):
            for place in targets:
                least = min(least, before + self._seconds(place, part, least - before))
        return least

    def _seconds(self, place: int, lefts: Sequence[int], limit: float) -> float:
        """Return the least seconds with a switch to the layout at `place`, when one of these numbers is left.

        Infinite where none is below `limit`.
        """
        moments, moved, means, rest = self.course.when(lefts)
        after = evenly(self.layouts[place], means, rest, lefts)
        least = math.inf
        for moment, of_left, seconds in zip(moments, moved, after, strict=True):
            # What a switch costs takes as long to predict as all else, and it costs no less than nothing.
            if moment + seconds < min(limit, least):
                least = min(least, moment + self.switch_seconds(self.current, place, of_left) + seconds)
        return least


def _parts(lefts: Sequence[int]) -> Iterator[Sequence[int]]:
    return (lefts[begin : begin + _AT_ONCE] for begin in range(0, len(lefts), _AT_ONCE))
