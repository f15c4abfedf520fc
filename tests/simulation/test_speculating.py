"""Rates and paces follow the epoch, and are made once for what does not change."""

from __future__ import annotations

import dataclasses

import pytest

from rhyme_openrlhf.scheduling.step_plan import Speculation
from rhyme_openrlhf.simulation import speculating
from rhyme_openrlhf.simulation.planner import History
from rhyme_openrlhf.simulation.settings import Features
from rhyme_openrlhf.simulation.speculating import Speculating
from rhyme_openrlhf.simulation.speculation_rates import NO_SPECULATION, Rates, full_windows
from rhyme_openrlhf.simulation.workload import PromptLoad, StepLoad
from tests.simulation import kinds

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
    monkeypatch.setattr(speculating, "window_rates", lambda *_: measured[0])
    windows = Speculating(Features(speculation="window"), KINDS, ())
    windows.turn_to(5, 2)
    assert windows.rates == measured[0] and set(windows.paces.values()) == {full_windows}


def test_what_is_verified_is_asked_of_the_middle_of_the_step() -> None:
    now = Speculating(Features(speculation="window"), KINDS, ())
    load = StepLoad(2, (PromptLoad(7, 100, (50, 60)), PromptLoad(8, 300, (10, 20))))
    history = History()
    assert now.verified(load, history, 2, 16, 1) == Speculation()
    now.turn_to(2, 2)
    asked = []
    pace = now.paces[1]
    now.paces = {1: lambda *step: asked.append(step) or pace(*step)}  # type: ignore[func-returns-value]
    history.note(1, PromptLoad(7, 100, (400, 800)))
    found = now.verified(load, history, 2, 16, 1)
    # Two samples an engine, prompts of 200 tokens, half of 600 tokens of response.
    assert asked == [(2, 2 * 500.0, 2 * now.rates.drafts_per_step)]
    assert found.tokens_per_step == now.rates.tokens_per_step and found.drafts_per_step > 0
