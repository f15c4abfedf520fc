"""The predicted seconds of a decode step, corrected by the engine's real steps (RLHFSpec 5.2).

Another job on the machine, a throttled clock or other engines on it scale all step times from one rollout to the next.
So one factor covers all steps and moves fast. Beside it, each size of step has a factor for the profile's own error,
which moves slowly. A size not seen for a while then follows the others. Averages are of measured / predicted itself,
not of its logarithm: tokens a second depend on the mean step, and the geometric mean of a long tail is below the mean.

Invariants:
- Without observations the factor is 1, and it stays within its bounds.
- One observation moves it by at most the share that its RATE gives: a step that an interrupt stretched hundredfold says
  nothing about the next one.
- A cached answer is the exact one for the middle of its bucket. It is off by at most the change of the step time within
  a bucket (a sixteenth of the context).
- The first query outside the profile is reported to `on_outside`, once. Such queries continue the nearest edge's slope.
- One caller at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.latency.step_model import CONTEXT_BITS, MIDDLES, StepModel, buckets_of, context_bucket

# The weights of one observation. In the factor for all steps it is large: about two steps are remembered. By replay of
# two runs, the error of single steps is least with 0.4 to 0.5 (docs/measurements/drafts.md). This factor is the same
# for all draft lengths, so it changes no choice between them. In a size's own factor the weight is small, and larger
# for its first observations: 1 / FIRST, 1 / (FIRST + 2), ...
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
        """`rows`: tokens that the engine computes in a step of these samples and draft tokens, with its padding."""
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
        """Note a step's predicted seconds (without correction) and its measured seconds, both above 0."""
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
        """True once a step was observed; before, all factors are 1."""
        return bool(self._own)

    def size_of(self, running: int, drafts: int) -> Size:
        """Return a step's size: its samples, and its rows if any draft is verified, to the power of two.

        All draft counts of one stair are one size, because their measured times differ by chance. Otherwise drafts
        would end within a stair, where the next token costs nothing.
        """
        return running.bit_length(), self._rows(running, drafts).bit_length() if drafts else 0

    def factor(self, running: int, drafts: int) -> float:
        """Return the factor of the profile's prediction."""
        return self.factor_of(self.size_of(running, drafts))

    def factor_of(self, size: Size) -> float:
        """Return the factor of steps of this size."""
        factor = self._factors.get(size)
        if factor is None:
            own = self._own.get(size)
            factor = self._factors[size] = self._usual if own is None else _bounded(self._all * own[0])
        return factor


def _bounded(factor: float) -> float:
    return max(1 / BOUND, min(BOUND, factor))


# Seconds of a decode step of (samples, tokens of context in all, draft tokens in all): `Predictor.step_seconds`.
StepSeconds = Callable[[int, int, int], float]
# Seconds of steps: samples and draft tokens of each column, contexts with a row for each of several steps of a column.
SecondsOfMany = Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]]

# Answers kept: some 20 MB.
MOST_ANSWERS = 100_000
# Tables of step seconds kept: of some thousand floats each, so some MB.
MOST_TABLES = 512
# Their sizes are powers of two from this on, so that steps which propose more or fewer tokens share one.
SMALLEST_TABLE = 64


