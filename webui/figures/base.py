"""What all figures share: no theme, and the words that go with a figure.

`layout.meta` carries what is shown beside the drawing: `description`, a sentence for those who do not see it, and
`empty`, the sentence that stands in its place when there is nothing to draw (None otherwise).
"""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from rhyme_openrlhf.api.curves import Axis, Curve
from rhyme_openrlhf.webui import text
from rhyme_openrlhf.webui.figures import palette

AXIS_TITLES: dict[Axis, str] = {"step": "Step", "time": "Seconds since the first step"}


def blank(description: str, empty: str | None = None) -> go.Figure:
    """A figure without traces and without theme."""
    figure = go.Figure(layout=go.Layout(template=go.layout.Template()))
    figure.update_layout(meta={"description": description, "empty": empty})
    return figure


def has_values(curve: Curve) -> bool:
    """Whether anything of it can be drawn."""
    return any(value is not None for value in curve.values)


def lines(shown: Sequence[Curve], axis: Axis, y_title: str, description: str, empty: str) -> go.Figure:
    """Curves over one axis. `empty`: what is said when none of them has a value."""
    drawn = [curve for curve in shown if has_values(curve)]
    if not drawn:
        return blank(description, empty)
    figure = blank(description)
    for index, curve in enumerate(drawn):
        figure.add_trace(
            go.Scatter(
                x=curve.x,
                y=curve.values,
                name=text.label(curve.name),
                # A single point is no line.
                mode="lines+markers" if len(curve.x) == 1 else "lines",
                line={"color": palette.series_color(index), "dash": palette.series_dash(index), "width": 2},
                connectgaps=False,
            )
        )
    figure.update_layout(
        xaxis={"title": {"text": AXIS_TITLES[axis]}},
        yaxis={"title": {"text": y_title}},
        showlegend=len(drawn) > 1,
        hovermode="x unified",
    )
    return figure
