"""Building blocks of all figures: an unthemed figure, its description, lines and axes.

`layout.meta` carries the text shown beside the drawing:

- `description`: a sentence for readers who cannot see the figure
- `empty`: the sentence shown instead of the figure when there is nothing to draw, else None
- `framed`: True if the layout alone fixes both axes (`frame`), so that an update redraws only the curves
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

AXIS_TITLES: dict[Axis, str] = {
    "step": "Step",
    "time": "Seconds since the first step",
    "tokens": "Response tokens so far",
    "samples": "Samples so far",
}
# Under a moving average the curve itself stays visible, faintly.
FAINT = 0.3
# An axis of at most this many steps has a tick at every step; otherwise plotly.js would put some between steps.
EVERY_STEP = 10
# A curve with fewer points than this has a marker at each point, because a line of two points looks like a trend.
MARKED_POINTS = 40
# Values in this range are written in full, as 5,000; `exponentformat` alone would write 0.5e+4.
PLAIN_FROM, PLAIN_TO = 1e3, 1e7
PATTERNS = ("", "/", ".", "x", "|")
# Room for steps to come: at most one part in ROOM of an axis of steps stays empty.
ROOM = 40


class OnAxis(Protocol):
    """Options of curves: their x axis, and the scale of the y axis ("linear" or "log")."""

    @property
    def axis(self) -> Axis: ...
    @property
    def scale(self) -> str: ...


def blank(description: str, empty: str | None = None) -> go.Figure:
    """Return a figure without traces and theme."""
    figure = go.Figure(layout=go.Layout(template=go.layout.Template()))
    figure.update_layout(meta={"description": description, "empty": empty})
    return figure


def plain(words: str) -> str:
    """Escape text that a run wrote, because plotly.js interprets some tags, entities and values in %{...}."""
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("%{", "&#37;{")


# Keys whose values plotly.js interprets as markup. A list of strings as coordinates holds names of categories.
_MARKUP_KEYS = frozenset({"name", "text", "hovertext", "ticktext", "x", "y"})
# The only markup that our own figures write is a line break. Text that `plain` has already escaped stays as it is.
_MARKUP = re.compile("<(?!br>)|(?<!<br)>|&(?!amp;|lt;|gt;|#37;)|%{")


def figure_json(figure: go.Figure) -> str:
    """Return the figure as JSON in which no name, label or hover text contains markup, except line breaks.

    A figure should pass text that a run wrote through `plain`, so that it is shown as written. This function escapes
    what a figure has forgotten, because a forgotten name could otherwise become a link.
    """
    return to_json_plotly(_without_markup(figure.to_dict()))


def _without_markup(node: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in node.items():
        if key == "meta":
            # Text beside the drawing, which pages insert as plain text.
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
    """Return the fill pattern of the `index`-th series of bars, plain if the bars are too thin for a pattern."""
    shape = PATTERNS[index % len(PATTERNS)] if bars < MARKED_POINTS else ""
    return {"shape": shape, "size": 6, "solidity": 0.3}


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
    """Draw curves over one axis; each curve keeps its colour when other curves are added or removed.

    `empty`: the sentence shown if no curve has a value. `names`: legend names instead of the default labels. `share`:
    the values are shares from 0 to 1, written as percentages.
    """
    drawn = [(index, curve) for index, curve in enumerate(shown) if has_values(curve)]
    if not drawn:
        return blank(description, empty)
    figure = blank(f"{description} {summary(drawn[0][1], share)}" if len(drawn) == 1 else description)
    for index, curve in drawn:
        color = palette.series_color(index)
        mode = "lines+markers" if len(curve.x) < MARKED_POINTS else "lines"
        line = {"color": color, "dash": palette.series_dash(index), "width": 2}
        marker = {"color": color, "symbol": palette.SYMBOLS[index % len(palette.SYMBOLS)], "size": 6}
        name = plain((names or {}).get(curve.name) or text.label(curve.name))
        figure.add_traces(curve_traces(curve, name, mode, line, marker))
    grows(figure, max(curve.x[-1] for _, curve in drawn))
    figure.update_layout(
        xaxis=x_axis(options.axis, max(curve.x[-1] for _, curve in drawn)),
        yaxis=y_axis(y_title, options.scale, [value for _, curve in drawn for value in curve.values], share),
        showlegend=len(drawn) > 1,
        hovermode="x unified",
    )
    frame_values(figure)
    return figure


def curve_traces(
    curve: Curve, name: str, mode: str, line: dict[str, Any], marker: dict[str, Any] | None = None
) -> list[go.Scatter]:
    """Return the line of a curve; if it has a moving average, that line, over the faint line of the curve itself."""
    style = {"line": line, "marker": marker or {}, "connectgaps": False, "name": name}
    if curve.smooth is None:
        return [go.Scatter(x=curve.x, y=curve.values, mode=mode, **style)]
    raw = go.Scatter(
        x=curve.x, y=curve.values, mode=mode, opacity=FAINT, showlegend=False, hoverinfo="skip",
        **{**style, "line": {**line, "width": 1}, "name": f"{name} (not smoothed)"},
    )  # fmt: skip
    return [raw, go.Scatter(x=curve.smooth.x, y=curve.smooth.values, mode="lines", **style)]


def x_axis(axis: Axis, end: float) -> dict[str, Any]:
    """Return the x axis of curves that end at `end`; steps and samples are whole numbers."""
    found: dict[str, Any] = {"title": {"text": AXIS_TITLES[axis]}}
    if axis in ("step", "samples"):
        found["tickformat"] = ",d"
    if axis == "step" and end <= EVERY_STEP:
        found["dtick"] = 1
    return found


def grows(figure: go.Figure, end: float) -> None:
    """Prepare the x axis of a figure over all steps of the run; `end` is the last step.

    The axis ends at the next round number, so most live updates leave its labels in place. Moving a label is costly:
    plotly.js measures it again, and the browser then computes the page's layout again.
    """
    # A stated type saves plotly.js from guessing it at every redraw.
    figure.update_layout(xaxis={"type": "linear"})
    if end > 0:
        figure.update_layout(xaxis={"autorangeoptions": {"include": round_end(end)}})


def frame(figure: go.Figure, low: float, high: float) -> None:
    """Let the y axis of a figure prepared by `grows` end at round numbers; the data span `low` to `high`.

    Logarithmic axes and axes with a fixed range stay as they are. A figure with few points is not framed, because its
    markers need extra room.
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
    """Apply `frame` to all values of a figure whose traces are not stacked."""
    values = [value for trace in figure.data for value in trace.y if value is not None]
    frame(figure, min(values), max(values))


