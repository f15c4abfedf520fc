"""Which running samples are too long for their rank group, and where they go (RhymeRL 6.3).

A sample is an outlier when it is among the last alpha of its rank group's samples that still run, and longer than beta
times the longest historical response of the rank group. beta follows how much responses grew from one epoch to the
next. Where an outlier goes, the paper says in words only ("groups with short rollout lengths are preferentially
intra-step migrated"): ours goes to an engine of a longer rank group for as long as one of those still generates in the
same step, and to the next step if none does.

Invariants: no sample within reach of its rank group's history is an outlier; at most alpha of a rank group's samples,
rounded up, ever are; a destination is never an engine of the sample's own rank group.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

# The paper's values (6.3). alpha: share of a rank group's samples; the floor of beta; the percentile that beta is.
ALPHA = 0.10
BETA_FLOOR = 1.1
BETA_PERCENTILE = 75
# 0.1 * 30 is a little more than 3 in floating point: a share that is whole must not be rounded up.
_ROUNDING = 1e-9


def beta(growth: Sequence[tuple[float, float]], floor: float = BETA_FLOOR) -> float:
    """The factor from (length last epoch, length this epoch) of the prompts: their growth's 75th percentile.

    At least `floor`, which is also the answer where nothing is known. Prompts without a length last epoch do not count.
    """
    rates = [now / last for last, now in growth if last > 0]
    return max(floor, float(np.percentile(rates, BETA_PERCENTILE))) if rates else floor


class Growth:
    """How much each prompt's responses grew from one epoch to the next, the newest of each prompt: what `beta` asks."""

    def __init__(self) -> None:
        self._of_epoch: dict[int, dict[Hashable, tuple[float, float]]] = {}
        self._known: tuple[float, float] | None = None

    def note(self, epoch: int, prompt: Hashable, before: float | None, now: float) -> None:
        """Note the median lengths of a prompt's responses, of its last epoch (None: not known) and of `epoch`."""
        self._known = None
        self._of_epoch.pop(epoch - 2, None)
        if before is not None:
            self._of_epoch.setdefault(epoch, {})[prompt] = (before, now)

    def beta(self, floor: float = BETA_FLOOR) -> float:
        """Return the factor by which a response may be longer than its rank group's longest one ever was."""
        if self._known is None or self._known[0] != floor:
            newest = {prompt: pair for _, of in sorted(self._of_epoch.items()) for prompt, pair in of.items()}
            self._known = floor, beta(list(newest.values()), floor)
        return self._known[1]


def last_count(samples: int, alpha: float = ALPHA) -> int:
    """How many of a rank group's samples are its last share."""
    return math.ceil(samples * alpha - _ROUNDING)


def outliers(
    running: Mapping[int, int], samples: int, longest: float, factor: float, alpha: float = ALPHA
) -> list[int]:
    """The samples of one rank group that should leave it, longest first.

    `running`: response tokens so far of each sample that still runs; `samples`: all of the rank group's in this step;
    `longest`: its longest historical response; `factor`: beta.
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
    """Where an outlier goes: to an `engine` in the same step, or to the next `step` (engine None)."""

    kind: Literal["same_step", "next_step"]
    engine: int | None


class RunningEngines:
    """Engines in the order in which outliers go to them: thousands of engines have as many outliers, and to look at
    all of them for each would take seconds.
    """

    def __init__(self, engines: Iterable[RunningEngine]) -> None:
        self._known = {engine.engine: engine for engine in engines}
        self._by_rank_group: dict[int, list[RunningEngine]] = defaultdict(list)
        for engine in sorted(self._known.values(), key=_fewest):
            self._by_rank_group[engine.rank_group].append(engine)

    def put(self, engine: RunningEngine) -> None:
        """It is like this by now."""
        self.remove(engine.engine)
        self._known[engine.engine] = engine
        bisect.insort(self._by_rank_group[engine.rank_group], engine, key=_fewest)

    def remove(self, number: int) -> None:
        """It runs no samples of the step, if it ever did."""
        known = self._known.pop(number, None)
        if known is not None:
            of_rank_group = self._by_rank_group[known.rank_group]
            del of_rank_group[bisect.bisect_left(of_rank_group, _fewest(known), key=_fewest)]

    def first(self, context: int, rank_group: int, source: int | None) -> RunningEngine | None:
        """Of the engines of longer rank groups with room for so many tokens, but for `source`, the one that runs the
        fewest samples."""
        fitting = (
            next((e for e in engines if e.free_tokens >= context and e.engine != source), None)
            for other, engines in self._by_rank_group.items()
            if other > rank_group
        )
        return min((engine for engine in fitting if engine is not None), key=_fewest, default=None)


def _fewest(engine: RunningEngine) -> tuple[int, int]:
    return engine.running, engine.engine


def destination(context: int, rank_group: int, engines: RunningEngines, source: int | None = None) -> Destination:
    """Where an outlier of `rank_group` with `context` tokens goes.

    `engines`: those still running samples of the step, with the weights of the outlier's own engine `source`.
    """
    found = engines.first(context, rank_group, source)
    return Destination("next_step", None) if found is None else Destination("same_step", found.engine)
