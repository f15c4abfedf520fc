"""The layouts that nodes begin a step with: prompts that were answered longest can begin at larger engines at once.

Usually all nodes begin with the aligned layout, and each switches when few of its samples are left. The longest samples
then take most of their tokens beside many others, at slow steps, and the stage waits for them. Here some nodes begin
with a larger layout, and get only the prompts that were answered longest. The other nodes get the rest and switch as
usual. The prompts are divided where both parts are predicted to take equally long (`Course`), for one, two, four and
more such nodes.

Prompts are ordered by the median of their last responses: a mean would follow single long responses, which do not come
again. Contexts are of responses alone, because prompts are given away before they are tokens.

Invariants:
- A plan is predicted to be quicker than all nodes beginning with the aligned layout; otherwise there is none.
- At least one node begins with the aligned layout. Each node that begins with another one gets a prompt.
- Without the earlier responses of every prompt there is no plan, nor where samples would wait for seats.
- The predicted samples of a larger engine fit into its KV cache.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.scheduling.rank_groups import historical_length
from rhyme_openrlhf.scheduling.stage_course import Course, Layout, Unfinished, UnfinishedSamples, by_history
from rhyme_openrlhf.scheduling.step_plan import assign
from rhyme_openrlhf.scheduling.tp_switch import SwitchSeconds, larger, least_seconds


@dataclass(frozen=True)
class FirstLayouts:
    """`layouts`: the one that each node begins with, by place. `engine_of`: of each prompt, its node, and which engine
    of that node's layout. `seconds`: predicted for the stage; `seconds_alike`: with the aligned layout on every node.
    """

    layouts: tuple[int, ...]
    engine_of: tuple[tuple[int, int], ...]
    seconds: float
    seconds_alike: float


def first_layouts(
    nodes: int,
    layouts: Sequence[Layout],
    lengths: Sequence[Sequence[int]],
    samples: int,
    seats: int,
    kv_tokens: Sequence[int],
    switch_seconds: SwitchSeconds,
) -> FirstLayouts | None:
    """Return the layouts to begin a step with; None: the aligned one everywhere.

    `layouts`: of each of the `nodes` nodes, the aligned one first; `lengths`: of each prompt's last responses;
    `samples`: of each prompt; `seats`: samples that an engine runs at once; `kv_tokens`: of an engine, by layout.
    """
    if nodes < 2 or len(layouts) < 2 or len(lengths) < 2 or not all(lengths):
        return None
    if len(lengths) * samples > nodes * layouts[0].engines * seats:
        return None
    step = _Step(layouts, lengths, samples, switch_seconds)
    everywhere = step.aligned(0, nodes)
    best: _Plan | None = None
    seconds = everywhere.seconds
    for place, large in itertools.product(larger(0, layouts), _doubled(nodes)):
        for plan in step.divided(place, large, nodes - large, seats, kv_tokens[place]):
            if plan.seconds < seconds and plan.first.fits(seats, kv_tokens[place]) and plan.rest.fits(seats):
                best, seconds = plan, plan.seconds
    if best is None:
        return None
    chosen = [(0, 0)] * len(lengths)
    count, alike = len(best.first.engines), nodes - best.large
    for prompt, engine in zip(step.order[:count], best.first.engines, strict=True):
        node, of_node = divmod(engine, layouts[best.place].engines)
        chosen[prompt] = (alike + node, of_node)
    for prompt, engine in zip(step.order[count:], best.rest.engines, strict=True):
        chosen[prompt] = divmod(engine, layouts[0].engines)
    return FirstLayouts((0,) * alike + (best.place,) * best.large, tuple(chosen), seconds, everywhere.seconds)


def _doubled(below: int) -> Iterator[int]:
    """Yield 1, 2, 4 and so on."""
    number = 1
    while number < below:
        yield number
        number *= 2


@dataclass(frozen=True)
class _Part:
    """Some prompts of a step on engines of one layout: the engine of each, and what is predicted."""

    engines: Sequence[int]
    seconds: float
    most_samples: int
    most_tokens: int = 0

    def fits(self, seats: int, kv_tokens: int = 0) -> bool:
        """Return whether no sample waits for a seat, and each engine holds its tokens."""
        return self.most_samples <= seats and self.most_tokens <= kv_tokens


@dataclass(frozen=True)
class _Plan:
    """The longest prompts on `large` nodes that begin with the layout at `place`, and the rest on the others."""

    place: int
    large: int
    first: _Part
    rest: _Part

    @property
    def seconds(self) -> float:
        return max(self.first.seconds, self.rest.seconds)


class _Step:
    """One step's prompts, longest first, with the predicted tokens of their samples."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        lengths: Sequence[Sequence[int]],
        samples: int,
        switch_seconds: SwitchSeconds,
    ) -> None:
        self._layouts, self._samples, self._switch_seconds = layouts, samples, switch_seconds
        medians = [historical_length(of_prompt) or 0.0 for of_prompt in lengths]
        self.order = sorted(range(len(lengths)), key=lambda prompt: -medians[prompt])
        self._work = [statistics.fmean(lengths[prompt]) for prompt in self.order]
        unfinished = UnfinishedSamples.of(
            [Unfinished(0, 0, tuple(lengths[prompt])) for prompt in self.order for _ in range(samples)]
        )
        self._contexts = unfinished.contexts
        self._remaining = by_history(unfinished, max(map(max, lengths)))

    def divided(self, place: int, large: int, alike: int, seats: int, kv_tokens: int) -> list[_Plan]:
        """Return the plans around the number of prompts with which both parts take as long, or the most that fit."""

        def plan(count: int) -> _Plan:
            return _Plan(place, large, self.large(count, place, large), self.aligned(count, alike))

        # Each of these nodes gets a prompt, as `assign` gives each engine one before any gets two.
        least, most = (large - 1) * self._layouts[place].engines + 1, len(self._work) - 1
        if least > most:
            return []
        # The first part takes longer with every prompt more, the rest less.
        low, high = plan(least), plan(most)
        while (few := len(low.first.engines)) + 1 < (many := len(high.first.engines)):
            middle = plan((few + many) // 2)
            more = middle.first.seconds < middle.rest.seconds and middle.first.fits(seats, kv_tokens)
            low, high = (middle, high) if more else (low, middle)
        return [low, high]

    def large(self, count: int, place: int, nodes: int) -> _Part:
        """Return the first `count` prompts on `nodes` nodes that begin with a larger layout."""
        layout = self._layouts[place]
        engines = assign(self._work[:count], [0.0] * (nodes * layout.engines))
        of_sample = np.repeat(engines, self._samples)
        contexts, remaining = self._of(0, count)
        course = Course(layout, contexts, remaining, of_sample.tolist())
        tokens = max(int(remaining[:, of_sample == engine].sum(axis=1).max()) for engine in set(engines))
        return _Part(engines, course.last, int(np.bincount(of_sample).max()), tokens)

    def aligned(self, first: int, nodes: int) -> _Part:
        """Return the prompts from `first` on, on `nodes` nodes of the aligned layout, each with its best switch."""
        layout = self._layouts[0]
        engines = assign(self._work[first:], [0.0] * (nodes * layout.engines))
        of_sample = np.repeat(engines, self._samples)
        contexts, remaining = self._of(first, len(self._work))
        seconds = 0.0
        for node in range(nodes):
            own = of_sample // layout.engines == node
            if own.any():
                on = of_sample[own].tolist()
                seconds = max(
                    seconds,
                    least_seconds(0, self._layouts, contexts[own], remaining[:, own], on, self._switch_seconds),
                )
        return _Part(engines, seconds, int(np.bincount(of_sample).max()))

    def _of(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        part = slice(begin * self._samples, end * self._samples)
        return self._contexts[part], self._remaining[:, part]
