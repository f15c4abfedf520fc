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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.latency.bucket_table import SecondsOfMany
from rhyme_openrlhf.scheduling.group_time import StepSeconds
from rhyme_openrlhf.scheduling.remaining_lengths import Unfinished, by_history, by_maximum

# Numbers of remaining samples that are told apart: up to this many each, beyond it each an eighth fewer than the last.
_FINE = 8


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


# Seconds to switch from one layout to another with samples of these contexts: (from, to, contexts), layouts by place.
SwitchSeconds = Callable[[int, int, Sequence[int]], float]


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
    if not samples:
        return None
    if engines is None:
        engines = [place % layouts[current].engines for place in range(len(samples))]
    if from_history:
        return _by_stopping(current, layouts, samples, longest_allowed, switch_seconds, engines)
    remaining = by_maximum(samples, longest_allowed)
    contexts = np.array([sample.context for sample in samples])
    stay = float(_Course(layouts[current], contexts, remaining, engines).last.mean())
    best: Switch | None = None
    for place, layout in list(enumerate(layouts))[current + 1 :]:
        total = _spread(layout, contexts[None], remaining) + switch_seconds(current, place, contexts.tolist())
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
    fewer = _classes(len(samples))[1:]
    best: Switch | None = None
    for place, layout in list(enumerate(layouts))[current + 1 :]:
        larger = list(enumerate(layouts))[place + 1 :]
        limit = best.seconds_switched if best is not None else stay
        cost = switch_seconds(current, place, contexts.tolist())
        total = now = cost + _spread(layout, contexts[None], remaining)
        if (now >= limit and not larger) or any(
            now > _later(course, current, place, layout, switch_seconds, left) for left in fewer
        ):
            continue
        if larger and fewer:
            # There they are spread evenly.
            there = _Course(layout, contexts, remaining, [turn % layout.engines for turn in range(len(samples))])
            total = min(
                now, *(cost + _later(there, place, *to, switch_seconds, left) for to in larger for left in fewer)
            )
        # Nor may it be better to wait for one of the larger ones.
        if total < limit and all(
            total <= _later(course, current, *to, switch_seconds, left) for to in larger for left in fewer
        ):
            best = Switch(place, stay, total)
    return best


def _later(
    course: _Course, current: int, place: int, layout: Layout, switch_seconds: SwitchSeconds, left: int
) -> float:
    """Seconds of the rest of the stage with a switch to `layout` when `left` samples are left, fewer than now."""
    moment, found, rest = course.when(left)
    moved = np.sort(found, axis=1).mean(axis=0).round().astype(int).tolist()
    return moment + switch_seconds(current, place, moved) + _spread(layout, found, rest)


