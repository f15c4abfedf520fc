"""Axes of the figures, and the frame that lets a live update redraw only the curves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

import plotly.graph_objects as go

from rhyme_openrlhf.api.read.curves import Axis

AXIS_TITLES: dict[Axis, str] = {
    "step": "Step",
    "time": "Seconds since the first step",
    "tokens": "Response tokens so far",
    "samples": "Samples so far",
}
# An axis of at most this many steps has a tick at every step; otherwise plotly.js would put some between steps.
EVERY_STEP = 10
# Below this number of points, points have markers and bars have patterns. A figure with fewer points has no frame.
MARKED_POINTS = 40
# Values in this range are written in full, as 5,000; `exponentformat` alone would write 0.5e+4.
PLAIN_FROM, PLAIN_TO = 1e3, 1e7
# An axis of shares up to this one has ticks with decimals.
FINE_SHARES = 0.05
# Room for steps to come: at most one part in ROOM of an axis of steps stays empty.
ROOM = 40


class OnAxis(Protocol):
    """Options of curves: their x axis, and the scale of the y axis ("linear" or "log")."""

    @property
    def axis(self) -> Axis: ...
    @property
    def scale(self) -> str: ...


def x_axis(axis: Axis, end: float) -> dict[str, Any]:
    """Return the x axis of curves that end at `end`; steps and samples are whole numbers."""
    if axis == "step":
        return whole_axis(AXIS_TITLES[axis], end)
    found: dict[str, Any] = {"title": {"text": AXIS_TITLES[axis]}}
    return {**found, "tickformat": ",d"} if axis == "samples" else found


def whole_axis(title: str, end: float) -> dict[str, Any]:
    """Return an x axis of steps or epochs up to `end`."""
    found: dict[str, Any] = {"title": {"text": title}, "tickformat": ",d"}
    return {**found, "dtick": 1} if end <= EVERY_STEP else found


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


def round_end(end: float) -> float:
    """Round `end` up to a multiple of the largest of 1, 2, 5, 10, ... that is at most `end / ROOM`."""
    return _up(end, end)


def _up(value: float, span: float) -> float:
    """Round `value` up to a multiple of the largest of 1, 2, 5, ... that is at most `span / ROOM`."""
    power = 10.0 ** math.floor(math.log10(span / ROOM))
    unit = max(times * power for times in (1, 2, 5) if times * power <= span / ROOM)
    # Round to twelve digits, because seconds have no more digits and 3 * 0.1 should be 0.3.
    return float(f"{math.ceil(float(f'{value / unit:.12g}')) * unit:.12g}")


def y_axis(
    title: str,
    scale: str,
    values: Iterable[float | None],
    *,
    share: bool = False,
    zero: bool = False,
    stack: bool = False,
) -> dict[str, Any]:
    """Return the y axis of these values; it is logarithmic only if `scale` is "log" and some value is above 0.

    `share`: the values are shares from 0 to 1, written as percentages. `zero`: a linear axis begins at 0, so that
    amounts can be compared. `stack`: the values are heights of stacks, which have no logarithmic axis.
    """
    known = [value for value in values if value is not None]
    largest = max(map(abs, known), default=0.0)
    # For exponents written as powers of ten, plotly.js adds an inline style, which the Content-Security-Policy refuses.
    axis: dict[str, Any] = {"title": {"text": title}, "exponentformat": "e"}
    if share:
        axis["tickformat"] = ".0%" if largest > FINE_SHARES else ".2%"
    elif PLAIN_FROM <= largest < PLAIN_TO:
        axis.update(tickformat=",~f", hoverformat=",.1~f")
    if scale == "log" and not stack and max(known, default=0.0) > 0:
        # Ticks at powers of ten, and at 2 and 5 between them where there is room.
        return {**axis, "type": "log", "dtick": "D2"}
    if zero or share:
        axis["rangemode"] = "tozero"
    if not share and not stack and len(set(known)) == 1:
        # By default, Plotly centres a constant in a range of 2, where a learning rate of 1e-6 looks like 0.
        axis["range"] = sorted((0.0, 1.5 * known[0])) if known[0] else [-0.05, 1.0]
    return axis
