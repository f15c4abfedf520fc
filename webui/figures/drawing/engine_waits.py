"""Sentences that say which engine waits, for what and since when, made from the lanes of the timeline. Pure.

A wait is any time in the shown steps in which an engine has nothing to run, also between two rollouts. The bubble
fraction counts only waits within rollouts. `telemetry/metrics.py` defines the causes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rhyme_openrlhf.api.read.timeline import Lane, LaneInterval
from rhyme_openrlhf.telemetry.metrics import UNEXPLAINED
from rhyme_openrlhf.webui.site import text

GENERATE = "generate"
# The state of an engine with nothing to run, as the end of a sentence "... mostly".
WAITS: dict[str, str] = {
    "tail": "waiting for the others' tail",
    "weights": "waiting for its first request",
    "sync": "loading weights",
    "switch": "changing its layout",
    "trainer": "waiting for the trainer",
    "unexplained": "without a reported cause",
}
# The same states as names in a legend.
NAMES: dict[str, str] = {
    "generate": "Generating",
    "tail": "Others' tail",
    "weights": "First request",
    "sync": "Loading weights",
    "switch": "Changing layout",
    "trainer": "Waiting for trainer",
    "unexplained": "No cause given",
}
# Waits less than this apart count as one wait, because engines record their states one after the other.
TOGETHER_SECONDS = 0.001
# Number of causes that a sentence names; the others are small.
NAMED_CAUSES = 3


@dataclass(frozen=True)
class Wait:
    """Waiting time of one engine over the shown steps.

    `seconds`: time without anything to run; `span`: all the time that the engine reported.
    """

    engine: int
    seconds: float
    span: float
    by_cause: Mapping[str, float]
    longest: float
    longest_cause: str
    longest_since: float

    @property
    def share(self) -> float | None:
        """Share of the engine's time that it waited."""
        return text.share(self.seconds, self.span)

    @property
    def cause(self) -> str:
        """The cause that the engine waited for longest, or "" if it never waited."""
        return max(self.by_cause, key=lambda one: self.by_cause[one], default="")

    @property
    def words(self) -> str:
        """The cause as a clause of a sentence."""
        return WAITS.get(self.cause, "")


def lane_state(interval: LaneInterval) -> str:
    """Return GENERATE, or the cause that the engine waits for: a key of `palette.LANES`."""
    if interval.state == GENERATE:
        return GENERATE
    cause = (interval.cause or UNEXPLAINED) if interval.state == "idle" else interval.state
    return cause if cause in WAITS else UNEXPLAINED


def waits(lanes: Iterable[Lane]) -> list[Wait]:
    """Return the waits of each lane that has intervals, the longest total wait first."""
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
    """Answer the page's question in sentences. `found`: the longest wait first; `engines`: the run's number of
    engines.
    """
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
