"""A recorded run played into the store: through the real ingestion, never ahead of the clock, to its end or a stop."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from sqlalchemy import func, select

from rhyme_openrlhf.api.access.service import Service
from rhyme_openrlhf.api.demo.recording import read_rows
from rhyme_openrlhf.api.demo.replay import FIRST_STEPS, SPEED, STOPPED, Replay
from rhyme_openrlhf.api.demo.synthetic_run import SyntheticRun, write_run_directory
from rhyme_openrlhf.api.http.limits import Limits
from rhyme_openrlhf.api.http.service_metrics import ServiceMetrics
from rhyme_openrlhf.api.settings import ServeSettings
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.models import Attempt, Run, RunTag
from rhyme_openrlhf.api.store.record import RawEvent, Step
from tests.stores import prepare

STEPS = 10


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    run = tmp_path / "recorded"
    write_run_directory(run, SyntheticRun(steps=STEPS, engines=2))
    config = '{"settings": {"run": {}, "control": {}}, "command": ["rhyme", "demo"]}'
    (run / "config.json").write_text(config)
    (run / "logs").mkdir()
    (run / "logs" / "driver.log").write_text("".join(f"line {number}\n" for number in range(100)))
    (run / "samples").mkdir()
    for step in range(1, STEPS + 1):
        (run / "samples" / f"step-{step:06d}.jsonl").write_text("{}\n")
    return run


@pytest.fixture
def service(tmp_path: Path) -> Service:
    settings = ServeSettings(data_dir=str(tmp_path / "data"), roots=str(tmp_path))
    prepare(settings)
    database = Database(settings.database_url())
    return Service(settings, database, Limits.of(settings), ServiceMetrics())


def stored(service: Service) -> tuple[Run, int, float]:
    with service.database.reading() as session:
        run = session.scalars(select(Run)).one()
        steps = session.scalar(select(func.count()).select_from(Step).where(Step.finished_at.is_not(None)))
        last = session.scalar(select(func.max(RawEvent.time)))
        return run, steps or 0, last or 0.0


def test_it_begins_with_some_steps_and_moves_to_its_end(service: Service, recorded: Path, tmp_path: Path) -> None:
    clock = Clock()
    replay = Replay(service, recorded, tmp_path / "played", "played", clock)
    replay.announce()
    rows = read_rows(recorded)
    rest = (rows[-1]["time"] - next(r["time"] for r in rows if r["kind"] == "train_step" and r["step"] == 4)) / SPEED
    replay.tick()
    run, steps, last = stored(service)
    assert (run.status, steps, run.origin) == ("running", FIRST_STEPS, "reported") and last <= clock.now
    assert len(list((tmp_path / "played" / "samples").iterdir())) == FIRST_STEPS
    seen = [steps]
    for _ in range(20):
        clock.now += rest / 20
        replay.tick()
        run, steps, last = stored(service)
        assert last <= clock.now + 1e-3
        seen.append(steps)
    assert seen == sorted(seen) and len(set(seen)) > 4
    clock.now += 1
    replay.tick()
    run, steps, last = stored(service)
    assert (run.status, steps) == ("succeeded", STEPS) and last == pytest.approx(clock.now - 1, abs=0.01)
    with service.database.reading() as session:
        assert session.scalar(select(func.count()).select_from(RawEvent)) == len(rows)
    assert run.dropped_events == 0
    played = tmp_path / "played"
    assert (played / "logs" / "driver.log").read_text() == (recorded / "logs" / "driver.log").read_text()
    assert len(list((played / "samples").iterdir())) == STEPS


def test_a_log_grows_by_whole_lines(service: Service, recorded: Path, tmp_path: Path) -> None:
    clock = Clock()
    replay = Replay(service, recorded, tmp_path / "played", "played", clock)
    replay.announce()
    replay.tick()
    clock.now += 40
    replay.tick()
    text = (tmp_path / "played" / "logs" / "driver.log").read_text()
    assert text.endswith("\n") and 10 < text.count("\n") < 100
    assert (recorded / "logs" / "driver.log").read_text().startswith(text)


def test_a_request_to_stop_ends_it(service: Service, recorded: Path, tmp_path: Path) -> None:
    clock = Clock()
    replay = Replay(service, recorded, tmp_path / "played", "played", clock)
    replay.announce()
    replay.tick()
    with service.database.writing() as session:
        session.scalars(select(Attempt)).one().stop_requested_at = clock.now
    clock.now += 1
    replay.tick()
    run, steps, _ = stored(service)
    assert (run.status, run.message) == ("stopped", STOPPED) and steps < STEPS
    clock.now += 1000
    replay.play(threading.Event())
    assert stored(service)[1] == steps


def test_after_its_end_it_is_played_again_under_its_address(service: Service, recorded: Path, tmp_path: Path) -> None:
    clock = Clock()
    replay = Replay(service, recorded, tmp_path / "played", "played", clock)
    replay.announce()
    with service.database.writing() as session:
        run = session.scalars(select(Run)).one()
        run.name, run.notes, run.tags = "shown", "a note", [RunTag(tag="recording")]
        uid = run.uid
    clock.now += 10_000
    replay.tick()
    assert stored(service)[0].status == "succeeded"
    replay.again()
    run, steps, last = stored(service)
    assert (run.uid, run.status, steps) == (uid, "running", FIRST_STEPS) and last <= clock.now
    assert len(list((tmp_path / "played" / "samples").iterdir())) == FIRST_STEPS
    with service.database.reading() as session:
        run = session.scalars(select(Run)).one()
        assert (run.name, run.notes, [one.tag for one in run.tags]) == ("shown", "a note", ["recording"])
    clock.now += 10_000
    replay.tick()
    assert stored(service)[1] == STEPS
