"""The gain that a run measures of itself, on engines whose gain is known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.drafting.gain import FEWEST, FEWEST_ESTIMATED, INTERVAL_STEPS, GainMeter

SHARE = 0.02
PERIOD = round(INTERVAL_STEPS / SHARE)
STEP_S = 0.010


def run(
    meter: GainMeter, steps: int, gain: float, noise: float = 0.05, seed: int = 0, overhead: float = 1.0
) -> list[str]:
    """Run steps of 8 samples whose noisy throughput is `gain` times as high with drafts; return the messages.

    `overhead`: throughput without speculation / throughput of an engine that leaves drafts out.
    """
    chance = random.Random(seed)
    said = []
    for _ in range(steps):
        ticket = meter.ask()
        tokens = 800 * gain if ticket.drafts else 800
        said.append(meter.step(ticket.number, 8, round(tokens), STEP_S * chance.gauss(1, noise), overhead))
    return [sentence for sentence in said if sentence]


@pytest.mark.parametrize("gain", [1.02, 1.5, 3.0])
def test_it_finds_the_gain_within_its_spread(gain: float) -> None:
    meter = GainMeter(SHARE)
    run(meter, 60 * PERIOD, gain)
    found = meter.now()
    assert found is not None and found.intervals == 60
    assert found.low < gain < found.high
    assert found.high / found.low < 1.05


@pytest.mark.parametrize("comparisons", [2, 3, 4, 8])
def test_the_interval_of_few_comparisons_has_the_gain_in_it_as_often_as_it_says(comparisons: int) -> None:
    found = []
    for seed in range(400):
        meter = GainMeter(0.3)
        run(meter, comparisons * round(INTERVAL_STEPS / 0.3), 1.2, 0.2, seed)
        gain = meter.now()
        assert gain is not None and gain.intervals == comparisons
        found.append(gain.low < 1.2 < gain.high)
    # 95 %, and a spread of 1.1 % over 400 runs.
    assert sum(found) / len(found) > 0.91


def test_intervals_take_their_share_of_the_steps() -> None:
    meter = GainMeter(SHARE)
    without = 0
    for _ in range(20 * PERIOD):
        without += not meter.ask().drafts
    assert without == 20 * INTERVAL_STEPS


@pytest.mark.parametrize("settling", [0, 1])
def test_an_interval_ends_before_the_steps_that_settle_and_those_it_is_compared_with(settling: int) -> None:
    meter = GainMeter(SHARE, settling)
    tickets = [meter.ask() for _ in range(PERIOD)]
    first = PERIOD - 2 * INTERVAL_STEPS - settling
    assert [ticket.number for ticket in tickets if not ticket.drafts] == list(range(first, first + INTERVAL_STEPS))


def test_without_a_share_nothing_is_tried() -> None:
    meter = GainMeter(0)
    assert run(meter, 500, 0.1) == [] and meter.ask().drafts and meter.now() is None


def test_drafting_that_does_not_pay_is_switched_off_and_comes_back_when_it_does() -> None:
    meter = GainMeter(SHARE)
    (said,) = run(meter, FEWEST * PERIOD, 0.7)
    assert said.startswith("drafting is switched off: with it this engine has 0.7")
    assert not meter.ask().drafts
    again = run(meter, 2 * FEWEST * PERIOD, 1.6)
    assert len(again) == 1 and again[0].startswith("drafting is switched on again: with it this engine has 1.")
    assert run(meter, 2 * FEWEST * PERIOD, 1.6) == []


def test_no_gain_at_all_switches_nothing_on_noise() -> None:
    assert [run(GainMeter(SHARE), 10 * FEWEST * PERIOD, 1.0, 0.2, seed) for seed in range(3)] == [[], [], []]


def test_a_load_that_drains_does_not_look_like_a_gain() -> None:
    meter = GainMeter(SHARE)
    chance = random.Random(1)
    for _ in range(40):
        for step in range(PERIOD):
            # From 64 samples to 48, whose steps take hardly less.
            running = 64 - 16 * step // PERIOD
            meter.step(meter.ask().number, running, running, STEP_S * chance.gauss(1, 0.02))
    found = meter.now()
    assert found is not None and found.low < 1.01 and found.high > 0.99


def test_a_stretch_with_a_step_missing_is_not_compared() -> None:
    meter = GainMeter(SHARE)
    for _ in range(5):
        run(meter, PERIOD - 2, 2.0)
        meter.ask()
        run(meter, 1, 2.0)
    assert meter.now() is None
    # Before the steps that count, a missing one costs nothing.
    for _ in range(2):
        run(meter, 10, 2.0)
        meter.ask()
        run(meter, PERIOD - 11, 2.0)
    assert meter.now() is not None


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 999), st.floats(0, 9)), max_size=3 * PERIOD))
def test_whatever_the_steps_are_it_goes_on(steps: list[tuple[int, int, float]]) -> None:
    meter = GainMeter(0.1)
    for running, tokens, seconds in steps:
        meter.step(meter.ask().number, running, tokens, seconds)
    found = meter.now()
    assert found is None or 0 < found.low <= found.ratio <= found.high


def test_steps_that_settle_are_not_compared() -> None:
    meter = GainMeter(SHARE, settling=2)
    left_out = 0
    for _ in range(40 * PERIOD):
        ticket = meter.ask()
        # The two steps behind an interval are ten times as slow.
        settling = ticket.drafts and left_out > 0
        left_out = 2 if not ticket.drafts else left_out - settling
        tokens = 80 if settling else 1200 if ticket.drafts else 800
        meter.step(ticket.number, 8, tokens, STEP_S)
    found = meter.now()
    assert found is not None and found.intervals == 40 and found.ratio == pytest.approx(1.5)


def test_the_gain_is_against_an_engine_without_speculation() -> None:
    """1.2 times the tokens per second of the same engine, which an engine without speculation has 1.4 times."""
    meter = GainMeter(SHARE)
    said = run(meter, 60 * PERIOD, 1.2, overhead=1.4)
    found = meter.now()
    assert found is not None and found.drafting
    assert found.ratio == pytest.approx(1.2 / 1.4, rel=0.02) and found.low < 1.2 / 1.4 < found.high
    assert found.within == pytest.approx(1.2, rel=0.02)
    # Once, though it stays so; and drafts stay on, because this engine is slower without them.
    assert len(said) == 1
    assert "an engine without speculation (--no-histospec.enable) has 1.1" in said[0]
    # It pays again, and then no more: that is told anew.
    assert run(meter, 200 * PERIOD, 1.8, overhead=1.4) == []
    assert len(run(meter, 200 * PERIOD, 1.2, overhead=1.4)) == 1


def test_an_engine_that_gains_in_spite_of_its_overhead_says_nothing() -> None:
    meter = GainMeter(SHARE)
    assert run(meter, 60 * PERIOD, 1.8, overhead=1.3) == []
    found = meter.now()
    assert found is not None and found.low > 1.3


def test_drafts_are_switched_by_what_the_engine_itself_gains() -> None:
    meter = GainMeter(SHARE)
    said = run(meter, FEWEST * PERIOD, 0.7, overhead=1.4)
    assert len(said) == 1 and said[0].startswith("drafting is switched off: with it this engine has 0.7")
    # While drafting is off, its gain is still reported.
    run(meter, 20 * PERIOD, 0.7, overhead=1.4)
    found = meter.now()
    assert found is not None and not found.drafting and found.ratio == pytest.approx(0.5, rel=0.05)


def test_an_estimate_is_there_before_two_comparisons_are() -> None:
    meter = GainMeter(SHARE)
    for step in range(FEWEST_ESTIMATED):
        assert meter.now() is None
        meter.expect(0.010, 0.014 if step % 2 else 0.022)
    found = meter.now()
    assert found is not None and found.intervals == 0 and (found.ratio, found.low, found.high) == (0, 0, 0)
    assert found.estimate == pytest.approx(1.8)
    # What drafts gained long ago does not count for ever, and what is measured stands beside it.
    for _ in range(5000):
        meter.expect(0.010, 0.030)
    run(meter, 10 * PERIOD, 1.5)
    now = meter.now()
    assert now is not None and now.estimate == pytest.approx(3.0, rel=0.01) and now.low < 1.5 < now.high
