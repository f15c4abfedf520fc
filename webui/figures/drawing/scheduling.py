"""Scheduling figures: predicted against real lengths, moves of samples, and layout switches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import plotly.graph_objects as go

from rhyme_openrlhf.api.store.record import Switch
from rhyme_openrlhf.telemetry.events import RankGroups
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.base import MARKED_POINTS, blank, pattern, plain
from rhyme_openrlhf.webui.figures.drawing.timeline import CAUSE_WORDS
from rhyme_openrlhf.webui.site import text

# Most groups that are drawn, each as a trace of its own; a run has at most one per engine.
MOST_SHOWN = 64
NO_GROUPS = "Not recorded by this run: only --histopipe.enable groups prompts by predicted length."
NO_MOVES = (
    "Not recorded by this run: no sample moved from one engine to another. Samples can move with "
    "--move.enable or --reallocation.enable."
)
NO_SWITCHES = "Not recorded by this run: no machine changed its tensor-parallel layout; --tp_switch.enable allows it."
NO_REALLOCATION = (
    "Not recorded by this run: no samples were reallocated between engines (--reallocation.enable) in a step whose "
    "engines reported what they ran (once a second)."
)


@dataclass(frozen=True)
class MoveBucket:
    """Moves of one cause in steps `first` to `last`."""

    first: int
    last: int
    cause: str
    count: int


@dataclass(frozen=True)
class Reallocation:
    """Samples running on each engine before the first and after the last reallocation of a step."""

    step: int
    before: Mapping[int, int]
    after: Mapping[int, int]


def predicted_length(groups: Sequence[RankGroups], options: object) -> go.Figure:
    """Draw each group's predicted mean length against its real one; on the diagonal they are equal."""
    description = "Mean response length of each rank group, predicted against real; on the dotted line they are equal."
    points = _points(groups)
    if not points:
        return blank(description, NO_GROUPS)
    errors = [abs(predicted - real) / real for _, _, predicted, real in points if real > 0]
    off = f" Predictions are off by {text.percent(fmean(errors))} on average." if errors else ""
    figure = blank(f"{description}{off}{_left_out(groups)}")
    largest = max(max(predicted, real) for *_, predicted, real in points)
    figure.add_trace(
        go.Scatter(
            x=[0, largest], y=[0, largest], mode="lines", name="Equal", hoverinfo="skip",
            line={"color": palette.GREY, "width": 1, "dash": "dot"},
        )
    )  # fmt: skip
    for group in sorted({one[1] for one in points}):
        of_group = [one for one in points if one[1] == group]
        figure.add_trace(
            go.Scatter(
                x=[one[2] for one in of_group], y=[one[3] for one in of_group], mode="markers",
                name=f"Group {group + 1}",
                text=[f"step {one[0]}" for one in of_group],
                marker={
                    "color": palette.series_color(group), "symbol": palette.SYMBOLS[group % len(palette.SYMBOLS)],
                    "size": 6, "opacity": 0.75,
                },
                hovertemplate="%{text}: predicted %{x:,.0f}, real %{y:,.0f} tokens",
            )
        )  # fmt: skip
    figure.update_layout(
        xaxis={"title": {"text": "Predicted (tokens)"}, "rangemode": "tozero"},
        yaxis={"title": {"text": "Real (tokens)"}, "rangemode": "tozero"},
        showlegend=True,
        hovermode="closest",
    )
    return figure


def prediction_error(groups: Sequence[RankGroups], options: object) -> go.Figure:
    """Draw the relative error of the predicted lengths over steps."""
    description = "Mean error of the groups' predicted lengths, as a share of the real lengths."
    by_step: dict[int, list[float]] = defaultdict(list)
    for step, _, predicted, real in _points(groups):
        if real > 0:
            by_step[step].append(abs(predicted - real) / real)
    if not by_step:
        return blank(description, NO_GROUPS)
    figure = blank(description)
    figure.add_trace(
        go.Scatter(
            x=list(by_step), y=[fmean(errors) for errors in by_step.values()], name="Error",
            mode="lines+markers" if len(by_step) < MARKED_POINTS else "lines",
            line={"color": palette.BLUE, "width": 2}, hovertemplate="step %{x}: %{y:.1%}<extra></extra>",
        )
    )  # fmt: skip
    figure.update_layout(
        xaxis={"title": {"text": "Step"}},
        yaxis={"title": {"text": "Error of predicted length"}, "tickformat": ".0%", "rangemode": "tozero"},
    )
    return figure


def group_engines(groups: Sequence[RankGroups], options: object) -> go.Figure:
    """Draw the number of engines of each rank group over steps."""
    description = "Engines of each group of prompts with similar lengths, by step; group 1 has the shortest responses."
    if not groups:
        return blank(description, NO_GROUPS)
    figure = blank(f"{description}{_left_out(groups)}")
    for group in range(min(MOST_SHOWN, max(len(one.engines) for one in groups))):
        shown = [one for one in groups if group < len(one.engines)]
        figure.add_trace(
            go.Bar(
                x=[one.step for one in shown], y=[one.engines[group] for one in shown], name=f"Group {group + 1}",
                marker={"color": palette.series_color(group), "line": {"width": 0}}, textposition="none",
                text=[
                    f"step {one.step}, group {group + 1}: {text.counted(one.engines[group], 'engine')}"
                    + (f", {text.counted(one.prompts[group], 'prompt')}" if group < len(one.prompts) else "")
                    for one in shown
                ],
                hovertemplate="%{text}<extra></extra>",
            )
        )  # fmt: skip
    figure.update_layout(
        barmode="stack", bargap=0, showlegend=True, hovermode="closest", xaxis={"title": {"text": "Step"}},
        yaxis={"title": {"text": "Engines"}},
    )  # fmt: skip
    return figure


