"""How the rest of a stage goes in a layout, if nothing is switched any more (PAT 4.2): what `tp_switch.py` compares.

Samples that an engine has go on at one pace, as many as still run; a group of samples is cut where their number falls
to a next class, and each cut's steps are timed by its middle. Every engine is a group of its own; samples that are
spread evenly over a layout's engines are one.

Lengths come in scenarios (`remaining_lengths.py`): all is timed in each, and what is compared is the mean.
Invariant: whoever asks for many moments at once has the same answers as one who asks for one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.drafting_core import stages
from rhyme_openrlhf.latency.predictor import SecondsOfMany
from rhyme_openrlhf.scheduling.group_time import StepSeconds


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
        """For numbers of samples left, of those in `fewer`: seconds until then, in the mean; what contexts those have
        then, usually; the mean of these in each scenario; and what is then left of each sample, behind zeros.
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
        """When each sample ends in each scenario, seconds."""
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
    """For each group of samples their seconds, spread over the layout's engines and all going on at the same pace, the
    mean of the scenarios. Arguments as `_timed`."""
    _, tokens, steps, counts = _timed(layout, contexts, rest, np.array(sizes), layout.engines)
    found: list[float] = stages.mean_seconds(tokens, steps, layout.tokens_per_step, counts).tolist()
    return found


def _timed(
    layout: Layout, contexts: NDArray[np.float64], rest: NDArray[np.int64], sizes: NDArray[np.int64], engines: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """The rest of a stage for each group of samples, cut where the number of running ones falls to a next class.

    Of each group and scenario: tokens at the end of each cut, and between its ends; seconds of a step in it, one
    row a scenario, one group behind the other; and how many cuts each group has, behind which there are no tokens.
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
