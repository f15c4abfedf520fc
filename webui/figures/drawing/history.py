"""Figures of the draft history: the size and place of the workers' indexes, and what engines find in them.

Each worker writes one event per step, and a figure sums over the workers. A worker that has not reported a step yet
counts with its last report, so that a line does not drop while events of a step are still arriving.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import plotly.graph_objects as go

from rhyme_openrlhf.telemetry.events import HistoryState
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.base import MARKED_POINTS, blank, pattern
from rhyme_openrlhf.webui.site import text

NOT_RECORDED = (
    "Not recorded by this run: it has no history workers (--histospec.enable, --history.workers), or none has indexed "
    "a step yet."
)
# Units based on 1024 bytes, the largest first.
UNITS: tuple[tuple[str, int], ...] = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))
# Results of an engine's lookup in stacking order: name, field, colour.
ANSWERS: tuple[tuple[str, str, str], ...] = (
    ("In memory", "hits", palette.GREEN),
    ("Had to be read or built", "late", palette.ORANGE),
    ("No history yet", "misses", palette.GREY),
)
Parts = Sequence[tuple[str, Callable[[HistoryState], int]]]


def answers(states: Sequence[HistoryState], options: object) -> go.Figure:
    """Draw the shares of the engines' lookups that found an index in memory, found it late, or found no history."""
    description = "Results of the engines' lookups of a prompt's draft index, as shares of all lookups."
    by_step: dict[int, list[int]] = defaultdict(lambda: [0] * len(ANSWERS))
    for one in states:
        for place, (_, field, _) in enumerate(ANSWERS):
            by_step[one.step][place] += getattr(one, field)
    asked = {step: counts for step, counts in by_step.items() if sum(counts)}
    if not asked:
        return blank(description, NOT_RECORDED)
    whole = [sum(counts[place] for counts in asked.values()) for place in range(len(ANSWERS))]
    words = [
        f"{name.lower()} {text.percent(count / sum(whole))}"
        for (name, _, _), count in zip(ANSWERS, whole, strict=True)
    ]  # fmt: skip
    figure = blank(f"{description} Over the steps shown: {', '.join(words)}.")
    for place, (name, _, color) in enumerate(ANSWERS):
        figure.add_trace(
            go.Bar(
                x=list(asked), y=[counts[place] / sum(counts) for counts in asked.values()], name=name,
                text=[
                    f"step {step}: {name.lower()} {text.number(counts[place])} of {text.number(sum(counts))}"
                    for step, counts in asked.items()
                ],
                textposition="none", hovertemplate="%{text}<extra></extra>",
                marker={"color": color, "line": {"width": 0}, "pattern": pattern(place, len(asked))},
            )
        )  # fmt: skip
    figure.update_layout(
        barmode="stack", bargap=0.08, showlegend=True, hovermode="closest", xaxis={"title": {"text": "Step"}},
        yaxis={"title": {"text": "Share of lookups"}, "tickformat": ".0%", "range": [0, 1]},
    )  # fmt: skip
    return figure


def prompts(states: Sequence[HistoryState], options: object) -> go.Figure:
    """Draw the number of prompts that workers know, and where the prompts' indexes are."""
    description = (
        "Prompts with a history, and where their draft indexes are; each round of a conversation counts as a prompt."
    )
    parts: Parts = (
        ("Known", lambda one: one.prompts),
        ("Index in memory", lambda one: one.resident),
        ("Index on disk only", lambda one: one.spilled),
    )
    return _lines(states, parts, 1, "Prompts", description)


def memory(states: Sequence[HistoryState], options: object) -> go.Figure:
    """Draw the bytes of indexes and responses in memory, and of indexes on disk."""
    description = (
        "Memory for draft indexes and responses of all workers, and disk space for indexes that did not fit in memory."
    )
    parts: Parts = (
        ("In memory", lambda one: one.memory_bytes),
        ("On disk", lambda one: one.disk_bytes),
    )
    most = max((max(of) for _, *of in _summed(states, parts)), default=0)
    unit, size = next(((unit, size) for unit, size in UNITS if most >= size), UNITS[-1])
    return _lines(states, parts, size, unit, description)


def _lines(states: Sequence[HistoryState], parts: Parts, size: int, y_title: str, description: str) -> go.Figure:
    """Draw one line per part, in units of `size`."""
    rows = _summed(states, parts)
    if not rows:
        return blank(description, NOT_RECORDED)
    last = [text.number(value / size) for value in rows[-1][1:]]
    words = ", ".join(f"{name.lower()} {value}" for (name, _), value in zip(parts, last, strict=True))
    figure = blank(f"{description} At step {rows[-1][0]}: {words} ({y_title}).")
    for index, (name, _) in enumerate(parts):
        figure.add_trace(
            go.Scatter(
                x=[row[0] for row in rows], y=[row[1 + index] / size for row in rows], name=name,
                mode="lines+markers" if len(rows) < MARKED_POINTS else "lines",
                line={"color": palette.series_color(index), "dash": palette.series_dash(index), "width": 2},
                marker={"symbol": palette.SYMBOLS[index], "size": 6},
            )
        )  # fmt: skip
    figure.update_layout(
        xaxis={"title": {"text": "Step"}}, yaxis={"title": {"text": y_title}, "rangemode": "tozero"},
        showlegend=True, hovermode="x unified",
    )  # fmt: skip
    return figure


def _summed(states: Sequence[HistoryState], parts: Parts) -> list[tuple[int, ...]]:
    """Return rows (step, sum over workers of each part) of `states`, which are ordered by step.

    Each worker counts with its latest event so far.
    """
    known: dict[int, HistoryState] = {}
    rows: dict[int, tuple[int, ...]] = {}
    for one in states:
        known[one.worker] = one
        rows[one.step] = (one.step, *(sum(value(state) for state in known.values()) for _, value in parts))
    return list(rows.values())
