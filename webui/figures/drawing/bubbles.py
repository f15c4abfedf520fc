"""Bubble fraction per step, stacked by what the engines waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from rhyme_openrlhf.api.read.curves import Axis
from rhyme_openrlhf.telemetry.metrics import bubble_share
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.base import MARKED_POINTS, OnAxis, blank, frame, grows, x_axis
from rhyme_openrlhf.webui.site import text

# The state of an engine with nothing to run, as the end of a sentence "... mostly".
WAITS: dict[str, str] = {
    "tail": "waiting for the others' tail",
    "weights": "waiting for its first request",
    "sync": "loading weights",
    "switch": "changing its layout",
    "trainer": "waiting for the trainer",
    "unexplained": "without a reported cause",
    # In the timeline in place of the cause.
    "rehearse": "rehearsing coming prompts, with nothing else to run",
}
# The same states as names in a legend.
NAMES: dict[str, str] = {
    "generate": "Generating",
    "rehearse": "Rehearsing",
    "tail": "Others' tail",
    "weights": "First request",
    "sync": "Loading weights",
    "switch": "Changing layout",
    "trainer": "Waiting for trainer",
    "unexplained": "No cause given",
}


@dataclass(frozen=True)
class StepBucket:
    """Engine seconds of the rollout stages of steps `first` to `last`, and their bubble seconds by cause.

    `at`: mean end of these steps in seconds since the run's first step began, None if unknown.
    """

    first: int
    last: int
    at: float | None
    engine_seconds: float
    by_cause: Mapping[str, float]


def fraction(buckets: Sequence[StepBucket], options: OnAxis) -> go.Figure:
    """Draw one bar per bucket, stacked by each cause's `metrics.bubble_share`; a click on a bar opens its steps.

    Many buckets are drawn as a stepped area.
    """
    # Bars are of steps; in between there is only time.
    axis: Axis = "time" if options.axis == "time" else "step"
    drawn = [one for one in buckets if one.engine_seconds > 0 and (axis == "step" or one.at is not None)]
    description = "Share of the engines' time in rollouts with nothing to run, by what they waited for."
    if not drawn:
        return blank(description, "No rollout of this run is finished yet: it ends with what each engine waited for.")
    total = {cause: sum(one.by_cause[cause] for one in drawn) for cause in palette.CAUSES}
    whole = sum(one.engine_seconds for one in drawn)
    shares = {cause: share for cause, seconds in total.items() if (share := bubble_share(seconds, 1, whole))}
    # Leave out shares that round to 0.
    parts = [f"{NAMES[cause].lower()} {text.percent(share)}" for cause, share in _largest(shares) if share >= 0.0005]
    if parts:
        description += f" Over all: {', '.join(parts)}."
    figure = blank(description)
    x = [(one.first + one.last) / 2 if axis == "step" else one.at for one in drawn]
    width = [one.last - one.first + 0.84 for one in drawn] if axis == "step" else None
    for cause, color in palette.CAUSES.items():
        if not total[cause]:
            continue
        values = [one.by_cause[cause] / one.engine_seconds for one in drawn]
        hover = [
            f"{text.span(one.first, one.last).capitalize()}: {NAMES[cause].lower()} {text.percent(value)}"
            for one, value in zip(drawn, values, strict=True)
        ]
        shared = {
            "x": x, "y": values, "name": NAMES[cause], "text": hover, "customdata": [one.last for one in drawn],
            "hovertemplate": "%{text}<extra></extra>",
        }  # fmt: skip
        if len(drawn) < MARKED_POINTS:
            look = {"color": color, "line": {"width": 0}}
            figure.add_trace(go.Bar(**shared, width=width, textposition="none", marker=look))
        else:
            # Bars would be too thin, and plotly.js draws an area in a tenth of the time.
            line = {"color": color, "width": 0, "shape": "hvh"}
            figure.add_trace(go.Scatter(**shared, mode="lines", stackgroup="causes", fillcolor=color, line=line))
    grows(figure, drawn[-1].last if axis == "step" else drawn[-1].at or 0.0)
    figure.update_layout(
        barmode="stack",
        bargap=0.08,
        xaxis=x_axis(axis, drawn[-1].last if axis == "step" else 0.0),
        yaxis={"title": {"text": "Bubble fraction"}, "tickformat": ".0%", "rangemode": "tozero"},
        showlegend=True,
        hovermode="closest",
    )
    frame(figure, 0.0, max(sum(one.by_cause.values()) / one.engine_seconds for one in drawn))
    return figure


def _largest(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(shares.items(), key=lambda one: -one[1])
