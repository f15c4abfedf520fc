"""How much slower or faster the steps of now are than the profile says: learnt while the run goes.

Another job on the machine, a clock that throttles, engines that share a machine while the profile was measured on one
alone: they scale all step times, from one rollout to the next. So there is a factor for all steps, which moves fast,
and beside it one for each size of step (what the profile has wrong about it), which moves slowly. A size that was not
seen for a while then follows what the others say.

Averages are of measured / predicted itself, not of its logarithm: tokens a second are made of the mean step, and step
times have a long tail, so that their geometric mean lies below it.

Invariants: without observations the factor is 1; one observation moves it by at most a share that its RATEs give,
whatever was measured (a step that an interrupt stretched hundredfold says nothing about the next one); it stays within
the bounds.
"""

from __future__ import annotations

from collections.abc import Callable

# What one observation weighs. Of the factor for all much: some two steps are remembered. By replay of two runs' steps,
# whose times wander, the error of single steps is least with 0.4 to 0.5, and that of a rollout's means falls
# further (docs/benchmarks.md); what is the same for all draft lengths changes no choice between them. Of its size's own
# little, a size's first ones more: 1 / FIRST, 1 / (FIRST + 2), ...
RATE, OWN_RATE = 0.4, 0.02
FIRST = 10
# A step is seldom off by more for a reason that lasts: beyond, an observation counts as this.
MOST_AT_ONCE = 2.0
# A profile that is further off is of another machine.
BOUND = 8.0

Size = tuple[int, int]


class Correction:
    """Moving averages of measured / predicted."""

    def __init__(self, rows: Callable[[int, int], int] = lambda running, drafts: running + drafts) -> None:
        """`rows`: tokens that the engine computes in a step of so many samples and draft tokens, with its padding."""
        self._rows = rows
        self._all = 1.0
        # Of each size its own factor beside that of all, and how often it was seen.
        self._own: dict[Size, tuple[float, int]] = {}
        # Of the sizes that were seen lately, for those that never were.
        self._usual_own = 1.0
        # The products of those that were asked for since the last observation.
        self._factors: dict[Size, float] = {}
        self._usual = 1.0

    def observe(self, running: int, drafts: int, predicted: float, measured: float) -> None:
        """A step of this size was predicted (without correction) and took so long, both in seconds above 0."""
        size = self.size_of(running, drafts)
        own, seen = self._own.get(size, (1.0, 0))
        off = measured / (predicted * self._all * own)
        off = max(1 / MOST_AT_ONCE, min(MOST_AT_ONCE, off)) - 1
        self._all = _bounded(self._all * (1 + off * RATE))
        own *= 1 + off * max(OWN_RATE, 1 / (FIRST + 2 * seen))
        self._own[size] = (_bounded(own), seen + 1)
        self._usual_own += RATE * (own - self._usual_own)
        self._usual = _bounded(self._all * self._usual_own)
        self._factors.clear()

    @property
    def observed(self) -> bool:
        """Whether any step was; before, all factors are 1."""
        return bool(self._own)

    def size_of(self, running: int, drafts: int) -> Size:
        """Steps of one size: samples, and rows if any draft is verified, to the power of two.

        All draft counts of one stair are one size: what their steps were measured to take differs by chance, and would
        end drafts within a stair, where the next token costs nothing.
        """
        return running.bit_length(), self._rows(running, drafts).bit_length() if drafts else 0

    def factor(self, running: int, drafts: int) -> float:
        """What to multiply the profile's prediction by."""
        return self.factor_of(self.size_of(running, drafts))

    def factor_of(self, size: Size) -> float:
        """The same, of a step of that size."""
        factor = self._factors.get(size)
        if factor is None:
            own = self._own.get(size)
            factor = self._factors[size] = self._usual if own is None else _bounded(self._all * own[0])
        return factor


def _bounded(factor: float) -> float:
    return max(1 / BOUND, min(BOUND, factor))
