"""When the unfinished samples of a node go on with more tensor parallelism (PAT 4.2, algorithm 1).

Few samples decode faster on many devices together, many on few devices each. Each time samples have finished, the time
that remains under the current layout is compared with what it would be after a switch, the switch included.

Two ways to know what remains. `by_maximum`, the paper's: everything runs to the longest response allowed; the switch is
made when it beats staying. `by_history`: the lengths that the prompts' history makes likely; then samples drop out on
the way, and to switch now is also compared with switching later, when fewer are left, because a rule that only knows
"now or never" switches as soon as it pays at all, which is too early.

How the rest of a stage is timed: decode steps until the next sample ends, as many samples as then run. In the current
layout each engine goes on by itself with the samples it has, and the stage waits for the last one; after a switch they
are spread evenly over the layout's engines. With several larger layouts, what one of them is worth includes going on
to a larger one later, when still fewer are left. What a later switch would find is what each engine has left by then:
the longest samples are often together, on the engine that is slowest because of them, and so are further from their
ends than the mean. A rule that forgets this always finds later better than now.

Invariants: a switch is only ordered if its predicted total, its cost included, is smaller than staying; never to the
current layout or one before it (they are given by size, and of a step's samples ever fewer are left); without samples
nothing is ordered.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.latency.bucket_table import SecondsOfMany
from rhyme_openrlhf.scheduling.group_time import StepSeconds
from rhyme_openrlhf.scheduling.remaining_lengths import Unfinished, by_history, by_maximum

# Numbers of remaining samples that are told apart: up to this many each, beyond it each an eighth fewer than the last.
_FINE = 8
# Later moments of a switch that are looked at together: of some thousand samples, so in some MB.
_AT_ONCE = 16


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


@dataclass(frozen=True)
class Switch:
    """The order to go on in `layouts[target]`, with what was predicted for the rest of the stage, in seconds."""

    target: int
    seconds_stay: float
    seconds_switched: float


# Seconds (none below 0) to switch from one layout to another with samples of these contexts: (from, to, contexts),
# layouts by place.
SwitchSeconds = Callable[[int, int, Sequence[int]], float]


def larger(current: int, layouts: Sequence[object]) -> range:
    """The places of the layouts that a switch may go to; empty: there is nothing to decide."""
    return range(current + 1, len(layouts))


def decide(
    current: int,
    layouts: Sequence[Layout],
    samples: Sequence[Unfinished],
    longest_allowed: int,
    switch_seconds: SwitchSeconds,
    from_history: bool = True,
    engines: Sequence[int] | None = None,
) -> Switch | None:
    """Whether to switch now, and to which layout; None: go on as it is (ask again when samples have finished).

    `layouts`: smaller tensor-parallel sizes first; only those behind `current` are switched to.
    `engines`: which engine of the current layout each sample is on, by any number; None: they are spread evenly.
    """
    if not samples or not larger(current, layouts):
        return None
    if engines is None:
        engines = [place % layouts[current].engines for place in range(len(samples))]
    if from_history:
        return _by_stopping(current, layouts, samples, longest_allowed, switch_seconds, engines)
    remaining = by_maximum(samples, longest_allowed)
    contexts = np.array([sample.context for sample in samples])
    stay = float(_Course(layouts[current], contexts, remaining, engines).last.mean())
    best: Switch | None = None
    for place in larger(current, layouts):
        total = _spread(layouts[place], contexts, remaining)
        total += switch_seconds(current, place, contexts.tolist())
        if total < (best.seconds_switched if best else stay):
            best = Switch(place, stay, total)
    return best


def _by_stopping(
    current: int,
    layouts: Sequence[Layout],
    samples: Sequence[Unfinished],
    longest_allowed: int,
    switch_seconds: SwitchSeconds,
    engines: Sequence[int],
) -> Switch | None:
    remaining = by_history(samples, longest_allowed)
    contexts = np.array([sample.context for sample in samples])
    course = _Course(layouts[current], contexts, remaining, engines)
    stay = float(course.last.mean())
    best: Switch | None = None
    for place in larger(current, layouts):
        further = larger(place, layouts)
        limit = best.seconds_switched if best is not None else stay
        cost = switch_seconds(current, place, contexts.tolist())
        total = now = cost + _spread(layouts[place], contexts, remaining)
        later = _Later(course, current, layouts, switch_seconds)
        if (now >= limit and not further) or later.is_less([place], now):
            continue
        if further and len(samples) > 1:
            # There they are spread evenly.
            evenly = [turn % layouts[place].engines for turn in range(len(samples))]
            there = _Course(layouts[place], contexts, remaining, evenly)
            total = min(now, _Later(there, place, layouts, switch_seconds).least(further, cost, now))
        # Nor may it be better to wait for one of the larger ones.
        if total < limit and not later.is_less(further, total):
            best = Switch(place, stay, total)
    return best


@dataclass(frozen=True)
class _Later:
    """The rest of the stage in the layout `current`, which goes on by `course`, with a switch when fewer are left."""

    course: _Course
    current: int
    layouts: Sequence[Layout]
    switch_seconds: SwitchSeconds

    def is_less(self, targets: Sequence[int], seconds: float) -> bool:
        """Whether it takes less than `seconds` with a switch to one of these layouts."""
        # What follows a switch takes time: where its moment is not before, nothing is less.
        lefts = [left for left, moment in self.course.fewer if moment < seconds]
        # Where waiting is better at all, the next sample's end is most times a better moment than now.
        parts = itertools.chain((lefts[:1],), _parts(lefts[1:])) if lefts else ()
        return any(seconds > total for part in parts for place in targets for total in self._seconds(place, part))

    def least(self, targets: Sequence[int], before: float, limit: float) -> float:
        """The least that it takes after `before` seconds with a switch to one of these layouts; what is not less than
        `limit` need not be said."""
        lefts = [left for left, moment in self.course.fewer if before + moment < limit]
        found = (before + total for part in _parts(lefts) for place in targets for total in self._seconds(place, part))
        return min(found, default=limit)

    def _seconds(self, place: int, lefts: Sequence[int]) -> list[float]:
        """With a switch to the layout at `place`, for each number of samples that are then left."""
        moments, contexts, rest = self.course.when(lefts)
        usual = np.rint(np.sort(contexts, axis=2).sum(axis=1) / contexts.shape[1]).astype(int)
        moved = [of_left[-left:].tolist() for of_left, left in zip(usual, lefts, strict=True)]
        means = contexts.sum(axis=2, keepdims=True) / np.array(lefts)[:, None, None]
        after = _evenly(self.layouts[place], means, rest, lefts)
        return [
            moment + self.switch_seconds(self.current, place, of_left) + seconds
            for moment, of_left, seconds in zip(moments, moved, after, strict=True)
        ]


def _parts(lefts: Sequence[int]) -> Iterator[Sequence[int]]:
    return (lefts[begin : begin + _AT_ONCE] for begin in range(0, len(lefts), _AT_ONCE))


class _Course:
    """How the rest of a stage goes if nothing is switched. `last`: when its last sample ends in each scenario."""

    def __init__(
        self, layout: Layout, contexts: NDArray[np.int64], remaining: NDArray[np.int64], engines: Sequence[int]
    ) -> None:
        self._contexts = contexts
        self._remaining = remaining
        numbers = {engine: number for number, engine in enumerate(dict.fromkeys(engines))}
        # Of each sample.
        self._engine = np.array([numbers[engine] for engine in engines])
        sizes = np.bincount(self._engine)
        # Each engine's samples side by side, the last ones of its row.
        alike = np.argsort(self._engine, kind="stable")
        on, most = self._engine[alike], int(sizes.max())
        rest = np.zeros((len(sizes), len(remaining), most), dtype=np.int64)
        rest[on, :, np.arange(len(on)) - sizes.cumsum()[on] + most] = remaining[:, alike].T
        means = np.bincount(self._engine, weights=contexts) / sizes
        ends, seconds = _timed(layout, means[:, None, None], rest, sizes.tolist(), 1)
        passed = seconds.cumsum(axis=2)
        self.last = passed[:, :, -1].max(axis=0)
        # Of each engine and scenario how many tokens each of its samples has by when, from nothing on; behind the last
        # one's end no more.
        self._tokens = np.concatenate([np.zeros_like(ends[:, :, :1]), ends, ends[:, :, -1:]], axis=2)
        self._clock = np.zeros(self._tokens.shape)
        self._clock[:, :, 1:-1] = passed
        self._cuts = np.array([len(_classes(size)) for size in sizes.tolist()])
        for number, count in enumerate(self._cuts.tolist()):
            self._clock[number, :, count + 1 :] = np.inf

    @functools.cached_property
    def fewer(self) -> list[tuple[int, float]]:
        """Numbers of samples left that are told apart, fewer than now, with the seconds until then in the mean."""
        lefts = _classes(len(self._contexts))[1:]
        return list(zip(lefts, self._moments(lefts).mean(axis=1).tolist(), strict=True))

    def when(self, lefts: Sequence[int]) -> tuple[list[float], NDArray[np.int64], NDArray[np.int64]]:
        """For numbers of samples left, fewer than now: seconds until then, in the mean; and of those that are left in
        each scenario, the last ones of a row, their contexts then and what is then left of each; before them zeros.
        """
        moments = self._moments(lefts)
        scenarios = np.arange(len(self._remaining))[:, None]
        remaining = self._remaining[scenarios, self._order]
        whole = np.minimum(self._tokens_at(moments)[:, scenarios, self._engine[self._order]], remaining - 1)
        places = np.arange(remaining.shape[1])
        there = (places >= len(places) - np.array(lefts)[:, None])[:, None, :]
        contexts = (self._contexts[self._order] + whole) * there
        return moments.mean(axis=1).tolist(), contexts, (remaining - whole) * there

    @functools.cached_property
    def _ends(self) -> NDArray[np.float64]:
        """When each sample ends in each scenario, seconds: `_clock` over `_tokens`, as np.interp has it."""
        engines, scenarios, known = self._tokens.shape
        # All engines' and scenarios' tokens one behind the other, so that one search finds all.
        width = int(self._tokens.max()) + 1
        rows = np.arange(engines * scenarios).reshape(engines, scenarios)[self._engine].T
        behind = (self._tokens + width * np.arange(engines * scenarios).reshape(engines, scenarios, 1)).ravel()
        at = np.searchsorted(behind, self._remaining + width * rows, side="right") - 1
        last = self._cuts[self._engine] + known * rows
        at = np.minimum(at, last - 1)
        tokens, clock = self._tokens.ravel(), self._clock.ravel()
        wide = np.maximum(tokens[at + 1] - tokens[at], 1)
        between = (clock[at + 1] - clock[at]) / wide * (self._remaining - tokens[at]) + clock[at]
        found: NDArray[np.float64] = np.where(self._remaining == tokens[last], clock[last], between)
        return found

    @functools.cached_property
    def _order(self) -> NDArray[np.intp]:
        """The samples of each scenario as they end."""
        return np.argsort(self._ends, axis=1)

    @functools.cached_property
    def _ended(self) -> NDArray[np.float64]:
        """When the first sample of each scenario ends, the second, and so on."""
        return np.sort(self._ends, axis=1)

    def _moments(self, lefts: Sequence[int]) -> NDArray[np.float64]:
        """When so many are left, in each scenario."""
        return np.ascontiguousarray(self._ended[:, [-left - 1 for left in lefts]].T)

    def _tokens_at(self, moments: NDArray[np.float64]) -> NDArray[np.int64]:
        """Whole tokens that a sample of each engine (last axis) has by then, as np.interp has them."""
        at = (self._clock <= moments[:, None, :, None]).sum(axis=3)
        engines, scenarios = np.arange(at.shape[1])[:, None], np.arange(at.shape[2])
        since, until = self._clock[engines, scenarios, at - 1], self._clock[engines, scenarios, at]
        had, have = self._tokens[engines, scenarios, at - 1], self._tokens[engines, scenarios, at]
        found = (have - had) / (until - since) * (moments[:, None, :] - since) + had
        return np.rint(found).astype(np.int64).transpose(0, 2, 1)


@functools.lru_cache(maxsize=4096)
def _classes(samples: int) -> tuple[int, ...]:
    """Numbers of running samples that are told apart, from `samples` down to 1."""
    found = [samples]
    while found[-1] > 1:
        found.append(found[-1] - max(1, found[-1] // _FINE))
    return tuple(found)


def _spread(layout: Layout, contexts: NDArray[np.int64], remaining: NDArray[np.int64]) -> float:
    """Seconds of samples that are spread evenly over a layout's engines, the mean of the scenarios."""
    return _evenly(layout, contexts.sum() / np.full((1, 1, 1), len(contexts)), remaining[None], [len(contexts)])[0]


