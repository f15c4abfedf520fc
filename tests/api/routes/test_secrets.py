"""Secrets of a run that reports, or is imported: in no row that is written now, and in no answer, also of old rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from rhyme_openrlhf.api.ingest.importer import import_directory
from rhyme_openrlhf.api.launch.actions import Launching, LaunchSettings
from rhyme_openrlhf.settings.redaction import HIDDEN
from rhyme_openrlhf.telemetry.events import RunStarted

SECRET = "hunter2secret"
COMMAND = ["rhyme", "train", "--logger.wandb.key", SECRET, f"--reward.remote_url=http://me:{SECRET}@host/score"]
CONFIG: dict[str, Any] = {
    "command": COMMAND,
    "settings": {"run": {"name": "a run"}},
    "arguments": {"logger": {"wandb": {"key": SECRET}}, "reward": {"remote_url": [f"http://me:{SECRET}@host/score"]}},
    "versions": {"torch": "2.11"},
}
UID, OTHER = "a" * 16, "c" * 16
WITH_A_RUN = (
    f"/api/v1/runs/{UID}",
    f"/api/v1/runs/{UID}/events",
    f"/api/v1/runs/{UID}/events?kind=run_started",
    "/api/v1/runs",
    "/api/v1/export/runs?format=json",
    "/api/v1/export/runs?format=csv",
)


def started(command: list[str], numbered: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = numbered([(1.0, "driver", RunStarted(1, "a run", command, 2, 1, 1, 3, 4, 2, False))])
    return rows


def stored(api: Any) -> str:
    """Everything that the store holds of runs and events, as text."""
    with api.service.database.reading() as session:
        rows = [session.execute(text(f"SELECT * FROM {table}")).all() for table in ("runs", "events")]
    return str(rows)


@pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)
def test_what_is_reported_is_stored_and_shown_without_secrets(api: Any, numbered: Any) -> None:
    api.announce(config=CONFIG)
    api.send(started(COMMAND, numbered))
    assert SECRET not in stored(api)
    for path in WITH_A_RUN:
        answer = api.viewer.get(path)
        assert answer.status_code == 200 and SECRET not in answer.text, path
    run = api.viewer.get(WITH_A_RUN[0]).json()
    assert run["command"] == [
        "rhyme",
        "train",
        "--logger.wandb.key",
        HIDDEN,
        f"--reward.remote_url=http://{HIDDEN}@host/score",
    ]
    assert run["config"]["arguments"]["logger"]["wandb"]["key"] == HIDDEN
    assert run["versions"] == {"torch": "2.11"}


@pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)
def test_rows_of_an_earlier_version_are_shown_without_secrets(api: Any, numbered: Any) -> None:
    api.announce()
    api.announce(run=OTHER, attempt="d" * 16, name="another")
    api.send(started(["rhyme"], numbered))
    config = {name: part for name, part in CONFIG.items() if name not in ("command", "versions")}
    with api.service.database.writing() as session:
        values = {"config": json.dumps(config), "command": json.dumps(COMMAND), "uid": UID}
        kind = "JSONB" if session.bind.dialect.name == "postgresql" else "JSON"
        statement = f"UPDATE runs SET config = CAST(:config AS {kind}), command = CAST(:command AS {kind})"
        if kind == "JSON":
            statement = "UPDATE runs SET config = :config, command = :command"
        session.execute(text(f"{statement} WHERE uid = :uid"), values)
        body = json.dumps({"name": "a run", "command": COMMAND})
        session.execute(text("UPDATE events SET body = :body WHERE kind = 'run_started'"), {"body": body})
    assert SECRET in stored(api)
    for path in (*WITH_A_RUN, f"/api/v1/config-diff?a={UID}&b={OTHER}", f"/api/v1/compare?run={UID}&run={OTHER}"):
        answer = api.viewer.get(path)
        assert answer.status_code == 200 and SECRET not in answer.text, path


def test_a_directory_of_an_earlier_version_is_imported_without_secrets(api: Any, numbered: Any, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in started(COMMAND, numbered)))
    uid = import_directory(api.service.database, folder, 1_800_000_000.0).run_uid
    assert SECRET not in stored(api)
    assert HIDDEN in api.viewer.get(f"/api/v1/runs/{uid}").text


def test_a_secret_in_a_spec_is_refused_without_being_repeated(api: Any) -> None:
    api.app.state.launching = Launching(LaunchSettings(), api.root, (api.root,), "http://127.0.0.1:8420")
    command = f"rhyme train --logger.wandb.key {SECRET} --reward.remote_url http://me:{SECRET}@host/score"
    answer = api.operator.post("/api/v1/specs/validate", json={"command": command})
    assert answer.status_code == 200 and SECRET not in answer.text
    refused = {"arguments.logger.wandb.key", "arguments.reward.remote_url"}
    assert {one["field"] for one in answer.json()["errors"]} == refused
