"""Curves of several runs in one figure: each run keeps its colour and dash in every figure of the page."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from rhyme_openrlhf.api.read.curves import Curve
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.base import OnAxis, blank, curve_traces, has_values, plain, x_axis, y_axis
from rhyme_openrlhf.webui.site import text


def of_runs(runs: Sequence[tuple[str, Curve]], options: OnAxis, y_title: str, share: bool = False) -> go.Figure:
    """Draw one line per run from (name, curve) pairs in the order of the page.

    `share`: the values are shares from 0 to 1, written as percentages.
    """
    drawn = [(index, name, curve) for index, (name, curve) in enumerate(runs) if has_values(curve)]
    if not drawn:
        return blank(f"{y_title} of several runs: no values.", "None of these runs has reported this.")
    write = text.percent if share else text.number
    last = [f"{name} ends at {write(_last(curve))}" for _, name, curve in drawn]
    missing = [name for name, curve in runs if not has_values(curve)]
    description = f"{y_title} of {text.counted(len(drawn), 'run')}: {', '.join(last)}."
    if missing:
        description += f" Without values: {', '.join(missing)}."
    figure = blank(description)
    for index, name, curve in drawn:
        # A single point needs a marker, because it makes no line.
        mode = "lines+markers" if len(curve.x) == 1 else "lines"
        line = {"color": palette.series_color(index), "dash": palette.series_dash(index), "width": 2}
        figure.add_traces(curve_traces(curve, plain(name), mode, line))
    figure.update_layout(
        xaxis=x_axis(options.axis, max(curve.x[-1] for _, _, curve in drawn)),
        yaxis=y_axis(plain(y_title), options.scale, [value for _, _, curve in drawn for value in curve.values], share),
        showlegend=True,
        hovermode="x unified",
    )
    return figure


def _last(curve: Curve) -> float | None:
    return next((value for value in reversed(curve.values) if value is not None), None)
