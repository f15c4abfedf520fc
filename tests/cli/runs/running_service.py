"""A real service over a real socket, a user who is signed in to it, and a run that was reported to it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rhyme_openrlhf.api.app")

import uvicorn

from rhyme_openrlhf import embedded
from rhyme_openrlhf.api.access.local_link import keep_address
from rhyme_openrlhf.api.app import create_app
from rhyme_openrlhf.api.launch.actions import Launching, LaunchSettings
from rhyme_openrlhf.api.launch.ray_jobs import RayLauncher
from rhyme_openrlhf.api.settings import ServeSettings
from rhyme_openrlhf.api.store import credentials
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.cli.runs.command import main
from rhyme_openrlhf.client.access import Access, keep
from rhyme_openrlhf.telemetry.event_log import EventLog
from rhyme_openrlhf.telemetry.events import (
    SCHEMA_VERSION,
    EngineStep,
    Note,
    RolloutFinished,
    RunFinished,
    RunStarted,
    TrainStep,
)
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.telemetry.reporter import Reporter, read_report
from tests.telemetry.control_server import make_run

DEADLINE_S = 60.0
RUN_STARTED = RunStarted(SCHEMA_VERSION, "trial", ["rhyme", "train"], 2, 1, 2, 2, 12, 8, False)


@dataclass
class Service:
    """A running service: where, its tokens by role, below which directory runs may lie, and its store."""

    url: str
    tokens: dict[str, str]
    root: Path
    database: Database


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, starts_listener: None) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("service")
    settings = ServeSettings(
        data_dir=str(root / "data"),
        roots=f"{root}:{embedded.MODEL.parent}",
        requests_per_second=100_000.0,
        request_burst=100_000,
        live_poll_s=0.05,
    )
    app = create_app(settings)
    # A cluster that nobody reaches, and no dispatcher that would try: what is started stays in the queue.
    cluster = RayLauncher("http://127.0.0.1:9")
    app.state.launching = Launching(
        LaunchSettings(), settings.data_path(), settings.root_paths(), "http://127.0.0.1:9", cluster
    )
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    end = time.monotonic() + DEADLINE_S
    while not server.started:
        assert time.monotonic() < end and thread.is_alive(), "the service did not start"
        time.sleep(0.02)
    with app.state.service.database.writing() as session:
        roles = ("operator", "viewer", "reporter")
        tokens = {role: credentials.issue_token(session, f"the {role}", role, time.time()).secret for role in roles}  # type: ignore[arg-type]
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    keep_address(root / "data", url, url)
    yield Service(url, tokens, root, app.state.service.database)
    server.should_exit = True
    thread.join(DEADLINE_S)


@pytest.fixture
def signed_in(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RHYME_CONTROL_URL", "RHYME_CONTROL_TOKEN", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    keep(Access(service.url, service.tokens["operator"]), {"HOME": str(tmp_path)})


@pytest.fixture
def rhyme(signed_in: None, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*argv: str) -> tuple[int, str, str]:
        code = main(list(argv))
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


Rhyme = Callable[..., tuple[int, str, str]]


def answer(rhyme: Rhyme, *argv: str) -> Any:
    # Before everything else: behind -- it would be the command's.
    code, out, err = rhyme(argv[0], "--json", *argv[1:])
    assert code == 0, err
    return json.loads(out)


def write_steps(run: Path, first: int, last: int) -> None:
    with EventLog(run / "events.jsonl") as log:
        for step in range(first, last + 1):
            for engine in range(2):
                counters = EngineCounters(4800, 4750, 500, 1900, 0, 900, 2000, 1500, 1.5, 0.1, 48)
                log.write(EngineStep(step, engine, counters, step - 1), "rollout")
            log.write(RolloutFinished(step, 1, 2.0, 96, 9600, 0.1 * step, 100.0, 98.0, 180.0, 256, 3), "rollout")
            log.write(TrainStep(step, 1, {"rollout": 2.0, "train": 1.0}, {"policy_loss": 0.1}), "trainer")


@pytest.fixture(scope="module")
def reported(service: Service) -> str:
    """A finished run that the real reporter sent."""
    uid, attempt = "1" * 16, "2" * 16
    run = make_run(service.root / "reported", service.url, run_uid=uid, attempt_uid=attempt)
    with EventLog(run / "events.jsonl") as log:
        log.write(RUN_STARTED, "driver")
    write_steps(run, 1, 4)
    with EventLog(run / "events.jsonl") as log:
        log.write(Note("warning", "a note with [red]markup[/red]"), "driver")
        log.write(RunFinished("succeeded", "", 12.0), "driver")
    (run / "logs" / "driver.log").write_text("".join(f"line {number}\n" for number in range(1000)))
    ending = threading.Event()
    ending.set()
    Reporter(read_report(run), service.tokens["reporter"], ending).run()
    return uid
