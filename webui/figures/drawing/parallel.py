"""Parallel coordinates: an axis for each option and result, and a line through them for each run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.base import blank, plain
from rhyme_openrlhf.webui.site import text

# Classes of runs by their place in the order of the last axis, and what draws each.
CLASSES = ("Best quarter", "Second quarter", "Third quarter", "Last quarter", "No result yet")
COLORS = (palette.GREEN, palette.BLUE, palette.GOLD, palette.RED, palette.GREY)
# Distance between two named values of an axis: the height of a line in the smallest drawing.
APART = 0.14
# From this ratio of the largest to the smallest value on, an axis of numbers above 0 is logarithmic.
LOG_FROM = 20


@dataclass(frozen=True)
class Place:
    """A value on an axis, and the same in words; None is no value."""

    value: Any
    words: str


@dataclass(frozen=True)
class Line:
    """A run with its value on each axis."""

    name: str
    places: tuple[Place, ...]


def parallel_coordinates(axes: Sequence[str], lines: Sequence[Line]) -> go.Figure:
    """Draw lines over axes; the last axis has the result, of which more is better.

    One trace holds all lines of a class, with a gap between any two.
    """
    if not lines or len(axes) < 2:
        return blank("Options and results of runs: none.", "There are no runs to draw.")
    scales = [_Scale([line.places[at] for line in lines]) for at in range(len(axes))]
    titles = [plain(axis) for axis in axes]
    figure = blank(_description(axes, lines))
    classes = _classes(lines)
    for number, title in enumerate(CLASSES):
        x: list[str | None] = []
        y: list[float | None] = []
        hover: list[str | None] = []
        for line in (line for line, of in zip(lines, classes, strict=True) if of == number):
            for axis, scale, place in zip(titles, scales, line.places, strict=True):
                x.append(axis)
                y.append(scale.at(place))
                hover.append(f"{plain(line.name)}<br>{axis} {plain(place.words)}")
            x, y, hover = [*x, None], [*y, None], [*hover, None]
        color = COLORS[number]
        if x:
            figure.add_scatter(
                x=x, y=y, text=hover, name=title, mode="lines+markers", connectgaps=False, opacity=0.8,
                line={"color": color, "dash": palette.series_dash(number), "width": 1.5},
                marker={"color": color, "symbol": palette.SYMBOLS[number], "size": 6},
                hovertemplate="%{text}<extra></extra>",
            )  # fmt: skip
    ticks = [(axis, *tick) for axis, scale in zip(titles, scales, strict=True) for tick in scale.ticks()]
    figure.add_scatter(
        x=[axis for axis, _, _ in ticks], y=[at for _, at, _ in ticks], text=[plain(words) for _, _, words in ticks],
        name="Values of the axes", mode="text", textposition="top center", hoverinfo="skip", showlegend=False,
        # A halo in the colour of the background, because lines run behind the values.
        cliponaxis=False, textfont={"shadow": "auto"},
    )  # fmt: skip
    figure.update_layout(
        # Room on both sides, for the values of the first and the last axis.
        xaxis={"showgrid": True, "gridwidth": 2, "showline": False, "ticks": "", "range": [-0.25, len(axes) - 0.75]},
        yaxis={"visible": False, "range": [-0.06, 1.12]},
        showlegend=True,
        hovermode="closest",
    )
    return figure


class _Scale:
    """Positions from 0 to 1 of the values of an axis: numbers by their size, anything else in order."""

    def __init__(self, places: Sequence[Place]) -> None:
        known = {repr(place.value): place for place in places if place.value is not None}
        self._places = list(known.values())
        self._is_number = all(
            isinstance(one.value, int | float) and not isinstance(one.value, bool) for one in self._places
        )
        if self._is_number:
            self._places.sort(key=lambda one: one.value)
            ends = [self._places[0].value, self._places[-1].value] if self._places else [0, 0]
            self._is_log = ends[0] > 0 and ends[1] >= LOG_FROM * ends[0]
            self._low, self._high = map(self._scaled, ends)
        else:
            self._places.sort(key=lambda one: one.words)
            self._order = {repr(one.value): index for index, one in enumerate(self._places)}
            self._low, self._high = 0.0, len(self._places) - 1.0

    def at(self, place: Place) -> float | None:
        """Return the position of a value."""
        if place.value is None:
            return None
        value = self._scaled(place.value) if self._is_number else self._order[repr(place.value)]
        return 0.5 if self._high == self._low else (value - self._low) / (self._high - self._low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return positions and words of the values that the axis names."""
        places = sorted((at, one.words) for one in self._places if (at := self.at(one)) is not None)
        found = places[-1:]
        for at, words in places[:-1]:
            # The largest value is always named; of the others those that leave room for it and for each other.
            if 1 - at >= APART and (len(found) == 1 or at - found[-1][0] >= APART):
                found.append((at, words))
        return found

    def _scaled(self, value: float) -> float:
        return math.log(value) if self._is_log else value


def _classes(lines: Sequence[Line]) -> list[int]:
    """Return each line's class: its quarter in the order of the last axis, the largest value first."""
    results = [line.places[-1].value for line in lines]
    ranked = sorted((at for at, value in enumerate(results) if value is not None), key=lambda at: -results[at])
    found = [len(CLASSES) - 1] * len(lines)
    for rank, at in enumerate(ranked):
        found[at] = 4 * rank // len(ranked)
    return found


def _description(axes: Sequence[str], lines: Sequence[Line]) -> str:
    found = f"{text.counted(len(lines), 'run')} over {', '.join(axes)}."
    known = [line for line in lines if line.places[-1].value is not None]
    if not known:
        return found
    best = max(known, key=lambda line: line.places[-1].value)
    values = ", ".join(f"{axis} {place.words}" for axis, place in zip(axes, best.places, strict=True))
    return f"{found} The best is {best.name}: {values}."
