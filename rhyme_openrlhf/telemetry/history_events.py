"""What history workers record: a part of the schema in telemetry/events.py, whose rules hold here too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rhyme_openrlhf.telemetry.event_base import Event


@dataclass(frozen=True)
class RankStability(Event):
    """Rank correlation (Spearman) of the prompts' median response lengths in this epoch and the one before.

    Then RhymeRL's figure 9 and table 2 (history/ranks.py): what became of the `responses` responses of this epoch in
    `groups` ranking groups predicted from the epoch before. `accurate`: same group or lower. Moved up: `not_last`,
    `within_reach`, `migrated`; these four shares add up to 1. `near_boundary`: moved up one group, into its shorter
    half. All None in records of older writers.
    """

    kind: ClassVar[str] = "rank_stability"
    epoch: int
    correlation: float
    prompts: int
    groups: int | None = None
    responses: int | None = None
    accurate: float | None = None
    near_boundary: float | None = None
    not_last: float | None = None
    within_reach: float | None = None
    migrated: float | None = None


@dataclass(frozen=True)
class HistoryState(Event):
    """A history worker has indexed its share of step `step`.

    `prompts` it knows (rounds of conversations counted singly); draft indexes in memory (`resident`) and on the disk
    alone (`spilled`); `memory_bytes` of indexes and responses, `disk_bytes` of spilled indexes. Since its last event,
    engines asked for indexes that were in memory (`hits`), that had to be read or built first (`late`), and for
    prompts without history (`misses`).
    """

    kind: ClassVar[str] = "history_state"
    step: int
    worker: int
    prompts: int
    resident: int
    spilled: int
    memory_bytes: int
    disk_bytes: int
    hits: int
    late: int
    misses: int
