"""The dashboard as people meet it: a real service over HTTP with a recorded run in its store, and a real Chromium."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

import certifi
import httpx
import uvicorn
from fastapi import FastAPI

from rhyme_openrlhf import embedded
from rhyme_openrlhf.api.access.service import Service
from rhyme_openrlhf.api.app import create_app
from rhyme_openrlhf.api.demo.demonstration import LIVE
from rhyme_openrlhf.api.demo.recording import unpack
from rhyme_openrlhf.api.ingest.importer import import_directory
from rhyme_openrlhf.api.launch.actions import Launching, LaunchSettings
from rhyme_openrlhf.api.settings import ServeSettings
from rhyme_openrlhf.api.store import credentials
from rhyme_openrlhf.webui.install import install
from tests.api.launch_service import Cluster

RECORDED = Path(__file__).parents[1] / "data" / "recorded_run.jsonl"
START_SECONDS = 60
# httpx gives up after 5 s, in which a busy machine has not simulated a run of another size, and may not have answered.
ANSWER_SECONDS = 120


@pytest.fixture(scope="package", autouse=True)
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let httpx read one certificate instead of all: for each client, that takes longer than a request.

    Services of tests speak no TLS.
    """
    end = "-----END CERTIFICATE-----\n"
    first, _, _ = Path(certifi.where()).read_text(encoding="ascii").partition(end)
    file = tmp_path_factory.mktemp("certificates") / "one.pem"
    file.write_text(first + end, encoding="ascii")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SSL_CERT_FILE", str(file))
        yield


@dataclass
class Dashboard:
    """A service that answers at `url`; `link(role)` is a sign-in link of that role."""

    url: str
    app: FastAPI
    service: Service
    tokens: dict[str, str]
    run_uid: str

    def link(self, role: str = "operator", path: str = "/") -> str:
        return f"{self.url}{path}#token={self.tokens[role]}"

    def client(self, role: str = "") -> httpx.Client:
        """Return a client with the token of that role, or of nobody."""
        headers = {"Authorization": f"Bearer {self.tokens[role]}"} if role else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=ANSWER_SECONDS)

    def signed_in(self, role: str = "operator") -> httpx.Client:
        """Return a client with a session of that role."""
        client = self.client()
        opened = client.post("/api/v1/session", json={"token": self.tokens[role]})
        assert opened.status_code == 200
        client.headers["X-CSRF-Token"] = opened.json()["csrf"]
        return client


class PromptServer(uvicorn.Server):
    """A server that sees at once that it shall end; uvicorn's own looks ten times a second."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.005)


@contextlib.contextmanager
def serving(app: FastAPI, port: int = 0) -> Iterator[int]:
    """Serve `app` from a thread; gives its port."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
        server = PromptServer(uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, f"the service is not up after {START_SECONDS} s"
            time.sleep(0.02)
        yield bound.getsockname()[1]
        server.should_exit = True
        thread.join(START_SECONDS)
        assert not thread.is_alive(), f"the service has not ended after {START_SECONDS} s"


def make_tokens(service: Service) -> dict[str, str]:
    """A token of each role that sees pages."""
    with service.database.writing() as session:
        return {
            role: credentials.issue_token(session, f"the {role}", role, time.time()).secret  # type: ignore[arg-type]
            for role in ("operator", "viewer")
        }


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """A run directory with the recorded run."""
    directory = tmp_path / "runs" / "20261121-demo"
    directory.mkdir(parents=True)
    shutil.copy(RECORDED, directory / "events.jsonl")
    settings = {"run": {"name": "demo"}, "histospec": {"enable": True}}
    (directory / "config.json").write_text(json.dumps({"settings": settings, "arguments": {}}))
    return directory


@pytest.fixture
def empty_dashboard(make_settings: Callable[..., ServeSettings], starts_listener: None) -> Iterator[Dashboard]:
    """A service without runs."""
    app = create_app(make_settings())
    install(app)
    with serving(app) as port:
        service: Service = app.state.service
        yield Dashboard(f"http://127.0.0.1:{port}", app, service, make_tokens(service), "")


@pytest.fixture
def dashboard(empty_dashboard: Dashboard, run_directory: Path) -> Dashboard:
    """A service with the recorded run, "demo"."""
    imported = import_directory(empty_dashboard.service.database, run_directory, time.time())
    empty_dashboard.run_uid = imported.run_uid
    return empty_dashboard


@pytest.fixture
def launching_dashboard(dashboard: Dashboard, tmp_path: Path) -> Dashboard:
    """The same with a cluster of 8 GPUs whose jobs wait (`app.state.launching.launcher` is it)."""
    settings = dashboard.service.settings
    dashboard.app.state.launching = Launching(
        LaunchSettings(), settings.data_path(), settings.root_paths(), dashboard.url, Cluster()
    )
    return dashboard


@pytest.fixture
def demo_dashboard(
    make_settings: Callable[..., ServeSettings], tmp_path: Path, starts_listener: None
) -> Iterator[Dashboard]:
    """A service with one of the demonstration's recorded runs: responses, logs and figures of its machine too."""
    runs = tmp_path / "runs"
    runs.mkdir(exist_ok=True)
    recorded = {path.name: path for path in unpack(embedded.RECORDING, runs)}
    app = create_app(make_settings())
    install(app)
    with serving(app) as port:
        service: Service = app.state.service
        imported = import_directory(service.database, recorded[LIVE], time.time())
        yield Dashboard(f"http://127.0.0.1:{port}", app, service, make_tokens(service), imported.run_uid)
