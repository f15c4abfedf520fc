"""A figure by declaration: its words and axes, and a pure function that makes series of its rows.

`Chart(...).draw(rows, options)` draws. `Curves` is the chart of a run's curves, whose axes the reader chooses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import plotly.graph_objects as go

from rhyme_openrlhf.api.read.curves import Curve
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.axes import OnAxis, frame, grows, whole_axis, x_axis, y_axis
from rhyme_openrlhf.webui.figures.drawing.base import blank, plain
from rhyme_openrlhf.webui.figures.drawing.series import Bars, Line, Series, Span
from rhyme_openrlhf.webui.site import text

# Text, or what makes it of the rows.
Words = str | Callable[[Any], str]
# What a chart's x counts: steps or epochs, amounts from 0 on, moments, or names and anything else.
Counted = Literal["whole", "amount", "date", "other"]
_X_AXES: dict[Counted, dict[str, Any]] = {
    "amount": {"rangemode": "tozero", "tickformat": ",~f"},
    "date": {"type": "date"},
    "other": {},
}


@dataclass(frozen=True)
class Content:
    """Series of a chart, and the words that go with them.

    `facts`: what the rows say, in sentences; `note`: a sentence above the drawing. `x`, `y`: the axes' titles if the
    rows decide them.
    """

    series: Sequence[Series]
    facts: str = ""
    note: str = ""
    x: str = ""
    y: str = ""


@dataclass(frozen=True)
class Level:
    """A horizontal line to compare with, and its name."""

    at: float
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The declaration of a figure.

    `content(rows)`: None if there is nothing to draw; then the figure is the sentence `empty`. `description`: for
    readers who cannot see the figure. `share`: the values are shares from 0 to 1, written as percentages. `zero`: the
    y axis begins at 0; `top`: it ends there. `beside`: bars of one x stand beside each other. `gap`: between bars, as
    a share of their distance. `legend`: None for a legend if there are several series. `grows`: the x axis has all
    steps of the run, so its end is a round number (`axes.grows`).
    """

    content: Callable[[Any], Content | None] | None
    description: Words
    empty: Words
    x: str = "Step"
    counted: Counted = "whole"
    y: Words = ""
    share: bool = False
    zero: bool = True
    top: float | None = None
    level: Level | None = None
    beside: bool = False
    gap: float = 0.08
    legend: bool | None = None
    grows: bool = False

    def draw(self, rows: Any, options: Any) -> go.Figure:
        """Draw the rows."""
        content = self._content(rows)
        description = _said(self.description, rows)
        shown = [one for one in enumerate(content.series) if one[1].drawable()] if content else []
        if content is None or not shown:
            return blank(description, _said(self.empty, rows))
        figure = blank(" ".join(filter(None, (description, content.facts, content.note))))
        figure.add_traces([trace for place, one in shown for trace in one.traces(place)])
        series = [one for _, one in shown]
        heights = self._heights(series)
        ends = [x.last if isinstance(x, Span) else x for one in series for x in one.x[-1:]]
        if self.grows:
            grows(figure, max(ends))
        y = y_axis(
            plain(content.y or _said(self.y, rows)), self._scale(options), heights,
            share=self.share, zero=self.zero, stack=any(map(self._stacks, series)),
        )  # fmt: skip
        if self.top is not None:
            y["range"] = [min(0.0, *heights), self.top]
        figure.update_layout(
            xaxis=self._x_axis(content.x or self.x, max(ends), options),
            yaxis=y,
            showlegend=len(content.series) > 1 if self.legend is None else self.legend,
            hovermode="closest" if any(one.words for one in series) else "x unified",
        )
        if any(isinstance(one, Bars) for one in series):
            figure.update_layout(barmode="group" if self.beside else "stack", bargap=self.gap)
        if any(isinstance(one, Line) and one.band for one in series):
            # By default, areas between lines turn the order around.
            figure.update_layout(legend={"traceorder": "normal"})
        if self.level:
            line = {"color": palette.GREY, "width": 1, "dash": "dot"}
            words = {"text": self.level.name, "font": {"size": 10}, "showarrow": False}
            name = {**words, "xanchor": "right", "yanchor": "bottom"} if self.level.name else None
            figure.add_hline(self.level.at, line=line, annotation=name)
        if content.note:
            self._write(figure, content.note)
        if self.grows:
            frame(figure, min(heights), max(heights))
        return figure

    def _content(self, rows: Any) -> Content | None:
        return self.content(rows) if self.content else None

    def _x_axis(self, title: str, end: Any, options: Any) -> dict[str, Any]:
        if self.counted == "whole":
            return whole_axis(title, end)
        return {"title": {"text": title}, **_X_AXES[self.counted]}

    def _scale(self, options: Any) -> str:
        return "linear"

    def _stacks(self, series: Series) -> bool:
        return series.stacked and not self.beside

    def _write(self, figure: go.Figure, note: str) -> None:
        """Write above the drawing, where the note hides no curve."""
        figure.add_annotation(
            text=note.replace(": ", ":<br>"), xref="paper", yref="paper", x=0, y=1, xanchor="left", yanchor="bottom",
            align="left", showarrow=False,
        )  # fmt: skip
        figure.update_layout(margin={"t": 48})

    def _heights(self, series: Sequence[Series]) -> list[float]:
        """Return the values that the y axis must contain; those of a stack are sums."""
        single: list[float] = []
        stacks: dict[Any, float] = defaultdict(float)
        for one in series:
            if self._stacks(one):
                for x, y in zip(one.x, one.y, strict=True):
                    stacks[x] += y or 0.0
            else:
                single += [y for y in one.heights if y is not None]
        return [*single, *stacks.values()]


@dataclass(frozen=True, kw_only=True)
class Curves(Chart):
    """The chart of a run's curves by their names, over the axis and scale that the reader chooses.

    `content`: if the curves are not just lines; `label`: a curve's name in the legend.
    """

    content: Callable[[Any], Content | None] | None = None
    label: Callable[[str], str] = text.label
    zero: bool = False
    grows: bool = True

    def _content(self, rows: Mapping[str, Curve]) -> Content | None:
        if self.content:
            return self.content(rows)
        drawn = [curve for curve in rows.values() if has_values(curve)]
        facts = summary(drawn[0], self.share) if len(drawn) == 1 else ""
        return Content(curve_lines(rows.values(), self.label), facts)

    def _x_axis(self, title: str, end: float, options: OnAxis) -> dict[str, Any]:
        return x_axis(options.axis, end)

    def _scale(self, options: OnAxis) -> str:
        return options.scale


def curve_lines(curves: Iterable[Curve], label: Callable[[str], str] = text.label) -> list[Line]:
    """Return a line for each curve."""
    return [Line(label(curve.name), curve.x, curve.values, average=curve.smooth) for curve in curves]


def has_values(curve: Curve) -> bool:
    """Return True if at least one value of the curve can be drawn."""
    return any(value is not None for value in curve.values)


def summary(curve: Curve, share: bool = False) -> str:
    """Return a curve's first, last, lowest and highest value in one sentence, or "" if the curve has no values.

    `share`: the values are shares from 0 to 1, written as percentages.
    """
    values = [value for value in curve.values if value is not None]
    if not values:
        return ""
    written = [
        text.percent(one) if share else text.number(one) for one in (values[0], values[-1], min(values), max(values))
    ]
    return f"First {written[0]}, last {written[1]}, lowest {written[2]}, highest {written[3]}."


def _said(words: Words, rows: Any) -> str:
    return words if isinstance(words, str) else words(rows)
