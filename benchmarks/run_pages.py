"""Queries to a service while its ingestion is measured, and the two ways of sending them."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
from recorded_load import Reporter
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.ingest.announce import Announcement, announce
from rhyme_openrlhf.api.ingest.store_batch import ingest
from rhyme_openrlhf.api.ingest.validation import prepare
from rhyme_openrlhf.api.read.curves import curves
from rhyme_openrlhf.api.read.pagination import Order, page_of
from rhyme_openrlhf.api.read.runs import RunFilter, list_runs
from rhyme_openrlhf.api.read.timeline import timeline
from rhyme_openrlhf.api.store.bounds import INT32
from rhyme_openrlhf.api.store.database import BusyError, Database
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import EngineStepRow, RawEvent, Step, of_kinds

# The steps that a timeline shows at once.
WINDOW = 20
POINTS = 500

# What a run's page asks: over HTTP, and as functions.
PAGES = {
    "runs": "/api/v1/runs",
    "run": "/api/v1/runs/{uid}",
    "last steps": "/api/v1/runs/{uid}/steps?limit=100&direction=desc",
    "curves": "/api/v1/runs/{uid}/series?names=reward,rollout_seconds",
    "metric": "/api/v1/runs/{uid}/series?names=policy_loss",
    "engines": "/api/v1/runs/{uid}/steps/{step}/engines",
    "timeline": "/api/v1/runs/{uid}/timeline?from_step={step}&to_step={last}",
    "notes": "/api/v1/runs/{uid}/events?kind=note&direction=desc&limit=50",
}


def _steps(session: Session, run: Run, step: int) -> object:
    return page_of(session, Step, [Step.run_id == run.id], Order("step", Step.step, Step.step, "desc"), 100, None)


def _engines(session: Session, run: Run, step: int) -> object:
    where = [EngineStepRow.run_id == run.id, EngineStepRow.step == step]
    order = Order("engine", EngineStepRow.engine, EngineStepRow.engine, "asc")
    return page_of(session, EngineStepRow, where, order, 100, None)


def _notes(session: Session, run: Run, step: int) -> object:
    where: Any = [RawEvent.run_id == run.id, *of_kinds(["note"])]
    return page_of(session, RawEvent, where, Order("id", RawEvent.id, RawEvent.id, "desc"), 50, None)


QUESTIONS: dict[str, Callable[[Session, Run, int], object]] = {
    "runs": lambda session, run, step: list_runs(session, RunFilter(), "created_at", "desc", 50, None),
    "run": lambda session, run, step: run,
    "last steps": _steps,
    "curves": lambda session, run, step: curves(session, run.uid, ["reward", "rollout_seconds"], 0, INT32, POINTS),
    "metric": lambda session, run, step: curves(session, run.uid, ["policy_loss"], 0, INT32, POINTS),
    "engines": _engines,
    "timeline": lambda session, run, step: timeline(session, run.uid, step, step + WINDOW, None, 16, 5000),
    "notes": _notes,
}


@dataclass(frozen=True)
class Way:
    """A way to speak to a service: make an attempt known, send one of its batches, query its run."""

    announce: Callable[[Reporter], None]
    send: Callable[[Reporter, bytes], None]
    ask: Callable[[Reporter, str], None]


def by_functions(database: Database) -> Way:
    """Return the way by the service's own functions."""
    decode = msgspec.json.Decoder().decode

    def make_known(reporter: Reporter) -> None:
        with database.writing() as session:
            announce(session, Announcement(reporter.attempt_uid, reporter.run_uid, "benchmark", "/", {}), time.time())

    def send(reporter: Reporter, body: bytes) -> None:
        arrived = prepare(decode(body)["events"])
        while True:
            try:
                with database.writing() as session:
                    ingest(session, reporter.attempt_uid, arrived, time.time())
                return
            except BusyError:  # as a reporter does when it is told to come again
                time.sleep(1)

    def ask(reporter: Reporter, name: str) -> None:
        with database.reading() as session:
            QUESTIONS[name](session, find_run(session, reporter.run_uid), reporter.steps // 2)

    return Way(make_known, send, ask)


def over_http(url: str, token: str) -> Way:
    """Through a running service."""
    address = urlsplit(url).netloc
    local = threading.local()

    def request(method: str, path: str, body: bytes | None = None) -> None:
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(address, timeout=60)
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        while True:
            local.connection.request(method, path, body, headers)
            response = local.connection.getresponse()
            content = response.read()
            if response.status not in (429, 503):
                break
            time.sleep(float(response.headers.get("Retry-After", 1)))
        if response.status >= 300:
            raise RuntimeError(f"{method} {path}: {response.status} {content[:300]!r}")

    def make_known(reporter: Reporter) -> None:
        body = {"run": reporter.run_uid, "name": "benchmark", "run_directory": "/", "config": {}}
        request("PUT", f"/api/v1/ingest/attempts/{reporter.attempt_uid}", json.dumps(body).encode())

    def send(reporter: Reporter, body: bytes) -> None:
        request("POST", f"/api/v1/ingest/attempts/{reporter.attempt_uid}/batches", body)

    def ask(reporter: Reporter, name: str) -> None:
        step = max(1, reporter.steps // 2)
        request("GET", PAGES[name].format(uid=reporter.run_uid, step=step, last=step + WINDOW))

    return Way(make_known, send, ask)
