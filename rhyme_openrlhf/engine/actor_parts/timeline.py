"""One engine's time as intervals, and why it was idle. Pure: times in, intervals out.

Bubbles (docs/architecture.md): engine time in the rollout stage with nothing to run, always with a cause.
Invariants: intervals are contiguous, but for times in which the engine's devices are another layout's (ELSEWHERE);
they never overlap, and are handed out once; an idle interval never crosses the border of the rollout stage.
"""

from __future__ import annotations

from dataclasses import dataclass

# Not a state that is told: another engine's timeline has this time.
ELSEWHERE = "elsewhere"


@dataclass(frozen=True)
class TimelineInterval:
    """The engine was in `state` ("generate", "idle", "sync", "switch") from `start` to `end` (unix seconds)."""

    state: str
    start: float
    end: float
    cause: str
    weight_version: int


class EngineTimeline:
    """Collects what an engine is doing; starts idle at `now`."""

    def __init__(self, now: float) -> None:
        self._state = "idle"
        self._since = now
        self._version = 0
        self._closed: list[tuple[str, float, float, int]] = []

    @property
    def state(self) -> str:
        """What the engine is doing."""
        return self._state

    def enter(self, state: str, now: float, weight_version: int) -> None:
        """The engine is in `state` from `now` on. Entering the same state again only continues it."""
        if state == self._state and weight_version == self._version:
            return
        if now > self._since:
            self._closed.append((self._state, self._since, now, self._version))
        self._state, self._since, self._version = state, now, weight_version

    def take(self, rollout_start: float, rollout_end: float) -> list[TimelineInterval]:
        """Everything up to `rollout_end` that was not taken yet; the running state goes on from there.

        Idle time inside the stage is `tail` once the engine has generated in it (others still run) and `weights`
        before that (it waits for its first request of this version); outside the stage the cause is `trainer`.
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
            if state != "idle":
                cause = "sync" if state == "sync" else ""
                intervals.append(TimelineInterval(state, start, end, cause, version))
                generated = generated or (state == "generate" and end > rollout_start)
                continue
            if start < rollout_start:
                outside = min(end, rollout_start)
                intervals.append(TimelineInterval("idle", start, outside, "trainer", version))
                start = outside
            if end > start:
                intervals.append(TimelineInterval("idle", start, end, "tail" if generated else "weights", version))
        return intervals
