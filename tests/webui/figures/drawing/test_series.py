"""The kinds of series: escaped names and words, a look of their own, and what the axes hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.axes import MARKED_POINTS
from rhyme_openrlhf.webui.figures.drawing.chart import Chart, Content, Curves, Level
from rhyme_openrlhf.webui.figures.drawing.series import Area, Band, Bars, Dots, Guide, Line, Series, Span
from tests.webui.figure_rows import Options, traces

KINDS = [Line, Dots, Bars, Area]


def chart(*series: Series, **declared: Any) -> Any:
    """A chart of these series."""
    return Chart(content=lambda _: Content(series), description="d", empty="e", **declared).draw(None, Options())


@pytest.mark.parametrize("kind", [*KINDS, Guide])
def test_names_and_words_are_no_markup(kind: Callable[..., Series]) -> None:
    (trace,) = chart(kind("<b>", [1, 2], [3.0, 4.0], ["<i>", "%{x}"])).data
    assert (trace.name, *trace.text) == ("&lt;b&gt;", "&lt;i&gt;", "&#37;{x}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_series_keeps_its_look_when_others_are_missing(kind: Callable[..., Series]) -> None:
    a, b, nothing = kind("a", [1], [2.0]), kind("b", [1], [2.0]), kind("a", [], [])
    assert traces(chart(a, b))["b"] == traces(chart(nothing, b))["b"] != traces(chart(b, a))["b"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_draw_is_the_sentence(kind: Callable[..., Series]) -> None:
    for series in ([kind("a", [], [])], [kind("a", [1], [None])], []):
        figure = chart(*series)
        assert figure.layout.meta == {"description": "d", "empty": "e"} and not figure.data


@pytest.mark.parametrize("kind", KINDS)
def test_words_are_shown_alone_and_values_together(kind: Callable[..., Series]) -> None:
    worded, valued = chart(kind("a", [1], [2.0], ["two"])), chart(kind("a", [1], [2.0], value="%{y:.1f} s"))
    assert (worded.layout.hovermode, worded.data[0].hovertemplate) == ("closest", "%{text}<extra></extra>")
    assert (valued.layout.hovermode, valued.data[0].hovertemplate) == ("x unified", "%{y:.1f} s")
    both = chart(kind("a", [1], [2.0], ["two"], "%{text}: %{y}"))
    assert (both.layout.hovermode, both.data[0].hovertemplate) == ("closest", "%{text}: %{y}")


@pytest.mark.parametrize(("points", "marked"), [(1, True), (MARKED_POINTS - 1, True), (MARKED_POINTS, False)])
def test_few_points_are_marked(points: int, marked: bool) -> None:
    x, y = list(range(points)), [1.0] * points
    (line,), (bars,) = chart(Line("a", x, y)).data, chart(Line("", [], []), Bars("a", x, y)).data
    assert (line.mode == "lines+markers") == marked == (bars.marker.pattern.shape == "/")


@pytest.mark.parametrize(("kind", "top"), [(Bars, 80), (Area, 80), (Line, 40)])
def test_the_axis_holds_a_stack(kind: Callable[..., Series], top: float) -> None:
    x, y = list(range(1, 101)), [float(value % 41) for value in range(100)]
    layout = chart(kind("a", x, y), kind("b", x, y), grows=True).layout
    assert layout.yaxis.autorangeoptions.include == (0, top) and layout.meta["framed"]


@pytest.mark.parametrize(("kind", "scale"), [(Bars, "linear"), (Area, "linear"), (Line, "log")])
def test_stacks_have_no_logarithmic_axis(kind: Callable[..., Series], scale: str) -> None:
    curves = Curves(content=lambda _: Content([kind("a", [1, 2], [1.0, 9.0])]), description="d", empty="e")
    assert curves.draw({}, Options(scale="log")).layout.yaxis.type == scale


def test_a_constant_fills_two_thirds_and_a_constant_stack_the_axis() -> None:
    assert list(chart(Line("a", [1, 2], [4.0, 4.0])).layout.yaxis.range) == [0, 6]
    axis = chart(Bars("a", [1, 2], [1.0, 3.0]), Bars("b", [1, 2], [3.0, 1.0])).layout.yaxis
    assert (axis.range, axis.rangemode) == (None, "tozero")


def test_bars_of_steps_are_as_wide_as_their_steps_and_open_the_last() -> None:
    (bars,) = chart(Bars("a", [Span(1, 5), Span(6, 7)], [1.0, 2.0])).data
    assert (
        list(bars.x) == [3, 6.5] and list(bars.width) == pytest.approx([4.84, 1.84]) and list(bars.customdata) == [5, 7]
    )


def test_a_band_lies_behind_its_line_and_within_the_axis() -> None:
    band = Band([1, 2], [0.0, -10.0], [3.0, 2000.0], ("low", "high"))
    figure = chart(Line("a", [1, 2], [1.0, 2.0], band=band))
    assert [trace.name for trace in figure.data] == ["high", "low", "a"]
    assert figure.data[1].fill == "tonexty" and figure.data[1].fillcolor == palette.faint(figure.data[2].line.color)
    # Numbers of this size are written in full.
    assert figure.layout.yaxis.tickformat == ",~f"


@pytest.mark.parametrize(("end", "every"), [(10, 1), (11, None)])
@pytest.mark.parametrize("kind", KINDS)
def test_there_are_no_ticks_between_steps(kind: Callable[..., Series], end: int, every: int | None) -> None:
    axis = chart(kind("a", [1, end], [1.0, 1.0])).layout.xaxis
    assert (axis.tickformat, axis.dtick) == (",d", every)


def test_a_level_is_a_dotted_line_with_its_name() -> None:
    layout = chart(Line("a", [1], [2.0]), level=Level(1.0, "as before")).layout
    assert [(one.y0, one.y1, one.line.dash) for one in layout.shapes] == [(1, 1, "dot")]
    assert [one.text for one in layout.annotations] == ["as before"]


def test_bars_beside_each_other_are_no_stack_and_a_top_ends_the_axis() -> None:
    pair = Bars("a", [1], [4.0]), Bars("b", [1], [4.0])
    beside, stacked = chart(*pair, beside=True).layout, chart(*pair, top=10.0).layout
    assert (beside.barmode, stacked.barmode) == ("group", "stack")
    assert (list(beside.yaxis.range), list(stacked.yaxis.range)) == ([0, 6], [0, 10])