def _evenly(
    layout: Layout, contexts: NDArray[np.float64], rest: NDArray[np.int64], sizes: Sequence[int]
) -> list[float]:
    """For each group of samples their seconds, spread over the layout's engines and all going on at the same pace, the
    mean of the scenarios. Arguments as `_timed`."""
    _, seconds = _timed(layout, contexts, rest, sizes, layout.engines)
    return [
        float(np.add.reduce(np.add.reduce(of_group[:, : len(_classes(size))], axis=1))) / len(of_group)
        for of_group, size in zip(seconds, sizes, strict=True)
    ]


def _timed(
    layout: Layout, contexts: NDArray[np.float64], rest: NDArray[np.int64], sizes: Sequence[int], engines: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The rest of a stage for each group of samples, cut where the number of running ones falls to a next class.

    Of each group and scenario: tokens at the end of each cut, and its seconds, 0 for cuts that only other groups have.
    `contexts`: the mean of a group's samples, with an axis for scenarios and one for cuts; `rest`: tokens still to come
    of each group, scenario and sample, where a group of `sizes` has fewer samples than another with zeros before them;
    `engines`: that a group's samples are spread over.
    """
    groups, scenarios, most = rest.shape
    running, behind, samples, drafts = _cuts(tuple(sizes), engines, layout.drafts_per_step)
    ordered = np.sort(rest, axis=2)
    ends = ordered[np.arange(groups)[:, None, None], np.arange(scenarios)[:, None], most - 1 - behind]
    tokens = ends.copy()
    tokens[:, :, 1:] -= ends[:, :, :-1]
    middles = np.rint((contexts + ends - tokens / 2) * running).astype(np.int64)
    # One row a scenario, one column a cut.
    asked = middles.transpose(1, 0, 2).reshape(scenarios, -1)
    if layout.seconds_of is not None:
        steps = layout.seconds_of(samples, asked, drafts)
    else:
        steps = np.array(
            [
                [layout.step_seconds(*step) for step in zip(samples, of_scenario, drafts, strict=True)]
                for of_scenario in asked.tolist()
            ]
        )
    each = steps.reshape(scenarios, groups, -1).transpose(1, 0, 2)
    return ends, tokens / layout.tokens_per_step * each


@functools.lru_cache(maxsize=1024)
def _cuts(
    sizes: tuple[int, ...], engines: int, drafts_per_step: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int], list[int]]:
    """Of each group and cut, with an axis for scenarios: how many samples run on the fullest engine, and how many end
    after the cut; and in one row the samples and draft tokens of its steps.
    """
    classes = [_classes(size) for size in sizes]
    running = np.ones((len(sizes), 1, max(map(len, classes))), dtype=np.int64)
    behind = np.zeros(running.shape, dtype=np.int64)
    for place, left in enumerate(classes):
        running[place, 0, : len(left)] = [-(-then // engines) for then in left]
        behind[place, 0, : len(left) - 1] = left[1:]
    drafts = np.rint(running * drafts_per_step).astype(np.int64)
    return running, behind, running.ravel().tolist(), drafts.ravel().tolist()
