"""What all figures share: no theme, and the words that go with a figure.

`layout.meta` carries what is shown beside the drawing: `description`, a sentence for those who do not see it, and
`empty`, the sentence that stands in its place when there is nothing to draw (None otherwise). `framed` says that the
layout alone tells where both axes end (`frame`): where it is the same as before, only curves are drawn again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Protocol

import plotly.graph_objects as go
from plotly.io.json import to_json_plotly

from rhyme_openrlhf.api.read.curves import Axis, Curve
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.site import text

AXIS_TITLES: dict[Axis, str] = {"step": "Step", "time": "Seconds since the first step"}
# A curve with fewer points than this has a mark at each: a line of two points looks like a trend.
MARKED_POINTS = 40
# Values that are written out as 5,000: with `exponentformat` alone they would be 0.5e+4.
PLAIN_FROM, PLAIN_TO = 1e3, 1e7
PATTERNS = ("", "/", ".", "x", "|")
# Of an axis of steps, at most one part in so many is left for steps to come.
ROOM = 40


class OnAxis(Protocol):
    """Options of curves: their x axis, and the scale of y ("linear" or "log")."""

    @property
    def axis(self) -> Axis: ...
    @property
    def scale(self) -> str: ...


def blank(description: str, empty: str | None = None) -> go.Figure:
    """A figure without traces and without theme."""
    figure = go.Figure(layout=go.Layout(template=go.layout.Template()))
    figure.update_layout(meta={"description": description, "empty": empty})
    return figure


def plain(words: str) -> str:
    """Text that a run wrote, for a name or a hover: plotly.js reads some tags, entities, and values in %{...}."""
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("%{", "&#37;{")


# Where plotly.js reads markup. A list in the place of coordinates is the names of categories.
_MARKUP_KEYS = frozenset({"name", "text", "hovertext", "ticktext", "x", "y"})
# All that our own figures write of markup is a line break; and what `plain` has made is not made again.
_MARKUP = re.compile("<(?!br>)|(?<!<br)>|&(?!amp;|lt;|gt;|#37;)|%{")


def figure_json(figure: go.Figure) -> str:
    """Return the figure as JSON in which no name, label or hover text is markup, but for line breaks.

    A figure should pass what a run wrote through `plain`, so that it reads as it was written. This catches the rest,
    because a forgotten name would otherwise be a link.
    """
    return to_json_plotly(_without_markup(figure.to_dict()))


def _without_markup(node: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in node.items():
        if key == "meta":
            # Words beside the drawing, which pages show as text.
            found[key] = value
        elif isinstance(value, dict):
            found[key] = _without_markup(value)
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
            found[key] = [_without_markup(one) for one in value]
        elif key not in _MARKUP_KEYS:
            found[key] = value
        elif isinstance(value, (list, tuple)):
            found[key] = [_harmless(one) if isinstance(one, str) else one for one in value]
        else:
            found[key] = _harmless(value) if isinstance(value, str) else value
    return found


def _harmless(words: str) -> str:
    return _MARKUP.sub(lambda found: plain(found[0]), words)


def pattern(index: int, bars: int) -> dict[str, Any]:
    """What tells the `index`-th series of bars apart besides its colour; thin bars have no room for it."""
    shape = PATTERNS[index % len(PATTERNS)] if bars < MARKED_POINTS else ""
    return {"shape": shape, "size": 6, "solidity": 0.3}


def has_values(curve: Curve) -> bool:
    """Whether anything of it can be drawn."""
    return any(value is not None for value in curve.values)


def summary(curve: Curve, share: bool = False) -> str:
    """A curve in one sentence; empty without values. `share`: values are shares, written as percentages."""
    values = [value for value in curve.values if value is not None]
    if not values:
        return ""
    written = [
        text.percent(one) if share else text.number(one) for one in (values[0], values[-1], min(values), max(values))
    ]
    return f"First {written[0]}, last {written[1]}, lowest {written[2]}, highest {written[3]}."


def lines(
    shown: Sequence[Curve],
    options: OnAxis,
    y_title: str,
    description: str,
    empty: str,
    *,
    share: bool = False,
    names: dict[str, str] | None = None,
) -> go.Figure:
    """Curves over one axis. `empty`: what is said when none of them has a value; `names`: instead of their labels.

    `share`: values are 0 to 1, written as percentages. A curve has the same colour whichever others are there.
    """
    drawn = [(index, curve) for index, curve in enumerate(shown) if has_values(curve)]
    if not drawn:
        return blank(description, empty)
    figure = blank(f"{description} {summary(drawn[0][1], share)}" if len(drawn) == 1 else description)
    for index, curve in drawn:
        color = palette.series_color(index)
        figure.add_trace(
            go.Scatter(
                x=curve.x,
                y=curve.values,
                name=plain((names or {}).get(curve.name) or text.label(curve.name)),
                mode="lines+markers" if len(curve.x) < MARKED_POINTS else "lines",
                line={"color": color, "dash": palette.series_dash(index), "width": 2},
                marker={"color": color, "symbol": palette.SYMBOLS[index % len(palette.SYMBOLS)], "size": 6},
                connectgaps=False,
            )
        )
    grows(figure, max(curve.x[-1] for _, curve in drawn))
    figure.update_layout(
        xaxis={"title": {"text": AXIS_TITLES[options.axis]}},
        yaxis=y_axis(y_title, options.scale, [value for _, curve in drawn for value in curve.values], share),
        showlegend=len(drawn) > 1,
        hovermode="x unified",
    )
    frame_values(figure)
    return figure


def grows(figure: go.Figure, end: float) -> None:
    """Prepare the x axis of a figure over all of the run's steps, of which `end` is the last.

    The axis ends at the next round number: most live updates then leave its labels where they are. plotly.js measures a
    label anew wherever it has not stood before, makes the browser lay out the page for that, and keeps what it found.
    """
    # Numbers: plotly.js need not find that out at every drawing.
    figure.update_layout(xaxis={"type": "linear"})
    if end > 0:
        figure.update_layout(xaxis={"autorangeoptions": {"include": round_end(end)}})


def frame(figure: go.Figure, low: float, high: float) -> None:
    """Let the y axis of a figure that `grows` end at round numbers too; `low` to `high` is all that is drawn.

    Not of a logarithmic axis, nor of one with a range. Marks need room of their own, so few points have no frame.
    """
    x, y = figure.layout.xaxis, figure.layout.yaxis
    if not figure.data or y.type == "log" or y.range is not None:
        return
    figure.update_layout(yaxis={"type": "linear"})
    if y.rangemode == "tozero":
        low, high = min(0.0, low), max(0.0, high)
    ends = x.autorangeoptions.include
    if ends is None or high <= low or min(len(one.x) for one in figure.data) < MARKED_POINTS:
        return
    begin, end = min(one.x[0] for one in figure.data), max(ends) if isinstance(ends, tuple) else ends
    figure.update_layout(
        xaxis={"autorangeoptions": {"include": [begin, end]}},
        yaxis={"autorangeoptions": {"include": [0.0 - _up(-low, high - low), _up(high, high - low)]}},
    )
    figure.layout.meta["framed"] = True


def frame_values(figure: go.Figure) -> None:
    """`frame` around all values of a figure whose traces are not stacked."""
    values = [value for trace in figure.data for value in trace.y if value is not None]
    frame(figure, min(values), max(values))


def round_end(end: float) -> float:
    """`end`, or a little more: a multiple of the largest of 1, 2, 5, 10, ... that is at most its `ROOM`th part."""
    return _up(end, end)


def _up(value: float, span: float) -> float:
    """`value`, or a little more: a multiple of the largest of 1, 2, 5, ... that is at most `span`'s `ROOM`th part."""
    power = 10.0 ** math.floor(math.log10(span / ROOM))
    unit = max(times * power for times in (1, 2, 5) if times * power <= span / ROOM)
    # To twelve digits: seconds have no more, and 3 * 0.1 is to be 0.3.
    return float(f"{math.ceil(float(f'{value / unit:.12g}')) * unit:.12g}")


def y_axis(title: str, scale: str, values: Sequence[float | None], share: bool = False) -> dict[str, Any]:
    """The y axis of these values. A logarithmic one only where there is something above 0."""
    # As powers of ten, plotly.js writes an inline style, which the Content-Security-Policy refuses.
    axis: dict[str, Any] = {"title": {"text": title}, "exponentformat": "e"}
    if share:
        axis["tickformat"] = ".0%" if max((abs(v) for v in values if v is not None), default=1.0) > 0.05 else ".2%"
    elif PLAIN_FROM <= max((abs(v) for v in values if v is not None), default=0.0) < PLAIN_TO:
        axis.update(tickformat=",~f", hoverformat=",.1~f")
    if scale == "log" and any(value is not None and value > 0 for value in values):
        # Powers of ten, with 2 and 5 between them where there is room.
        axis.update(type="log", dtick="D2")
    elif share:
        axis["rangemode"] = "tozero"
    elif len(same := {value for value in values if value is not None}) == 1:
        # Plotly draws a constant in the middle of 2, where a learning rate of 1e-6 seems to be 0.
        value = same.pop()
        axis["range"] = sorted((0.0, 1.5 * value)) if value else [-0.05, 1.0]
    return axis
