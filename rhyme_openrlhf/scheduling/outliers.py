"""Outliers: running samples that are too long for their rank group, and their destinations (RhymeRL 6.3).

A sample is an outlier if two things hold. It is among the last alpha of its rank group's samples that still run, and it
is longer than beta times the rank group's longest historical length. A prompt's historical length is the median of its
last responses (6.2), so one freak response does not hide the next. beta follows how much responses grew from one epoch
to the next.

The paper describes destinations in words only ("groups with short rollout lengths are preferentially intra-step
migrated"). Here an outlier goes to an engine of a longer rank group that still generates in the same step, and to the
next step if there is none.

Invariants:
- No sample within beta of its rank group's history is an outlier.
- At most alpha of a rank group's samples, rounded up, are outliers at a time.
- A destination is never an engine of the sample's own rank group.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

# The paper's values (6.3). alpha: share of a rank group's samples; the floor of beta; the percentile that beta is.
ALPHA = 0.10
BETA_FLOOR = 1.1
BETA_PERCENTILE = 75
# Between two looks at the engines. An outlier has to be found while it runs: with a small model, 100 tokens take a
# third of a second. With many engines looks are rarer, because a run's controller spends about a millisecond on each.
LOOK_SECONDS = 0.25
LOOK_SECONDS_PER_ENGINE = 0.004
# 0.1 * 30 is a little more than 3 in floating point: a share that is whole must not be rounded up.
_ROUNDING = 1e-9


def look_seconds(engines: int) -> float:
    """Return the seconds from one look for outliers to the next, in live and simulated runs."""
    return max(LOOK_SECONDS, engines * LOOK_SECONDS_PER_ENGINE)


def beta(growth: Iterable[tuple[float, float]], floor: float = BETA_FLOOR) -> float:
    """Return the 75th percentile of the prompts' growth, from (length last epoch, length this epoch) of each.

    The result is at least `floor`, also without data. Prompts without a length last epoch do not count.
    """
    rates = [now / last for last, now in growth if last > 0]
    return max(floor, float(np.percentile(rates, BETA_PERCENTILE))) if rates else floor


class Growth:
    """The newest growth of each prompt's responses from one epoch to the next, the input of `beta`."""

    def __init__(self) -> None:
        self._epoch = 0
        # By prompt: the epoch of its newest growth, and the median lengths before and in that epoch.
        self._noted: dict[Hashable, int] = {}
        self._newest: dict[Hashable, tuple[float, float]] = {}
        self._known: tuple[float, float] | None = None

    def note(self, epoch: int, prompt: Hashable, before: float | None, now: float) -> None:
        """Note the median lengths of a prompt's responses, of its last epoch (None: not known) and of `epoch`."""
        if epoch > self._epoch:
            self._epoch, self._known = epoch, None
            for old in [key for key, noted in self._noted.items() if noted < epoch - 1]:
                del self._noted[old], self._newest[old]
        if before is not None and epoch >= self._noted.get(prompt, 0):
            self._noted[prompt], self._newest[prompt], self._known = epoch, (before, now), None

    def beta(self, floor: float = BETA_FLOOR) -> float:
        """Return the factor by which a response may exceed its rank group's longest historical length."""
        if self._known is None or self._known[0] != floor:
            self._known = floor, beta(self._newest.values(), floor)
        return self._known[1]


def last_count(samples: int, alpha: float = ALPHA) -> int:
    """Return how many samples are the last share of a rank group of this many samples."""
    return math.ceil(samples * alpha - _ROUNDING)


def outliers(
    running: Mapping[int, int], samples: int, longest: float, factor: float, alpha: float = ALPHA
) -> list[int]:
    """Return the samples of one rank group that should leave it, longest first.

    `running`: response tokens so far of each sample that still runs; `samples`: number of the rank group's samples in
    this step; `longest`: its longest historical length; `factor`: beta.
    """
    if len(running) > last_count(samples, alpha):
        return []
    found = [sample for sample, length in running.items() if length > factor * longest]
    return sorted(found, key=lambda sample: (-running[sample], sample))


@dataclass(frozen=True)
class RunningEngine:
    """An engine that generates this step: its rank group, samples it runs, and tokens of KV cache it has free."""

    engine: int
    rank_group: int
    running: int
    free_tokens: int


@dataclass(frozen=True)
class Destination:
    """An outlier's way: to an `engine` in the same step, or to the next step (engine None)."""

    kind: Literal["same_step", "next_step"]
    engine: int | None


class RunningEngines:
    """The engines of a step in the order in which outliers go to them.

    The order is kept because thousands of engines have as many outliers: a search per outlier would take seconds.
    """

    def __init__(self, engines: Iterable[RunningEngine]) -> None:
        self._known = {engine.engine: engine for engine in engines}
        self._by_rank_group: dict[int, list[RunningEngine]] = defaultdict(list)
        for engine in sorted(self._known.values(), key=_fewest):
            self._by_rank_group[engine.rank_group].append(engine)

    def put(self, engine: RunningEngine) -> None:
        """Add an engine or replace what is known of it."""
        self.remove(engine.engine)
        self._known[engine.engine] = engine
        bisect.insort(self._by_rank_group[engine.rank_group], engine, key=_fewest)

    def remove(self, number: int) -> None:
        """Remove an engine that runs no samples of the step any more; unknown engines are ignored."""
        known = self._known.pop(number, None)
        if known is not None:
            of_rank_group = self._by_rank_group[known.rank_group]
            del of_rank_group[bisect.bisect_left(of_rank_group, _fewest(known), key=_fewest)]

    def first(self, context: int, rank_group: int, source: int | None) -> RunningEngine | None:
        """Return the engine with the fewest samples among those of longer rank groups with room for `context` tokens.

        `source` is never returned.
        """
        fitting = (
            next((e for e in engines if e.free_tokens >= context and e.engine != source), None)
            for other, engines in self._by_rank_group.items()
            if other > rank_group
        )
        return min((engine for engine in fitting if engine is not None), key=_fewest, default=None)


def _fewest(engine: RunningEngine) -> tuple[int, int]:
    return engine.running, engine.engine


def destination(context: int, rank_group: int, engines: RunningEngines, source: int | None = None) -> Destination:
    """Return where an outlier of `rank_group` with `context` tokens goes.

    `engines`: engines that still run samples of the step, with the same weights as the outlier's engine `source`.
    """
    found = engines.first(context, rank_group, source)
    return Destination("next_step", None) if found is None else Destination("same_step", found.engine)
