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

import math
from collections.abc import Mapping, Sequence
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


def destination(context: int, rank_group: int, engines: Sequence[RunningEngine]) -> Destination:
    """Where an outlier of `rank_group` with `context` tokens goes; `engines`: those still running samples of the step.

    Of the engines of longer rank groups with room for it, the one that runs the fewest samples.
    """
    fitting = [e for e in engines if e.rank_group > rank_group and e.free_tokens >= context]
    if not fitting:
        return Destination("next_step", None)
    return Destination("same_step", min(fitting, key=lambda e: (e.running, e.engine)).engine)
