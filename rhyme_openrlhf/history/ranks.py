"""How well last epoch's response lengths rank this epoch's responses (RhymeRL, section 6.1, figure 9, table 2). Pure.

A ranking group is an equal share of the responses in order of length. Predicted: a response's group if all of its
prompt's responses had the median length of the prompt's last rollout. Real: its group by its own length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.history.shard import EpochLengths

# Figure 9 has 8 groups, table 2 has 8 and 16.
GROUPS = 8
# RhymeRL, section 6.3: what HistoPipe migrates are responses within the last 10 % of their group that are longer than
# 1.1 times the longest historical length in it. (There the factor can also grow with the lengths; this is its floor.)
LAST_SHARE = 0.1
REACH = 1.1


@dataclass(frozen=True)
class RankChange:
    """Shares (0 to 1) of an epoch's responses, by what became of their predicted group.

    `accurate`: they are in the same group or in a lower one. The others moved up; they are, in table 2's order,
    `not_last` (not among the longest tenth of their predicted group), `within_reach` (at most 1.1 times the longest
    median in it) or `migrated`: these four add up to 1. `near_boundary` (figure 9's upper bars): moved up by one group
    only, and into its shorter half.
    """

    groups: int
    responses: int
    accurate: float
    near_boundary: float
    not_last: float
    within_reach: float
    migrated: float


def rank_change(epoch: EpochLengths, groups: int = GROUPS) -> RankChange | None:
    """What became of the predicted groups in an epoch; None without a prompt that has a rollout before it.

    Prompts are divided into groups of as equal numbers as there are, and a real group has as many responses as the
    predicted one: so a prediction that is right throughout changes no group, whatever does not divide evenly. Of equal
    lengths at a boundary none has moved up.
    """
    prompts, responses = epoch.before.size, epoch.lengths.size
    if not prompts or not responses:
        return None
    prompt_groups = np.empty(prompts, dtype=np.int64)
    prompt_groups[np.argsort(epoch.before, kind="stable")] = np.arange(prompts) * groups // prompts
    predicted = np.repeat(prompt_groups, epoch.counts)
    ends = np.cumsum(np.bincount(predicted, minlength=groups))
    ordered = np.sort(epoch.lengths)
    # The longest response of each real group; an empty group has the one before's, so nothing falls into it.
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
    """Spearman's correlation of the prompts' median lengths before and in the epoch; None where it is undefined.

    Undefined: fewer than two prompts, or medians that are all equal.
    """
    with_responses = epoch.counts > 0
    parts = np.split(epoch.lengths, np.cumsum(epoch.counts)[:-1]) if epoch.counts.size else []
    after = np.array([np.median(part) for part in parts if part.size])
    first, second = _ranks(epoch.before[with_responses]), _ranks(after)
    if first.size < 2 or not first.std() or not second.std():
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 0; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[inverse]


def together(shares: list[EpochLengths]) -> EpochLengths:
    """The prompts of all workers."""
    return EpochLengths(
        np.concatenate([share.before for share in shares]),
        np.concatenate([share.counts for share in shares]),
        np.concatenate([share.lengths for share in shares]),
    )
