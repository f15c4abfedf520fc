"""What drafts come from: the history workers' indexes, where they are, and whether engines find them in time.

Workers write one event a step each; a figure shows all of them together. A worker that has not reported a step yet
counts with what it last said, so that a line does not drop while a step's events are still coming.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec
import plotly.graph_objects as go

from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.base import MARKED_POINTS, blank, pattern
from rhyme_openrlhf.webui.site import text

NOT_RECORDED = (
    "Not recorded by this run: it has no history workers (--histospec.enable, --history.workers), or none has indexed "
    "a step yet."
)
# Units of 1024 bytes, the largest first.
UNITS: tuple[tuple[str, int], ...] = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))
# What an engine found, in the order in which it is stacked: name, field, colour.
ANSWERS: tuple[tuple[str, str, str], ...] = (
    ("In memory", "hits", palette.GREEN),
    ("Had to be read or built", "late", palette.ORANGE),
    ("No history yet", "misses", palette.GREY),
)


class HistoryState(msgspec.Struct):
    """The event of this name; sizes in bytes, `hits`, `late` and `misses` since the worker's last event."""

    step: int
    worker: int
    prompts: int
    resident: int
    spilled: int
    memory_bytes: int
    disk_bytes: int
    hits: int
    late: int
    misses: int


Parts = Sequence[tuple[str, Callable[[HistoryState], int]]]


def answers(states: Sequence[HistoryState], options: object) -> go.Figure:
    """Shares of the engines' questions that found an index in memory, late, or no history."""
    description = "What engines found when they asked for a prompt's draft index, as shares of their questions."
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
        yaxis={"title": {"text": "Share of questions"}, "tickformat": ".0%", "range": [0, 1]},
    )  # fmt: skip
    return figure


def prompts(states: Sequence[HistoryState], options: object) -> go.Figure:
    """Prompts that workers know, and where their indexes are."""
    description = "Prompts (rounds of conversations counted singly) with a history, and where their draft indexes are."
    parts: Parts = (
        ("Known", lambda one: one.prompts),
        ("Index in memory", lambda one: one.resident),
        ("Index on the disk alone", lambda one: one.spilled),
    )
    return _lines(states, parts, 1, "Prompts", description)


def memory(states: Sequence[HistoryState], options: object) -> go.Figure:
    """Bytes of indexes and responses in memory, and of indexes on the disk."""
    description = "Memory of draft indexes and responses of all workers, and disk space of indexes that did not fit."
    parts: Parts = (
        ("In memory", lambda one: one.memory_bytes),
        ("On the disk", lambda one: one.disk_bytes),
    )
    most = max((max(of) for _, *of in _summed(states, parts)), default=0)
    unit, size = next(((unit, size) for unit, size in UNITS if most >= size), UNITS[-1])
    return _lines(states, parts, size, unit, description)


def _lines(states: Sequence[HistoryState], parts: Parts, size: int, y_title: str, description: str) -> go.Figure:
    """A line a part, in units of `size`."""
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
    """(step, sum over workers of each part), by what each worker had last said; `states` in order of steps."""
    known: dict[int, HistoryState] = {}
    rows: dict[int, tuple[int, ...]] = {}
    for one in states:
        known[one.worker] = one
        rows[one.step] = (one.step, *(sum(value(state) for state in known.values()) for _, value in parts))
    return list(rows.values())
