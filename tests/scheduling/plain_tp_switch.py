"""The rule of TP switches in its plain form: one scenario, one engine and one moment after the other, nothing left out.

It says beside its answer how close the closest of its comparisons was, since sums of floats depend on their order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from rhyme_openrlhf.scheduling.stage_course import SCENARIOS, Layout, Unfinished
from rhyme_openrlhf.scheduling.tp_switch import Switch, SwitchSeconds

# An engine's times: (tokens of each of its samples, seconds), ascending from 0.
Clock = tuple[list[float], list[float]]


def lengths_by_history(samples: Sequence[Unfinished], longest: int) -> list[list[int]]:
    """`by_history`, one sample after the other."""
    found: list[list[int]] = [[] for _ in range(SCENARIOS)]
    for place, sample in enumerate(samples):
        longer = sorted(min(length, longest) for length in sample.earlier if min(length, longest) > sample.generated)
        for scenario in range(SCENARIOS):
            quantile = ((scenario + place * 3) % SCENARIOS + 0.5) / SCENARIOS
            if sample.generated >= longest:
                rest = 1
            elif longer:
                rest = longer[int(quantile * len(longer))] - sample.generated
            elif not sample.earlier:
                rest = int(quantile * (longest - sample.generated))
            else:
                begin = max(sample.generated, 1)
                rest = int(begin / (1 - quantile * (1 - begin / longest)) - sample.generated)
            found[scenario].append(max(rest, 1))
    return found


class Rule:
    """`decide` by history. `closest`: relative difference of the closest comparison."""

    def __init__(self, layouts: Sequence[Layout], switch_seconds: SwitchSeconds) -> None:
        self._layouts, self._switch_seconds = layouts, switch_seconds
        self.closest = math.inf

    def decide(
        self, current: int, samples: Sequence[Unfinished], longest: int, engines: Sequence[int]
    ) -> Switch | None:
        scenarios = lengths_by_history(samples, longest)
        contexts = [sample.context for sample in samples]
        here = [clocks(self._layouts[current], contexts, rest, engines) for rest in scenarios]
        stay = fmean(max(seconds[-1] for _, seconds in of_engines.values()) for of_engines in here)
        lefts = classes(len(samples))[1:]
        best: Switch | None = None
        for place in range(current + 1, len(self._layouts)):
            layout, further = self._layouts[place], range(place + 1, len(self._layouts))
            cost = self._switch_seconds(current, place, contexts)
            total = now = cost + self._spread(place, [contexts] * len(scenarios), scenarios)
            evenly = [turn % layout.engines for turn in range(len(samples))]
            there = [clocks(layout, contexts, rest, evenly) for rest in scenarios]
            later = [self._later(here, current, place, contexts, scenarios, engines, left) for left in lefts]
            for left in lefts:
                for to in further:
                    total = min(total, cost + self._later(there, place, to, contexts, scenarios, evenly, left))
                    later.append(self._later(here, current, to, contexts, scenarios, engines, left))
            # Against a switch to this one later without what comes after it, against one to a larger one with it.
            same, larger = later[: len(lefts)], later[len(lefts) :]
            limit = stay if best is None else best.seconds_switched
            waits = any([self._less(other, now) for other in same] + [self._less(other, total) for other in larger])
            if self._less(total, limit) and not waits:
                best = Switch(place, stay, total)
        return best

    def _less(self, one: float, other: float) -> bool:
        self.closest = min(self.closest, abs(one - other) / max(one, other))
        return one < other

    def _later(
        self,
        course: Sequence[dict[int, Clock]],
        current: int,
        place: int,
        contexts: Sequence[int],
        scenarios: Sequence[Sequence[int]],
        engines: Sequence[int],
        left: int,
    ) -> float:
        moments, rests, founds = [], [], []
        for of_engines, rest in zip(course, scenarios, strict=True):
            ends = np.array([np.interp(one, *of_engines[at]) for one, at in zip(rest, engines, strict=True)])
            moments.append(float(np.sort(ends)[-left - 1]))
            done = {at: round(np.interp(moments[-1], seconds, tokens)) for at, (tokens, seconds) in of_engines.items()}
            last = np.argsort(ends)[-left:].tolist()
            whole = {sample: min(done[engines[sample]], rest[sample] - 1) for sample in last}
            rests.append([rest[sample] - whole[sample] for sample in last])
            founds.append([contexts[sample] + whole[sample] for sample in last])
        moved = [round(fmean(alike)) for alike in zip(*map(sorted, founds), strict=True)]
        return fmean(moments) + self._switch_seconds(current, place, moved) + self._spread(place, founds, rests)

    def _spread(self, place: int, contexts: Sequence[Sequence[int]], scenarios: Sequence[Sequence[int]]) -> float:
        layout = self._layouts[place]
        return fmean(
            clock(layout, of, rest, layout.engines)[1][-1] for of, rest in zip(contexts, scenarios, strict=True)
        )


def classes(samples: int) -> list[int]:
    """Numbers of running samples that are told apart."""
    found = [samples]
    while found[-1] > 1:
        found.append(found[-1] - max(1, found[-1] // 8))
    return found


def clocks(layout: Layout, contexts: Sequence[int], rest: Sequence[int], engines: Sequence[int]) -> dict[int, Clock]:
    """That of each engine."""
    on = {at: [sample for sample, engine in enumerate(engines) if engine == at] for at in engines}
    return {
        at: clock(layout, [contexts[sample] for sample in own], [rest[sample] for sample in own], 1)
        for at, own in on.items()
    }


def clock(layout: Layout, contexts: Sequence[int], rest: Sequence[int], engines: int) -> Clock:
    """Return the clock of samples that go on at the same pace, spread over `engines` engines."""
    ordered, left, mean = sorted(rest), classes(len(rest)), sum(contexts) / len(contexts)
    ends, passed = [0.0], [0.0]
    for then, after in zip(left, [*left[1:], 0], strict=True):
        end, running = ordered[-after - 1], -(-then // engines)
        tokens = end - ends[-1]
        context = round((mean + end - tokens / 2) * running)
        seconds = layout.step_seconds(running, context, round(running * layout.drafts_per_step))
        ends.append(end)
        passed.append(passed[-1] + tokens / layout.tokens_per_step * seconds)
    return ends, passed


def stage_so_far(seed: int, count: int, done: int) -> tuple[list[Unfinished], list[int]]:
    """Return a long-tailed stage's unfinished samples after about `done` tokens, and the engine of each."""
    draw = random.Random(seed)
    samples, engines = [], []
    for place in range(count):
        mean = draw.lognormvariate(6.5, 1.0)
        length, *earlier = (int(mean * draw.lognormvariate(0, 0.3)) + 1 for _ in range(draw.randint(1, 6)))
        had = int(done * draw.uniform(0.9, 1.1))
        if length > had:
            samples.append(Unfinished(had, had + draw.randint(10, 300), tuple(earlier)))
            engines.append(place * 4 // count)
    return samples, engines
