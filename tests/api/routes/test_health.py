"""Probes, metrics and the dashboard that reads them; and errors that say nothing of the inside."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from alembic.script import ScriptDirectory
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import event, text

from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.readiness import Writable

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana-dashboard.json"


def test_alive_and_ready(api: Any) -> None:
    assert api.nobody.get("/healthz").json() == {"status": "ok"}
    assert api.nobody.get("/readyz").json() == {"status": "ok"}


def test_another_schema_is_not_ready(api: Any) -> None:
    with api.service.database.writing() as session:
        session.execute(text("UPDATE alembic_version SET version_num = 'other'"))
    assert api.nobody.get("/readyz").status_code == 503
    assert api.nobody.get("/healthz").status_code == 200


def test_a_probe_reads_no_migrations(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert api.nobody.get("/readyz").status_code == 200
    monkeypatch.setattr(ScriptDirectory, "from_config", None)
    assert api.nobody.get("/readyz").status_code == 200


def test_a_disk_without_room_is_not_ready(make_api: Any, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", disk]).returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        api = make_api(data_dir=str(disk / "data"))
        assert api.nobody.get("/readyz").status_code == 200
        with (disk / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - 128 * 1024)
        api.service.writable = Writable(api.service.database)
        answer = api.nobody.get("/readyz")
        assert answer.status_code == 503 and "needs 32 MB: make room" in answer.json()["detail"]
        (disk / "ballast").unlink()
        # What was found holds for some seconds.
        assert api.nobody.get("/readyz").status_code == 503
        api.service.writable = Writable(api.service.database)
        assert api.nobody.get("/readyz").status_code == 200
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)
def test_a_store_that_takes_no_writes_is_not_ready(api: Any) -> None:
    engine = api.service.database.engine
    assert api.nobody.get("/readyz").status_code == 200

    @event.listens_for(engine, "checkout")
    def refuse(connection: Any, *rest: Any) -> None:
        cursor = connection.cursor()
        sqlite = api.service.database.is_sqlite
        cursor.execute("PRAGMA query_only = ON" if sqlite else "SET default_transaction_read_only = on")
        cursor.close()
        connection.commit()

    api.service.writable = Writable(api.service.database)
    answer = api.nobody.get("/readyz")
    assert answer.status_code == 503 and answer.json()["detail"].startswith("the database accepts no writes")
    assert api.nobody.get("/healthz").status_code == 200


def test_a_probe_seldom_writes(api: Any) -> None:
    written: list[str] = []

    @event.listens_for(api.service.database.engine, "before_cursor_execute")
    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        written.extend([statement] if statement.startswith("UPDATE") else [])

    for _ in range(20):
        assert api.nobody.get("/readyz").status_code == 200
    assert len(written) <= 1


def test_metrics_show_runs_that_have_not_ended(api: Any) -> None:
    with api.service.database.writing() as session:
        session.add(
            Run(uid="1" * 16, origin="launched", name='a "name"\n\\', status="running", created_at=1.0, reward=0.5)
        )
        session.add(Run(uid="2" * 16, origin="launched", name="over", status="failed", created_at=1.0, reward=0.5))
    families = {family.name: family for family in text_string_to_metric_families(api.viewer.get("/metrics").text)}
    rewards = families["rhyme:run_reward"].samples
    assert [(sample.labels, sample.value) for sample in rewards] == [({"run": "1" * 16, "name": 'a "name"\n\\'}, 0.5)]
    by_status = {sample.labels["status"]: sample.value for sample in families["rhyme:runs"].samples}
    assert by_status["running"] == 1.0 and by_status["failed"] == 1.0 and by_status["queued"] == 0.0


def test_requests_are_counted_by_template_so_that_labels_stay_few(reported: Any) -> None:
    for uid in ("a" * 16, "e" * 16):
        reported.viewer.get(f"/api/v1/runs/{uid}")
    reported.viewer.get("/nothing/such")
    metrics = reported.viewer.get("/metrics").text
    assert 'rhyme:http_requests_total{method="GET",route="/api/v1/runs/{uid}",status="404"} 1.0' in metrics
    assert "/nothing/such" not in metrics and "e" * 16 not in metrics


def test_every_metric_of_the_dashboard_exists(reported: Any, record: Any) -> None:
    reported.announce(run="c" * 16, attempt="d" * 16)
    reported.send(record(ended=False), attempt="d" * 16)
    there = set(re.findall(r"^(rhyme:[a-z0-9_]+)", reported.viewer.get("/metrics").text, re.MULTILINE))
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    named = {name for query in queries for name in re.findall(r"rhyme:[a-z0-9_]+", query)}
    assert len(queries) >= 8
    assert named <= there, named - there


@pytest.mark.parametrize("path", ["/", "/nothing", "/docs", "/openapi.json", "/api/v1/nothing"])
def test_what_is_not_there_is_a_problem(api: Any, path: str) -> None:
    answer = api.viewer.get(path)
    assert answer.status_code == 404
    assert answer.json() == {
        "type": "about:blank",
        "title": "Not Found",
        "status": 404,
        "code": "not_found",
        "detail": "Not Found",
    }


def test_a_wrong_method_is_a_problem_that_names_the_right_ones(api: Any) -> None:
    answer = api.operator.put("/api/v1/runs")
    assert answer.status_code == 405 and "GET" in answer.headers["allow"]
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_form_that_is_wrong_is_told_field_by_field(api: Any) -> None:
    answer = api.operator.post("/api/v1/tokens", json={"name": "", "role": "king", "more": "secret-value"})
    assert answer.status_code == 422
    problem = answer.json()
    assert {error["field"] for error in problem["errors"]} == {"body.name", "body.role", "body.more"}
    assert "secret-value" not in answer.text
    assert (
        api.operator.post("/api/v1/tokens", content=b"{", headers={"Content-Type": "application/json"}).status_code
        == 422
    )


def test_a_defect_says_nothing_of_the_inside(reported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("the password is 12345")

    monkeypatch.setattr("rhyme_openrlhf.api.routes.runs.find_run", broken)
    answer = reported.viewer.get(f"/api/v1/runs/{'a' * 16}")
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert "12345" not in answer.text and "Traceback" not in answer.text
    assert answer.headers["content-security-policy"]


def test_a_database_that_is_away_is_a_503_with_a_time(api: Any, tmp_path: Path) -> None:
    api.viewer.get("/api/v1/runs")
    with api.service.database.engine.connect() as connection:
        connection.execute(text("ALTER TABLE runs RENAME TO away"))
        connection.commit()
    answer = api.viewer.get("/api/v1/runs")
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert "away" not in answer.text and "SELECT" not in answer.text
