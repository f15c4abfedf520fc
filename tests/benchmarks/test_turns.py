"""Speeds of turns and their ratios: what a disturbed machine does to them."""

from __future__ import annotations

import math
import random

import pytest
from turns import Turn, mean_speed, ratio, usual_speed

PARTS = (100, 300)


def arm(slower: float, repeats: int = 40, stalls: float = 0.0, seed: int = 0) -> list[list[Turn]]:
    """1000 tokens a second / `slower`, give or take a tenth; a share `stalls` of the turns takes ten times as long."""
    chance = random.Random(seed)
    return [
        [
            Turn(tokens, tokens / 1000 * slower * chance.uniform(0.9, 1.1) * (10 if chance.random() < stalls else 1))
            for tokens in PARTS
        ]
        for _ in range(repeats)
    ]


def test_every_part_counts_by_its_work() -> None:
    # 100 tokens in 1 s, and 300 in 1 s; one of three turns was disturbed.
    repeats = [[Turn(100, 1.0), Turn(300, 1.0)], [Turn(100, 9.0), Turn(300, 1.0)], [Turn(100, 1.0), Turn(300, 1.0)]]
    assert usual_speed(repeats) == pytest.approx(200)
    assert mean_speed(repeats) == pytest.approx(1200 / 14)


def test_stalls_do_not_hide_which_arm_is_slower() -> None:
    for stalls in (0.0, 0.15):
        found = ratio([(arm(1.1, stalls=stalls, seed=1), arm(1.0, stalls=stalls, seed=2))], usual_speed)
        assert found.low < 1 / 1.1 < found.high < 1
    settled = ratio([(arm(1.1, seed=1), arm(1.0, seed=2))], mean_speed)
    assert settled.low < 1 / 1.1 < settled.high < 1


def test_pairs_are_averaged_evenly_on_both_sides() -> None:
    same, half, twice = arm(1.0, seed=3), arm(2.0, seed=3), arm(0.5, seed=3)
    for speed in (usual_speed, mean_speed):
        found = ratio([(half, same), (twice, same)], speed)
        assert found.value == pytest.approx(1) and found.low <= 1 <= found.high
    assert ratio([(half, same)], mean_speed).value == pytest.approx(0.5)


def test_one_repeat_has_no_interval() -> None:
    one = arm(1.0, repeats=1)
    found = ratio([(one, one)], usual_speed)
    assert found.value == 1 and math.isnan(found.low) and math.isnan(found.high)
