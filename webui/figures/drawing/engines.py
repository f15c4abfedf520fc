"""Samples taken once a second of each engine: running requests, speed, and acceptance rate of drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import plotly.graph_objects as go

from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.base import MARKED_POINTS, blank
from rhyme_openrlhf.webui.site import text

NOTHING = (
    "No engine has reported samples in these steps. Engines report once a second while they generate; records of "
    "older versions have no such reports."
)
# Most lines that can be told apart; more engines are drawn as a mean between the smallest and the largest value.
MOST_LINES = 8
BINS = 120
# No line is drawn over a gap longer than this: samples come once a second, and steps lie further apart.
GAP_SECONDS = 2.5


class Look(NamedTuple):
    """One engine at unix `time`; rates cover the time since the previous sample."""

    engine: int
    time: float
    running: int
    tokens_per_second: float | None
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Looks:
    """Samples that engines reported in steps `first` to `last`, ordered by time.

    `truncated`: earlier samples were left out.
    """

    first: int
    last: int
    looks: Sequence[Look]
    truncated: bool


Value = Callable[[Look], float | None]


def running(rows: Looks, options: object) -> go.Figure:
    """Draw the number of samples running on each engine."""
    return _over_time(rows, lambda one: one.running, "Samples running on each engine", "Running samples", False)


def speed(rows: Looks, options: object) -> go.Figure:
    """Draw each engine's response tokens per second."""
    return _over_time(rows, lambda one: one.tokens_per_second, "Tokens a second of each engine", "Tokens/s", False)


def acceptance(rows: Looks, options: object) -> go.Figure:
    """Draw the share of each engine's drafted tokens that were accepted."""
    title = "Share of each engine's drafted tokens that were accepted"
    return _over_time(rows, lambda one: one.accepted / one.drafted if one.drafted else None, title, "Accepted", True)


def _over_time(rows: Looks, value: Value, title: str, y_title: str, share: bool) -> go.Figure:
    description = f"{title}, {text.span(rows.first, rows.last)}."
    known = [(one.engine, one.time, found) for one in rows.looks if (found := value(one)) is not None]
    if not known:
        return blank(description, NOTHING)
    if rows.truncated:
        description += " Only the latest samples are shown."
    begin = min(at for _, at, _ in known)
    by_engine: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for engine, at, found in known:
        by_engine[engine].append((round(at - begin, 2), found))
    figure = blank(description)
    if len(by_engine) <= MOST_LINES:
        for index, (engine, points) in enumerate(sorted(by_engine.items())):
            _add_engine(figure, index, engine, points)
    else:
        _add_band(figure, known, begin, len(by_engine))
    figure.update_layout(
        xaxis={"title": {"text": f"Seconds since {text.moment(begin)}"}},
        yaxis={"title": {"text": y_title}, "rangemode": "tozero", **({"tickformat": ".0%"} if share else {})},
        showlegend=True,
        hovermode="x unified",
    )
    return figure


def _add_engine(figure: go.Figure, index: int, engine: int, points: Sequence[tuple[float, float]]) -> None:
    x: list[float | None] = []
    y: list[float | None] = []
    for at, found in points:
        if x and x[-1] is not None and at - x[-1] > GAP_SECONDS:
            x.append(None)
            y.append(None)
        x.append(at)
        y.append(found)
    color = palette.series_color(index)
    figure.add_trace(
        go.Scatter(
            x=x, y=y, name=f"Engine {engine}", mode="lines+markers" if len(x) < MARKED_POINTS else "lines",
            line={"color": color, "dash": palette.series_dash(index), "width": 2},
            marker={"color": color, "symbol": palette.SYMBOLS[index], "size": 5}, connectgaps=False,
        )
    )  # fmt: skip


def _add_band(figure: go.Figure, known: Sequence[tuple[int, float, float]], begin: float, engines: int) -> None:
    width = max(1.0, (max(at for _, at, _ in known) - begin) / BINS)
    bins: dict[int, list[float]] = defaultdict(list)
    for _, at, found in known:
        bins[int((at - begin) / width)].append(found)
    x = [round((index + 0.5) * width, 2) for index in sorted(bins)]
    values = [bins[index] for index in sorted(bins)]
    line = {"color": palette.BLUE, "width": 0}
    mode = "lines+markers" if len(x) < MARKED_POINTS else "lines"
    figure.add_trace(
        go.Scatter(x=x, y=[max(of) for of in values], name="Largest", mode="lines", line=line, showlegend=False)
    )
    figure.add_trace(
        go.Scatter(
            x=x, y=[min(of) for of in values], name="Smallest", mode="lines", line=line, showlegend=False,
            fill="tonexty", fillcolor="rgba(59, 130, 214, 0.2)",
        )
    )  # fmt: skip
    figure.add_trace(
        go.Scatter(
            x=x, y=[fmean(of) for of in values], name=f"Mean of {engines} engines, between smallest and largest",
            mode=mode, line={"color": palette.BLUE, "width": 2}, marker={"size": 5},
        )
    )  # fmt: skip
