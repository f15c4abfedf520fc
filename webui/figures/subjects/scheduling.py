"""Figures of scheduling: predicted against real lengths, moves of samples, and layout switches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.latest_events import latest
from rhyme_openrlhf.api.read.step_buckets import bucket_width
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import EngineSampleRow, Move, Switch
from rhyme_openrlhf.telemetry.events import RankGroups
from rhyme_openrlhf.webui.figures.drawing.chart import Content
from rhyme_openrlhf.webui.figures.drawing.series import Bars, Dots, Guide, Line, Span
from rhyme_openrlhf.webui.figures.drawing.timeline import CAUSE_WORDS
from rhyme_openrlhf.webui.figures.run_figure import RunChart, RunFigure, Window
from rhyme_openrlhf.webui.figures.subjects.timeline import MOST_BARS
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
# Most steps whose groups are shown: one point per group and step.
MOST_GROUPS = 500
MOST_SWITCHES = 2000
# Samples of 256 engines over a minute and a half: one step.
MOST_LOOKS = 25_000
REALLOCATION = "reallocation"


@dataclass(frozen=True)
class MoveBucket:
    """Moves of one cause in these steps."""

    steps: Span
    cause: str
    count: int


@dataclass(frozen=True)
class Reallocation:
    """Samples running on each engine before the first and after the last reallocation of a step."""

    step: int
    before: Mapping[int, int]
    after: Mapping[int, int]


@dataclass(frozen=True)
class MoveKind:
    """Moves of one cause, carrier and outcome: their number and mean cost.

    `mean_downtime`: mean time in which no engine generated the sample; `mean_predicted`: the predicted downtime.
    """

    cause: str
    carrier: str
    outcome: str
    count: int
    mean_seconds: float | None
    mean_downtime: float | None
    mean_predicted: float | None
    mean_tokens: float | None


def move_kinds(session: Session, run: Run) -> list[MoveKind]:
    """Return all moves of a run, grouped; the most frequent group first."""
    kind = (Move.cause, Move.carrier, Move.outcome)
    count = func.count()
    rows = session.execute(
        select(*kind, count, *map(func.avg, (Move.seconds, Move.downtime_seconds, Move.predicted_seconds, Move.tokens)))
        .where(Move.run_id == run.id)
        .group_by(*kind)
        .order_by(count.desc(), *kind)
    ).all()
    # PostgreSQL returns the mean of integers as a Decimal.
    return [
        MoveKind(
            cause, carrier, outcome, moves, seconds, downtime, predicted, None if tokens is None else float(tokens)
        )
        for cause, carrier, outcome, moves, seconds, downtime, predicted, tokens in rows
    ]


def _groups(session: Session, run: Run, window: Window) -> list[RankGroups]:
    return latest(session, run, "rank_groups", RankGroups, MOST_GROUPS, by=("step",)).bodies


def _moves(session: Session, run: Run, window: Window) -> list[MoveBucket]:
    shown = (Move.run_id == run.id, Move.step >= window.from_step, Move.step <= window.to_step)
    first, last = session.execute(select(func.min(Move.step), func.max(Move.step)).where(*shown)).one()
    if first is None:
        return []
    width = bucket_width(first, last, MOST_BARS)
    bucket = (Move.step - first) // width
    rows = session.execute(
        select(bucket, Move.cause, func.count()).where(*shown).group_by(bucket, Move.cause).order_by(bucket)
    ).all()
    return [
        MoveBucket(Span(first + at * width, first + (at + 1) * width - 1), cause, count) for at, cause, count in rows
    ]


def _switches(session: Session, run: Run, window: Window) -> list[Switch]:
    query = select(Switch).where(Switch.run_id == run.id).order_by(Switch.time.desc()).limit(MOST_SWITCHES)
    return list(reversed(session.scalars(query).all()))


def _reallocation(session: Session, run: Run, window: Window) -> Reallocation | None:
    """Return the newest step that has reallocations, with the engines' running samples before and after."""
    where = (Move.run_id == run.id, Move.cause == REALLOCATION)
    step = session.scalar(select(func.max(Move.step)).where(*where))
    if step is None:
        return None
    begin, end = session.execute(
        select(func.min(Move.time), func.max(Move.time)).where(*where, Move.step == step)
    ).one()
    table = EngineSampleRow
    rows = session.execute(
        select(table.engine, table.time, table.running)
        .where(table.run_id == run.id, table.step == step)
        .order_by(table.time)
        .limit(MOST_LOOKS)
    ).all()
    before = {engine: running for engine, at, running in rows if at <= begin}
    after = {engine: running for engine, at, running in reversed(rows) if at >= end}
    return Reallocation(step, before, after)


def _points(groups: Sequence[RankGroups]) -> Iterator[tuple[int, int, float, float]]:
    """Yield (step, group, predicted, real) of every group that is drawn."""
    for one in groups:
        for group, (predicted, real) in enumerate(zip(one.predicted[:MOST_SHOWN], one.real, strict=False)):
            yield one.step, group, predicted, real


def _left_out(groups: Sequence[RankGroups]) -> str:
    """Return a sentence for groups that are not drawn, "" if all are."""
    most = max(len(one.engines) for one in groups)
    return f"Only the first {MOST_SHOWN} of {most} groups are drawn." if most > MOST_SHOWN else ""


