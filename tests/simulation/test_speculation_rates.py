"""Mean rates of speculation against the window itself, drawn token by token."""

from __future__ import annotations

import random

import pytest

from rhyme_openrlhf.drafting.budget import SpeculationWindow
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.simulation.speculation_rates import Acceptance, budgeted, proposal_rates, window_rates
from tests.simulation.kinds import TIMES

SETTINGS = HistoSpecSettings()


@pytest.mark.parametrize("probability", [0.0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("coverage", [0.4, 1.0])
def test_the_rates_are_those_of_drawn_windows(probability: float, coverage: float) -> None:
    draw = random.Random(1)
    window, tokens, drafts, steps = SpeculationWindow(SETTINGS), 0, 0, 30_000
    for _ in range(steps):
        tokens += 1
        if draw.random() >= coverage:
            continue
        accepted = 0
        while accepted < window.size and draw.random() < probability:
            accepted += 1
        tokens, drafts = tokens + accepted, drafts + window.size
        window.record(window.size, accepted)
    rates = window_rates(SETTINGS, Acceptance(coverage, probability))
    assert rates.tokens_per_step == pytest.approx(tokens / steps, rel=0.03)
    assert rates.drafts_per_step == pytest.approx(drafts / steps, rel=0.03)


def test_everything_accepted_is_the_largest_window() -> None:
    rates = window_rates(SETTINGS, Acceptance(1.0, 1.0))
    assert (rates.tokens_per_step, rates.window) == (1 + SETTINGS.window_max, SETTINGS.window_max)
    assert window_rates(SETTINGS, Acceptance(0.0, 0.9)).tokens_per_step == 1.0


def test_a_budget_never_makes_a_step_less_worth() -> None:
    """Tokens a second with the budget's draft tokens are at least those without any, and with full windows."""
    acceptance = Acceptance(0.7, 0.8)
    rates = proposal_rates(SETTINGS, acceptance)
    pace = budgeted(TIMES, rates, acceptance)
    for running in (1, 8, 64, 200):
        context = running * 300.0
        chosen = pace(running, context, running * rates.drafts_per_step)
        value = running * rates.tokens_per_step * chosen.part / TIMES.seconds(running, context, chosen.drafts)
        assert value >= 0.97 * running / TIMES.seconds(running, context, 0)
        for other in (rates, window_rates(SETTINGS, acceptance)):
            full = round(running * other.drafts_per_step)
            assert value >= 0.97 * running * other.tokens_per_step / TIMES.seconds(running, context, full)
    assert pace(8, 100.0, 0.0).drafts == 0
