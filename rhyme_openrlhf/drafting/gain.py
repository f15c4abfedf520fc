"""The gain of drafts, measured by the run itself: now and then a few decode steps leave drafts out.

There are two comparisons:
- **Within the engine**: with drafts against the same engine without. It decides whether the engine drafts.
- **Against an engine without speculation**, which may be faster than this one without drafts, by a factor that a
  profile knows (latency/predictor.py). It is what drafts gain a user; where they lose, one sentence says so. A running
  engine cannot become such an engine, because that one has another model runner.

Before there are enough comparisons there is an **estimate**. It is the time that the same tokens take without drafts,
by the step times that plan drafts, over the time that the steps took.

An engine's tokens per second in an interval without drafts are compared with those of as many steps just before and
just after, because its load changes all the time. The figure is the geometric mean of the last intervals, with its
spread. Where drafts make the engine slower, they are switched off. From then on they are tried in the intervals, and
come back when they pay.

Invariants: pure; at most `share` of the steps are in intervals. Only whole stretches of steps that follow each other,
with about as many samples, are compared. A switch needs the evidence of FEWEST intervals since the last switch, whose
spread lies wholly on one side of no gain.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

# Steps of an interval: with fewer a single slow step decides, with more the load has changed meanwhile.
INTERVAL_STEPS = 4
# Intervals that count: at a hundredth of the steps some 50,000 of them.
KEPT = 128
FEWEST = 8
# Half the width of the interval that switches, in standard errors. It is wide because it is looked at often.
SWITCHING_WIDTH = 3.5
# Samples running before and after an interval may differ by this share.
ALIKE = 0.2
# The estimate is a moving mean over this number of steps with drafts, and known from the fewest on.
ESTIMATED_STEPS, FEWEST_ESTIMATED = 512, 32
# The stretches of steps that are compared: before an interval, inside it, after it.
INSIDE = 1


@dataclass(frozen=True)
class Gain:
    """Tokens per second with drafts / of an engine without speculation; `low` to `high` is a 95 % interval.

    `intervals`: comparisons; with 0 of them, these three and `within` are 0. `estimate`: the ratio by step times, 0
    where it is not known. `drafting`: whether drafts are on; `within`: the ratio to this engine without drafts,
    which is the same where nothing is known of an engine without speculation.
    """

    ratio: float
    low: float
    high: float
    intervals: int
    drafting: bool
    within: float
    estimate: float = 0.0


@dataclass
class _Stretch:
    """Some steps in a row."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    running: int = 0
    log_overhead: float = 0.0

    def add(self, running: int, tokens: int, seconds: float, overhead: float) -> None:
        self.steps += 1
        self.tokens += tokens
        self.seconds += seconds
        self.running += running
        self.log_overhead += math.log(overhead)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Ticket(NamedTuple):
    """A decode step that is about to be: its number, and whether it is to have drafts."""

    number: int
    drafts: bool