def _predicted_length(groups: Sequence[RankGroups]) -> Content | None:
    by_group: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
    for step, group, predicted, real in _points(groups):
        by_group[group].append((predicted, real, f"step {step}"))
    if not by_group:
        return None
    points = [point for of in by_group.values() for point in of]
    errors = [abs(predicted - real) / real for predicted, real, _ in points if real > 0]
    facts = [f"Predictions are off by {text.percent(fmean(errors))} on average."] if errors else []
    largest = max(max(predicted, real) for predicted, real, _ in points)
    hover = "%{text}: predicted %{x:,.0f}, real %{y:,.0f} tokens"
    dots = [
        Dots(f"Group {group + 1}", [x for x, _, _ in of], [y for _, y, _ in of], [words for *_, words in of], hover)
        for group, of in sorted(by_group.items())
    ]
    equal = Guide("Equal", [0, largest], [0, largest])
    return Content([*dots, equal], " ".join([*facts, _left_out(groups)]).rstrip())


def _prediction_error(groups: Sequence[RankGroups]) -> Content:
    by_step: dict[int, list[float]] = defaultdict(list)
    for step, _, predicted, real in _points(groups):
        if real > 0:
            by_step[step].append(abs(predicted - real) / real)
    return Content([Line("Error", list(by_step), [fmean(errors) for errors in by_step.values()], value="%{y:.1%}")])


def _group_engines(groups: Sequence[RankGroups]) -> Content | None:
    if not groups:
        return None
    bars = []
    for group in range(min(MOST_SHOWN, max(len(one.engines) for one in groups))):
        shown = [one for one in groups if group < len(one.engines)]
        words = [
            f"step {one.step}, group {group + 1}: {text.counted(one.engines[group], 'engine')}"
            + (f", {text.counted(one.prompts[group], 'prompt')}" if group < len(one.prompts) else "")
            for one in shown
        ]
        engines = [one.engines[group] for one in shown]
        bars.append(Bars(f"Group {group + 1}", [one.step for one in shown], engines, words, patterned=False))
    return Content(bars, _left_out(groups))


def _moves_by_cause(buckets: Sequence[MoveBucket]) -> Content:
    total: dict[str, int] = defaultdict(int)
    for one in buckets:
        total[one.cause] += one.count
    bars = []
    for cause in [*CAUSE_WORDS, *sorted(set(total) - set(CAUSE_WORDS))]:
        shown = [one for one in buckets if one.cause == cause]
        name = CAUSE_WORDS.get(cause, cause)
        words = [f"{text.span(*one.steps)}: {name} {one.count}" for one in shown]
        x, y = [one.steps for one in shown], [one.count for one in shown]
        bars.append(Bars(name[:1].upper() + name[1:], x, y, words))
    facts = ", ".join(f"{CAUSE_WORDS.get(cause, cause)} {text.number(count)}" for cause, count in total.items())
    return Content(bars, f"{facts}.")


def _switch_seconds(rows: Sequence[Switch]) -> Content | None:
    by_kind: dict[tuple[int, int], list[Switch]] = defaultdict(list)
    for row in rows:
        if row.seconds is not None:
            by_kind[row.from_tp, row.to_tp].append(row)
    if not by_kind:
        return None
    dots = []
    for (before, after), shown in sorted(by_kind.items()):
        words = [f"{row.node}, step {row.step}: {text.counted(row.samples, 'sample')}" for row in shown]
        x, y = [row.step for row in shown], [row.seconds for row in shown]
        dots.append(Dots(f"TP {before} to {after}", x, y, words, "%{text}, %{y:.2f} s<extra></extra>"))
    seconds = [row.seconds or 0.0 for shown in by_kind.values() for row in shown]
    return Content(dots, f"There were {text.number(len(seconds))}, {text.duration(fmean(seconds))} each on average.")


def _before_and_after(row: Reallocation | None) -> Content | None:
    if row is None or not row.before or not row.after:
        return None
    parts = {"Before": row.before, "After": row.after}
    bars = [
        Bars(name, [f"Engine {engine}" for engine in sorted(of)], [of[engine] for engine in sorted(of)])
        for name, of in parts.items()
    ]
    before, after = (max(of.values()) - min(of.values()) for of in parts.values())
    facts = f"Step {row.step}: the fullest engine had {before} more than the emptiest before, {after} after."
    return Content(bars, facts, x=f"Step {row.step}")


FIGURES: tuple[RunFigure, ...] = (
    RunChart(
        "predicted_length", "Predicted and real length", _groups,
        content=_predicted_length, x="Predicted (tokens)", counted="amount", y="Real (tokens)", empty=NO_GROUPS,
        description="Mean response length of each rank group, predicted against real; on the dotted line they are "
        "equal.",
    ),
    RunChart(
        "prediction_error", "Error of predicted lengths", _groups,
        content=_prediction_error, y="Error of predicted length", share=True, empty=NO_GROUPS,
        description="Mean error of the groups' predicted lengths, as a share of the real lengths.",
    ),
    RunChart(
        "rank_groups", "Engines of each rank group", _groups,
        content=_group_engines, y="Engines", gap=0.0, empty=NO_GROUPS,
        description="Engines of each group of prompts with similar lengths, by step; group 1 has the shortest "
        "responses.",
    ),
    RunChart(
        "moves", "Moves by cause", _moves,
        content=_moves_by_cause, y="Moved samples", empty=NO_MOVES,
        description="Samples that moved from one engine to another, by cause.",
    ),
    RunChart(
        "switches", "Layout switches", _switches,
        content=_switch_seconds, y="Seconds", legend=True, empty=NO_SWITCHES,
        description="Changes of a machine's tensor-parallel size: when, and how long each one took.",
    ),
    RunChart(
        "reallocation", "Reallocation, before and after", _reallocation,
        content=_before_and_after, counted="other", y="Running samples", beside=True, empty=NO_REALLOCATION,
        description="Samples running on each engine before and after reallocation.",
    ),
)  # fmt: skip
