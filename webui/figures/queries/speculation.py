"""Queries of the figures of speculation and of the draft history."""

from __future__ import annotations

from pydantic import Field, field_validator
from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.latest_events import latest
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import EngineSampleRow
from rhyme_openrlhf.telemetry.events import DraftBudget, DraftGain, HistoryState
from rhyme_openrlhf.webui.figures.drawing import engines, history
from rhyme_openrlhf.webui.figures.drawing import speculation as drawing
from rhyme_openrlhf.webui.figures.drawing.engines import Look, Looks
from rhyme_openrlhf.webui.figures.queries.timeline import RANGES, RANGES_LENGTH, checked_ranges, engine_numbers
from rhyme_openrlhf.webui.figures.run_figure import RunFigure, StepsShown, Window, curves_of, shown_steps

# Five minutes of 64 engines that report once a second.
MOST_LOOKS = 20_000
# Events of 64 engines over 30 steps, parsed in about 20 ms.
MOST_BUDGETS = 2000
# One event per worker and step: the last 500 steps of 4 workers, parsed in about 5 ms.
MOST_STATES = 2000


class LooksShown(StepsShown):
    """The options of per-engine figures. `engines`: a list as "0, 3, 8-15"; empty for all engines."""

    engines: str = Field(default="", max_length=RANGES_LENGTH, pattern=RANGES)

    _check = field_validator("engines")(checked_ranges)


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


def _budgets(session: Session, run: Run, window: Window) -> list[DraftBudget]:
    return latest(session, run, "draft_budget", DraftBudget, MOST_BUDGETS, by=("step", "engine")).bodies


def _gains(session: Session, run: Run, window: Window) -> list[DraftGain]:
    return latest(session, run, "draft_gain", DraftGain, MOST_BUDGETS, by=("step", "engine")).bodies


def _states(session: Session, run: Run, window: Window) -> list[HistoryState]:
    found = latest(session, run, "history_state", HistoryState, MOST_STATES, by=("step", "worker")).bodies
    return sorted(found, key=lambda one: (one.step, one.worker))


FIGURES: tuple[RunFigure, ...] = (
    RunFigure(
        "speculation", "Speculation and acceptance", curves_of("speculation_rate", "acceptance_rate"), drawing.rates
    ),
    RunFigure(
        "tokens_per_step", "Tokens per sample and decode step", curves_of("tokens_per_step"), drawing.tokens_per_step
    ),
    RunFigure(
        "draft_sources", "Sources of accepted drafts", curves_of(*drawing.SOURCES, drawing.EARLIER), drawing.sources
    ),
    RunFigure("draft_length", "Tokens per draft", curves_of("drafted_per_draft"), drawing.draft_length),
    RunFigure("draft_cost", "Share of busy time spent drafting", curves_of("drafting_share"), drawing.cost),
    RunFigure("decode_step", "Time of a decode step", curves_of("decode_step_ms"), drawing.step_time),
    RunFigure("running", "Running samples by engine", _looks, engines.running, LooksShown),
    RunFigure("engine_speed", "Tokens per second by engine", _looks, engines.speed, LooksShown),
    RunFigure("engine_acceptance", "Acceptance by engine", _looks, engines.acceptance, LooksShown),
    RunFigure("draft_budget", "Draft budget over steps", _budgets, drawing.budget),
    RunFigure("chosen_length", "Draft length against running samples", _budgets, drawing.chosen_length),
    RunFigure("draft_gain", "Gain of drafts, measured in this run", _gains, drawing.gain),
    RunFigure("accepted_tokens", "Expected and accepted draft tokens", _budgets, drawing.accepted),
    RunFigure("predicted_step", "Predicted and real step time", _budgets, drawing.predicted_time),
    RunFigure("history_answers", "Results of draft lookups", _states, history.answers),
    RunFigure("history_prompts", "Prompts with a history", _states, history.prompts),
    RunFigure("history_memory", "Memory and disk space of the history", _states, history.memory),
)
