"""Curves read from blocks are those of the rows, to the bit, however the rows came."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import MetaData, func, insert, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.ingest.announce import Announcement, announce
from rhyme_openrlhf.api.ingest.store_batch import forget_events, ingest
from rhyme_openrlhf.api.ingest.validation import prepare
from rhyme_openrlhf.api.read.curves import Axis, Curve, curve_names, curves
from rhyme_openrlhf.api.read.downsampling import downsample
from rhyme_openrlhf.api.store import curve_blocks
from rhyme_openrlhf.api.store.curve_blocks import (
    BLOCK_STEPS,
    PACKED_AT_ONCE,
    SETTLED_STEPS,
    metric_names,
    settle_all,
    unpack,
)
from rhyme_openrlhf.api.store.database import Database, upgrade
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import CurveBlock, Metric, Step
from rhyme_openrlhf.api.store.step_figures import STEP_CURVES
from rhyme_openrlhf.telemetry.event_json import to_json
from rhyme_openrlhf.telemetry.events import (
    Evaluation,
    Event,
    RolloutFinished,
    RolloutStarted,
    TrainStep,
)
from tests.examples import examples

NOW = 1_800_000_000.0
STEPS = 60
NAMES = ("reward", "rollout_seconds", "samples", "tokens_per_second", "loss", "eval/pass1", "never", "finished_at")
_uids = (f"{number:016x}" for number in itertools.count(1))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks small, so that few steps make many of them."""
    for name, value in (("BLOCK_STEPS", 12), ("PACKED_AT_ONCE", 4), ("SETTLED_STEPS", 3), ("PIECE_STEPS", 10)):
        monkeypatch.setattr(curve_blocks, name, value)


def unrolled(session: Session, run: Run, name: str, first: int, last: int, points: int, axis: Axis) -> Curve:
    """The curve from the rows alone."""
    ends = dict(session.execute(select(Step.step, Step.finished_at).where(Step.run_id == run.id)).all())
    begin = session.scalar(select(func.min(Step.started_at)).where(Step.run_id == run.id))
    of: Any = Step if name in STEP_CURVES else Metric
    query = select(of.step, STEP_CURVES.get(name, Metric.value)).where(
        of.run_id == run.id, of.step.between(first, last)
    )
    if of is Metric:
        query = query.where(Metric.name == name)
    rows = session.execute(query.order_by(of.step)).all()
    if axis == "time":
        timed = [(ends.get(step), value) for step, value in rows]
        rows = [(end - begin, value) for end, value in timed if end is not None and begin is not None]  # type: ignore[misc]
    return Curve(name, *downsample([x for x, _ in rows], [y for _, y in rows], points), count=len(rows))


def same(session: Session, run: Run, first: int, last: int, points: int, axis: Axis) -> None:
    found = curves(session, run.uid, NAMES, first, last, points, axis)
    assert found == [unrolled(session, run, name, first, last, points, axis) for name in NAMES]


def events_of(step: int, rng: random.Random) -> list[Event]:
    """Of one step; not every step has all of them."""
    metrics = {"reward": rng.random(), "loss": rng.choice([rng.random(), math.nan])}
    metrics = {name: value for name, value in metrics.items() if rng.random() < 0.8}
    train = TrainStep(step, 1, {"rollout": 1.0, "train": rng.random()}, metrics)
    rollout = RolloutFinished(step, 1, rng.choice([1.5, math.inf]), 8, rng.randrange(999), None, 1.0, 1.0, 1.0, 1, 0)
    possible: list[Event] = [RolloutStarted(step, 1, 1, 8), rollout, train, Evaluation(step, {"pass1": rng.random()})]
    return [event for event in possible if rng.random() < 0.85]


