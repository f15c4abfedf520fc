"""One engine's time in the streaming pipeline: states, and causes that are known when the engine becomes idle. Pure.

Where steps overlap, a stage's borders do not tell why an engine was idle (`timeline.py`); the engine itself does.

Invariant: the intervals that were taken are contiguous from the first moment to the last border, whatever happened in
between, so that an engine's states add up to wall time (but for times in which its devices are another layout's); what
is behind the border is handed out later.
"""

from __future__ import annotations

from rhyme_openrlhf.engine.actor_parts.timeline import ELSEWHERE, EngineTimeline, TimelineInterval


class CausedTimeline(EngineTimeline):
    """Starts idle at `now`, because of the trainer: nothing has been handed to the engine yet."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self._cause = "trainer"
        self._intervals: list[TimelineInterval] = []

    def enter(self, state: str, now: float, weight_version: int) -> None:
        """The engine is in `state` from `now` on; the cause of idle time is the last one given."""
        if state != self._state or weight_version != self._version:
            self._cut(now)
            self._state, self._version = state, weight_version

    def because(self, cause: str, now: float) -> None:
        """Idle time from `now` on, running or to come, is for this cause."""
        if cause != self._cause and self._state == "idle":
            self._cut(now)
        self._cause = cause

    def _cut(self, now: float) -> None:
        if now <= self._since:
            return
        if self._state != ELSEWHERE:
            causes = {"idle": self._cause, "sync": "sync", "switch": "switch"}
            self._intervals.append(
                TimelineInterval(self._state, self._since, now, causes.get(self._state, ""), self._version)
            )
        self._since = now

    def take(self, rollout_start: float, rollout_end: float) -> list[TimelineInterval]:
        """Everything up to `rollout_end` that was not taken yet; an interval over the border is divided by it."""
        self._cut(max(rollout_end, self._since))
        taken = [_until(interval, rollout_end) for interval in self._intervals if interval.start < rollout_end]
        self._intervals = [_from(interval, rollout_end) for interval in self._intervals if interval.end > rollout_end]
        return taken


def _until(interval: TimelineInterval, end: float) -> TimelineInterval:
    return TimelineInterval(
        interval.state, interval.start, min(interval.end, end), interval.cause, interval.weight_version
    )


def _from(interval: TimelineInterval, start: float) -> TimelineInterval:
    return TimelineInterval(
        interval.state, max(interval.start, start), interval.end, interval.cause, interval.weight_version
    )
