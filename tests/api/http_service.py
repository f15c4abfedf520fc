"""A service over HTTP: a real app on real SQLite, tokens of every role, and runs that were reported to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from rhyme_openrlhf.api.access.service import Service
from rhyme_openrlhf.api.app import create_app
from rhyme_openrlhf.api.settings import ServeSettings
from rhyme_openrlhf.api.store import credentials
from rhyme_openrlhf.telemetry.event_json import to_json
from rhyme_openrlhf.telemetry.events import (
    CheckpointSaved,
    EngineInterval,
    EngineSample,
    EngineStep,
    Event,
    LayoutSwitched,
    Note,
    RankStability,
    RolloutFinished,
    RolloutStarted,
    RunFinished,
    RunStarted,
    SampleMoved,
    TrainStep,
)
from rhyme_openrlhf.telemetry.metrics import EngineCounters

BASE = "http://127.0.0.1:8420"
START = 1_760_000_000.0
Numbered = Callable[[list[tuple[float, str, Event]]], list[dict[str, Any]]]


@dataclass
class Api:
    """A service, and a client for each kind of caller."""

    app: FastAPI
    service: Service
    operator: TestClient
    viewer: TestClient
    reporter: TestClient
    nobody: TestClient
    tokens: dict[str, str]
    root: Path

    def announce(self, run: str = "a" * 16, attempt: str = "b" * 16, name: str = "a run", **more: Any) -> None:
        body = {"run": run, "name": name, "run_directory": str(self.root / run), "config": {}, **more}
        answer = self.reporter.put(f"/api/v1/ingest/attempts/{attempt}", json=body)
        assert answer.status_code == 200, answer.text

    def send(self, events: list[dict[str, Any]], attempt: str = "b" * 16) -> dict[str, Any]:
        answer = self.reporter.post(f"/api/v1/ingest/attempts/{attempt}/batches", json={"events": events})
        assert answer.status_code == 200, answer.text
        receipt: dict[str, Any] = answer.json()
        return receipt


@pytest.fixture
def store(request: pytest.FixtureRequest) -> str:
    """URL of the store, "" for the settings' own SQLite; modules mark what runs on PostgreSQL too."""
    return request.getfixturevalue("postgresql_url") if getattr(request, "param", "") == "postgresql" else ""


@pytest.fixture
def make_api(make_settings: Callable[..., ServeSettings], tmp_path: Path, store: str) -> Iterator[Callable[..., Api]]:
    """Start services; each is stopped at the end."""
    open_clients: list[TestClient] = []
    root = tmp_path / "runs"
    root.mkdir()

    def make(**more: Any) -> Api:
        app = create_app(make_settings(**{"database": store, **more}))
        nobody = TestClient(app, base_url=BASE, raise_server_exceptions=False)
        nobody.__enter__()
        open_clients.append(nobody)
        service: Service = app.state.service
        tokens: dict[str, str] = {}
        clients: dict[str, TestClient] = {}
        with service.database.writing() as session:
            for role in ("operator", "viewer", "reporter"):
                tokens[role] = credentials.issue_token(session, f"the {role}", role, time.time()).secret  # type: ignore[arg-type]
        for role, secret in tokens.items():
            headers = {"Authorization": f"Bearer {secret}"}
            clients[role] = TestClient(app, base_url=BASE, headers=headers, raise_server_exceptions=False)
            # The service's own event loop, as in a real service. Otherwise each request makes a thread with a new loop.
            clients[role].portal = nobody.portal
        return Api(app=app, service=service, nobody=nobody, tokens=tokens, root=root, **clients)

    yield make
    for client in open_clients:
        client.__exit__(None, None, None)


@pytest.fixture
def api(make_api: Callable[..., Api]) -> Api:
    return make_api()


@pytest.fixture
def numbered() -> Numbered:
    """Events as JSON, numbered by source."""

    def number(events: list[tuple[float, str, Event]]) -> list[dict[str, Any]]:
        following: dict[str, int] = {}
        rows = []
        for at, source, event in events:
            sequence = following.get(source, 0)
            following[source] = sequence + 1
            rows.append(to_json(event, at, source, sequence))
        return rows

    return number


@pytest.fixture
def record(numbered: Numbered) -> Callable[..., list[dict[str, Any]]]:
    """The events of a small run with two engines."""

    def make(steps: int = 3, engines: int = 2, ended: bool = True) -> list[dict[str, Any]]:
        rows: list[tuple[float, str, Event]] = [
            (START, "driver", RunStarted(1, "a run", ["rhyme"], engines, 1, 1, steps, 4, 2, False))
        ]
        for step in range(1, steps + 1):
            begin = START + 10.0 * step
            rows.append((begin, "driver", RolloutStarted(step, 1, 4, 8)))
            for engine in range(engines):
                counters = EngineCounters(100, 90, 30, 60, 50, 10, 40, 20, 2.0, 0.25, 4, 5, 3)
                rows.append((begin + 4, f"engine-{engine}", EngineStep(step, engine, counters, step - 1)))
                busy = EngineInterval(engine, "generate", begin, begin + 2 + engine, step, step - 1)
                idle = EngineInterval(engine, "idle", begin + 2 + engine, begin + 4, step, step - 1, "tail")
                rows += [(begin + 4, f"engine-{engine}", one) for one in (busy, idle)]
                rows.append((begin + 1, f"engine-{engine}", EngineSample(step, engine, 4, 1.0, 50, 20, 10)))
            rows.append(
                (
                    begin + 2,
                    "driver",
                    SampleMoved(step, "s1", 0, 1, "reallocation", "recompute", "moved", 0.5, 7, 0.2, 0.4),
                )
            )
            rows.append((begin + 2, "driver", LayoutSwitched(step, "node", 1, 2, 3, 0.25)))
            rows.append((begin + 4, "driver", RolloutFinished(step, 1, 4.0, 8, 200, 0.5, 25.0, 24.0, 40.0, 50, 0)))
            parts = {"rollout": 4.0, "train": 3.0}
            metrics = {"reward": 0.5 + step / 100, "policy_loss": float("nan") if step == 2 else 0.1 * step}
            rows.append((begin + 9, "trainer", TrainStep(step, 1, parts, metrics)))
        rows.append((START + 10.0 * steps + 9, "driver", RankStability(1, 0.75, 4)))
        rows.append((START + 10.0 * steps + 9, "driver", CheckpointSaved(steps, "/checkpoints/tag")))
        rows.append((START + 10.0 * steps + 9, "driver", Note("info", "<b>a note</b>")))
        if ended:
            rows.append((START + 10.0 * steps + 10, "driver", RunFinished("succeeded", "", 60.0)))
        return numbered(rows)

    return make


@pytest.fixture
def reported(api: Api, record: Callable[..., list[dict[str, Any]]]) -> Api:
    """A service with one run, "aaaaaaaaaaaaaaaa", that reported three steps and ended."""
    api.announce()
    api.send(record())
    return api
