"""Tier 1: the prompts of a step, ranked by how long their last responses were, in rank groups (RhymeRL 6.2, 6.4).

A rank group is an equal share of the ranked prompts. In odd steps the rank groups go over the engines from the shortest
to the longest, in even steps from the longest to the shortest, so that an engine with long responses in one step has
short ones in the next.

Invariants: each prompt is in exactly one rank group; their sizes differ by at most one; no prompt of a rank group has a
longer history than one of the next; prompts without history stand in the middle of the ranking; equal lengths keep
the order of the prompts, so the same input gives the same groups.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LengthHistory:
    """A prompt's last rollout: `median` and `longest` of its response lengths in tokens."""

    median: float
    longest: float

    @staticmethod
    def of(lengths: Sequence[int]) -> LengthHistory | None:
        """Return the history of a prompt whose last responses had these lengths; None for a prompt never seen."""
        return LengthHistory(statistics.median(lengths), max(lengths)) if lengths else None


@dataclass(frozen=True)
class RankGroup:
    """Prompts of one length class.

    `prompts`: places in the step's list, ascending by length. `mean_length`: mean of their historical (median) lengths,
    the representative length of figure 12; `longest`: the longest historical response among them. Tokens.
    """

    prompts: tuple[int, ...]
    mean_length: float
    longest: float


def rank_groups(histories: Sequence[LengthHistory | None], groups: int) -> tuple[RankGroup, ...]:
    """The step's prompts in `groups` rank groups from short to long; fewer where there are fewer prompts.

    None stands for a prompt never seen: it counts as a prompt of the median length. Empty when no prompt has a history:
    then dispatch by load (`dispatch.py`), as RhymeRL does in the first epoch. Raises ValueError for `groups` below 1.
    """
    if groups < 1:
        raise ValueError(f"there must be at least one rank group, got {groups}")
    known = [history for history in histories if history is not None]
    if not known:
        return ()
    middle = statistics.median(history.median for history in known)
    medians = np.array([middle if history is None else history.median for history in histories], dtype=np.float64)
    longest = np.array([middle if history is None else history.longest for history in histories], dtype=np.float64)
    parts = np.array_split(np.argsort(medians, kind="stable"), min(groups, len(histories)))
    return tuple(
        RankGroup(tuple(part.tolist()), float(medians[part].mean()), float(longest[part].max())) for part in parts
    )


def ascending(step: int) -> bool:
    """Whether the rank groups go over the engines from short to long in this step (counted from 1)."""
    return step % 2 == 1


def engines_by_group(step: int, shares: Sequence[int]) -> list[range]:
    """The engines (places from 0) of each rank group, when rank group i has `shares[i]` of them.

    Turning the order round pairs the longest with the shortest, which makes the largest sum over two steps as small as
    any order can.
    """
    order = range(len(shares)) if ascending(step) else range(len(shares) - 1, -1, -1)
    ranges = [range(0)] * len(shares)
    begin = 0
    for group in order:
        ranges[group] = range(begin, begin + shares[group])
        begin += shares[group]
    return ranges