class GainMeter:
    """The comparisons of one engine."""

    def __init__(self, share: float, settling: int = 0) -> None:
        """`share` of the decode steps, 0 to 0.3, are given to intervals; 0: none, and drafting is always on.

        `settling`: steps after an interval that are not compared, because what they do is still the interval's.
        """
        self._drafting = True
        self._settling = settling
        # Of each comparison within the engine the logarithm, and that of the overhead of speculation meanwhile.
        self._logs: deque[float] = deque(maxlen=KEPT)
        self._overheads: deque[float] = deque(maxlen=KEPT)
        # Whether it was said that an engine without speculation is faster.
        self._said_slower = False
        # Steps of a cycle, the last of which are those before, in and after an interval.
        self._period = round(INTERVAL_STEPS / share) if share else 0
        self._asked = 0
        self._cycle = 0
        self._stretches = (_Stretch(), _Stretch(), _Stretch())
        # Of steps with drafts: how many there were, moving means of their seconds, and of those without drafts.
        self._estimated, self._with, self._without = 0, 0.0, 0.0

    def stop(self) -> None:
        """Leave drafts out of every step from now on, and compare nothing."""
        self._switch(False)
        self._period = 0

    def ask(self) -> Ticket:
        """Return the ticket of the next decode step."""
        number, self._asked = self._asked, self._asked + 1
        in_interval = self._period > 0 and self._stretch_of(number) == INSIDE
        return Ticket(number, self._drafting != in_interval)

    def drafts_soon(self, steps: int) -> bool:
        """Return whether one of the next `steps` tickets is to have drafts, as far as is known now."""
        if not self._period:
            return self._drafting
        numbers = range(self._asked, self._asked + steps)
        return any(self._drafting != (self._stretch_of(number) == INSIDE) for number in numbers)

    def step(self, number: int, running: int, tokens: int, seconds: float, overhead: float = 1.0) -> str:
        """Compare a step: its ticket's `number`, samples `running`, `tokens` that it gave and `seconds` that it took.

        `overhead`: how many times as long such a step takes here without drafts as in an engine without speculation.
        Steps come in order, but some may be missing. Returns "" or, where drafting was switched by what it said, or is
        found to be slower than an engine without speculation, one sentence with the reason.
        """
        stretch = self._stretch_of(number) if self._period else None
        if stretch is None:
            return ""
        cycle = number // self._period
        if cycle != self._cycle:
            self._cycle, self._stretches = cycle, (_Stretch(), _Stretch(), _Stretch())
        self._stretches[stretch].add(running, tokens, seconds, overhead)
        if number % self._period < self._period - 1 or not self._compare():
            return ""
        return self._judge()

    def expect(self, seconds: float, without: float) -> None:
        """Note that a step with drafts took `seconds`, and that without drafts its tokens take `without`."""
        self._estimated += 1
        weight = 1 / min(self._estimated, ESTIMATED_STEPS)
        self._with += weight * (seconds - self._with)
        self._without += weight * (without - self._without)

    def now(self) -> Gain | None:
        """Return the figures; None before there are two comparisons or an estimate."""
        estimate = self._without / self._with if self._estimated >= FEWEST_ESTIMATED and self._with > 0 else 0.0
        if len(self._logs) < 2:
            return Gain(0.0, 0.0, 0.0, 0, self._drafting, 0.0, estimate) if estimate else None
        width = half_width(len(self._logs))
        mean, low, high = self._against_without(width)
        return Gain(mean, low, high, len(self._logs), self._drafting, self._within(width)[0], estimate)

    def _within(self, width: float) -> tuple[float, float, float]:
        return _interval(self._logs, width)

    def _against_without(self, width: float) -> tuple[float, float, float]:
        return _interval([log - overhead for log, overhead in zip(self._logs, self._overheads, strict=True)], width)

    def _stretch_of(self, number: int) -> int | None:
        place = number % self._period - (self._period - 3 * INTERVAL_STEPS - self._settling)
        after = place - (INSIDE + 1) * INTERVAL_STEPS
        if 0 <= after < self._settling:
            return None
        if after >= 0:
            place -= self._settling
        return place // INTERVAL_STEPS if place >= 0 else None

    def _compare(self) -> bool:
        before, inside, after = self._stretches
        if any(part.steps < INTERVAL_STEPS or not part.tokens or part.seconds <= 0 for part in self._stretches):
            return False
        if abs(after.running - before.running) > ALIKE * before.running:
            return False
        usual = (math.log(before.rate) + math.log(after.rate)) / 2
        off = usual - math.log(inside.rate)
        self._logs.append(off if self._drafting else -off)
        self._overheads.append(sum(part.log_overhead / part.steps for part in self._stretches) / len(self._stretches))
        return True

    def _judge(self) -> str:
        found = self.now()
        if found is None or found.intervals < FEWEST:
            return ""
        ratio, at_least, at_most = self._within(half_width(found.intervals))
        _, low, high = self._within(SWITCHING_WIDTH)
        words = f"{ratio:.2f} times the tokens per second (95 %: {at_least:.2f} to {at_most:.2f})"
        if self._drafting and high < 1:
            self._switch(False)
            return f"drafting is switched off: with it this engine has {words}; it is tried again now and then"
        if not self._drafting and low > 1:
            self._switch(True)
            return f"drafting is switched on again: with it this engine has {words}"
        return self._slower(found) if any(self._overheads) else ""

    def _switch(self, drafting: bool) -> None:
        self._drafting = drafting
        self._logs.clear()
        self._overheads.clear()

    def _slower(self, found: Gain) -> str:
        """Return the sentence that an engine without speculation is faster: once, until that changes."""
        _, low, high = self._against_without(SWITCHING_WIDTH)
        said, self._said_slower = self._said_slower, (self._said_slower or high < 1) and low <= 1
        if said or not self._said_slower:
            return ""
        return (
            f"an engine without speculation (--no-histospec.enable) has {1 / found.ratio:.2f} times the tokens per "
            f"second of this one with drafts (95 %: {1 / found.high:.2f} to {1 / found.low:.2f}), at today's acceptance"
        )


def half_width(comparisons: int) -> float:
    """Return half the width of the 95 % interval of the mean of two comparisons or more, in standard errors.

    Student's t, because few comparisons say little of their own spread: by table for two and three, else by its
    expansion around the normal distribution, which is within 4 %.
    """
    freedom = comparisons - 1
    return {1: 12.71, 2: 4.30}.get(freedom) or 1.96 + 2.37 / freedom + 2.82 / freedom**2


def _interval(logs: Collection[float], width: float) -> tuple[float, float, float]:
    """Return the geometric mean, and the bounds `width` standard errors below and above it."""
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - width * error), math.exp(mean + width * error)
