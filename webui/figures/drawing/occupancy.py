"""Overviews of many engines: how much of each time bin each engine waited, and how many engines were in which state.

Pure; drawn from the same rows as the lanes of `timeline.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from rhyme_openrlhf.api.read.timeline import Lane
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.base import blank
from rhyme_openrlhf.webui.figures.drawing.chart import Content
from rhyme_openrlhf.webui.figures.drawing.engine_waits import GENERATE, NAMES, answer, lane_state, waits
from rhyme_openrlhf.webui.figures.drawing.series import Area, row_bars
from rhyme_openrlhf.webui.figures.drawing.timeline import MANY_LANES, NOTHING, TimelineRows, reported
from rhyme_openrlhf.webui.site import text

# Columns of the figure: about four pixels each on a laptop.
BINS = 240
# Name, upper limit of the share, colour. Engines that wait are bright, because the reader looks for them. The colours
# are from matplotlib's "cividis", which looks the same with every kind of colour blindness.
LEVELS: tuple[tuple[str, float, str], ...] = (
    ("Waits up to 5%", 0.05, "#1f3a6e"),
    ("5 to 35%", 0.35, "#575c6d"),
    ("35 to 65%", 0.65, "#8a8678"),
    ("65 to 95%", 0.95, "#c4b56c"),
    ("More than 95%", math.inf, "#fee838"),
)


def heat(rows: TimelineRows, options: object) -> go.Figure:
    """Draw one row per engine and one column per time bin, coloured by the share of time without anything to run.

    The figure consists of bars, and neighbours of the same level are joined. plotly.js gives the image of a heat map an
    inline style, which the Content-Security-Policy refuses.
    """
    found = [lane for lane in rows.lanes if lane.intervals]
    title = "How much of each stretch of time each engine had nothing to run."
    if not found:
        return blank(title, NOTHING)
    begin, width = _grid(found)
    figure = blank(" ".join([title, *answer(waits(found), rows.first, rows.last, rows.engines)]))
    runs: list[list[tuple[int, int, int]]] = [[] for _ in LEVELS]
    for place, lane in enumerate(found):
        for level, first, last in _runs(waiting_shares(lane, begin, width)):
            runs[level].append((place, first, last))
    for (name, _, color), of_level in zip(LEVELS, runs, strict=True):
        bars = [
            (
                place,
                round(first * width, 3),
                round((last - first + 1) * width, 3),
                f"Engine {found[place].engine}: {name.lower()}<br>"
                f"{text.duration((last - first + 1) * width)} from {text.clock(begin + first * width)}",
            )
            for place, first, last in of_level
        ]
        figure.add_trace(row_bars(name, bars, {"color": color}, height=1.0))
    figure.update_layout(
        barmode="overlay",
        bargap=0,
        xaxis={"title": {"text": f"Seconds since {text.moment(begin)}"}, "range": [0, round(BINS * width, 3)]},
        yaxis={
            "title": {"text": ""},
            "range": [len(found) - 0.5, -0.5],
            "tickvals": list(range(len(found))),
            "ticktext": [f"Engine {lane.engine}" for lane in found],
            "tickfont": {"size": 9 if len(found) > MANY_LANES else 11},
            "showgrid": False,
        },
        legend={"traceorder": "normal"},
        showlegend=True,
        hovermode="closest",
    )
    return figure


def waiting_shares(lane: Lane, begin: float, width: float) -> list[float | None]:
    """Return the share of each column in which the engine waited, None where it reported nothing."""
    known = [0.0] * BINS
    waited = [0.0] * BINS
    for one in lane.intervals:
        waits_now = lane_state(one) != GENERATE
        for index, seconds in _parts(one.start, one.end, begin, width):
            known[index] += seconds
            waited[index] += seconds if waits_now else 0.0
    return [part / whole if whole > 0 else None for part, whole in zip(waited, known, strict=True)]


def _runs(shares: Sequence[float | None]) -> list[tuple[int, int, int]]:
    """Join neighbouring columns of the same level: (level, first column, last column)."""
    found: list[tuple[int, int, int]] = []
    for index, share in enumerate(shares):
        if share is None:
            continue
        level = next(i for i, (_, most, _) in enumerate(LEVELS) if share <= most)
        if found and found[-1][0] == level and found[-1][2] == index - 1:
            found[-1] = (level, found[-1][1], index)
        else:
            found.append((level, index, index))
    return found


def states(rows: TimelineRows) -> Content | None:
    """Return how many engines are in which state, over time."""
    found = [lane for lane in rows.lanes if lane.intervals]
    if not found:
        return None
    begin, width = _grid(found)
    seconds: dict[str, list[float]] = {}
    for lane in found:
        for one in lane.intervals:
            of_state = seconds.setdefault(lane_state(one), [0.0] * BINS)
            for index, part in _parts(one.start, one.end, begin, width):
                of_state[index] += part
    x = [round(i * width, 3) for i in range(BINS)]
    areas = [
        Area(NAMES[state], x, [round(value / width, 3) for value in seconds[state]], (), "%{y:.1f}", color, shape="hv")
        for state, color in palette.LANES.items()
        if state in seconds
    ]
    facts = " ".join(answer(waits(found), rows.first, rows.last, rows.engines))
    return Content(areas, facts, x=f"Seconds since {text.moment(begin)}")


def _grid(found: Sequence[Lane]) -> tuple[float, float]:
    """Return the start of the first column (unix seconds), and the seconds of a column."""
    begin, end = reported(found)
    return begin, max(end - begin, 1e-6) / BINS


def _parts(start: float, end: float, begin: float, width: float) -> list[tuple[int, float]]:
    """Return each column that the interval touches, with the interval's seconds in that column."""
    first = max(0, min(BINS - 1, int((start - begin) / width)))
    last = max(0, min(BINS - 1, int((end - begin) / width)))
    return [
        (index, seconds)
        for index in range(first, last + 1)
        if (seconds := min(end, begin + (index + 1) * width) - max(start, begin + index * width)) > 0
    ]
