"""Tier 2 against equal shares, and its bounds; against brute force: tests/oracles."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.scheduling.engine_shares import plan_shares
from rhyme_openrlhf.scheduling.step_plan import GroupTime, Speculation
from tests.latency import formula


def tau(fixed: float, samples: int) -> Callable[[float, int], float]:
    """Steps of constant cost and one of each sample: as decoding is."""
    return lambda length, engines: length * (fixed + math.ceil(samples / engines))


small = st.tuples(st.lists(st.floats(1, 1000), min_size=2, max_size=4).map(sorted), st.integers(0, 5), st.floats(0, 20))


@given(small, st.integers(1, 64), st.floats(0, 3000))
def test_never_worse_than_equal_shares_and_all_engines_are_used(
    case: tuple[list[float], int, float], samples: int, training: float
) -> None:
    lengths, more, fixed = case
    engines = len(lengths) + more
    plan = plan_shares(lengths, engines, tau(fixed, samples), training)
    assert sum(plan.engines) == engines and all(share >= 1 for share in plan.engines)
    equal = equal_shares(lengths, engines, tau(fixed, samples))
    assert plan.cycle_seconds <= equal[0] * (1 + 1e-9) and plan.idle_share <= equal[1] + 1e-9


def equal_shares(lengths: list[float], engines: int, seconds: Callable[[float, int], float]) -> tuple[float, float]:
    """(cycle, idle share) of equal shares, counted engine by engine."""
    whole, over = divmod(engines, len(lengths))
    shares = [whole + (group >= len(lengths) - over) for group in range(len(lengths))]
    row = [seconds(length, n) for length, n in zip(lengths, shares, strict=True) for _ in range(n)]
    busy = [odd + even for odd, even in zip(row, reversed(row), strict=True)]
    return max(busy), 1 - sum(busy) / (engines * max(busy)) if max(busy) else 0.0


def test_exponential_lengths_get_a_better_plan_in_nearly_every_case() -> None:
    """Figure 11's case. Where the plan is not better it is the equal one: no shift of one engine helps."""
    draw = random.Random(7)
    gains = []
    for _ in range(200):
        lengths = sorted(200 * math.exp(draw.gauss(0, 1) + 0.35 * group) for group in range(8))
        engines = draw.choice([16, 32, 64])
        plan = plan_shares(lengths, engines, tau(60, 256))
        gains.append(equal_shares(lengths, engines, tau(60, 256))[1] - plan.idle_share)
    assert min(gains) > -1e-9 and sum(gains) / len(gains) > 0.3
    assert sum(gain > 0 for gain in gains) >= 194


def test_one_rank_group_has_all_engines() -> None:
    assert plan_shares([10.0], 5, tau(1, 10)).engines == (5,)


def test_impossible_demands_are_refused() -> None:
    for lengths in ([], [1.0, 2.0, 3.0, 4.0]):
        with pytest.raises(ValueError, match="cannot share 3 engines"):
            plan_shares(lengths, 3, tau(1, 1))


@given(st.integers(1, 400), st.floats(1, 1000), st.integers(1, 63))
def test_more_engines_never_take_longer(samples: int, length: float, engines: int) -> None:
    time_of = GroupTime(Predictor(StepModel(formula.profile())).step_seconds, samples, 20.0, 32)
    # Contexts are answered by the middle of their bucket, a sixteenth wide.
    assert time_of(length, engines + 1) <= time_of(length, engines) * 1.07


def test_speculation_shortens_a_rank_group() -> None:
    seconds = Predictor(StepModel(formula.profile())).step_seconds
    plain = GroupTime(seconds, 8, 16.0, 64)(1000.0, 2)
    assert GroupTime(seconds, 8, 16.0, 64, Speculation(2.0, 3.0))(1000.0, 2) < 0.65 * plain


def test_a_thousand_engines_ask_the_latency_model_seldom() -> None:
    """What makes planning quick: tau is asked some hundred times, not engines times rank groups (32,768)."""
    asked = 0
    seconds = GroupTime(Predictor(StepModel(formula.profile())).step_seconds, 4096 * 8 // 32, 100.0, 256)

    def counted(length: float, engines: int) -> float:
        nonlocal asked
        asked += 1
        return seconds(length, engines)

    begin = time.perf_counter()
    plan = plan_shares([50 * 1.2**group for group in range(32)], 1024, counted)
    print(f"planned in {time.perf_counter() - begin:.3f} s, tau asked {asked} times")
    assert sum(plan.engines) == 1024
    assert asked < 5000