def round_end(end: float) -> float:
    """Round `end` up to a multiple of the largest of 1, 2, 5, 10, ... that is at most `end / ROOM`."""
    return _up(end, end)


def _up(value: float, span: float) -> float:
    """Round `value` up to a multiple of the largest of 1, 2, 5, ... that is at most `span / ROOM`."""
    power = 10.0 ** math.floor(math.log10(span / ROOM))
    unit = max(times * power for times in (1, 2, 5) if times * power <= span / ROOM)
    # Round to twelve digits, because seconds have no more digits and 3 * 0.1 should be 0.3.
    return float(f"{math.ceil(float(f'{value / unit:.12g}')) * unit:.12g}")


def y_axis(title: str, scale: str, values: Sequence[float | None], share: bool = False) -> dict[str, Any]:
    """Return the y axis of these values; it is logarithmic only if `scale` is "log" and some value is above 0."""
    # For exponents written as powers of ten, plotly.js adds an inline style, which the Content-Security-Policy refuses.
    axis: dict[str, Any] = {"title": {"text": title}, "exponentformat": "e"}
    if share:
        axis["tickformat"] = ".0%" if max((abs(v) for v in values if v is not None), default=1.0) > 0.05 else ".2%"
    elif PLAIN_FROM <= max((abs(v) for v in values if v is not None), default=0.0) < PLAIN_TO:
        axis.update(tickformat=",~f", hoverformat=",.1~f")
    if scale == "log" and any(value is not None and value > 0 for value in values):
        # Ticks at powers of ten, and at 2 and 5 between them where there is room.
        axis.update(type="log", dtick="D2")
    elif share:
        axis["rangemode"] = "tozero"
    elif len(same := {value for value in values if value is not None}) == 1:
        # By default, Plotly centres a constant in a range of 2, where a learning rate of 1e-6 looks like 0.
        value = same.pop()
        axis["range"] = sorted((0.0, 1.5 * value)) if value else [-0.05, 1.0]
    return axis
