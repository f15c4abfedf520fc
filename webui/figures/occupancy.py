"""Many engines at once: how much of each stretch of time each one waited, and how many engines did what.

Pure; of the same rows as the lanes of `timeline.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from rhyme_openrlhf.api.timeline import Lane
from rhyme_openrlhf.webui import text
from rhyme_openrlhf.webui.figures import palette
from rhyme_openrlhf.webui.figures.base import blank
from rhyme_openrlhf.webui.figures.bubbles import NAMES
from rhyme_openrlhf.webui.figures.timeline import NOTHING, TimelineRows
from rhyme_openrlhf.webui.waiting import GENERATE, answer, lane_state, waits

# Columns of the picture: about four pixels each on a laptop.
BINS = 240
# Bright where engines wait: what is looked for. "Cividis" reads the same with every kind of colour blindness.
SCALE = "Cividis"


def heat(rows: TimelineRows, options: object) -> go.Figure:
    """A row an engine, a column a stretch of time, coloured by the share of it with nothing to run."""
    found = [lane for lane in rows.lanes if lane.intervals]
    title = "How much of each stretch of time each engine had nothing to run."
    if not found:
        return blank(title, NOTHING)
    begin, width = _grid(found)
    figure = blank(" ".join([title, *answer(waits(found), rows.first, rows.last, rows.engines)]))
    cells: list[list[float | None]] = []
    for lane in found:
        known = [0.0] * BINS
        waited = [0.0] * BINS
        for one in lane.intervals:
            waits_now = lane_state(one) != GENERATE
            for index, seconds in _parts(one.start, one.end, begin, width):
                known[index] += seconds
                waited[index] += seconds if waits_now else 0.0
        cells.append([round(part / whole, 3) if whole > 0 else None for part, whole in zip(waited, known, strict=True)])
    figure.add_trace(
        go.Heatmap(
            x=[round((i + 0.5) * width, 3) for i in range(BINS)],
            y=[f"Engine {lane.engine}" for lane in found],
            z=cells,
            zmin=0,
            zmax=1,
            colorscale=SCALE,
            name="Waiting",
            hoverongaps=False,
            hovertemplate="%{y}: waits %{z:.0%} of the time at %{x:.1f} s<extra></extra>",
            colorbar={
                "title": {"text": "Waiting", "side": "right"},
                "tickformat": ".0%",
                "thickness": 12,
                "outlinewidth": 0,
            },
        )  # fmt: skip
    )
    figure.update_layout(
        xaxis={"title": {"text": f"Seconds since {text.moment(begin)}"}},
        yaxis={"title": {"text": ""}, "autorange": "reversed", "type": "category", "tickfont": {"size": 10}},
        hovermode="closest",
    )
    return figure


def states(rows: TimelineRows, options: object) -> go.Figure:
    """How many engines did what, over time."""
    found = [lane for lane in rows.lanes if lane.intervals]
    title = "How many of the engines shown ran or waited for what, over time."
    if not found:
        return blank(title, NOTHING)
    begin, width = _grid(found)
    figure = blank(" ".join([title, *answer(waits(found), rows.first, rows.last, rows.engines)]))
    seconds: dict[str, list[float]] = {}
    for lane in found:
        for one in lane.intervals:
            of_state = seconds.setdefault(lane_state(one), [0.0] * BINS)
            for index, part in _parts(one.start, one.end, begin, width):
                of_state[index] += part
    for state, color in palette.LANES.items():
        if state in seconds:
            figure.add_trace(
                go.Scatter(
                    x=[round(i * width, 3) for i in range(BINS)],
                    y=[round(value / width, 3) for value in seconds[state]],
                    name=NAMES[state],
                    stackgroup="engines",
                    line={"width": 0, "color": color, "shape": "hv"},
                    fillcolor=color,
                    mode="lines",
                    hovertemplate="%{y:.1f}",
                )
            )
    figure.update_layout(
        xaxis={"title": {"text": f"Seconds since {text.moment(begin)}"}},
        yaxis={"title": {"text": "Engines"}, "rangemode": "tozero"},
        showlegend=True,
        hovermode="x unified",
    )
    return figure


def _grid(found: Sequence[Lane]) -> tuple[float, float]:
    """The moment at which the columns begin (unix seconds), and a column's seconds."""
    begin = min(one.start for lane in found for one in lane.intervals)
    end = max(one.end for lane in found for one in lane.intervals)
    return begin, max(end - begin, 1e-6) / BINS


def _parts(start: float, end: float, begin: float, width: float) -> list[tuple[int, float]]:
    """The columns that a stretch lies in, and its seconds in each."""
    first = max(0, min(BINS - 1, int((start - begin) / width)))
    last = max(0, min(BINS - 1, int((end - begin) / width)))
    return [
        (index, seconds)
        for index in range(first, last + 1)
        if (seconds := min(end, begin + (index + 1) * width) - max(start, begin + index * width)) > 0
    ]
