"""Figures of the draft history: the size and place of the workers' indexes, and what engines find in them.

Each worker writes one event per step, and a figure sums over the workers. A worker that has not reported a step yet
counts with its last report, so that a line does not drop while events of a step are still arriving.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.latest_events import latest
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.telemetry.events import HistoryState
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.chart import Content
from rhyme_openrlhf.webui.figures.drawing.series import Bars, Line
from rhyme_openrlhf.webui.figures.run_figure import RunChart, RunFigure, Window
from rhyme_openrlhf.webui.site import text

NOT_RECORDED = (
    "Not recorded by this run: it has no history workers (--histospec.enable, --history.workers), or none has indexed "
    "a step yet."
)
# One event per worker and step: the last 500 steps of 4 workers, parsed in about 5 ms.
MOST_STATES = 2000
# Units based on 1024 bytes, the largest first.
UNITS: tuple[tuple[str, int], ...] = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))
# Results of an engine's lookup in stacking order: name, field, colour.
ANSWERS: tuple[tuple[str, str, str], ...] = (
    ("In memory", "hits", palette.GREEN),
    ("Had to be read or built", "late", palette.ORANGE),
    ("No history yet", "misses", palette.GREY),
)
# Fields of `HistoryState` by their names in a legend.
Parts = Mapping[str, str]


def _states(session: Session, run: Run, window: Window) -> list[HistoryState]:
    found = latest(session, run, "history_state", HistoryState, MOST_STATES, by=("step", "worker")).bodies
    return sorted(found, key=lambda one: (one.step, one.worker))


def _answers(states: Sequence[HistoryState]) -> Content | None:
    """Return the shares of the engines' lookups that found an index in memory, found it late, or found no history."""
    by_step: dict[int, list[int]] = defaultdict(lambda: [0] * len(ANSWERS))
    for one in states:
        for place, (_, field, _) in enumerate(ANSWERS):
            by_step[one.step][place] += getattr(one, field)
    asked = {step: counts for step, counts in by_step.items() if sum(counts)}
    if not asked:
        return None
    whole = sum(map(sum, asked.values()))
    bars, facts = [], []
    for place, (name, _, color) in enumerate(ANSWERS):
        words = [
            f"step {step}: {name.lower()} {text.number(counts[place])} of {text.number(sum(counts))}"
            for step, counts in asked.items()
        ]
        shares = [counts[place] / sum(counts) for counts in asked.values()]
        bars.append(Bars(name, list(asked), shares, words, color=color))
        facts.append(f"{name.lower()} {text.percent(sum(counts[place] for counts in asked.values()) / whole)}")
    return Content(bars, f"Over the steps shown: {', '.join(facts)}.")


def _totals(parts: Parts, unit: Callable[[float], tuple[str, int]]) -> Callable[[Sequence[HistoryState]], Content]:
    """Return what draws a line per part, in the unit that suits the largest value, as (name, size)."""

    def content(states: Sequence[HistoryState]) -> Content:
        known: dict[int, HistoryState] = {}
        by_step: dict[int, list[int]] = {}
        for one in states:
            known[one.worker] = one
            by_step[one.step] = [sum(getattr(state, field) for state in known.values()) for field in parts.values()]
        name, size = unit(max((max(values) for values in by_step.values()), default=0))
        lines = [
            Line(part, list(by_step), [values[place] / size for values in by_step.values()])
            for place, part in enumerate(parts)
        ]
        if not by_step:
            return Content(lines)
        last = ", ".join(f"{line.name.lower()} {text.number(line.y[-1])}" for line in lines)
        return Content(lines, f"At step {max(by_step)}: {last} ({name}).", y=name)

    return content


def _bytes(most: float) -> tuple[str, int]:
    return next(((unit, size) for unit, size in UNITS if most >= size), UNITS[-1])


FIGURES: tuple[RunFigure, ...] = (
    RunChart(
        "history_answers", "Results of draft lookups", _states,
        content=_answers, y="Share of lookups", share=True, top=1.0, empty=NOT_RECORDED,
        description="Results of the engines' lookups of a prompt's draft index, as shares of all lookups.",
    ),
    RunChart(
        "history_prompts", "Prompts with a history", _states,
        content=_totals(
            {"Known": "prompts", "Index in memory": "resident", "Index on disk only": "spilled"},
            lambda most: ("Prompts", 1),
        ),
        description="Prompts with a history, and where their draft indexes are; each round of a conversation "
        "counts as a prompt.",
        empty=NOT_RECORDED,
    ),
    RunChart(
        "history_memory", "Memory and disk space of the history", _states,
        content=_totals({"In memory": "memory_bytes", "On disk": "disk_bytes"}, _bytes),
        description="Memory for draft indexes and responses of all workers, and disk space for indexes that did "
        "not fit in memory.",
        empty=NOT_RECORDED,
    ),
)  # fmt: skip
