"""The compiled course of a rollout stage (csrc/stage.cpp): arrays in, arrays out.

scheduling/stage_course.py explains the words. Arrays are ordered by group of samples, then by scenario, then by cut or
sample. All functions raise ValueError for arrays that do not fit together.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

_Wholes = NDArray[np.int64]
_Reals = NDArray[np.float64]

def classes(samples: int) -> _Wholes:
    """Return the numbers of running samples that are told apart, from `samples` down to 1."""

def by_engine(
    contexts: ArrayLike, remaining: ArrayLike, engine: ArrayLike, engines: int
) -> tuple[_Wholes, _Reals, _Wholes]:
    """Return each engine's tokens still to come behind zeros, its mean context, and its number of samples."""

def cut(
    rest: ArrayLike, sizes: ArrayLike, engines: int, contexts: ArrayLike, drafts_per_step: float
) -> tuple[_Wholes, _Wholes, _Wholes, _Wholes, _Wholes, _Wholes]:
    """Cut the rest of a stage where the number of running samples falls to the next class.

    Returns the tokens at the end of each cut and those between its ends. Then, for the cuts of all groups one behind
    the other: samples on the fullest engine, tokens of context in the middle of the cut (a row for each scenario), and
    draft tokens of a step. Last, how many cuts each group has.
    """

def mean_seconds(tokens: ArrayLike, steps: ArrayLike, tokens_per_step: float, counts: ArrayLike) -> _Reals:
    """Return the seconds of each group, the mean of the scenarios. `steps`: seconds of a step in each cut."""

def clocks(
    ends: ArrayLike, tokens: ArrayLike, steps: ArrayLike, tokens_per_step: float, counts: ArrayLike
) -> tuple[_Wholes, _Reals, float]:
    """Return tokens and seconds at the ends of the cuts, beginning with 0, and the mean end of the last sample.

    Behind a group's last cut its clock is infinite.
    """

def moments_of_ends(
    had: ArrayLike, clock: ArrayLike, counts: ArrayLike, engine: ArrayLike, remaining: ArrayLike
) -> _Reals:
    """Return when each sample ends in each scenario, by the clock of its engine."""

def mean_moments(ends: ArrayLike, order: ArrayLike, lefts: ArrayLike) -> _Reals:
    """Return when so many samples are left, the mean of the scenarios. `order`: samples as they end."""

def when_left(
    had: ArrayLike,
    clock: ArrayLike,
    engine: ArrayLike,
    contexts: ArrayLike,
    remaining: ArrayLike,
    order: ArrayLike,
    ends: ArrayLike,
    lefts: ArrayLike,
) -> tuple[list[list[int]], _Wholes, _Reals]:
    """Return, for each number of samples left: their usual contexts, tokens still to come behind zeros, mean contexts.

    Usual contexts are the means over the scenarios of contexts in ascending order.
    """

def scenarios_of(
    generated: ArrayLike,
    history: ArrayLike,
    lengths: ArrayLike,
    begins: ArrayLike,
    longest_allowed: int,
    scenarios: int,
    shift: int,
) -> _Wholes:
    """Return tokens still to come of each sample in each scenario, as `stage_course.by_history` explains.

    `history`: the number of each sample's history; `lengths`: all histories, each from its place in `begins` on.
    """