def new_attempt(database: Database, run_uid: str) -> str:
    uid = next(_uids)
    with database.writing() as session:
        announce(session, Announcement(uid, run_uid, "made up", "/runs/x", {}), NOW)
    return uid


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_blocks_say_what_the_rows_say(database: Database, small_blocks: None, data: st.DataObject) -> None:
    rng = data.draw(st.randoms(use_true_random=True))
    run_uid = next(_uids)
    attempts: list[str] = []
    sequences: dict[str, int] = {}
    for _ in range(data.draw(st.integers(1, 3), "attempts")):
        attempts.append(new_attempt(database, run_uid))
        first = rng.randrange(STEPS // 2)
        # In order but for some; some come after the attempt that follows has begun.
        pending = sorted(range(first, STEPS - rng.randrange(9)), key=lambda step: step + rng.expovariate(0.2))
        pending += [rng.randrange(STEPS) for _ in range(3)]
        while pending:
            count = rng.randrange(1, 30)
            uid = rng.choice(attempts)
            events = [event for step in pending[:count] for event in events_of(step, rng)]
            del pending[:count]
            begin = sequences.get(uid, 0)
            sequences[uid] = begin + len(events)
            rows = [to_json(event, NOW + rng.random(), "trainer", begin + i) for i, event in enumerate(events)]
            with database.writing() as session:
                ingest(session, uid, prepare(rows), NOW)
        with database.reading() as session:
            run = session.execute(select(Run).where(Run.uid == run_uid)).scalar_one()
            low, high = sorted((rng.randrange(-1, STEPS) + 1, rng.randrange(2 * STEPS)))
            same(session, run, low, high, rng.choice([4, 12, 500]), rng.choice(["step", "time"]))
            same(session, run, 0, 2**31 - 1, 20, "step")
    with database.writing() as session:
        run = session.execute(select(Run).where(Run.uid == run_uid)).scalar_one()
        # All of it made anew, from the rows: nothing is left of how it came.
        kept = run.packed_steps, blocks(session, run)
        unpack(session.connection(), run, 0)
        settle_all(session)
        assert (run.packed_steps, blocks(session, run)) == kept
        forget_events(session, run, run.attempts[0])
        same(session, run, 0, 2**31 - 1, 20, "step")


def blocks(session: Session, run: Run) -> list[Any]:
    """Return the blocks of a run."""
    of = CurveBlock
    query = select(of.name, of.block, of.offsets, of.values).where(of.run_id == run.id)
    return list(session.execute(query.order_by(of.name, of.block)).all())


def test_a_long_run_is_read_from_blocks(database: Database) -> None:
    rng = random.Random(1)
    run_uid = next(_uids)
    attempt = new_attempt(database, run_uid)
    packed = BLOCK_STEPS + 3 * PACKED_AT_ONCE
    newest = SETTLED_STEPS + packed + 5
    events = [event for step in range(1, newest) for event in events_of(step, rng)] + [RolloutStarted(newest, 1, 1, 8)]
    rows = [to_json(event, NOW + i, "trainer", i) for i, event in enumerate(events)]
    with database.writing() as session:
        ingest(session, attempt, prepare(rows), NOW)
    with database.writing() as session:
        run = session.execute(select(Run).where(Run.uid == run_uid)).scalar_one()
        assert run.packed_steps == packed
        whole = curves(session, run.uid, NAMES, 0, newest, 5000)
        # Not from the rows: without these, it is the same.
        for table in (Step, Metric):
            behind = table.step < run.packed_steps  # type: ignore[attr-defined]
            session.execute(table.__table__.delete().where(behind))  # type: ignore[attr-defined]
        assert curves(session, run.uid, NAMES, 0, newest, 5000) == whole
        session.rollback()


def test_names_of_metrics_are_found_by_the_index(database: Database) -> None:
    with database.writing() as session:
        run, other = next(_uids), next(_uids)
        for uid in (run, other):
            announce(session, Announcement(next(_uids), uid, "made up", "/runs/x", {}), NOW)
        ids = [session.execute(select(Run.id).where(Run.uid == uid)).scalar_one() for uid in (run, other)]
        named = [("b", ids[0]), ("a", ids[0]), ("Z", ids[0]), ("c", ids[1])]
        rows = [{"run_id": i, "name": n, "step": s, "attempt_id": 1, "value": 0.0} for n, i in named for s in (1, 2)]
        session.execute(insert(Metric), rows)
        assert metric_names(session.connection(), ids[0]) == ["Z", "a", "b"]
        assert metric_names(session.connection(), ids[1] + 1) == []
        one = session.execute(select(Run).where(Run.uid == run)).scalar_one()
        assert curve_names(session, one)["metrics"] == ["Z", "a", "b"]


def test_an_upgrade_makes_the_blocks_of_runs_that_are_there(empty_url: str) -> None:
    store = Database(empty_url)
    packed = BLOCK_STEPS + 5 * PACKED_AT_ONCE
    newest = SETTLED_STEPS + packed
    with store._writing_engine.begin() as connection:
        upgrade(connection, "0003")
        tables = MetaData()
        tables.reflect(connection)
        run = {"uid": "0" * 16, "origin": "reported", "name": "old", "notes": "", "status": "running", "message": "",
               "command": [], "config": {}, "versions": {}, "created_by": "", "created_at": NOW, "step": 1, "epoch": 1,
               "dropped_events": 0}  # fmt: skip
        zeros = {c.name: 0 for c in tables.tables["steps"].columns if not c.nullable}
        rng = random.Random(2)
        steps = [
            {**zeros, "run_id": 1, "step": step, "started_at": NOW + step, "finished_at": NOW + step + rng.random(),
             "reward": rng.random(), "rollout_seconds": rng.choice([None, 2.0]), "response_tokens": 100, "samples": 8}
            for step in range(1, newest + 1)
        ]  # fmt: skip
        metrics = [
            {"run_id": 1, "name": name, "step": step, "attempt_id": 1, "value": rng.choice([None, rng.random()])}
            for name, every in (("loss", 1), ("eval/pass1", 10))
            for step in range(0, newest, every)
        ]
        for name, rows in (("runs", [run]), ("steps", steps), ("metrics", metrics)):
            connection.execute(insert(tables.tables[name]), rows)
    store.upgrade()
    store.upgrade()
    with store.reading() as session:
        one = session.execute(select(Run)).scalar_one()
        assert one.packed_steps == packed
        kinds = len(STEP_CURVES) + 2
        assert session.scalar(select(func.count()).select_from(CurveBlock)) == 2 * kinds
        same(session, one, 0, newest, 50, "step")
        same(session, one, 70, newest - 70, 5000, "time")
    store.dispose()


def test_blocks_that_are_stored_have_these_definitions() -> None:
    """Who changes them lets a migration throw the blocks away, so that the upgrade makes new ones.

    DELETE FROM curve_blocks; UPDATE runs SET packed_steps = 0
    """
    meant = [str(BLOCK_STEPS), *(f"{name} = {made}" for name, made in sorted(STEP_CURVES.items()))]
    assert hashlib.sha256("\n".join(meant).encode()).hexdigest()[:16] == "c1eb9327db134884"
