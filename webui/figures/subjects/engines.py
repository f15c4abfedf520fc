"""Figures of samples taken once a second of each engine: running requests, speed, and acceptance rate of drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from pydantic import Field, field_validator
from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import EngineSampleRow
from rhyme_openrlhf.webui.figures.drawing.chart import Content
from rhyme_openrlhf.webui.figures.drawing.series import Band, Line
from rhyme_openrlhf.webui.figures.run_figure import RunChart, RunFigure, StepsShown, shown_steps
from rhyme_openrlhf.webui.figures.subjects.timeline import RANGES, RANGES_LENGTH, checked_ranges, engine_numbers
from rhyme_openrlhf.webui.site import text

NOTHING = (
    "No engine has reported samples in these steps. Engines report once a second while they generate; records of "
    "older versions have no such reports."
)
# Five minutes of 64 engines that report once a second.
MOST_LOOKS = 20_000
# Most lines that can be told apart; more engines are drawn as a mean between the smallest and the largest value.
MOST_LINES = 8
BINS = 120
# No line is drawn over a gap longer than this: samples come once a second, and steps lie further apart.
GAP_SECONDS = 2.5


class LooksShown(StepsShown):
    """The options of per-engine figures. `engines`: a list as "0, 3, 8-15"; empty for all engines."""

    engines: str = Field(default="", max_length=RANGES_LENGTH, pattern=RANGES)

    _check = field_validator("engines")(checked_ranges)


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


def _looks(session: Session, run: Run, options: LooksShown) -> Looks:
    first, last = shown_steps(session, run, options)
    table = EngineSampleRow
    query = select(
        table.engine, table.time, table.running, table.tokens_per_second, table.drafted, table.accepted
    ).where(table.run_id == run.id, table.step >= first, table.step <= last)
    if options.engines:
        query = query.where(table.engine.in_(engine_numbers(options.engines)))
    rows = session.execute(query.order_by(table.time.desc(), table.id.desc()).limit(MOST_LOOKS + 1)).all()
    looks = [Look(*row) for row in reversed(rows[:MOST_LOOKS])]
    return Looks(first, last, looks, len(rows) > MOST_LOOKS)


def _figure(
    name: str, title: str, words: str, y: str, value: Callable[[Look], float | None], share: bool = False
) -> RunChart:
    """Return the figure of a value of each engine, described as "words, steps 1 to 3."."""

    def content(rows: Looks) -> Content | None:
        known = [(one.engine, one.time, found) for one in rows.looks if (found := value(one)) is not None]
        if not known:
            return None
        begin = min(at for _, at, _ in known)
        by_engine: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for engine, at, found in known:
            by_engine[engine].append((at - begin, found))
        if len(by_engine) <= MOST_LINES:
            lines = [_line(f"Engine {engine}", points) for engine, points in sorted(by_engine.items())]
        else:
            lines = [_mean(by_engine)]
        facts = "Only the latest samples are shown." if rows.truncated else ""
        return Content(lines, facts, x=f"Seconds since {text.moment(begin)}")

    return RunChart(
        name, title, _looks,
        content=content, counted="other", y=y, share=share, legend=True, empty=NOTHING,
        description=lambda rows: f"{words}, {text.span(rows.first, rows.last)}.",
        options=LooksShown,
    )  # fmt: skip


def _line(name: str, points: Sequence[tuple[float, float]]) -> Line:
    x: list[float | None] = []
    y: list[float | None] = []
    for at, found in points:
        if x and x[-1] is not None and at - x[-1] > GAP_SECONDS:
            x.append(None)
            y.append(None)
        x.append(round(at, 2))
        y.append(found)
    return Line(name, x, y)


def _mean(by_engine: dict[int, list[tuple[float, float]]]) -> Line:
    """Return the mean over the engines in each time bin, with a band from the smallest to the largest value."""
    width = max(1.0, max(at for points in by_engine.values() for at, _ in points) / BINS)
    bins: dict[int, list[float]] = defaultdict(list)
    for points in by_engine.values():
        for at, found in points:
            bins[int(at / width)].append(found)
    x = [round((index + 0.5) * width, 2) for index in sorted(bins)]
    values = [bins[index] for index in sorted(bins)]
    band = Band(x, [min(of) for of in values], [max(of) for of in values], ("Smallest", "Largest"), hovers=True)
    name = f"Mean of {len(by_engine)} engines, between smallest and largest"
    return Line(name, x, [fmean(of) for of in values], band=band)


FIGURES: tuple[RunFigure, ...] = (
    _figure(
        "running", "Running samples by engine", "Samples running on each engine", "Running samples",
        lambda one: one.running,
    ),
    _figure(
        "engine_speed", "Tokens per second by engine", "Tokens a second of each engine", "Tokens/s",
        lambda one: one.tokens_per_second,
    ),
    _figure(
        "engine_acceptance", "Acceptance by engine", "Share of each engine's drafted tokens that were accepted",
        "Accepted", lambda one: one.accepted / one.drafted if one.drafted else None, share=True,
    ),
)  # fmt: skip
