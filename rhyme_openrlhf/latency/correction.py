"""How much slower or faster the steps of now are than the profile says: learnt while the run goes.

Another job on the machine, a clock that throttles, a newer driver: they scale step times. The correction is a factor
for all steps and a finer one for each size of step, both moving averages of measured / predicted in logarithms, so
that twice as long and half as long weigh the same.

Invariants: without observations the factor is 1; one observation moves it by at most MOST_AT_ONCE, whatever was
measured (a step that an interrupt stretched hundredfold says nothing about the next one); it stays within the bounds.
"""

from __future__ import annotations

import math

# One observation's weight in the averages: some 16 steps are remembered, a part of a rollout, because engines that
# share a machine slow each other down from one moment to the next.
RATE = 0.06
# A step is seldom off by more for a reason that lasts: beyond, an observation counts as this.
MOST_AT_ONCE = math.log(2.0)
# A profile that is further off is of another machine.
BOUND = math.log(8.0)


Size = tuple[int, int]


def size_of(running: int, drafts: int) -> Size:
    """Steps of one size: samples and rows to the power of two."""
    return running.bit_length(), (running + drafts).bit_length()


class Correction:
    """Moving averages of log(measured / predicted)."""

    def __init__(self) -> None:
        self._all = 0.0
        self._by_size: dict[Size, float] = {}
        # Their exponentials, which are asked for far more often than they change.
        self._factor_of_all = 1.0
        self._factors: dict[Size, float] = {}

    def observe(self, running: int, drafts: int, predicted: float, measured: float) -> None:
        """A step of this size was predicted (without correction) and took so long, both in seconds above 0."""
        off = math.log(measured / predicted)
        size = size_of(running, drafts)
        self._by_size[size] = _moved(self._by_size.get(size, self._all), off)
        self._all = _moved(self._all, off)
        self._factors[size], self._factor_of_all = math.exp(self._by_size[size]), math.exp(self._all)

    def factor(self, running: int, drafts: int) -> float:
        """What to multiply the profile's prediction by."""
        return self.factor_of(size_of(running, drafts))

    def factor_of(self, size: Size) -> float:
        """The same, of a step of that size."""
        return self._factors.get(size, self._factor_of_all)


def _moved(before: float, off: float) -> float:
    step = max(-MOST_AT_ONCE, min(MOST_AT_ONCE, off - before))
    return max(-BOUND, min(BOUND, before + RATE * step))
