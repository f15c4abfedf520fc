"""Rank stability: how well last epoch's response lengths rank this epoch's (RhymeRL, section 6.1, figure 9, table 2).

A ranking group is an equal share of the responses in order of length.

- Predicted group of a response: its group if all of its prompt's responses had the median length of the prompt's last
  rollout.
- Real group of a response: its group by its own length.

All functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.history.shard import EpochLengths

# Figure 9 has 8 groups, table 2 has 8 and 16.
GROUPS = 8
# RhymeRL, section 6.3: HistoPipe migrates responses within the last 10 % of their group that are longer than 1.1 times
# the longest historical length in it. (In the paper, the factor can also grow with the lengths; 1.1 is its floor.)
LAST_SHARE = 0.1
REACH = 1.1


@dataclass(frozen=True)
class RankChange:
    """Shares (0 to 1) of an epoch's responses, by how their real group differs from their predicted one.

    The first four add up to 1. The last three of these moved up, and are given in table 2's order:

    - `accurate`: in the same group or in a lower one.
    - `not_last`: not among the longest tenth of their predicted group.
    - `within_reach`: at most 1.1 times the longest median in their predicted group.
    - `migrated`: longer than that.
    - `near_boundary` (figure 9's upper bars): moved up by one group only, and into its shorter half.
    """

    groups: int
    responses: int
    accurate: float
    near_boundary: float
    not_last: float
    within_reach: float
    migrated: float


def rank_change(epoch: EpochLengths, groups: int = GROUPS) -> RankChange | None:
    """Compare an epoch's real groups with the predicted ones; return None if no prompt has an earlier rollout.

    Prompts are divided into groups as equal in number as possible. A real group has as many responses as the predicted
    one. So a prediction that is right throughout changes no group, even where the numbers do not divide evenly. Equal
    lengths at a boundary count as not moved up.
    """
    prompts, responses = epoch.before.size, epoch.lengths.size
    if not prompts or not responses:
        return None
    prompt_groups = np.empty(prompts, dtype=np.int64)
    prompt_groups[np.argsort(epoch.before, kind="stable")] = np.arange(prompts) * groups // prompts
    predicted = np.repeat(prompt_groups, epoch.counts)
    ends = np.cumsum(np.bincount(predicted, minlength=groups))
    ordered = np.sort(epoch.lengths)
    # The longest response of each real group. An empty group takes the previous group's, so no response falls into it.
    longest = ordered[np.maximum(ends - 1, 0)]
    real = np.searchsorted(longest, epoch.lengths, side="left")
    higher = real > predicted

    begins = np.concatenate([[0], ends[:-1]])
    middle = ordered[np.clip((begins + ends - 1) // 2, 0, responses - 1)]
    near = higher & (real == predicted + 1) & (epoch.lengths <= middle[real])

    last = np.zeros(responses, dtype=bool)
    reach = np.zeros(groups)
    for group in np.unique(predicted):
        members = np.flatnonzero(predicted == group)
        order = members[np.argsort(epoch.lengths[members], kind="stable")]
        last[order[int(members.size * (1 - LAST_SHARE)) :]] = True
        reach[group] = REACH * epoch.before[prompt_groups == group].max()
    within = higher & last & (epoch.lengths <= reach[predicted])
    migrated = higher & last & ~within
    return RankChange(
        groups=groups,
        responses=responses,
        accurate=float(1 - higher.mean()),
        near_boundary=float(near.mean()),
        not_last=float((higher & ~last).mean()),
        within_reach=float(within.mean()),
        migrated=float(migrated.mean()),
    )


def rank_correlation(epoch: EpochLengths) -> float | None:
    """Return Spearman's correlation of the prompts' median lengths before and in the epoch; None if undefined.

    The correlation is undefined for fewer than two prompts, and for medians that are all equal.
    """
    with_responses = epoch.counts > 0
    parts = np.split(epoch.lengths, np.cumsum(epoch.counts)[:-1]) if epoch.counts.size else []
    after = np.array([np.median(part) for part in parts if part.size])
    first, second = _ranks(epoch.before[with_responses]), _ranks(after)
    if first.size < 2 or not first.std() or not second.std():
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ranks from 0; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[inverse]


def together(shares: list[EpochLengths]) -> EpochLengths:
    """Join the prompts of all workers."""
    return EpochLengths(
        np.concatenate([share.before for share in shares]),
        np.concatenate([share.counts for share in shares]),
        np.concatenate([share.lengths for share in shares]),
    )