def moves(buckets: Sequence[MoveBucket], options: object) -> go.Figure:
    """Draw the number of moves over steps, stacked by cause."""
    description = "Samples that moved from one engine to another, by cause."
    total: dict[str, int] = defaultdict(int)
    for one in buckets:
        total[one.cause] += one.count
    if not total:
        return blank(description, NO_MOVES)
    words = ", ".join(f"{plain(CAUSE_WORDS.get(cause, cause))} {text.number(count)}" for cause, count in total.items())
    figure = blank(f"{description} {words}.")
    for index, cause in enumerate([*CAUSE_WORDS, *sorted(set(total) - set(CAUSE_WORDS))]):
        shown = [one for one in buckets if one.cause == cause]
        if not shown:
            continue
        name = plain(CAUSE_WORDS.get(cause, cause))
        figure.add_trace(
            go.Bar(
                x=[(one.first + one.last) / 2 for one in shown], y=[one.count for one in shown],
                width=[one.last - one.first + 0.84 for one in shown], name=name[:1].upper() + name[1:],
                text=[f"{text.span(one.first, one.last)}: {name} {one.count}" for one in shown], textposition="none",
                customdata=[one.last for one in shown],
                marker={
                    "color": palette.series_color(index), "line": {"width": 0},
                    "pattern": pattern(index, len(shown)),
                },
                hovertemplate="%{text}<extra></extra>",
            )
        )  # fmt: skip
    figure.update_layout(
        barmode="stack", showlegend=True, hovermode="closest", xaxis={"title": {"text": "Step"}},
        yaxis={"title": {"text": "Moved samples"}, "rangemode": "tozero"},
    )  # fmt: skip
    return figure


def switches(rows: Sequence[Switch], options: object) -> go.Figure:
    """Draw the duration of each layout switch over steps."""
    description = "Changes of a machine's tensor-parallel size: when, and how long each one took."
    known = [row for row in rows if row.seconds is not None]
    if not known:
        return blank(description, NO_SWITCHES)
    mean = fmean(row.seconds or 0.0 for row in known)
    figure = blank(f"{description} There were {text.number(len(known))}, {text.duration(mean)} each on average.")
    kinds = sorted({(row.from_tp, row.to_tp) for row in known})
    for index, (before, after) in enumerate(kinds):
        shown = [row for row in known if (row.from_tp, row.to_tp) == (before, after)]
        figure.add_trace(
            go.Scatter(
                x=[row.step for row in shown], y=[row.seconds for row in shown], mode="markers",
                name=f"TP {before} to {after}",
                marker={"color": palette.series_color(index), "symbol": palette.SYMBOLS[index % 8], "size": 7},
                text=[f"{plain(row.node)}, step {row.step}: {text.counted(row.samples, 'sample')}" for row in shown],
                hovertemplate="%{text}, %{y:.2f} s<extra></extra>",
            )
        )  # fmt: skip
    figure.update_layout(
        showlegend=True, hovermode="closest", xaxis={"title": {"text": "Step"}},
        yaxis={"title": {"text": "Seconds"}, "rangemode": "tozero"},
    )  # fmt: skip
    return figure


def reallocation(row: Reallocation | None, options: object) -> go.Figure:
    """Draw the running samples of each engine before and after the newest step's reallocation."""
    description = "Samples running on each engine before and after reallocation."
    if row is None or not row.before or not row.after:
        return blank(description, NO_REALLOCATION)
    apart = [max(of.values()) - min(of.values()) for of in (row.before, row.after)]
    figure = blank(
        f"{description} Step {row.step}: the fullest engine had {apart[0]} more than the emptiest before, "
        f"{apart[1]} after."
    )
    for index, (name, of) in enumerate((("Before", row.before), ("After", row.after))):
        figure.add_trace(
            go.Bar(
                x=[f"Engine {engine}" for engine in sorted(of)], y=[of[engine] for engine in sorted(of)], name=name,
                marker={
                    "color": palette.series_color(index),
                    "pattern": {"shape": "/" if index == 0 else "", "size": 6, "solidity": 0.3},
                },
            )
        )  # fmt: skip
    figure.update_layout(
        barmode="group", showlegend=True, hovermode="x unified", xaxis={"title": {"text": f"Step {row.step}"}},
        yaxis={"title": {"text": "Running samples"}, "rangemode": "tozero"},
    )  # fmt: skip
    return figure


def _points(groups: Sequence[RankGroups]) -> list[tuple[int, int, float, float]]:
    """Return (step, group, predicted, real) of every group that is drawn."""
    return [
        (one.step, group, predicted, real)
        for one in groups
        for group, (predicted, real) in enumerate(zip(one.predicted[:MOST_SHOWN], one.real, strict=False))
    ]


def _left_out(groups: Sequence[RankGroups]) -> str:
    """Return a sentence for groups that are not drawn, "" if all are."""
    most = max(len(one.engines) for one in groups)
    return f" Only the first {MOST_SHOWN} of {most} groups are drawn." if most > MOST_SHOWN else ""
