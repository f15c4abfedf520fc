"""Tier 1: the prompts of a step, ranked by how long their last responses were, in rank groups (RhymeRL 6.2, 6.4).

A rank group is an equal share of the ranked prompts. In odd steps the rank groups go over the engines from short to
long, in even steps from long to short. So an engine with long responses in one step has short ones in the next.

Invariants:
- Each prompt is in exactly one rank group; their sizes differ by at most one.
- No prompt of a rank group has a longer history than one of the next.
- Prompts without history are in the middle of the ranking.
- Equal lengths keep the order of the prompts, so the same input gives the same groups.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def historical_length(lengths: Sequence[int]) -> float | None:
    """Return a prompt's historical length: the median of its last responses (RhymeRL 6.2); None if never seen."""
    return float(statistics.median(lengths)) if lengths else None


@dataclass(frozen=True)
class RankGroup:
    """Prompts of one length class.

    `prompts`: places in the step's list, ascending by length. `mean_length`: mean of their historical lengths, the
    representative length of figure 12. `longest`: the longest of their historical lengths. Both in tokens. For prompts
    never seen, `length_prior.py` has both.
    """

    prompts: tuple[int, ...]
    mean_length: float
    longest: float


def rank_groups(
    lengths: Sequence[float | None], groups: int, limits: Sequence[float | None] = ()
) -> tuple[RankGroup, ...]:
    """Return the step's prompts in `groups` rank groups from short to long, fewer if there are fewer prompts.

    `lengths`: historical length of each prompt, or the one to expect; None counts as the median length. `limits`: what
    `longest` is the longest of, where that is not the lengths.
    Returns nothing if no prompt has a history: then prompts are placed `by_load`, as RhymeRL does in the first epoch.
    Raises ValueError for `groups` below 1.
    """
    if groups < 1:
        raise ValueError(f"there must be at least one rank group, got {groups}")
    known = [length for length in lengths if length is not None]
    if not known:
        return ()
    middle = statistics.median(known)
    filled = np.array([middle if length is None else length for length in lengths], dtype=np.float64)
    parts = np.array_split(np.argsort(filled, kind="stable"), min(groups, len(lengths)))
    tops = filled if not limits else np.array([middle if top is None else top for top in limits], dtype=np.float64)
    return tuple(RankGroup(tuple(part.tolist()), float(filled[part].mean()), float(tops[part].max())) for part in parts)


def ascending(step: int) -> bool:
    """Return whether the rank groups go over the engines from short to long in this step (counted from 1)."""
    return step % 2 == 1


def engines_by_group(step: int, shares: Sequence[int]) -> list[range]:
    """Return the engines (places from 0) of each rank group, if rank group i has `shares[i]` of them.

    Reversing the order pairs the longest with the shortest. No other order makes the largest sum over two steps
    smaller.
    """
    order = range(len(shares)) if ascending(step) else range(len(shares) - 1, -1, -1)
    ranges = [range(0)] * len(shares)
    begin = 0
    for group in order:
        ranges[group] = range(begin, begin + shares[group])
        begin += shares[group]
    return ranges
