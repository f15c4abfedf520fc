"""Rows of figures, as the store would give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rhyme_openrlhf.api.read.curves import Curve
from rhyme_openrlhf.api.read.timeline import Lane, LaneInterval
from rhyme_openrlhf.api.store.record import Move, Switch
from rhyme_openrlhf.webui.figures.drawing.chart import Curves
from rhyme_openrlhf.webui.figures.drawing.timeline import StageSpan, StepMark, TimelineRows
from rhyme_openrlhf.webui.figures.one_run import RUN_FIGURES

# 2026-03-04 00:00:00 UTC.
MIDNIGHT = 1_772_582_400.0


@dataclass(frozen=True)
class Options:
    """Options of curves."""

    axis: str = "step"
    scale: str = "linear"


def curve(name: str, *values: float | None) -> Curve:
    """Of steps from 1 on."""
    return Curve(name, [float(step) for step in range(1, len(values) + 1)], list(values), len(values))


def interval(
    engine: int, state: str, start: float, end: float, cause: str = "", version: int | None = 1
) -> LaneInterval:
    """Of step 2; seconds after MIDNIGHT."""
    return LaneInterval(
        engine=engine, state=state, cause=cause, start=MIDNIGHT + start, end=MIDNIGHT + end, step=2,
        weight_version=version,
    )  # fmt: skip


def lane(engine: int, *intervals: LaneInterval) -> Lane:
    """Its bubble seconds are not used by figures."""
    return Lane(engine, 0.0, list(intervals))


def two_lanes() -> list[Lane]:
    """Engine 0 runs 9 of 10 seconds, engine 3 runs 4 and waits mostly for the other's tail."""
    return [
        lane(0, interval(0, "idle", 0, 1, "weights"), interval(0, "generate", 1, 10)),
        lane(
            3,
            interval(3, "sync", 0, 1, "sync", 0),
            interval(3, "idle", 1, 2, "weights"),
            interval(3, "generate", 2, 6),
            interval(3, "idle", 6, 10, "tail"),
        ),
    ]


def rows(**more: Any) -> TimelineRows:
    """A window of step 2 with two engines."""
    values: dict[str, Any] = {
        "first": 2, "last": 2, "lanes": two_lanes(), "engines": 2, "truncated": False,
        "steps": [StepMark(2, MIDNIGHT, MIDNIGHT + 15)],
        "stages": [StageSpan(2, "train", MIDNIGHT + 10, MIDNIGHT + 15)],
        "moves": [], "switches": [],
    }  # fmt: skip
    return TimelineRows(**{**values, **more})


def move(source: int, destination: int, at: float, cause: str = "outlier_intra", sample: str = "s1") -> Move:
    """A move that took half a second."""
    return Move(
        time=MIDNIGHT + at, step=2, sample=sample, source_engine=source, destination_engine=destination, cause=cause,
        carrier="kv_transfer", outcome="moved", seconds=0.5, tokens=1200, downtime_seconds=0.1, predicted_seconds=0.2,
    )  # fmt: skip


def switch(at: float) -> Switch:
    """A machine goes from tensor-parallel size 1 to 2."""
    return Switch(time=MIDNIGHT + at, step=2, node="node-0", from_tp=1, to_tp=2, samples=3, seconds=0.8)


def draw(name: str, rows: Any, options: Any = None) -> Any:
    """The figure of a run with this name, drawn of `rows`."""
    return RUN_FIGURES[name].draw(rows, options or Options())


def curves(*shown: Curve, options: Any = None, **more: Any) -> Any:
    """A chart of these curves."""
    chart = Curves(description="d", empty="e", y="y", **more)
    return chart.draw({one.name: one for one in shown}, options or Options())


def traces(figure: Any) -> dict[str, Any]:
    """Traces by name."""
    return {trace.name: trace for trace in figure.data}