class _Course:
    """How the rest of a stage goes if nothing is switched. `last`: when its last sample ends in each scenario."""

    def __init__(
        self, layout: Layout, contexts: NDArray[np.int64], remaining: NDArray[np.int64], engines: Sequence[int]
    ) -> None:
        self._contexts = contexts
        self._remaining = remaining
        on: dict[int, list[int]] = {}
        for place, engine in enumerate(engines):
            on.setdefault(engine, []).append(place)
        self._places = list(on.values())
        ends, seconds = _timed(layout, contexts[None], remaining, self._places, 1)
        passed = seconds.cumsum(axis=2)
        self.last = passed[:, :, -1].max(axis=0)
        # Of each engine and scenario how many tokens each of its samples has by when, from nothing on; behind the last
        # one's end no more.
        engines_there, scenarios, cuts = ends.shape
        self._tokens = np.zeros((engines_there, scenarios, cuts + 2))
        self._tokens[:, :, 1:-1] = ends
        self._tokens[:, :, -1] = ends[:, :, -1]
        self._clock = np.zeros(self._tokens.shape)
        self._clock[:, :, 1:-1] = passed
        self._counts = [len(_classes(len(places))) for places in self._places]
        for place, count in enumerate(self._counts):
            self._clock[place, :, count + 1 :] = np.inf

    @functools.cached_property
    def _ends(self) -> NDArray[np.float64]:
        """When each sample ends in each scenario, seconds."""
        found = np.empty(self._remaining.shape)
        for place, places in enumerate(self._places):
            known = self._counts[place] + 1
            for scenario in range(len(found)):
                tokens, clock = self._tokens[place, scenario, :known], self._clock[place, scenario, :known]
                found[scenario, places] = np.interp(self._remaining[scenario, places], tokens, clock)
        return found

    @functools.cached_property
    def _order(self) -> NDArray[np.intp]:
        """The samples of each scenario as they end."""
        return np.argsort(self._ends, axis=1)

    def when(self, left: int) -> tuple[float, NDArray[np.int64], NDArray[np.int64]]:
        """Seconds until so many samples are left, fewer than now, in the mean; in each scenario their contexts then,
        and what is then left of each.
        """
        scenarios = np.arange(len(self._ends))
        moments = self._ends[scenarios, self._order[:, -left - 1]]
        done = np.empty(self._ends.shape)
        for places, tokens in zip(self._places, self._tokens_at(moments), strict=True):
            done[:, places] = tokens[:, None]
        whole = np.minimum(done.round().astype(np.int64), self._remaining - 1)
        last = self._order[:, -left:]
        rest = np.take_along_axis(self._remaining - whole, last, axis=1)
        return float(moments.mean()), np.take_along_axis(self._contexts + whole, last, axis=1), rest

    def _tokens_at(self, moments: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens that a sample of each engine has by then in each scenario, as np.interp has them."""
        at = (self._clock <= moments[None, :, None]).sum(axis=2)
        engines, scenarios = np.ogrid[: at.shape[0], : at.shape[1]]
        since, until = self._clock[engines, scenarios, at - 1], self._clock[engines, scenarios, at]
        had, have = self._tokens[engines, scenarios, at - 1], self._tokens[engines, scenarios, at]
        found: NDArray[np.float64] = (have - had) / (until - since) * (moments - since) + had
        return found


@functools.lru_cache(maxsize=4096)
def _classes(samples: int) -> tuple[int, ...]:
    """Numbers of running samples that are told apart, from `samples` down to 1."""
    found = [samples]
    while found[-1] > 1:
        found.append(found[-1] - max(1, found[-1] // _FINE))
    return tuple(found)


def _spread(layout: Layout, contexts: NDArray[np.int64], remaining: NDArray[np.int64]) -> float:
    """Seconds of samples that are spread evenly over a layout's engines, all going on at the same pace; the mean of the
    scenarios.
    """
    everybody = [list(range(remaining.shape[1]))]
    return float(_timed(layout, contexts, remaining, everybody, layout.engines)[1].sum(axis=2).mean())


def _timed(
    layout: Layout,
    contexts: NDArray[np.int64],
    remaining: NDArray[np.int64],
    groups: Sequence[list[int]],
    engines: int,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The rest of a stage for each group of samples, cut where the number of running ones falls to a next class.

    Of each group and scenario: tokens at the end of each cut, and its seconds, 0 for cuts that only other groups have.
    `contexts`: of each scenario, or one for all; `engines`: that a group's samples are spread over.
    """
    classes = [_classes(len(places)) for places in groups]
    cuts, most = max(map(len, classes)), max(map(len, groups))
    # Those of a group are its row's last; before them zeros, less than any real one.
    ordered = np.zeros((len(groups), len(remaining), most), dtype=np.int64)
    context = np.empty((len(groups), len(contexts), 1))
    running = np.ones((len(groups), cuts), dtype=np.int64)
    at = np.full((len(groups), cuts), most - 1)
    for place, (places, left) in enumerate(zip(groups, classes, strict=True)):
        ordered[place, :, most - len(places) :] = remaining[:, places]
        context[place, :, 0] = contexts[:, places].sum(axis=1) / len(places)
        running[place, : len(left)] = [-(-then // engines) for then in left]
        # Tokens after which the sample ends that brings the number down to each class; the last one's is the stage's.
        at[place, : len(left) - 1] = [most - then - 1 for then in left[1:]]
    ordered.sort(axis=2)
    ends = ordered[np.arange(len(groups))[:, None, None], np.arange(len(remaining))[:, None], at[:, None, :]]
    tokens = ends.copy()
    tokens[:, :, 1:] -= ends[:, :, :-1]
    middles = ((context + ends - tokens / 2) * running[:, None, :]).round().astype(np.int64)
    # One row a scenario, one column a cut.
    asked = middles.transpose(1, 0, 2).reshape(len(remaining), -1)
    samples = running.ravel().tolist()
    drafts = [round(each * layout.drafts_per_step) for each in samples]
    if layout.seconds_of is not None:
        steps = layout.seconds_of(samples, asked, drafts)
    else:
        steps = np.array(
            [
                [layout.step_seconds(*step) for step in zip(samples, of_scenario, drafts, strict=True)]
                for of_scenario in asked.tolist()
            ]
        )
    each = steps.reshape(len(remaining), len(groups), cuts).transpose(1, 0, 2)
    return ends, tokens / layout.tokens_per_step * each
