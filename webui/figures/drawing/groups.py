"""Mean curves of groups of runs, with a band of one standard deviation over the seeds."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from rhyme_openrlhf.api.read.groups import MeanCurveView
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.base import blank, plain, x_axis, y_axis
from rhyme_openrlhf.webui.site import text


def of_groups(groups: Sequence[tuple[str, MeanCurveView]], y_title: str, share: bool = False) -> go.Figure:
    """Draw a line and a band per group from (name, curve) pairs in the order of the page.

    `share`: the values are shares from 0 to 1, written as percentages.
    """
    drawn = [(index, name, curve) for index, (name, curve) in enumerate(groups) if curve.x]
    if not drawn:
        return blank(f"{y_title} of groups of runs: no values.", "None of these runs has reported this.")
    write = text.percent if share else text.number
    ends = [f"{name} ends at {write(curve.mean[-1])}" for _, name, curve in drawn]
    figure = blank(
        f"{y_title} of {text.counted(len(drawn), 'group')}, mean and deviation over runs: {', '.join(ends)}."
    )
    for index, name, curve in drawn:
        color = palette.series_color(index)
        if max(curve.runs) > 1:
            edge = {"mode": "lines", "line": {"width": 0, "color": color}, "hoverinfo": "skip", "showlegend": False}
            figure.add_scatter(x=curve.x, y=curve.high, name=plain(f"{name}, mean + deviation"), **edge)
            figure.add_scatter(
                x=curve.x, y=curve.low, name=plain(f"{name}, mean - deviation"), fill="tonexty",
                fillcolor=palette.faint(color), **edge,
            )  # fmt: skip
        # A single point needs a marker, because it makes no line.
        mode = "lines+markers" if len(curve.x) == 1 else "lines"
        line = {"color": color, "dash": palette.series_dash(index), "width": 2}
        figure.add_scatter(x=curve.x, y=curve.mean, name=plain(name), mode=mode, line=line)
    values = [value for _, _, curve in drawn for value in (*curve.low, *curve.high)]
    figure.update_layout(
        xaxis=x_axis("step", max(curve.x[-1] for _, _, curve in drawn)),
        yaxis=y_axis(plain(y_title), "linear", values, share),
        showlegend=True,
        # By default, areas between lines turn the order around.
        legend={"traceorder": "normal"},
        hovermode="x unified",
    )
    return figure
