"""Decode steps of one engine kind, one at a time or thousands at once.

For a number of running samples and of draft tokens, the step time is a piecewise linear curve over the context
(latency/step_model.py); while nothing finishes, the context grows by the same number of tokens each step. So the sum
over any number of steps is a few arithmetic series.

Invariants: `total` is the sum of `seconds` over the same steps, up to rounding; `steps_until` is the number of steps
whose `total` first reaches a time.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.latency.step_model import StepModel

# Where step times bend sharply Newton's method may creep: after so many tries (it usually needs four), halving.
NEWTON_TRIES = 8

# Bits of a context that count: all.
_EXACT = 62

# Values at the contexts, slopes behind each, and the contexts: one array is passed in half the time of three.
_Curve = NDArray[np.float64]


class StepTimes:
    """The step times of one profile; `beside`: seconds of every step that the profile does not have."""

    def __init__(self, profile: Profile, beside: float = 0.0) -> None:
        self._beside = beside
        self.model = StepModel(profile)
        # The model bends where a profiled point is, for whatever number of samples.
        contexts = sorted({0, *(point.context for point in profile.steps)})
        # One more, so that the line beyond the last point has two points to lie on.
        self._contexts = np.array([*contexts, 2 * contexts[-1] + 1], dtype=np.int64)
        self._curves: dict[tuple[int, int], _Curve] = {}

    def _curve(self, running: int, drafts: int) -> _Curve:
        """Of these steps, made once."""
        known = self._curves.get((running, drafts))
        if known is None:
            known = self._curves[running, drafts] = np.empty((3, self._contexts.size))
            values, slopes, known[2] = known[0], known[1], self._contexts
            seconds, _ = self.model.seconds_of(np.array([running]), self._contexts[:, None], np.array([drafts]), _EXACT)
            values[:] = seconds[:, 0] + self._beside
            slopes[:-1] = np.diff(values) / np.diff(known[2])
            slopes[-1] = slopes[-2]
        return known

    def seconds(self, running: int, context: float, drafts: int) -> float:
        """Seconds of one step of `running` samples with `context` tokens and `drafts` draft tokens in all."""
        found: float = _seconds(self._curve(running, drafts), float(context))
        return found

    def total(self, running: int, context: float, drafts: int, steps: int, growth: float) -> float:
        """Seconds of `steps` steps, the first with `context` tokens and each next with `growth` (above 0) more."""
        found: float = _total(self._curve(running, drafts), context, steps, growth)
        return found

    def steps_until(
        self, running: int, context: float, drafts: int, most: int, growth: float, seconds: float, extra: float = 0.0
    ) -> int:
        """The fewest steps, at most `most`, that take `seconds` or more, when each takes `extra` seconds beside."""
        if most <= 0 or seconds <= 0:
            return 0
        found: int = _steps_until(self._curve(running, drafts), context, most, growth, seconds, extra)
        return found


@njit(cache=True)
def _seconds(curve, context):  # type: ignore[no-untyped-def]
    values, slopes, contexts = curve[0], curve[1], curve[2]
    at = np.searchsorted(contexts, context, side="right") - 1
    return values[at] + slopes[at] * (context - contexts[at])


@njit(cache=True)
def _total(curve, context, steps, growth):  # type: ignore[no-untyped-def]
    values, slopes, contexts = curve[0], curve[1], curve[2]
    last = contexts.size - 1
    at = np.searchsorted(contexts, context, side="right") - 1
    done, found = 0, 0.0
    while done < steps:
        begin = context + done * growth
        while at < last and contexts[at + 1] <= begin:
            at += 1
        count = steps - done
        if at < last:
            count = min(count, max(1, math.ceil((contexts[at + 1] - begin) / growth)))
        slope = slopes[at]
        found += count * (values[at] + slope * (begin - contexts[at])) + slope * growth * (count * (count - 1) / 2)
        done += count
    return found


@njit(cache=True)
def _steps_until(curve, context, most, growth, seconds, extra):  # type: ignore[no-untyped-def]
    # After `low` steps it is not reached; after `high` it is, or that is all. `middle` took `found`.
    low, high = -1, most
    middle, found, tries = 0, 0.0, 0
    while high - low > 1:
        if found >= seconds:
            high = middle
        else:
            low = middle
        tries += 1
        if tries <= NEWTON_TRIES:
            # Steps are nearly alike: as many more as the next one's time fits into what is missing.
            each = _seconds(curve, context + middle * growth) + extra
            more = math.ceil((seconds - found) / each) if each > 0 else most
            middle = min(max(middle + more, low + 1), high - 1)
        else:
            middle = (low + high) // 2
        found = _total(curve, context, middle, growth) + middle * extra
    return high
