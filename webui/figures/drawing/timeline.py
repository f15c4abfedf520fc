"""The bubble timeline: a lane per engine, coloured by its state, with the trainer's stages above the lanes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from rhyme_openrlhf.api.read.timeline import Lane, LaneInterval
from rhyme_openrlhf.api.store.record import Move, Switch
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.base import blank, plain
from rhyme_openrlhf.webui.figures.drawing.engine_waits import NAMES, answer, lane_state, waits
from rhyme_openrlhf.webui.figures.drawing.series import row_bars
from rhyme_openrlhf.webui.site import text

NOTHING = (
    "No engine has reported its states in these steps. Engines report at the end of each rollout; "
    "records of older versions have no such reports."
)
CAUSE_WORDS: dict[str, str] = {
    "outlier_intra": "outlier, within a machine",
    "outlier_inter": "outlier, to another machine",
    "reallocation": "reallocation",
    "tp_switch": "layout switch",
    "engine_lost": "engine lost",
}
MOVE_DASHES: dict[str, str] = {
    "outlier_intra": "solid", "outlier_inter": "dash", "reallocation": "dot", "tp_switch": "dashdot",
    "engine_lost": "longdash",
}  # fmt: skip
LANE_HEIGHT = 0.8
# Readable on every colour of the lanes; these colours are the same in both themes.
ON_LANES = "#101318"
# With more version numbers than this, they would overlap: only markers are drawn, and the hover text has the number.
VERSIONS_WRITTEN = 90
STEPS_WRITTEN = 12
# Above this number of lanes the font shrinks, because a lane is narrower than a line of text.
MANY_LANES = 24


@dataclass(frozen=True)
class StepMark:
    """A step of the window: the start of its rollout and the end of its training (unix seconds), None if unknown."""

    step: int
    started_at: float | None
    finished_at: float | None


@dataclass(frozen=True)
class StageSpan:
    """A stage of the trainer in one step, from `start` to `end` (unix seconds)."""

    step: int
    stage: str
    start: float
    end: float


@dataclass(frozen=True)
class TimelineRows:
    """Rows of the timeline for a window of steps.

    `engines`: the run's number of engines; `truncated`: some intervals were left out.
    """

    first: int
    last: int
    lanes: Sequence[Lane]
    engines: int
    truncated: bool
    steps: Sequence[StepMark]
    stages: Sequence[StageSpan]
    moves: Sequence[Move]
    switches: Sequence[Switch]


@dataclass(frozen=True)
class _Rows:
    """The row of each engine, of the trainer and of layout switches, and the moment that is 0 on the x axis."""

    names: list[str]
    engines: dict[int, int]
    trainer: int | None
    layout: int | None
    begin: float

    def bar(self, row: int, start: float, end: float, words: str) -> tuple[int, float, float, str]:
        """Return a bar of a row from its ends in unix seconds."""
        return row, round(start - self.begin, 4), round(end - start, 4), words


def reported(found: Sequence[Lane]) -> tuple[float, float]:
    """Return the start of the first and the end of the last interval of these lanes (unix seconds).

    At least one lane must have an interval.
    """
    return (
        min(one.start for lane in found for one in lane.intervals),
        max(one.end for lane in found for one in lane.intervals),
    )


def lanes(rows: TimelineRows, options: object) -> go.Figure:
    """Draw states as bars, changes of weight version, moves as arrows, and layout switches and stages above the
    lanes.
    """
    found = [lane for lane in rows.lanes if lane.intervals]
    title = "What each engine runs, or waits for, over time."
    if not found:
        return blank(title, NOTHING)
    figure = blank(" ".join([title, *answer(waits(found), rows.first, rows.last, rows.engines)]))
    places = _place(rows, found)
    for state, color in palette.LANES.items():
        _add_state(figure, found, places, state, color)
    _add_stages(figure, rows.stages, places)
    _add_versions(figure, found, places)
    _add_moves(figure, rows.moves, places)
    ends = [one.end for lane in found for one in lane.intervals] + [one.end for one in rows.stages]
    end = (max(ends) - places.begin) * 1.01
    _add_switches(figure, rows.switches, places, end)
    _add_steps(figure, rows.steps, places, reported(found)[1])
    small = {"tickfont": {"size": 9}} if len(found) > MANY_LANES else {}
    figure.update_layout(
        barmode="overlay",
        bargap=0,
        xaxis={"title": {"text": f"Seconds since {text.moment(places.begin)}"}, "range": [0, round(end, 3)]},
        yaxis={
            "title": {"text": ""},
            "tickvals": list(range(len(places.names))),
            "ticktext": places.names,
            # Leave space above the first row for the numbers of the steps; the first row is at the top.
            "range": [len(places.names) - 0.4, -1.15],
            "showgrid": False,
            **small,
        },
        legend={"traceorder": "normal"},
        showlegend=True,
        hovermode="closest",
        dragmode="zoom",
    )
    return figure


def _place(rows: TimelineRows, found: Sequence[Lane]) -> _Rows:
    names: list[str] = []
    trainer = layout = None
    if rows.stages:
        trainer = len(names)
        names.append("Trainer")
    if rows.switches:
        layout = len(names)
        names.append("Layout")
    engines = {lane.engine: len(names) + i for i, lane in enumerate(found)}
    names += [f"Engine {lane.engine}" for lane in found]
    begin, _ = reported(found)
    return _Rows(names, engines, trainer, layout, begin)


def _add_state(figure: go.Figure, found: Sequence[Lane], places: _Rows, state: str, color: str) -> None:
    shown = [(places.engines[lane.engine], one) for lane in found for one in lane.intervals if lane_state(one) == state]
    if shown:
        bars = [places.bar(place, one.start, one.end, _interval_text(one, state)) for place, one in shown]
        figure.add_trace(row_bars(NAMES[state], bars, {"color": color}))


def _interval_text(one: LaneInterval, state: str) -> str:
    version = "" if one.weight_version is None else f", weights v{one.weight_version}"
    words = NAMES[state] if state == "generate" else f"Waits: {NAMES[state].lower()}"
    return f"Engine {one.engine}, step {one.step}{version}<br>{words}, {_when(one.start, one.end)}"


def _when(start: float, end: float) -> str:
    return f"{text.duration(end - start)} from {text.clock(start)}"


def _add_stages(figure: go.Figure, stages: Sequence[StageSpan], places: _Rows) -> None:
    by_stage: dict[str, list[StageSpan]] = defaultdict(list)
    for one in stages:
        by_stage[one.stage].append(one)
    for stage in [*palette.STAGES, *sorted(set(by_stage) - set(palette.STAGES))]:
        if stage not in by_stage or places.trainer is None:
            continue
        bars = [
            places.bar(
                places.trainer,
                one.start,
                one.end,
                f"Trainer, step {one.step}<br>{plain(stage)}, {_when(one.start, one.end)}",
            )
            for one in by_stage[stage]
        ]
        pattern = {"shape": palette.STAGES.get(stage, "|"), "size": 6, "solidity": 0.35}
        figure.add_trace(row_bars(f"Trainer: {stage}", bars, {"color": palette.STAGE, "pattern": pattern}))


def _add_versions(figure: go.Figure, found: Sequence[Lane], places: _Rows) -> None:
    changes = []
    for lane in found:
        known = None
        for one in lane.intervals:
            if one.weight_version is not None and one.weight_version != known:
                changes.append((places.engines[lane.engine], one))
                known = one.weight_version
    if not changes:
        return
    written = len(changes) <= VERSIONS_WRITTEN and len(found) <= MANY_LANES
    figure.add_trace(
        go.Scatter(
            x=[round(one.start - places.begin, 4) for _, one in changes],
            y=[place for place, _ in changes],
            mode="markers+text" if written else "markers",
            marker={"symbol": "triangle-right", "size": 6, "color": ON_LANES},
            text=[f"v{one.weight_version}" for _, one in changes],
            textposition="middle right",
            textfont={"size": 10, "color": ON_LANES},
            name="Weight version",
            # No legend entry: the marker's colour fits lanes and is hard to see on a dark background; the text explains
            # it.
            showlegend=False,
            cliponaxis=True,
            hovertext=[
                f"Engine {one.engine}: weights v{one.weight_version} from {text.clock(one.start)}" for _, one in changes
            ],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    )


def _add_moves(figure: go.Figure, moves: Sequence[Move], places: _Rows) -> None:
    by_cause: dict[str, list[Move]] = defaultdict(list)
    for one in moves:
        if one.source_engine in places.engines and one.destination_engine in places.engines:
            by_cause[one.cause].append(one)
    for cause, shown in sorted(by_cause.items()):
        x: list[float | None] = []
        y: list[float | None] = []
        words: list[str] = []
        for one in shown:
            start = round(one.time - (one.seconds or 0.0) - places.begin, 4)
            x += [start, round(one.time - places.begin, 4), None]
            y += [places.engines[one.source_engine], places.engines[one.destination_engine], None]
            words += [_move_text(one)] * 2 + [""]
        figure.add_trace(
            go.Scatter(
                x=x,
                y=y,
                mode="lines+markers",
                name=f"Move: {plain(CAUSE_WORDS.get(cause, cause))}",
                text=words,
                hovertemplate="%{text}<extra></extra>",
                line={"color": palette.MOVE, "width": 1.6, "dash": MOVE_DASHES.get(cause, "solid")},
                marker={
                    "color": palette.MOVE,
                    "symbol": ["circle", "arrow", "circle"] * len(shown),
                    "angleref": "previous",
                    "size": [5, 10, 0] * len(shown),
                },
            )  # fmt: skip
        )


def _move_text(one: Move) -> str:
    cost = "" if one.seconds is None else f" in {text.duration(one.seconds)}"
    stood = []
    if one.downtime_seconds is not None:
        stood.append(f"{text.duration(one.downtime_seconds)} without an engine")
    if one.predicted_seconds is not None:
        stood.append(f"{text.duration(one.predicted_seconds)} expected")
    return (
        f"Sample {plain(one.sample)}: engine {one.source_engine} to {one.destination_engine}"
        f"<br>{plain(CAUSE_WORDS.get(one.cause, one.cause))}, {plain(one.carrier.replace('_', ' '))}, "
        f"{plain(one.outcome)}<br>{text.counted(one.tokens, 'token')}{cost}, {text.clock(one.time)}"
        + (f"<br>{', '.join(stood)}" if stood else "")
    )


def _add_switches(figure: go.Figure, switches: Sequence[Switch], places: _Rows, end: float) -> None:
    if places.layout is None:
        return
    begins = [round(one.time - (one.seconds or 0.0) - places.begin, 4) for one in switches]
    figure.add_trace(
        go.Scatter(
            x=begins,
            y=[places.layout] * len(switches),
            mode="markers+text",
            marker={"symbol": "diamond", "size": 9, "color": palette.CAUSES["switch"]},
            text=[f"TP {one.from_tp} → {one.to_tp}" for one in switches],
            # Within the figure.
            textposition=["middle right" if begin < end / 2 else "middle left" for begin in begins],
            textfont={"size": 10},
            hovertext=[
                f"{plain(one.node)}: tensor parallel size {one.from_tp} to {one.to_tp}"
                f"<br>{text.counted(one.samples, 'sample')} moved in {text.duration(one.seconds)}, step {one.step}"
                for one in switches
            ],
            hovertemplate="%{hovertext}<extra></extra>",
            name="Layout switch",
        )
    )


def _add_steps(figure: go.Figure, steps: Sequence[StepMark], places: _Rows, end: float) -> None:
    marks = [one for one in steps if one.started_at is not None and places.begin - 1 <= one.started_at <= end]
    every = -(-len(marks) // STEPS_WRITTEN)
    shapes: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    for i, one in enumerate(marks):
        x = round((one.started_at or 0.0) - places.begin, 4)
        line = {"color": palette.GREY, "width": 1, "dash": "dot"}
        shapes.append({"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line})
        if i % every == 0:
            words = {"text": f"Step {one.step}", "x": x, "y": -0.85, "showarrow": False, "xanchor": "left"}
            notes.append({**words, "font": {"size": 11}})
    figure.update_layout(shapes=shapes, annotations=notes)
