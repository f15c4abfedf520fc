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

import functools
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
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
    alike = step.rest(0, nodes).seconds()
    best: _Plan | None = None
    for place, large in itertools.product(larger(0, layouts), _doubled(nodes)):
        limit = alike if best is None else best.seconds
        best = step.divided(place, large, nodes - large, seats, kv_tokens[place], limit) or best
    if best is None:
        return None
    chosen = [(0, 0)] * len(lengths)
    count, as_usual = len(best.first.engines), nodes - best.large
    for prompt, engine in zip(step.order[:count], best.first.engines, strict=True):
        node, of_node = divmod(engine, layouts[best.place].engines)
        chosen[prompt] = (as_usual + node, of_node)
    for prompt, engine in zip(step.order[count:], best.rest, strict=True):
        chosen[prompt] = divmod(engine, layouts[0].engines)
    return FirstLayouts((0,) * as_usual + (best.place,) * best.large, tuple(chosen), best.seconds, alike)


def _doubled(below: int) -> Iterator[int]:
    """Yield 1, 2, 4 and so on."""
    number = 1
    while number < below:
        yield number
        number *= 2


@dataclass(frozen=True)
class _First:
    """The longest prompts on engines of a larger layout: the engine of each, and what is predicted."""

    engines: Sequence[int]
    seconds: float
    most_samples: int
    most_tokens: int

    def fits(self, seats: int, kv_tokens: int) -> bool:
        """Return whether no sample waits for a seat, and each engine holds its tokens."""
        return self.most_samples <= seats and self.most_tokens <= kv_tokens


@dataclass(frozen=True)
class _Plan:
    """The longest prompts on `large` nodes that begin with the layout at `place`; the engines of the rest."""

    place: int
    large: int
    first: _First
    rest: Sequence[int]
    seconds: float


class _Rest:
    """The other prompts on nodes of the aligned layout, each with its best switch; a node is predicted when needed."""

    def __init__(
        self,
        engines: Sequence[int],
        layouts: Sequence[Layout],
        switch_seconds: SwitchSeconds,
        contexts: NDArray[np.int64],
        remaining: NDArray[np.int64],
    ) -> None:
        """`engines`: of each prompt; the samples' `contexts` and `remaining` tokens are in the prompts' order."""
        self.engines = engines
        self._layouts, self._switch_seconds = layouts, switch_seconds
        self._contexts, self._remaining = contexts, remaining
        self._of_sample = np.repeat(engines, len(contexts) // len(engines))
        self.most_samples = int(np.bincount(self._of_sample).max())
        nodes = self._of_sample // layouts[0].engines
        order = nodes.argsort(kind="stable")
        numbers, begins = np.unique(nodes[order], return_index=True)
        self._samples = dict(zip(numbers.tolist(), np.split(order, begins[1:]), strict=True))
        self._known: dict[int, float] = {}

    def node(self, node: int) -> float:
        """Return the predicted seconds of a node, 0 without samples."""
        if node not in self._known:
            own = self._samples.get(node)
            self._known[node] = 0.0 if own is None else self._predicted(own)
        return self._known[node]

    def longer(self, seconds: float, among: Iterable[int]) -> int | None:
        """Return the first of these nodes that takes longer than `seconds`, None without one."""
        return next((node for node in among if self.node(node) > seconds), None)

    def seconds(self) -> float:
        """Return the predicted seconds of the longest node."""
        return max(map(self.node, self._samples))

    def _predicted(self, own: NDArray[np.intp]) -> float:
        return least_seconds(
            0,
            self._layouts,
            self._contexts[own],
            self._remaining[:, own],
            self._of_sample[own].tolist(),
            self._switch_seconds,
        )


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

    def divided(self, place: int, large: int, alike: int, seats: int, kv_tokens: int, limit: float) -> _Plan | None:
        """Return the quickest plan of fewer than `limit` seconds; None without one.

        The number of prompts is looked for with which both parts take as long, or the most that fit.
        """
        first_of = functools.cache(lambda count: self.first(count, place, large))
        rest_of = functools.cache(lambda count: self.rest(count, alike))
        # Each of these nodes gets a prompt, as `assign` gives each engine one before any gets two.
        least, most = (large - 1) * self._layouts[place].engines + 1, len(self._work) - 1
        if least > most:
            return None
        # The first part takes longer with every prompt more, the rest less. Of the rest, one or two nodes are the
        # longest for nearly every number of prompts: only those are predicted, until another is found to be longer.
        longest, low = {0: None}, least
        while True:
            high = most
            while low + 1 < high:
                count = (low + high) // 2
                first = first_of(count)
                # From `limit` on more prompts never help.
                more = first.fits(seats, kv_tokens) and first.seconds < limit
                if more and rest_of(count).longer(first.seconds, longest) is not None:
                    low = count
                else:
                    high = count
            first = first_of(high)
            if first.seconds >= limit or not first.fits(seats, kv_tokens):
                break
            longer = rest_of(high).longer(first.seconds, range(alike))
            if longer is None or longer in longest:
                break
            longest[longer] = None
        best: _Plan | None = None
        for count in (low, high):
            first, rest = first_of(count), rest_of(count)
            if first.seconds >= limit or not first.fits(seats, kv_tokens) or rest.most_samples > seats:
                continue
            if any(rest.node(node) >= limit for node in (*longest, *range(alike))):
                continue
            limit = max(first.seconds, rest.seconds())
            best = _Plan(place, large, first, rest.engines, limit)
        return best

    def first(self, count: int, place: int, nodes: int) -> _First:
        """Return the first `count` prompts on `nodes` nodes that begin with a larger layout."""
        layout = self._layouts[place]
        engines = assign(self._work[:count], [0.0] * (nodes * layout.engines))
        of_sample = np.repeat(engines, self._samples)
        contexts, remaining = self._of(0, count)
        course = Course(layout, contexts, remaining, of_sample.tolist())
        tokens = max(int(np.bincount(of_sample, weights=of_scenario).max()) for of_scenario in remaining)
        return _First(engines, course.last, int(np.bincount(of_sample).max()), tokens)

    def rest(self, first: int, nodes: int) -> _Rest:
        """Return the prompts from `first` on, on `nodes` nodes of the aligned layout."""
        engines = assign(self._work[first:], [0.0] * (nodes * self._layouts[0].engines))
        return _Rest(engines, self._layouts, self._switch_seconds, *self._of(first, len(self._work)))

    def _of(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        part = slice(begin * self._samples, end * self._samples)
        return self._contexts[part], self._remaining[:, part]
