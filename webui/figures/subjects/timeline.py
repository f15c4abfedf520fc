"""Figures of the shown steps: each engine over time, and overviews of many engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from pydantic import Field, field_validator
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.timeline import MAX_LANES, Lane, timeline
from rhyme_openrlhf.api.store.models import Attempt, Run
from rhyme_openrlhf.api.store.record import Move, RawEvent, Step, Switch, of_kinds
from rhyme_openrlhf.webui.figures.drawing import occupancy
from rhyme_openrlhf.webui.figures.drawing import timeline as drawing
from rhyme_openrlhf.webui.figures.drawing.timeline import StageSpan, StepMark, TimelineRows
from rhyme_openrlhf.webui.figures.run_figure import RunChart, RunDrawing, RunFigure, StepsShown, shown_steps

# Rectangles that a browser draws without a noticeable delay; overviews of many engines combine more of them.
LANE_INTERVALS = 5000
GRID_INTERVALS = 20_000
MOST_ARROWS = 300
MOST_STAGES = 1000
LANES = 16
# Most bars of a chart that a reader can still point at.
MOST_BARS = 160
RANGES = r"^\s*(\d{1,7}(\s*-\s*\d{1,7})?\s*(,\s*|$))*$"
RANGES_LENGTH = 200


def checked_ranges(ranges: str) -> str:
    """Return `ranges` as given; raise ValueError if it names more engines than a figure can draw."""
    if len(engine_numbers(ranges)) > MAX_LANES:
        raise ValueError(f"must name at most {MAX_LANES} engines")
    return ranges


class TimelineOptions(StepsShown):
    """The options of the timeline.

    `engines`: a list as "0, 3, 8-15"; without it, the `lanes` engines that waited most, sorted by `order`.
    """

    engines: str = Field(default="", max_length=RANGES_LENGTH, pattern=RANGES)
    lanes: int = Field(default=LANES, ge=1, le=MAX_LANES)
    order: Literal["worst", "number"] = "worst"

    _check = field_validator("engines")(checked_ranges)


def engine_numbers(ranges: str) -> list[int]:
    """Return the engines that a list as "0, 3, 8-15" names, sorted; at most one more than a figure can draw."""
    found: set[int] = set()
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        if low.strip():
            first = int(low)
            found.update(range(first, min(int(high) if high.strip() else first, first + MAX_LANES) + 1))
    return sorted(found)


def timeline_rows(session: Session, run: Run, options: TimelineOptions, most: int = LANE_INTERVALS) -> TimelineRows:
    """Return the rows of the shown steps, with at most `most` intervals."""
    first, last = shown_steps(session, run, options)
    chosen = engine_numbers(options.engines) or None
    lanes = len(chosen) if chosen else options.lanes
    found = timeline(session, run.uid, first, last, chosen, lanes, most)
    ordered = found.lanes
    if options.order == "number":
        ordered = sorted(found.lanes, key=lambda lane: lane.engine)
    window = (Step.run_id == run.id, Step.step >= first, Step.step <= last)
    steps = session.execute(
        select(
            Step.step, Step.started_at, Step.finished_at, Step.experience_seconds, Step.train_seconds, Step.sync_seconds
        )
        .where(*window)
        .order_by(Step.step)
    ).all()
    marks = [StepMark(row[0], row[1], row[2]) for row in steps]
    stages = _stages(session, run, [lane for lane in ordered if lane.intervals], marks)
    if not stages:
        stages = [span for row in steps for span in parts_backwards(row[0], row[2], row[3:6])]
    moves = session.scalars(
        select(Move)
        .where(Move.run_id == run.id, Move.step >= first, Move.step <= last)
        .order_by(Move.time, Move.id)
        .limit(MOST_ARROWS)
    ).all()
    switches = session.scalars(
        select(Switch)
        .where(Switch.run_id == run.id, Switch.step >= first, Switch.step <= last)
        .order_by(Switch.time, Switch.id)
        .limit(MOST_ARROWS)
    ).all()
    return TimelineRows(first, last, ordered, found.engines, found.truncated, marks, stages, moves, switches)


def _stages(session: Session, run: Run, lanes: Sequence[Lane], marks: Sequence[StepMark]) -> list[StageSpan]:
    """Return the trainer's stages from the first moment of the lanes to the end of the last step, of any step.

    The events that end a step limit the search: the trainer writes its stages between them, and the store keeps the
    order of a writer's events. An index finds both limits, so no other events are read.
    """
    if not lanes or not marks:
        return []
    begin, _ = drawing.reported(lanes)
    after = _train_step_id(session, run, begin)
    until = _train_step_id(session, run, marks[-1].finished_at)
    query = select(RawEvent.time, RawEvent.attempt_id, RawEvent.body).where(
        RawEvent.run_id == run.id, RawEvent.kind == "stage_started", RawEvent.id > (after or 0)
    )
    # The last step is still training and has no end yet, so every stage that has begun belongs to it.
    if until is not None:
        query = query.where(RawEvent.id < until)
    rows = session.execute(query.order_by(RawEvent.id).limit(MOST_STAGES)).all()
    found = [(at, attempt, msgspec.json.decode(body)) for at, attempt, body in rows]
    starts = [(at, attempt, one["step"], one["stage"]) for at, attempt, one in found]
    about = (Step.run_id == run.id, Step.step.in_({step for _, _, step, _ in starts}))
    done = session.execute(select(Step.step, Step.finished_at).where(*about)).all()
    attempts = session.execute(select(Attempt.id, Attempt.finished_at).where(Attempt.run_id == run.id)).tuples()
    spans = stage_spans(starts, {step: finished for step, finished in done}, dict(attempts.all()))
    return [StageSpan(one.step, one.stage, max(one.start, begin), one.end) for one in spans if one.end > begin]


def _train_step_id(session: Session, run: Run, finished_at: float | None) -> int | None:
    """Return the row number of the event that ended a step at this moment."""
    if finished_at is None:
        return None
    conditions = (RawEvent.run_id == run.id, *of_kinds(["train_step"]), RawEvent.time <= finished_at)
    return session.scalar(select(func.max(RawEvent.id)).where(*conditions))


def stage_spans(
    starts: Sequence[tuple[float, int, int, str]],
    finished: Mapping[int, float | None],
    ended: Mapping[int, float | None],
) -> list[StageSpan]:
    """Return spans of stages from `starts` (unix seconds, attempt, step, name).

    A stage ends when the next one of its attempt begins, its step is `finished` or its attempt has `ended`. A stage
    without an end yet is left out.
    """
    spans = []
    following: dict[int, float] = {}
    for at, attempt, step, stage in reversed(starts):
        ends = [end for end in (following.get(attempt), ended.get(attempt)) if end is not None and end >= at]
        following[attempt] = at
        done = finished.get(step)
        if done is not None and done >= at:
            ends.append(done)
        if ends:
            spans.append(StageSpan(step, stage, at, min(ends)))
    return spans[::-1]


def parts_backwards(step: int, finished_at: float | None, parts: Sequence[float | None]) -> list[StageSpan]:
    """Return the parts of a step (experience, train, sync), laid one after the other before the step's end.

    This is for records without stages.
    """
    if finished_at is None:
        return []
    spans, end = [], finished_at
    for stage, seconds in reversed(list(zip(("experience", "train", "sync"), parts, strict=True))):
        if seconds:
            spans.append(StageSpan(step, stage, end - seconds, end))
            end -= seconds
    return spans[::-1]


def _grid_rows(session: Session, run: Run, options: TimelineOptions) -> TimelineRows:
    return timeline_rows(session, run, options, GRID_INTERVALS)


FIGURES: tuple[RunFigure, ...] = (
    RunDrawing("timeline", "Engines over time", timeline_rows, drawing.lanes, options=TimelineOptions),
    RunDrawing("timeline_heat", "Where engines wait", _grid_rows, occupancy.heat, options=TimelineOptions),
    RunChart(
        "timeline_states", "Engines by state", _grid_rows, content=occupancy.states, counted="other", y="Engines",
        legend=True, empty=drawing.NOTHING, options=TimelineOptions,
        description="How many of the engines shown generate, or wait for which cause, over time.",
    ),
)  # fmt: skip
