"""Which engine waits, for what, since when: lanes of the timeline put into words. Pure.

Here a wait is any time without anything to run in the shown steps, also between two rollouts; the bubble fraction
counts only what lies within rollouts. What is waited for is as `telemetry/metrics.py` defines it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rhyme_openrlhf.api.read.timeline import Lane, LaneInterval
from rhyme_openrlhf.telemetry.metrics import UNEXPLAINED
from rhyme_openrlhf.webui.figures.drawing.bubbles import NAMES, WAITS
from rhyme_openrlhf.webui.site import text

GENERATE = "generate"
# Two waits this close are one: engines note their states one after the other.
TOGETHER_SECONDS = 0.001
# Causes that are named in a sentence; the rest are crumbs.
NAMED_CAUSES = 3


@dataclass(frozen=True)
class Wait:
    """One engine over the shown steps. `seconds`: without anything to run, of `span` seconds that it reported."""

    engine: int
    seconds: float
    span: float
    by_cause: Mapping[str, float]
    longest: float
    longest_cause: str
    longest_since: float

    @property
    def share(self) -> float | None:
        """Of its time."""
        return text.share(self.seconds, self.span)

    @property
    def cause(self) -> str:
        """What it waited for most; empty where it never waited."""
        return max(self.by_cause, key=lambda one: self.by_cause[one], default="")

    @property
    def words(self) -> str:
        """The cause as a clause."""
        return WAITS.get(self.cause, "")


def lane_state(interval: LaneInterval) -> str:
    """GENERATE, or what the engine waits for: a key of `palette.LANES`."""
    if interval.state == GENERATE:
        return GENERATE
    cause = (interval.cause or UNEXPLAINED) if interval.state == "idle" else interval.state
    return cause if cause in WAITS else UNEXPLAINED


def waits(lanes: Iterable[Lane]) -> list[Wait]:
    """One for each lane that has intervals, the longest in all first."""
    found = [_wait(lane) for lane in lanes if lane.intervals]
    return sorted(found, key=lambda one: (-one.seconds, one.engine))


def _wait(lane: Lane) -> Wait:
    by_cause: dict[str, float] = defaultdict(float)
    longest, longest_cause, longest_since = 0.0, "", 0.0
    since, until, current = 0.0, 0.0, ""
    for one in lane.intervals:
        state = lane_state(one)
        if state == GENERATE:
            current = ""
            continue
        by_cause[state] += one.end - one.start
        if state != current or one.start - until > TOGETHER_SECONDS:
            since, current = one.start, state
        until = one.end
        if until - since > longest:
            longest, longest_cause, longest_since = until - since, state, since
    span = max(one.end for one in lane.intervals) - min(one.start for one in lane.intervals)
    return Wait(lane.engine, sum(by_cause.values()), span, dict(by_cause), longest, longest_cause, longest_since)


def answer(found: Sequence[Wait], first: int, last: int, engines: int) -> list[str]:
    """The page's question answered in sentences. `found`: worst first; `engines`: how many there are in all."""
    if not found:
        return []
    worst = found[0]
    steps = text.span(first, last)
    if worst.seconds == 0:
        return [f"In {steps}, no engine that is shown had to wait."]
    sentences = [
        f"In {steps}, engine {worst.engine} waited {text.duration(worst.seconds)} "
        f"({text.percent(worst.share, 0)} of its time), mostly {worst.words} "
        f"({text.duration(worst.by_cause[worst.cause])})."
    ]
    if len(found) > 1:
        sentences[0] = sentences[0].replace(" waited ", " waited longest: ", 1)
    since = f"since {text.clock(worst.longest_since)}"
    sentences.append(
        f"Its longest wait in one piece: {text.duration(worst.longest)}, {since}, {WAITS[worst.longest_cause]}."
    )
    if len(found) > 1:
        sentences.append(_together(found, engines))
    return sentences


def _together(found: Sequence[Wait], engines: int) -> str:
    span = sum(one.span for one in found)
    total: dict[str, float] = defaultdict(float)
    for one in found:
        for cause, seconds in one.by_cause.items():
            total[cause] += seconds
    ordered = sorted(total.items(), key=lambda one: -one[1])[:NAMED_CAUSES]
    parts = ", ".join(
        f"{NAMES[cause].lower()} {text.percent(text.share(seconds, span), 0)}" for cause, seconds in ordered
    )
    who = f"the {engines} engines" if len(found) == engines else f"the {len(found)} engines shown (of {engines})"
    share = text.percent(text.share(sum(total.values()), span), 0)
    return f"Over these steps, training included, {who} together had nothing to run for {share} of their time: {parts}."
