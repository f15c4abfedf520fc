"""One engine's time as intervals, and why it was idle. Pure: times in, intervals out.

Bubbles (docs/architecture.md) are engine time in the rollout stage with nothing to run, always with a cause. Where
rollout stages follow each other, the stage's borders tell the cause (`EngineTimeline`). In the streaming pipeline,
where steps overlap, the engine itself tells it when it becomes idle (`CausedTimeline`).

Invariants:
- Intervals never overlap, and are handed out once.
- Intervals up to a border are contiguous, so an engine's states add up to wall time, except for times in which its
  devices are another layout's (ELSEWHERE).
- No interval crosses a requested border: the part after it is handed out later.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

# Not a state that is told: another engine's timeline has this time.
ELSEWHERE = "elsewhere"
# States of an engine with nothing to run, each with a cause; in the second it generates texts to draft from.
IDLE, REHEARSE = "idle", "rehearse"
BUBBLES = (IDLE, REHEARSE)


@dataclass(frozen=True)
class TimelineInterval:
    """The engine was in `state` ("generate", "idle", "rehearse", "sync", "switch") between two unix times."""

    state: str
    start: float
    end: float
    cause: str
    weight_version: int


class EngineTimeline:
    """Collects what an engine is doing; starts idle at `now`."""

    def __init__(self, now: float) -> None:
        self._state = IDLE
        self._since = now
        self._version = 0
        self._closed: list[tuple[str, float, float, int]] = []

    @property
    def state(self) -> str:
        """The engine's present state."""
        return self._state

    def enter(self, state: str, now: float, weight_version: int) -> None:
        """Note the state from `now` on. Entering the same state again only continues it."""
        if state == self._state and weight_version == self._version:
            return
        if now > self._since:
            self._closed.append((self._state, self._since, now, self._version))
        self._state, self._since, self._version = state, now, weight_version

    def because(self, cause: str, now: float) -> None:
        """Note why idle time from `now` on is idle: here the stage's borders tell."""

    def take(self, rollout_start: float, rollout_end: float) -> list[TimelineInterval]:
        """Return everything up to `rollout_end` that was not taken yet; the running state goes on from there.

        Idle time inside the stage is `tail` once the engine has generated in it (others still run). Before that it is
        `weights`: the engine waits for its first request of this version. Outside the stage the cause is `trainer`.
        """
        closed, self._closed = self._closed, []
        if rollout_end > self._since:
            closed.append((self._state, self._since, rollout_end, self._version))
            self._since = rollout_end
        intervals: list[TimelineInterval] = []
        generated = False
        for state, start, end, version in closed:
            if state == ELSEWHERE:
                continue
            if state not in BUBBLES:
                cause = "sync" if state == "sync" else ""
                intervals.append(TimelineInterval(state, start, end, cause, version))
                generated = generated or (state == "generate" and end > rollout_start)
                continue
            if start < rollout_start:
                outside = min(end, rollout_start)
                intervals.append(TimelineInterval(state, start, outside, "trainer", version))
                start = outside
            if end > start:
                intervals.append(TimelineInterval(state, start, end, "tail" if generated else "weights", version))
        return intervals


class CausedTimeline(EngineTimeline):
    """Starts idle at `now`, because of the trainer: nothing has been handed to the engine yet."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self._cause = "trainer"
        self._intervals: list[TimelineInterval] = []

    def enter(self, state: str, now: float, weight_version: int) -> None:
        """Note the state from `now` on; the cause of idle time is the last one given."""
        if state != self._state or weight_version != self._version:
            self._cut(now)
            self._state, self._version = state, weight_version

    def because(self, cause: str, now: float) -> None:
        """Note that idle time from `now` on, running or to come, is for this cause."""
        if cause != self._cause and self._state in BUBBLES:
            self._cut(now)
        self._cause = cause

    def _cut(self, now: float) -> None:
        if now <= self._since:
            return
        if self._state != ELSEWHERE:
            causes = dict.fromkeys(BUBBLES, self._cause) | {"sync": "sync", "switch": "switch"}
            cause = causes.get(self._state, "")
            self._intervals.append(TimelineInterval(self._state, self._since, now, cause, self._version))
        self._since = now

    def take(self, rollout_start: float, rollout_end: float) -> list[TimelineInterval]:
        """Return everything up to `rollout_end` that was not taken yet; the border divides an interval over it."""
        self._cut(max(rollout_end, self._since))
        before = [one for one in self._intervals if one.start < rollout_end]
        after = [one for one in self._intervals if one.end > rollout_end]
        self._intervals = [dataclasses.replace(one, start=max(one.start, rollout_end)) for one in after]
        return [dataclasses.replace(one, end=min(one.end, rollout_end)) for one in before]
