"""The rest of a rollout stage in a layout, if nothing is switched any more (PAT 4.2): what `tp_switch.py` compares.

How much longer an unfinished sample will be follows from its prompt's earlier response lengths: those beyond its own
length so far are equally likely. Where none is longer, the length is taken from a Pareto law that begins at the sample:
half of such samples end before they have doubled. For a prompt never seen, all lengths up to the longest response
allowed are equally likely. Future lengths are scenarios: each takes another quantile of every sample, shifted from
sample to sample, so that each scenario has long and short samples. All is timed in each scenario, and the mean is
compared.

The samples of an engine go on at one pace, as many as still run. A group of samples is cut where their number falls to
a next class, and each cut's decode steps are timed by its middle. Every engine is a group of its own; samples that are
spread evenly over a layout's engines are one group.

Invariants:
- No random numbers, so the same state gives the same answer.
- At least one token remains for each sample, and no response is longer than allowed.
- Many moments at once have the same answers as one after the other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.drafting_core import stages
from rhyme_openrlhf.latency.predictor import SecondsOfMany, StepSeconds

# Enough to tell early from late; each costs one walk through the rest of the stage.
SCENARIOS = 8
# Coprime to SCENARIOS: over SCENARIOS samples each quantile occurs once, in an order unlike the samples'.
_SHIFT = 3


class Unfinished(NamedTuple):
    """A running sample: tokens generated, tokens of context (prompt included), and its prompt's `earlier` lengths."""

    generated: int
    context: int
    earlier: tuple[int, ...] = ()


@dataclass(frozen=True)
class UnfinishedSamples:
    """Many of them by columns: hundreds are asked about at a time. `history`: of each sample, which of `histories`."""

    generated: NDArray[np.int64]
    contexts: NDArray[np.int64]
    history: NDArray[np.int64]
    histories: Sequence[NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.generated)

    @staticmethod
    def of(samples: Sequence[Unfinished]) -> UnfinishedSamples:
        """Return these samples in columns, in this order."""
        rows: dict[tuple[int, ...], int] = {}
        history = [rows.setdefault(sample.earlier, len(rows)) for sample in samples]
        return UnfinishedSamples(
            np.array([sample.generated for sample in samples], dtype=np.int64),
            np.array([sample.context for sample in samples], dtype=np.int64),
            np.array(history, dtype=np.int64),
            [np.array(earlier, dtype=np.int64) for earlier in rows],
        )


def by_maximum(samples: UnfinishedSamples, longest_allowed: int) -> NDArray[np.int64]:
    """PAT's bound: everything runs to the longest response allowed. int64[1, samples], tokens still to come."""
    return np.maximum(longest_allowed - samples.generated, 1)[None]


def by_history(samples: UnfinishedSamples, longest_allowed: int) -> NDArray[np.int64]:
    """Scenarios of tokens still to come, int64[SCENARIOS, samples]."""
    histories = samples.histories
    begins = np.array([0, *itertools.accumulate(map(len, histories))], dtype=np.int64)
    found: NDArray[np.int64] = stages.scenarios_of(
        samples.generated,
        samples.history,
        np.concatenate(histories),
        begins,
        longest_allowed,
        SCENARIOS,
        _SHIFT,
    )
    return found


@dataclass(frozen=True)
class Layout:
    """A way to divide a node: `engines` of `tensor_parallel_size` devices each, and their decode step's seconds.

    `tokens_per_step` and `drafts_per_step`: of a sample, with the speculation of now. `seconds_of`: the answers of
    `step_seconds` for many steps at once (`Predictor.seconds_of`); None: it is asked one by one.
    """

    tensor_parallel_size: int
    engines: int
    step_seconds: StepSeconds
    tokens_per_step: float = 1.0
    drafts_per_step: float = 0.0
    seconds_of: SecondsOfMany | None = None


