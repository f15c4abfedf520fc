"""The bubble fraction per step, stacked by what the engines waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.step_buckets import bubble_buckets
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import Step
from rhyme_openrlhf.telemetry.metrics import bubble_share
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.axes import AXIS_TITLES, MARKED_POINTS, OnAxis
from rhyme_openrlhf.webui.figures.drawing.chart import Chart, Content
from rhyme_openrlhf.webui.figures.drawing.engine_waits import NAMES
from rhyme_openrlhf.webui.figures.drawing.series import Area, Bars, Span
from rhyme_openrlhf.webui.figures.run_figure import RunDrawing, RunFigure, Window
from rhyme_openrlhf.webui.figures.subjects.timeline import MOST_BARS
from rhyme_openrlhf.webui.site import text

# The smallest share that the description names; smaller ones round to 0.
LEAST_SHARE = 0.0005


@dataclass(frozen=True)
class StepBucket:
    """Engine seconds of the rollout stages of these steps, and their bubble seconds by cause.

    `at`: mean end of these steps in seconds since the run's first step began, None if unknown.
    """

    steps: Span
    at: float | None
    engine_seconds: float
    by_cause: Mapping[str, float]


def _buckets(session: Session, run: Run, window: Window) -> list[StepBucket]:
    found = bubble_buckets(session, run, window.from_step, window.to_step, MOST_BARS)
    begin = session.scalar(select(func.min(Step.started_at)).where(Step.run_id == run.id))
    return [
        StepBucket(
            Span(one.first, one.last),
            None if one.ended_at is None or begin is None else one.ended_at - begin,
            one.engine_seconds,
            {name.removeprefix("bubble_"): seconds for name, seconds in one.bubbles.items()},
        )
        for one in found
    ]


def fraction(buckets: Sequence[StepBucket], options: OnAxis) -> go.Figure:
    """Draw one bar per bucket, stacked by each cause's `metrics.bubble_share`; a click on a bar opens its steps.

    Many buckets are drawn as a stepped area.
    """
    # Bars are of steps; in between there is only time.
    by_time = options.axis == "time"
    drawn = [one for one in buckets if one.engine_seconds > 0 and not (by_time and one.at is None)]

    def content(_: object) -> Content:
        whole = sum(one.engine_seconds for one in drawn)
        layers, shares = [], {}
        for cause, color in palette.CAUSES.items():
            values = [one.by_cause[cause] / one.engine_seconds for one in drawn]
            if any(values):
                layers.append(_layer(cause, color, drawn, values, by_time))
                shares[cause] = bubble_share(sum(one.by_cause[cause] for one in drawn), 1, whole) or 0.0
        parts = [
            f"{NAMES[cause].lower()} {text.percent(share)}"
            for cause, share in sorted(shares.items(), key=lambda one: -one[1])
            if share >= LEAST_SHARE
        ]
        return Content(layers, f"Over all: {', '.join(parts)}." if parts else "")

    return Chart(
        content=content, x=AXIS_TITLES["time" if by_time else "step"], counted="other" if by_time else "whole",
        y="Bubble fraction", share=True, legend=True, grows=True,
        description="Share of the engines' time in rollouts with nothing to run, by what they waited for.",
        empty="No rollout of this run is finished yet: it ends with what each engine waited for.",
    ).draw(None, options)  # fmt: skip


def _layer(cause: str, color: str, drawn: Sequence[StepBucket], values: Sequence[float], by_time: bool) -> Area | Bars:
    name = NAMES[cause]
    words = [
        f"{text.span(*one.steps).capitalize()}: {name.lower()} {text.percent(value)}"
        for one, value in zip(drawn, values, strict=True)
    ]
    shared: dict[str, Any] = {"color": color, "steps": [one.steps.last for one in drawn]}
    # Bars would be too thin, and plotly.js draws an area in a tenth of the time.
    if len(drawn) >= MARKED_POINTS:
        x = [one.at if by_time else one.steps.middle for one in drawn]
        return Area(name, x, values, words, **shared)
    return Bars(name, [one.at if by_time else one.steps for one in drawn], values, words, patterned=False, **shared)


FIGURES: tuple[RunFigure, ...] = (RunDrawing("bubbles", "Bubble fraction by cause", _buckets, fraction),)
