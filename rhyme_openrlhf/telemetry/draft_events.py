"""Events of drafting: what engines decided to draft, and what drafts gain. Part of `telemetry/events.py`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from rhyme_openrlhf.telemetry.event_base import Event


@dataclass(frozen=True)
class DraftBudget(Event):
    """What an engine chose to draft in a step's rollout stage, by how many samples were running.

    One entry for each number of running samples: decode steps with that many, the mean draft length chosen (tokens a
    sample), the mean time of such a step in milliseconds, as predicted and as it was, and the mean number of accepted
    draft tokens of all samples, as expected and as it was (empty in records of older writers).
    """

    kind: ClassVar[str] = "draft_budget"
    step: int
    engine: int
    running: list[int]
    decode_steps: list[int]
    draft_length: list[float]
    predicted_ms: list[float]
    real_ms: list[float]
    expected_accepted: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class DraftGain(Event):
    """What drafts gain on an engine, as the run measured it by leaving them out now and then.

    Tokens per second with drafts / of an engine without speculation: the mean of the last `intervals` comparisons, and
    its 95 % interval. `drafting`: whether drafts are on. `within`: the ratio to the same engine without drafts, which
    is the same where the profile has no engine without speculation; 0 in records of older writers, whose ratio it is.
    """

    kind: ClassVar[str] = "draft_gain"
    step: int
    engine: int
    ratio: float
    low: float
    high: float
    intervals: int
    drafting: bool
    within: float = 0.0


class _Gain(Protocol):
    """A DraftGain, or what a reader took of one."""

    @property
    def ratio(self) -> float: ...

    @property
    def low(self) -> float: ...

    @property
    def high(self) -> float: ...

    @property
    def drafting(self) -> bool: ...

    @property
    def within(self) -> float: ...


@dataclass(frozen=True)
class EnginesGain:
    """What drafts gain on all engines: the means of the engines' figures and of their intervals' ends.

    `without`: tokens per second of engines without speculation / of these as they run now, with drafts or without.
    """

    ratio: float
    low: float
    high: float
    without: float

    @property
    def advice(self) -> str:
        """Return what to do for the next run where engines without speculation are faster, "" elsewhere."""
        if self.high >= 1 or self.without <= 1:
            return ""
        return (
            f"Engines without speculation would have {self.without:.2f} times the tokens per second: give the next run "
            "--no-histospec.enable."
        )


def engines_gain(found: Collection[_Gain]) -> EnginesGain | None:
    """Return the figure of these engines, one entry for each; None without any."""
    if not found:
        return None
    ratio, low, high = (sum(getattr(one, name) for one in found) / len(found) for name in ("ratio", "low", "high"))
    # Older records do not have `within`, which is then the ratio.
    without = [(1.0 if one.drafting else one.within or one.ratio) / one.ratio for one in found]
    return EnginesGain(ratio, low, high, sum(without) / len(found))
