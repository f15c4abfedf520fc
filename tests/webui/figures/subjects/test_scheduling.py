"""Groups, moves, switches."""

import pytest

from rhyme_openrlhf.telemetry.events import RankGroups
from rhyme_openrlhf.webui.figures.drawing.series import Span
from rhyme_openrlhf.webui.figures.subjects.scheduling import MOST_SHOWN, MoveBucket, Reallocation
from tests.webui.figure_rows import draw, switch, traces

GROUPS = [
    RankGroups(1, [8, 8], [2, 2], [100.0, 400.0], [100.0, 500.0]),
    RankGroups(2, [8, 8], [1, 3], [150.0, 400.0], [100.0, 400.0]),
]


def test_predicted_against_real_has_a_diagonal_and_a_trace_a_group() -> None:
    figure = draw("predicted_length", GROUPS)
    drawn = traces(figure)
    assert list(drawn["Equal"].x) == [0, 500]
    assert list(drawn["Group 2"].x) == [400, 400] and list(drawn["Group 2"].y) == [500, 400]
    assert "off by 17.5% on average" in figure.layout.meta["description"]


def test_the_error_is_a_mean_over_groups() -> None:
    (line,) = draw("prediction_error", GROUPS).data
    assert list(line.y) == pytest.approx([0.1, 0.25])


def test_engines_of_groups_are_stacked() -> None:
    drawn = traces(draw("rank_groups", GROUPS))
    assert list(drawn["Group 1"].y) == [2, 1] and list(drawn["Group 2"].y) == [2, 3]
    assert drawn["Group 2"].text[1] == "step 2, group 2: 3 engines, 8 prompts"


def test_groups_without_lengths_and_thousands_of_groups_are_drawn() -> None:
    odd = [RankGroups(1, [1, 1], [1, 1], [5.0, -1.0], [-5.0, 0.0])]
    assert "off by" not in draw("predicted_length", odd).layout.meta["description"]
    assert draw("prediction_error", odd).layout.meta["description"]
    many = [RankGroups(1, [1] * 5000, [1] * 5000, [5.0] * 5000, [6.0] * 5000)]
    for name, further in (("predicted_length", 1), ("rank_groups", 0)):
        figure = draw(name, many)
        assert len(figure.data) == MOST_SHOWN + further
        assert "Only the first 64 of 5000 groups are drawn." in figure.layout.meta["description"]


def test_moves_are_stacked_by_cause() -> None:
    buckets = [
        MoveBucket(Span(1, 2), "outlier_intra", 3),
        MoveBucket(Span(1, 2), "reallocation", 1),
        MoveBucket(Span(3, 4), "new", 2),
    ]
    drawn = traces(draw("moves", buckets))
    assert list(drawn["Outlier, within a machine"].y) == [3] and list(drawn["Outlier, within a machine"].x) == [1.5]
    assert set(drawn) == {"Outlier, within a machine", "Reallocation", "New"}


def test_switches_are_told_apart_by_layout() -> None:
    (shown,) = draw("switches", [switch(1), switch(2)]).data
    assert shown.name == "TP 1 to 2" and list(shown.y) == [0.8, 0.8]


def test_reallocation_is_before_and_after() -> None:
    figure = draw("reallocation", Reallocation(7, {0: 12, 1: 2}, {0: 8, 1: 6}))
    assert "had 10 more than the emptiest before, 2 after" in figure.layout.meta["description"]
    assert list(traces(figure)["After"].y) == [8, 6]
