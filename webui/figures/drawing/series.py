"""The kinds of series that figures consist of, each drawn the same in every figure.

A series takes its colour, dash, symbol and pattern from its place in the figure, so it keeps them when others are
missing. Names and hover words are escaped here (`base.plain`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import plotly.graph_objects as go

from rhyme_openrlhf.api.read.curves import Curve
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.axes import MARKED_POINTS
from rhyme_openrlhf.webui.figures.drawing.base import plain

WORDS_ALONE = "%{text}<extra></extra>"
# Under a moving average the curve itself stays visible, faintly.
FAINT = 0.3
PATTERNS = ("", "/", ".", "x", "|")
# The height of a horizontal bar in a row of height 1.
ROW_HEIGHT = 0.8


class Span(NamedTuple):
    """Steps `first` to `last`, as the x of one bar."""

    first: int
    last: int

    @property
    def middle(self) -> float:
        """The bar's place on the axis."""
        return (self.first + self.last) / 2


@dataclass(frozen=True)
class Series(ABC):
    """A named series of points.

    `words`: the hover text of each point; without them, hovering shows all series at one x. `value`: plotly.js's
    template of a point, such as "%{y:.2f} ms", or "%{text}, %{y:.2f} ms" with the words. `steps`: the step that a click
    on each point opens.
    """

    name: str
    x: Sequence[Any]
    y: Sequence[float | None]
    words: Sequence[str] = ()
    value: str = ""
    color: str = ""
    steps: Sequence[int] = ()

    # Values at the same x are drawn on top of each other.
    stacked: ClassVar[bool] = False

    @abstractmethod
    def traces(self, place: int) -> list[go.Scatter | go.Bar]:
        """Return what plotly.js draws for the series at this place, from 0."""

    @property
    def heights(self) -> Sequence[float | None]:
        """Values that the y axis must contain."""
        return self.y

    def drawable(self) -> bool:
        """Return True if at least one point can be drawn."""
        return any(value is not None for value in self.y)

    def _color(self, place: int) -> str:
        return self.color or palette.series_color(place)

    def _shared(self) -> dict[str, Any]:
        found: dict[str, Any] = {"x": self.x, "y": self.y, "name": plain(self.name)}
        if self.words:
            found.update(text=[plain(one) for one in self.words], hovertemplate=self.value or WORDS_ALONE)
        elif self.value:
            found["hovertemplate"] = self.value
        if self.steps:
            found["customdata"] = self.steps
        return found


@dataclass(frozen=True)
class Band:
    """The area between two lines around a line. `hovers`: hovering over the figure shows both, too."""

    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    names: tuple[str, str]
    hovers: bool = False

    def traces(self, color: str) -> list[go.Scatter]:
        """Return the upper edge, and the lower edge with the area between them."""
        style: dict[str, Any] = {"mode": "lines", "line": {"color": color, "width": 0}, "showlegend": False}
        if not self.hovers:
            style["hoverinfo"] = "skip"
        low, high = map(plain, self.names)
        return [
            go.Scatter(x=self.x, y=self.high, name=high, **style),
            go.Scatter(x=self.x, y=self.low, name=low, fill="tonexty", fillcolor=palette.faint(color), **style),
        ]


