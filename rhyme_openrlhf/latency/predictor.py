"""What everyone asks: seconds of a step, corrected by what this engine's steps really take, and cached (RLHFSpec 5.2).

Invariants: an answer from the cache is the answer without it for the middle of its bucket, so it is off by at most
what the step time changes within a bucket (a sixteenth of the context); the first question outside of what was
profiled is told to `on_outside`, once, and answered with the nearest edge's slope. One caller at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.latency.correction import Correction, Size
from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.latency.step_model import CONTEXT_BITS, MIDDLES, StepModel, buckets_of, context_bucket

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
        """`on_outside`: is told, once, of a question outside of what was profiled; None: nobody is."""
        self.model = model
        self.correction = Correction(model.rows)
        self._on_outside = on_outside
        # By samples, leading bits of the context and how many follow them, and draft tokens.
        self._cache: dict[tuple[int, int, int, int], tuple[float, Size]] = {}
        # Profiled seconds by draft tokens, the sizes of those steps, and which of them each is.
        self._tables: dict[tuple[int, int, int], tuple[np.ndarray, list[Size], np.ndarray]] = {}

    def step_seconds(self, running: int, context: int, drafts: int) -> float:
        """Seconds of the step, corrected. Arguments as `StepModel.seconds`."""
        seconds, size = self._profiled(running, context, drafts)
        return seconds * self.correction.factor_of(size)

    def profiled_seconds(self, running: int, context: int, drafts: int) -> float:
        """The same without correction."""
        return self._profiled(running, context, drafts)[0]

    def seconds_of(
        self, running: NDArray[np.int64], contexts: NDArray[np.int64], drafts: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """`step_seconds` of many steps: `contexts` has a column for each of `running` and `drafts`."""
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
        """Seconds with 0 to `most` draft tokens, float64[most + 1], corrected: what a draft budget chooses from."""
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
        """A step of this engine took `seconds` (above 0)."""
        predicted = self.profiled_seconds(running, context, drafts)
        if predicted > 0:
            self.correction.observe(running, drafts, predicted, seconds)


class SpeculationOverhead:
    """How much slower an engine that speculates makes a step without drafts than an engine without speculation.

    On GPUs vLLM 0.29.0 gives up asynchronous scheduling and its second model runner for drafts that a scheduler makes.
    Both times are the profile's, so what disturbs the machine now is in neither.
    """

    def __init__(self, profile: Profile) -> None:
        """Raises ValueError for a profile without steps of an engine without speculation."""
        self._own = Predictor(StepModel(profile))
        self._without = Predictor(StepModel(dataclasses.replace(profile, steps=profile.unspeculated)))

    def factor(self, running: int, context: int) -> float:
        """Return seconds here / seconds there, for so many samples with so many tokens in all."""
        return self._own.profiled_seconds(running, context, 0) / self._without.profiled_seconds(running, context, 0)
