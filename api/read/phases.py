"""The phases of a run now, from its newest events and those of earlier runs of the same set-up. Only reads.

The same set-up is the same model, number of engines and machine. `telemetry/phase.py` computes; this module chooses the
events to read, so that the cost does not grow with a run's length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from sqlalchemy import JSON, ColumnElement, select, type_coerce
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store.models import Attempt, Run, RunParameter
from rhyme_openrlhf.api.store.record import RawEvent, of_kinds
from rhyme_openrlhf.api.store.status import RunStatus
from rhyme_openrlhf.settings.recorded import object_at
from rhyme_openrlhf.telemetry.event_json import EventError, parse
from rhyme_openrlhf.telemetry.events import (
    Measuring,
    ProcessReady,
    Recorded,
    RolloutFinished,
    RolloutProgress,
    RunStarted,
    TrainStep,
)
from rhyme_openrlhf.telemetry.phase import FREQUENT_EVENTS, RARE_EVENTS, Phase, phases

SHOWN: tuple[RunStatus, ...] = ("starting", "running", "stopping")
MODEL = "actor.model_name_or_path"
# Enough for a median that one odd run does not decide.
EARLIER_RUNS = 3
# First events of an earlier run, which cover its start, and its last steps, which report their own seconds.
HEAD, STEPS = 500, 10
# Newest events searched for the stage under way: 64 engines that sample every second write as many in 15 s.
WINDOW = 1000
# Engines that got ready, or measured points; a run of a thousand engines has a little more than a thousand.
MOST_START_EVENTS = 2000
_FREQUENT = tuple(one.kind for one in FREQUENT_EVENTS)
_OF_START = (ProcessReady.kind, Measuring.kind)


def phases_of(session: Session, run: Run, usual: bool = True) -> list[Phase]:
    """Return the phases of a run; none of a run that has not started or has ended. `usual`: with usual seconds."""
    if run.status not in SHOWN:
        return []
    newest = select(Attempt).where(Attempt.run_id == run.id).order_by(Attempt.number.desc()).limit(1)
    attempt = session.scalar(newest)
    if attempt is None:
        return []
    events = _newest(session, attempt)
    return phases(events, _earlier(session, run) if events and usual else (), attempt.started_at or attempt.queued_at)


def _newest(session: Session, attempt: Attempt) -> list[Recorded]:
    """Return the events of an attempt that say what it does now, in the order of their arrival."""
    of_attempt = [RawEvent.run_id == attempt.run_id, RawEvent.attempt_id == attempt.id]
    started = _last(session, of_attempt, RunStarted.kind, 1)
    # Without a bound, the database would search all steps of earlier attempts.
    since = [*of_attempt, RawEvent.id >= started[0].id] if started else of_attempt
    found = list(started)
    for kind in (one.kind for one in RARE_EVENTS if one is not RunStarted):
        found += _last(session, since, kind, MOST_START_EVENTS if kind in _OF_START else 1)
    window = select(RawEvent.id).where(*since).order_by(RawEvent.id.desc()).limit(WINDOW).subquery()
    query = select(RawEvent).where(RawEvent.id.in_(select(window.c.id)), RawEvent.kind.in_(_FREQUENT))
    frequent = session.scalars(query.order_by(RawEvent.id)).all()
    newest = max((row.id for row in frequent if row.kind == RolloutProgress.kind), default=None)
    found += [row for row in frequent if row.kind != RolloutProgress.kind or row.id == newest]
    return _parsed(found)


def _earlier(session: Session, run: Run) -> list[list[Recorded]]:
    """Return events of the newest earlier runs of the same set-up."""
    model = select(RunParameter.text).where(RunParameter.run_id == run.id, RunParameter.name == MODEL)
    host = object_at(run.config, "machine").get("host")
    if run.engines is None or not isinstance(host, str):
        return []
    alike = (
        select(Run.id)
        .join(RunParameter, RunParameter.run_id == Run.id)
        .where(
            Run.created_at < run.created_at,
            Run.engines == run.engines,
            RunParameter.name == MODEL,
            RunParameter.text == model.scalar_subquery(),
            type_coerce(Run.config, JSON)["machine"]["host"].as_string() == host,
        )
        .order_by(Run.created_at.desc())
        .limit(EARLIER_RUNS)
    )
    return [_seconds_of(session, run_id) for run_id in session.scalars(alike)]


def _seconds_of(session: Session, run_id: int) -> list[Recorded]:
    """Return the events of a run that tell how long its phases took."""
    head = select(RawEvent.id).where(RawEvent.run_id == run_id).order_by(RawEvent.id).limit(HEAD).subquery()
    kinds = [one.kind for one in (*RARE_EVENTS, *FREQUENT_EVENTS) if one is not RolloutProgress]
    found = list(session.scalars(select(RawEvent).where(RawEvent.id.in_(select(head.c.id)), RawEvent.kind.in_(kinds))))
    for kind in (RolloutFinished.kind, TrainStep.kind):
        found += _last(session, [RawEvent.run_id == run_id], kind, STEPS)
    return _parsed(found)


def _last(session: Session, conditions: Sequence[ColumnElement[bool]], kind: str, count: int) -> list[RawEvent]:
    """Return the newest events of a rare kind."""
    query = select(RawEvent).where(*conditions, *of_kinds([kind])).order_by(RawEvent.id.desc()).limit(count)
    return list(session.scalars(query))


def _parsed(rows: Sequence[RawEvent]) -> list[Recorded]:
    """Return each event once, in the order of arrival; without those that an earlier version has stored otherwise."""
    unique: dict[int, RawEvent] = {row.id: row for row in rows}
    found = (_parse(unique[number]) for number in sorted(unique))
    return [recorded for recorded in found if recorded is not None]


def _parse(row: RawEvent) -> Recorded | None:
    envelope = {"kind": row.kind, "time": row.time, "source": row.source, "sequence": row.sequence}
    try:
        return parse({**json.loads(row.body), **envelope})
    except EventError:
        return None
