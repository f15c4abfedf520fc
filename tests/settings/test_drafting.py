"""Settings that go together in no way."""

from __future__ import annotations

import dataclasses
import re

import pytest

from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import DraftingSettings, HistoSpecSettings
from rhyme_openrlhf.settings.options import SettingsError
from rhyme_openrlhf.settings.tp_switch import TpSwitchSettings


def test_a_model_that_nothing_uses_is_refused() -> None:
    with pytest.raises(SettingsError, match="only used by --drafting.source draft_model or eagle3 or .*, not by ngram"):
        DraftingSettings(source="ngram", model="half")


@pytest.mark.parametrize("source", ["draft_model", "eagle3", "history+draft_model", "history+eagle3"])
def test_a_source_that_needs_a_model_asks_for_it(source: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"--drafting.source {source} needs --drafting.model")):
        DraftingSettings(source=source)
    assert DraftingSettings(source=source, model="half").model == "half"


def test_an_unknown_source_is_refused_with_those_there_are() -> None:
    with pytest.raises(SettingsError, match="history, ngram, draft_model, eagle3"):
        DraftingSettings(source="medusa")


def test_history_workers_have_work_only_where_history_drafts() -> None:
    assert RhymeSettings().drafts_from_history
    assert RhymeSettings(drafting=DraftingSettings(source="history+draft_model", model="half")).drafts_from_history
    assert not RhymeSettings(drafting=DraftingSettings(source="ngram")).drafts_from_history
    assert not RhymeSettings(histospec=HistoSpecSettings(enable=False)).drafts_from_history


@pytest.mark.parametrize(("rule", "kept"), [("history", True), ("maximum", False)])
def test_lengths_are_kept_where_switches_are_decided_by_them(rule: str, kept: bool) -> None:
    plain = RhymeSettings(histospec=HistoSpecSettings(enable=False))
    assert not plain.keeps_history
    switching = TpSwitchSettings(enable=True, rule=rule)
    assert dataclasses.replace(plain, tp_switch=switching).keeps_history == kept
