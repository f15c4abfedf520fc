"""When drafting is switched off."""

from __future__ import annotations

import pytest

from rhyme_openrlhf.drafting.off_switch import HALF_LIFE, OffSwitch
from rhyme_openrlhf.history.index import Piece, build_index
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.settings.options import SettingsError
from tests.drafting.whole_texts import WholeTexts

LIMITS = ((0.0, 8), (0.5, 32), (0.8, 128))


def test_without_a_table_it_never_switches_off() -> None:
    switch = OffSwitch(())
    switch.record(1000, 0)
    assert switch.allows(10**6)


def test_the_limit_is_that_of_the_recent_acceptance_rate() -> None:
    switch = OffSwitch(LIMITS)
    assert switch.allows(128) and not switch.allows(129)
    switch.record(99, 59)
    assert switch.acceptance == pytest.approx(0.6, abs=0.01)
    assert switch.allows(32) and not switch.allows(33)
    for _ in range(10):
        switch.record(HALF_LIFE, 0)
    assert switch.allows(8) and not switch.allows(9)
    for _ in range(10):
        switch.record(HALF_LIFE, HALF_LIFE)
    assert switch.allows(128)


def test_old_drafts_count_half_after_half_a_life() -> None:
    switch = OffSwitch(LIMITS)
    for _ in range(20):
        switch.record(HALF_LIFE // 100, 0)
    before = switch.acceptance
    assert before < 0.01
    for _ in range(100):
        switch.record(HALF_LIFE // 100, HALF_LIFE // 100)
    # What came before weighs half of 20 hundredths against 100 hundredths of a life, themselves worth 72.
    assert switch.acceptance == pytest.approx(0.72 / 0.82, abs=0.02)


def test_the_drafter_asks_it_and_catches_up_afterwards() -> None:
    drafter = WholeTexts(HistoSpecSettings(batch_limits="0:1"))
    drafter.install("p", build_index([Piece([], [1, 2, 3, 4, 5], 1.0)] * 4))
    for request in "ab":
        drafter.begin(request, "p", 1, 12)
    assert drafter.draft_for(["a", "b"], [[9, 1], [9, 1]]) == [[], []]
    drafter.finish("b")
    assert drafter.draft_for(["a"], [[9, 1, 2, 3]])[0][0] == 4


@pytest.mark.parametrize("text", ["32", "0.5:32", "0:32,0:64", "0:32,1.5:64", "0:0", "0:32,", "a:b", "0:1:2", "nan:3"])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--histospec.batch_limits must be"):
        HistoSpecSettings(batch_limits=text)


def test_a_table_is_read() -> None:
    assert HistoSpecSettings(batch_limits="0:32,0.5:128").batch_limit_pairs() == ((0.0, 32), (0.5, 128))
    assert HistoSpecSettings().batch_limit_pairs() == ()