@dataclass(frozen=True)
class Line(Series):
    """A line; one with fewer points than `marked` has a marker at each point, because two points look like a trend.

    `average`: the line's moving average, drawn over it. `shape`: how plotly.js connects points.
    """

    average: Curve | None = None
    band: Band | None = None
    marked: int = MARKED_POINTS
    shape: str = ""

    @property
    def heights(self) -> Sequence[float | None]:
        """Values of the line and of its band."""
        return [*self.y, *self.band.low, *self.band.high] if self.band else self.y

    def traces(self, place: int) -> list[go.Scatter | go.Bar]:
        """Return the band, the line faintly if it has an average, and the line or its average."""
        color = self._color(place)
        line: dict[str, Any] = {"color": color, "dash": palette.series_dash(place), "width": 2}
        if self.shape:
            line["shape"] = self.shape
        style: dict[str, Any] = {"mode": "lines", "line": line}
        if len(self.x) < self.marked:
            style["mode"] = "lines+markers"
            style["marker"] = {"color": color, "symbol": palette.series_symbol(place), "size": 6}
        shared = self._shared()
        found = self.band.traces(color) if self.band else []
        if self.average is None:
            return [*found, go.Scatter(**shared, **style)]
        name = f"{shared['name']} (not smoothed)"
        faintly = {**style, "line": {**line, "width": 1}, "opacity": FAINT}
        raw = go.Scatter(**{**shared, "name": name}, **faintly, hoverinfo="skip", showlegend=False)
        shared.update(x=self.average.x, y=self.average.values)
        return [*found, raw, go.Scatter(**shared, **{**style, "mode": "lines"})]


@dataclass(frozen=True)
class Guide(Series):
    """A dotted line to compare points with, such as the diagonal."""

    def traces(self, place: int) -> list[go.Scatter | go.Bar]:
        """Return the line."""
        line = {"color": palette.GREY, "width": 1, "dash": "dot"}
        return [go.Scatter(**self._shared(), mode="lines", line=line, hoverinfo="skip")]


@dataclass(frozen=True)
class Dots(Series):
    """Single points. `symbol`, `size`: if they lie over other series."""

    symbol: str = ""
    size: int = 6

    def traces(self, place: int) -> list[go.Scatter | go.Bar]:
        """Return the points."""
        symbol = self.symbol or palette.series_symbol(place)
        marker = {"color": self._color(place), "symbol": symbol, "size": self.size}
        return [go.Scatter(**self._shared(), mode="markers", marker=marker)]


@dataclass(frozen=True)
class Bars(Series):
    """Bars; `x`: names, numbers, or `Span`s of steps. Few bars have a pattern besides their colour."""

    patterned: bool = True

    stacked: ClassVar[bool] = True

    def traces(self, place: int) -> list[go.Scatter | go.Bar]:
        """Return the bars."""
        shape = PATTERNS[place % len(PATTERNS)] if len(self.x) < MARKED_POINTS else ""
        marker: dict[str, Any] = {"color": self._color(place), "line": {"width": 0}}
        if self.patterned:
            marker["pattern"] = {"shape": shape, "size": 6, "solidity": 0.3}
        shared = self._shared()
        if self.x and isinstance(self.x[0], Span):
            shared.update(
                x=[one.middle for one in self.x],
                width=[one.last - one.first + 0.84 for one in self.x],
                customdata=[one.last for one in self.x],
            )
        return [go.Bar(**shared, marker=marker, textposition="none")]


@dataclass(frozen=True)
class Area(Series):
    """A layer of a stack of areas, which is quicker to draw than many bars. `shape`: how plotly.js connects points."""

    shape: str = "hvh"

    stacked: ClassVar[bool] = True

    def traces(self, place: int) -> list[go.Scatter | go.Bar]:
        """Return the layer; the stack has a gap where no layer has a value."""
        color = self._color(place)
        return [
            go.Scatter(
                **self._shared(), mode="lines", stackgroup="stack", stackgaps="infer zero", fillcolor=color,
                line={"color": color, "width": 0, "shape": self.shape},
            )
        ]  # fmt: skip


def row_bars(
    name: str, bars: Sequence[tuple[int, float, float, str]], marker: dict[str, Any], height: float = ROW_HEIGHT
) -> go.Bar:
    """Return horizontal bars from (row, start, length, hover text); the text may have line breaks and is not escaped.

    `height`: of a bar; a row has 1.
    """
    return go.Bar(
        orientation="h", y=[row for row, *_ in bars], base=[start for _, start, _, _ in bars],
        x=[length for _, _, length, _ in bars], width=height, name=plain(name), text=[words for *_, words in bars],
        textposition="none", hovertemplate=WORDS_ALONE, marker={"line": {"width": 0}, **marker},
    )  # fmt: skip
