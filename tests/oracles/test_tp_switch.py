"""The TP switch rule without any history, against the best moment of all (PAT 4.2).

A stage: samples on four small engines decode token by token; after a switch all go on one large engine. The rule knows
no earlier lengths. 250 stages with random layouts and lengths, some of which have a large layout that is better
throughout. A fifth of them run by default.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from rhyme_openrlhf.scheduling.stage_course import Layout, Unfinished
from rhyme_openrlhf.scheduling.tp_switch import decide

CASES = 50
ENGINES = 4
PROMPT = 100
LOOKS = 40
Seconds = Callable[[int, int, int], float]


def layout_seconds(weights: float, each: float, context: float, fixed: float) -> Seconds:
    return lambda running, tokens, drafts: fixed + weights + each * running + context * tokens


def clock(lengths: Sequence[int], done: int, seconds: Seconds) -> NDArray[np.float64]:
    """When each of an engine's decode steps ends, if all its samples have `done` tokens."""
    ends, now = [0.0], done
    while alive := sum(length > now for length in lengths):
        ends.append(ends[-1] + seconds(alive, alive * (PROMPT + now), 0))
        now += 1
    return np.array(ends)


def large_clock(rest: Sequence[tuple[int, int]], seconds: Seconds) -> float:
    """Seconds of samples of these (tokens so far, tokens still to come) on one engine."""
    total = 0.0
    for token in range(max(more for _, more in rest)):
        alive = [done + token for done, more in rest if more > token]
        total += seconds(len(alive), sum(alive) + PROMPT * len(alive), 0)
    return total


def loss(draw: random.Random) -> float:
    """Part by which a stage takes longer under the rule than with the best switch or none."""
    longest = draw.choice([300, 600])
    middle, spread = longest * draw.choice([0.05, 0.15, 0.3]), draw.choice([0.4, 0.8, 1.2])
    count = draw.choice([4, 12, 32])
    lengths = [min(max(int(middle * math.exp(draw.gauss(0, spread))), 4), longest) for _ in range(count)]
    weights, each, fixed = draw.choice([4.0, 12.0, 40.0]), draw.choice([0.02, 0.2, 1.0]), draw.choice([1.0, 3.0])
    small = layout_seconds(weights, each, each / 1000, fixed)
    large = layout_seconds(weights / 4, each / 4, each / 4000, fixed * draw.choice([1.0, 2.0]))
    cost = draw.choice([1.0, 5.0, 20.0]) * small(1, PROMPT, 0)
    own = [lengths[engine::ENGINES] for engine in range(ENGINES)]
    clocks = [clock(of, 0, small) for of in own]
    stay = float(max(of[-1] for of in clocks))

    def left(moment: float) -> list[tuple[int, int, int]]:
        done = [int(np.searchsorted(of, moment, side="right")) - 1 for of in clocks]
        return [
            (engine, done[engine], length - done[engine])
            for engine in range(ENGINES)
            for length in own[engine]
            if length > done[engine]
        ]

    def switched(moment: float) -> float:
        return moment + cost + large_clock([(done, rest) for _, done, rest in left(moment)], large)

    layouts = [Layout(2, ENGINES, small), Layout(8, 1, large)]
    moments = [stay * look / LOOKS for look in range(1, LOOKS)]
    best = min(stay, *map(switched, moments))
    for moment in moments:
        samples = [Unfinished(done, PROMPT + done) for _, done, _ in left(moment)]
        engines = [engine for engine, _, _ in left(moment)]
        if decide(0, layouts, samples, longest, lambda *_: cost, True, engines) is not None:
            return switched(moment) / best - 1
    return stay / best - 1


@pytest.mark.parametrize("parts", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_without_history_a_stage_takes_little_longer_than_with_the_best_switch(parts: int) -> None:
    losses = []
    for part in range(parts):
        draw = random.Random(part)
        losses += [loss(draw) for _ in range(CASES)]
    losses.sort()
    mean, most = sum(losses) / len(losses), losses[int(0.95 * len(losses))]
    print(f"{len(losses)} stages: mean {mean:.4f}, 95 % {most:.4f}, largest {losses[-1]:.4f}")
    assert losses[0] >= 0 and mean <= 0.02 and most <= 0.01