class Predictor:
    """Step times of one engine."""

    def __init__(self, model: StepModel, on_outside: Callable[[str], None] | None = None) -> None:
        """`on_outside`: called once, with a sentence, for a query outside the profile."""
        self.model = model
        self.correction = Correction(model.rows)
        self._on_outside = on_outside
        # By samples, leading bits of the context and how many follow them, and draft tokens.
        self._cache: dict[tuple[int, int, int, int], tuple[float, Size]] = {}
        # Profiled seconds by draft tokens, the sizes of those steps, and which of them each is.
        self._tables: dict[tuple[int, int, int], tuple[np.ndarray, list[Size], np.ndarray]] = {}

    def step_seconds(self, running: int, context: int, drafts: int) -> float:
        """Return the corrected seconds of the step. Arguments as `StepModel.seconds`."""
        seconds, size = self._profiled(running, context, drafts)
        return seconds * self.correction.factor_of(size)

    def profiled_seconds(self, running: int, context: int, drafts: int) -> float:
        """Return the seconds of the step without correction."""
        return self._profiled(running, context, drafts)[0]

    def seconds_of(
        self, running: NDArray[np.int64], contexts: NDArray[np.int64], drafts: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return `step_seconds` of many steps: `contexts` has a column for each of `running` and `drafts`."""
        buckets = buckets_of(contexts)
        profiled = self.model.seconds_near(running, buckets, drafts)
        if self._on_outside is not None:
            for step in zip(running.tolist(), MIDDLES[buckets.max(axis=0)].tolist(), drafts.tolist(), strict=True):
                self._tell_if_outside(*step)
        if not self.correction.observed:
            return profiled
        factors = [self.correction.factor(*step) for step in zip(running.tolist(), drafts.tolist(), strict=True)]
        return profiled * np.array(factors)

    def _profiled(self, running: int, context: int, drafts: int) -> tuple[float, Size]:
        drop = context.bit_length() - CONTEXT_BITS - 1
        key = (running, context >> drop, drop, drafts) if drop > 0 else (running, context, 0, drafts)
        known = self._cache.get(key)
        if known is None:
            if len(self._cache) >= MOST_ANSWERS:
                self._cache.clear()
            middle = context_bucket(context)
            known = self._cache[key] = (
                self.model.seconds(running, middle, drafts),
                self.correction.size_of(running, drafts),
            )
            self._tell_if_outside(running, middle, drafts)
        return known

    def step_table(self, running: int, context: int, most: int) -> np.ndarray:
        """Return corrected seconds with 0 to `most` draft tokens, float64[most + 1], for a draft budget."""
        # Longer ones of the same step are kept instead, so that few are made.
        kept = max(1 << (most - 1).bit_length(), SMALLEST_TABLE)
        key = (running, context_bucket(context), kept)
        if key not in self._tables:
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()
            # A correction is of a size of step (powers of two of its padded rows), so a table has few of them.
            least, greatest = (self.model.rows(running, drafts).bit_length() for drafts in (1, kept))
            begins = [0, 1] + [self.model.first_rows(1 << bits) - running for bits in range(least, greatest)]
            lengths = [end - begin for begin, end in itertools.pairwise([*begins, kept + 1])]
            sizes = [self.correction.size_of(running, drafts) for drafts in begins]
            self._tables[key] = (self.model.table(*key), sizes, np.repeat(np.arange(len(sizes)), lengths))
            self._tell_if_outside(running, context, most)
        profiled, sizes, which = self._tables[key]
        factors = np.array([self.correction.factor_of(size) for size in sizes])
        corrected: np.ndarray = profiled[: most + 1] * factors[which[: most + 1]]
        return corrected

    def _tell_if_outside(self, running: int, context: int, drafts: int) -> None:
        if self._on_outside is not None and not self.model.covers(running, context, drafts):
            tell, self._on_outside = self._on_outside, None
            tell(
                f"step times of {running} samples with {context} tokens of context and {drafts} draft tokens lie "
                "outside of what was profiled: the profile's edge is continued"
            )

    def observe(self, running: int, context: int, drafts: int, seconds: float) -> None:
        """Learn that a step of this engine took `seconds` (above 0)."""
        predicted = self.profiled_seconds(running, context, drafts)
        if predicted > 0:
            self.correction.observe(running, drafts, predicted, seconds)


class SpeculationOverhead:
    """The slowdown of steps without drafts on an engine that speculates, against an engine without speculation.

    On GPUs vLLM 0.29.0 gives up asynchronous scheduling and its second model runner for drafts that a scheduler makes.
    Both times are the profile's, so what disturbs the machine now is in neither.
    """

    def __init__(self, profile: Profile) -> None:
        """Raises ValueError for a profile without steps of an engine without speculation."""
        self._own = Predictor(StepModel(profile))
        self._without = Predictor(StepModel(dataclasses.replace(profile, steps=profile.unspeculated)))

    def factor(self, running: int, context: int) -> float:
        """Return seconds here / seconds there, for `running` samples with `context` tokens in all."""
        return self._own.profiled_seconds(running, context, 0) / self._without.profiled_seconds(running, context, 0)
