"""Speculation's predicted gain, against windows and budgets played through, and its course over a run."""

from __future__ import annotations

import dataclasses
import random

import pytest

from rhyme_openrlhf.drafting.budget import SpeculationWindow
from rhyme_openrlhf.scheduling.step_plan import Speculation
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.simulation import speculation
from rhyme_openrlhf.simulation.planner import History
from rhyme_openrlhf.simulation.settings import Acceptance, Features
from rhyme_openrlhf.simulation.speculation import (
    NO_SPECULATION,
    Rates,
    Speculating,
    budgeted,
    full_windows,
    proposal_rates,
    window_rates,
)
from rhyme_openrlhf.simulation.workload import PromptLoad, StepLoad
from tests.simulation import kinds
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


KINDS = {1: kinds.kind(), 2: dataclasses.replace(kinds.kind(), step_tokens=64)}
BUDGET = Features(speculation="budget", acceptance_epochs=3)


def test_acceptance_grows_from_the_second_epoch_on_and_then_stays() -> None:
    now = Speculating(BUDGET, KINDS, ())
    now.turn_to(1, 1)
    assert now.rates == NO_SPECULATION and set(now.paces.values()) == {full_windows}
    seen = []
    for epoch in (2, 3, 4, 5):
        now.turn_to(epoch, epoch)
        seen.append((now.rates, now.paces))
    assert seen[0][0].tokens_per_step < seen[1][0].tokens_per_step < seen[2][0].tokens_per_step
    # Behind the last acceptance nothing is made again, nor in another step of the same epoch.
    assert seen[3][1] is seen[2][1] is not seen[1][1] and set(seen[3][1]) == {1, 2}
    now.turn_to(9, 5)
    assert now.paces is seen[3][1]


def test_with_rates_of_a_run_each_step_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [Rates(1.5, 1.0, 2.0), Rates(2.5, 3.0, 4.0)]
    now = Speculating(Features(speculation="measured"), KINDS, measured)
    for step in (1, 2):
        now.turn_to(step, 1)
        assert now.rates == measured[step - 1]
    monkeypatch.setattr(speculation, "window_rates", lambda *_: measured[0])
    windows = Speculating(Features(speculation="window"), KINDS, ())
    windows.turn_to(5, 2)
    assert windows.rates == measured[0] and set(windows.paces.values()) == {full_windows}


def test_what_is_verified_is_asked_of_the_middle_of_the_step() -> None:
    now = Speculating(Features(speculation="window"), KINDS, ())
    load = StepLoad(2, (PromptLoad(7, 100, (50, 60)), PromptLoad(8, 300, (10, 20))))
    history = History()
    assert now.verified(load, history.lengths, 2, 16, 1) == Speculation()
    now.turn_to(2, 2)
    asked = []
    pace = now.paces[1]
    now.paces = {1: lambda *step: asked.append(step) or pace(*step)}  # type: ignore[func-returns-value]
    prompt = PromptLoad(7, 100, (400, 800))
    history.note(1, StepLoad(1, (prompt,)), prompt)
    found = now.verified(load, history.lengths, 2, 16, 1)
    # Two samples an engine, prompts of 200 tokens, half of 600 tokens of response.
    assert asked == [(2, 2 * 500.0, 2 * now.rates.drafts_per_step)]
    assert found.tokens_per_step == now.rates.tokens_per_step and found.drafts_per_step > 0
