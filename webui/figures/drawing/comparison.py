"""Curves of several runs, or mean curves of groups of runs: each keeps its colour and dash in all figures of a page."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from rhyme_openrlhf.api.read.curves import Curve
from rhyme_openrlhf.api.read.groups import MeanCurveView
from rhyme_openrlhf.webui.figures.drawing.axes import OnAxis
from rhyme_openrlhf.webui.figures.drawing.chart import Content, Curves
from rhyme_openrlhf.webui.figures.drawing.series import Band, Line
from rhyme_openrlhf.webui.site import text


def of_runs(runs: Sequence[tuple[str, Curve]], options: OnAxis, y_title: str, share: bool = False) -> go.Figure:
    """Draw one line per run from (name, curve) pairs in the order of the page.

    `share`: the values are shares from 0 to 1, written as percentages.
    """
    lines = [Line(name, curve.x, curve.values, average=curve.smooth, marked=2) for name, curve in runs]
    return _compared(lines, options, y_title, share, "run", "")


def of_groups(
    groups: Sequence[tuple[str, MeanCurveView]], options: OnAxis, y_title: str, share: bool = False
) -> go.Figure:
    """Draw a line per group, with a band of one standard deviation over its runs."""
    lines = []
    for name, curve in groups:
        names = f"{name}, mean - deviation", f"{name}, mean + deviation"
        band = Band(curve.x, curve.low, curve.high, names) if max(curve.runs, default=0) > 1 else None
        lines.append(Line(name, curve.x, curve.mean, band=band, marked=2))
    return _compared(lines, options, y_title, share, "group", ", mean and deviation over runs")


def _compared(lines: Sequence[Line], options: OnAxis, y_title: str, share: bool, what: str, further: str) -> go.Figure:
    write = text.percent if share else text.number
    last = [(line.name, next((y for y in reversed(line.y) if y is not None), None)) for line in lines]
    ends = [f"{name} ends at {write(value)}" for name, value in last if value is not None]
    missing = [name for name, value in last if value is None]
    facts = f"{y_title} of {text.counted(len(ends), what)}{further}: {', '.join(ends)}."
    if missing:
        facts += f" Without values: {', '.join(missing)}."
    return Curves(
        content=lambda _: Content(lines, facts), y=y_title, share=share, legend=True, grows=False,
        description="" if ends else f"{y_title} of several {what}s: no values.",
        empty="None of these runs has reported this.",
    ).draw(None, options)  # fmt: skip
