"""Speculation: rates, sources, draft lengths and their cost, the gain."""

import pytest

from rhyme_openrlhf.telemetry.events import DraftBudget, DraftGain
from rhyme_openrlhf.webui.figures.subjects.speculation import SOURCES
from tests.webui.figure_rows import curve, draw, traces


def test_rates_are_described_each() -> None:
    found = {name: curve(name, 0.25, 0.5) for name in ("speculation_rate", "acceptance_rate")}
    figure = draw("speculation", found)
    assert len(figure.data) == 2 and figure.layout.yaxis.tickformat == ".0%"
    assert "Speculation rate: first 25.0%, last 50.0%" in figure.layout.meta["description"]


def test_sources_are_stacked_to_the_speculation_rate() -> None:
    found = {name: curve(name, 0.0, share) for name, share in zip(SOURCES, (0.3, 0.1, 0.2, 0.1), strict=True)}
    found["earlier_share"] = curve("earlier_share", 0.0, 0.0)
    figure = draw("draft_sources", found)
    assert [trace.stackgroup for trace in figure.data] == ["stack"] * 4
    assert "earlier responses 30.0%, siblings of the same rollout 10.0%" in figure.layout.meta["description"]
    # Earlier runs' responses are a part of the first source: a line, not one more layer.
    found["earlier_share"] = curve("earlier_share", 0.2, 0.1)
    *stacked, line = draw("draft_sources", found).data
    assert (len(stacked), line.stackgroup, line.y) == (4, None, (0.2, 0.1))
    nothing = {name: curve(name, 0.0, None) for name in (*SOURCES, "earlier_share")}
    assert draw("draft_sources", nothing).layout.meta["empty"]


BUDGETS = [
    DraftBudget(1, 0, [1, 8], [10, 30], [8.0, 2.0], [10.0, 20.0], [10.0, 25.0]),
    DraftBudget(2, 0, [1, 8], [30, 10], [4.0, 2.0], [10.0, 20.0], [10.0, 25.0]),
]


def test_draft_lengths_are_weighted_by_decode_steps() -> None:
    (by_load,) = draw("chosen_length", BUDGETS).data
    assert list(by_load.x) == [1, 8] and list(by_load.y) == pytest.approx([5.0, 2.0])
    (over_steps,) = draw("draft_budget", BUDGETS).data
    assert list(over_steps.x) == [1, 2] and list(over_steps.y) == pytest.approx([3.5, 3.5])


def test_expected_and_accepted_tokens_are_compared() -> None:
    budgets = [DraftBudget(1, 0, [2], [10], [3.0], [1.0], [1.0], [4.0], [5.0]), *BUDGETS]
    figure = draw("accepted_tokens", budgets)
    # Records of older writers have neither.
    assert list(traces(figure)["Expected"].x) == [2] and list(traces(figure)["Accepted"].y) == [5.0]
    assert "--latency.profile" in draw("accepted_tokens", BUDGETS).layout.meta["empty"]


def test_the_gain_is_the_mean_of_the_engines_with_its_spread() -> None:
    figure = draw("draft_gain", [DraftGain(1, 0, 1.5, 1.4, 1.6, 9, True), DraftGain(1, 1, 2.5, 2.0, 3.0, 9, True)])
    assert list(traces(figure)["Measured"].y) == [2.0]
    assert "Now: 2.00 times the tokens/s without (95 %: 1.70 to 2.30)." in figure.layout.meta["description"]


def test_engines_that_drafts_make_slower_name_the_flag_of_the_next_run() -> None:
    slower = draw("draft_gain", [DraftGain(1, 0, 0.7, 0.6, 0.8, 9, True), DraftGain(1, 1, 0.9, 0.8, 1.0, 9, True)])
    (sentence,) = (annotation.text for annotation in slower.layout.annotations if annotation.text)
    assert sentence.startswith("Engines without speculation would have 1.27 times the tokens per second:")
    assert "--no-histospec.enable" in sentence and "--no-histospec.enable" in slower.layout.meta["description"]
    # An interval that has "no gain" in it says nothing, nor engines that have switched drafts off and lose no more.
    for found in (
        DraftGain(1, 0, 0.9, 0.8, 1.0, 9, True),
        DraftGain(1, 0, 0.8, 0.7, 0.9, 9, drafting=False, within=0.8),
    ):
        unsure = draw("draft_gain", [found])
        assert not unsure.layout.annotations and "--no-histospec" not in unsure.layout.meta["description"]
        assert ("no difference shown" in unsure.layout.meta["description"]) == found.drafting
    # Where such engines are slower for what they could do, that is what the next run gains.
    off = draw("draft_gain", [DraftGain(1, 0, 0.6, 0.5, 0.7, 9, drafting=False, within=0.9)])
    assert "would have 1.50 times" in off.layout.meta["description"]


def test_predicted_and_real_step_time_are_compared() -> None:
    figure = draw("predicted_step", BUDGETS)
    assert list(traces(figure)["Predicted"].y) == pytest.approx([10, 20])
    assert "off by 10.0% on average" in figure.layout.meta["description"]
