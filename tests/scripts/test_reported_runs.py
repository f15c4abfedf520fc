"""The count of lost and doubled events can fail: what is planted in a store is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from fastapi.testclient import TestClient
from sqlalchemy import delete, select, update

from rhyme_openrlhf.api.app import create_app
from rhyme_openrlhf.api.ingest.announce import Announcement, announce
from rhyme_openrlhf.api.ingest.importer import import_directory
from rhyme_openrlhf.api.store import credentials
from rhyme_openrlhf.api.store.models import Attempt
from rhyme_openrlhf.api.store.record import RawEvent, Step
from rhyme_openrlhf.telemetry.run_directory import CONFIG_FILE, EVENTS_FILE

ROOT = Path(__file__).parents[2]
UID = "c" * 16
NOW = 1_800_000_000.0


@pytest.fixture
def serve(script: Any, make_settings: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Services as the script asks them, inside this process."""
    with ExitStack() as stack:

        def start(name: str) -> Any:
            app = create_app(make_settings(data_dir=str(tmp_path / name)))
            stack.enter_context(TestClient(app))
            database = app.state.service.database
            with database.writing() as session:
                token = credentials.issue_token(session, "count", "operator", NOW).secret
            service = script.Service.__new__(script.Service)
            headers = {"Authorization": f"Bearer {token}"}
            service.client = TestClient(app, base_url="http://127.0.0.1/api/v1", headers=headers)
            service.database = database
            return service

        yield start


def test_what_is_lost_doubled_or_changed_is_counted(script: Any, serve: Callable[[str], Any], tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a"
    path.mkdir(parents=True)
    shutil.copy(script.RECORDED, path / EVENTS_FILE)
    control = {"run_uid": UID, "attempt_uid": "d" * 16}
    (path / CONFIG_FILE).write_text(json.dumps({"settings": {"control": control, "run": {"name": "a"}}}))
    run = script.ReportedRun.__new__(script.ReportedRun)
    run.path, run.uid = path, UID
    ours, imported = serve("ours"), serve("imported")
    import_directory(ours.database, path, NOW)
    whole = script.count(run, ours, imported)
    assert whole.whole and whole.written == len(script.RECORDED.read_text().splitlines())

    with ours.database.writing() as session:
        announce(session, Announcement("e" * 16, UID, "a", str(path), {}), NOW)
        attempts = session.scalars(select(Attempt.id).order_by(Attempt.number)).all()
        lost, doubled, changed = session.scalars(select(RawEvent).order_by(RawEvent.id).limit(3)).all()
        session.execute(delete(RawEvent).where(RawEvent.id == lost.id))
        # The store takes no event twice of one attempt: as if another had brought it too.
        copied = {name: getattr(doubled, name) for name in ("run_id", "source", "sequence", "time", "kind", "body")}
        session.add(RawEvent(**copied, attempt_id=attempts[1]))
        session.execute(update(RawEvent).where(RawEvent.id == changed.id).values(time=0.0))
        session.execute(update(Step).where(Step.step == 1).values(samples=0))
    counted = script.count(run, ours, imported)
    # A row that differs is one too many and one too few.
    assert (counted.missing, counted.doubled, counted.different, counted.derived) == (1, 1, 1, 2)
    assert counted.written == whole.written and not counted.whole