class Course:
    """The course of samples on engines of a layout. `last`: when the last one ends, the mean of the scenarios."""

    def __init__(
        self, layout: Layout, contexts: NDArray[np.int64], remaining: NDArray[np.int64], engines: Sequence[int]
    ) -> None:
        """`engines`: of each sample, any numbers."""
        self._contexts = contexts
        self._remaining = remaining
        numbers = {engine: number for number, engine in enumerate(dict.fromkeys(engines))}
        # Of each sample.
        self._engine = np.array(list(map(numbers.__getitem__, engines)))
        rest, means, sizes = stages.by_engine(contexts, remaining, self._engine, len(numbers))
        ends, tokens, steps, self._counts = _timed(layout, means, rest, sizes, 1)
        self._had, self._clock, self.last = stages.clocks(ends, tokens, steps, layout.tokens_per_step, self._counts)

    @functools.cached_property
    def fewer(self) -> list[tuple[int, float]]:
        """Numbers of samples left that are told apart, fewer than now, with the seconds until then in the mean."""
        lefts = stages.classes(len(self._contexts))[1:]
        moments = stages.mean_moments(self._ends, self._order, lefts)
        return list(zip(lefts.tolist(), moments.tolist(), strict=True))

    def when(self, lefts: Sequence[int]) -> tuple[list[float], list[list[int]], NDArray[np.float64], NDArray[np.int64]]:
        """Return the state of the stage when each of `lefts` samples, numbers in `fewer`, are left.

        Four parts: the mean seconds until then; their usual contexts; the mean context in each scenario; and the tokens
        still to come of each sample, behind zeros.
        """
        asked = np.array(lefts)
        usual, rest, means = stages.when_left(
            self._had, self._clock, self._engine, self._contexts, self._remaining, self._order, self._ends, asked
        )
        return [self._moments[left] for left in lefts], usual, means, rest

    @functools.cached_property
    def _moments(self) -> dict[int, float]:
        return dict(self.fewer)

    @functools.cached_property
    def _ends(self) -> NDArray[np.float64]:
        """Return the seconds until each sample ends, in each scenario."""
        found: NDArray[np.float64] = stages.moments_of_ends(
            self._had, self._clock, self._counts, self._engine, self._remaining
        )
        return found

    @functools.cached_property
    def _order(self) -> NDArray[np.intp]:
        """The samples of each scenario as they end."""
        return self._ends.argsort()


def spread(layout: Layout, contexts: NDArray[np.int64], remaining: NDArray[np.int64]) -> float:
    """Seconds of samples that are spread evenly over a layout's engines, the mean of the scenarios."""
    mean = np.array([[int(contexts.sum()) / len(contexts)]])
    return evenly(layout, mean, remaining[None], [len(contexts)])[0]


def evenly(layout: Layout, contexts: NDArray[np.float64], rest: NDArray[np.int64], sizes: Sequence[int]) -> list[float]:
    """Return each group's seconds if its samples are spread over the layout's engines and go on at the same pace.

    The result is the mean of the scenarios; arguments as `_timed`.
    """
    _, tokens, steps, counts = _timed(layout, contexts, rest, np.array(sizes), layout.engines)
    found: list[float] = stages.mean_seconds(tokens, steps, layout.tokens_per_step, counts).tolist()
    return found


def _timed(
    layout: Layout, contexts: NDArray[np.float64], rest: NDArray[np.int64], sizes: NDArray[np.int64], engines: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """Return the rest of a stage for each group of samples, cut where the number of running ones falls to a next class.

    Four parts: tokens at the end of each cut; tokens between its ends; seconds of a step in it; and each group's number
    of cuts. Step seconds have one row a scenario, one group behind the other. Behind its cuts a group has no tokens.
    `contexts`: the mean of a group's samples, with an axis for scenarios; `rest`: tokens still to come of each group,
    scenario and sample, where a group of `sizes` has fewer samples than another with zeros before them; `engines`:
    engines that a group's samples are spread over.
    """
    ends, tokens, running, middles, drafts, counts = stages.cut(rest, sizes, engines, contexts, layout.drafts_per_step)
    if layout.seconds_of is not None:
        return ends, tokens, layout.seconds_of(running, middles, drafts), counts
    steps = [
        [layout.step_seconds(*step) for step in zip(running.tolist(), of_scenario, drafts.tolist(), strict=True)]
        for of_scenario in middles.tolist()
    ]
    return ends, tokens, np.array(steps, dtype=np.float64), counts
