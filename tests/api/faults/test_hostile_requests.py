"""Random announcements, events, imports and forms with hostile values: each is stored or refused, and can be shown.

10,000 of them, with bounds on memory and on the CPU time of a request:

    RHYME_FUZZ=10000 pytest tests/api/faults/test_hostile_requests.py
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest

pytest.importorskip("fastapi")

from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from sqlalchemy import update

from rhyme_openrlhf.api.app import ROUTERS
from rhyme_openrlhf.api.ingest.announce import OBJECTS
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.webui.figures.one_run import RUN_FIGURES
from rhyme_openrlhf.webui.install import install as install_dashboard
from tests.api.launch_service import LaunchService, launch_service

ASKED = int(os.environ.get("RHYME_FUZZ", "0"))
COUNT = ASKED or 120
pytestmark = pytest.mark.timeout(300 + 3 * ASKED)
# Only where RHYME_FUZZ asks for them: seconds of CPU of a request, and bytes by which the process may grow.
MOST_CPU_S, MOST_GROWTH = 2.0, 300 * 2**20
# The service's refusals; a conflict, a rate and a missing provider are no faults.
REFUSALS = {400, 401, 403, 404, 405, 409, 412, 413, 415, 422, 429}
UID = "0f3a5b7c9d1e2f40"


class Raw(str):
    """A piece of JSON text that no Python value gives."""


TEXTS = [
    "", " ", "\0", "\ud800", "a" * 300, "a" * 20_000, "😀" * 200, "../../etc/passwd", "nan", "-inf", "[" * 2400,
    "{" * 2400, "9" * 5000, "1..5", "log:0..1e999", "\u202e\x7f\r\n", "<script>alert(1)</script>", "%00%ff", "http://[::1",
    "http://u:p@h/?token=x", "--control.token=x", "1e400", "true", "rank_groups", UID, "a,b,,c", "${x}", "{{7*7}}",
]  # fmt: skip
NUMBERS = [
    0, -1, 1, 7, 2**31 - 1, 2**31, -(2**31) - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 0.5, -0.0, 1e-320,
    1e308, -1e308, 1.7976931348623157e308, 4294967296.5,
]  # fmt: skip
RAW = [
    "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1" + 400 * "0", 5000 * "9", '"\\ud800"', '"\\u0000"',
    2400 * "[" + 2400 * "]", 40 * '{"a":' + "1" + 40 * "}", 300 * "[" + 300 * "]",
]  # fmt: skip


class Hostile:
    """Draws values, and changes valid ones."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def value(self) -> Any:
        """Return a value that a field may not expect."""
        kind = self.draw.randrange(8)
        if kind < 2:
            return self.draw.choice(TEXTS)
        if kind < 4:
            return self.draw.choice(NUMBERS)
        if kind == 4:
            return Raw(self.draw.choice(RAW))
        if kind == 5:
            return self.draw.choice([None, True, False, [], {}, [[]], {"": {}}])
        if kind == 6:
            return self.draw.choice((1, 2, 3, 500)) * [self.draw.choice([*TEXTS[:8], *NUMBERS])]
        return {self.draw.choice(TEXTS): self.draw.choice([*TEXTS, *NUMBERS, None]) for _ in range(3)}

    def changed(self, value: Any, times: int) -> Any:
        """Return a copy with some places replaced, removed or added."""
        value = copy.deepcopy(value)
        for _ in range(times):
            value = self._once(value)
        return value

    def _once(self, value: Any) -> Any:
        if isinstance(value, dict) and value and self.draw.random() < 0.9:
            name = self.draw.choice(list(value))
            deed = self.draw.random()
            if deed < 0.1:
                del value[name]
            elif deed < 0.2:
                value[self.draw.choice(TEXTS)] = self.value()
            else:
                value[name] = self._once(value[name])
            return value
        if isinstance(value, list) and value and self.draw.random() < 0.7:
            at = self.draw.randrange(len(value))
            value[at] = self._once(value[at])
            return value
        return self.value()


def text_of(value: Any) -> str:
    """Return JSON in which raw pieces stand as they are."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{text_of(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text_of, value)) + "]"
    return json.dumps(value)


@dataclass
class Attack:
    """A service with pages, what is sent to it, and what it answered."""

    service: LaunchService
    client: TestClient
    hostile: Hostile
    rows: list[dict[str, Any]]
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    slowest: tuple[float, str] = (0.0, "")
    sequence: int = 0

    def send(self, method: str, path: str, text: str | None = None, **more: Any) -> int:
        """Send one request; it must end in time and without a fault."""
        began = time.process_time()
        content = None if text is None else text.encode("utf-8", "surrogatepass")
        answer = self.client.request(
            method,
            path,
            content=content,
            headers={"Content-Type": "application/json", **more.pop("headers", {})},
            **more,
        )
        spent = time.process_time() - began
        shown = f"{method} {path[:300]} {(text or '')[:600]}"
        self.slowest = max(self.slowest, (spent, shown))
        self.answers[method, answer.status_code] += 1
        assert answer.is_success or answer.is_redirect or answer.status_code in REFUSALS, (
            answer.status_code, shown, answer.text[:300]
        )  # fmt: skip
        assert not ASKED or spent < MOST_CPU_S, (spent, shown)
        return answer.status_code

    def look(self, run: str, times: int) -> None:
        """Ask for some pages, figures and answers about a run."""
        for path in self.hostile.draw.sample(_READS, min(times, len(_READS))):
            self.send("GET", path.replace("{uid}", run))


def _announcement(attack: Attack) -> None:
    draw = attack.hostile.draw
    run, attempt = f"{draw.randrange(2**64):016x}", f"{draw.randrange(2**64):016x}"
    config = {
        "command": ["rhyme", "train", "--x"],
        "settings": {"run": {"name": "a"}, "emulate": {"profile": "p"}, "control": {}},
        "arguments": {"actor": {"model_name_or_path": "m", "adam.lr": 1e-6}, "vllm": {"num_engines": 2}},
        "versions": {"vllm": "0"},
        "git": {"package": {"commit": "abc", "dirty": False}},
        "machine": {"cpus": 2, "host": "h"},
    }
    body = {"run": run, "name": "a", "run_directory": str(attack.service.root), "config": config}
    body = attack.hostile.changed(body, draw.randint(1, 3))
    path = f"/api/v1/ingest/attempts/{attempt}"
    if attack.send("PUT", path, text_of(body)) == 200 and body["run"] == run:
        attack.send("POST", f"{path}/batches", json.dumps({"events": [attack.rows[0]]}))
        attack.look(run, 4)


def _events(attack: Attack) -> None:
    draw = attack.hostile.draw
    run, attempt = (f"{draw.randrange(8):016x}", f"{draw.randrange(8) + 16:016x}")
    run = f"{int(attempt, 16) - 16:016x}"
    body = {"run": run, "name": "a", "run_directory": "/", "config": {}}
    attack.send("PUT", f"/api/v1/ingest/attempts/{attempt}", json.dumps(body))
    chosen = draw.sample(attack.rows, draw.randint(1, 6))
    for row in chosen:
        attack.sequence += draw.choice((1, 1, 1, 1000, 2**45))
        row["sequence"] = attack.sequence % 2**53
    batch = {
        "events": chosen,
        "dropped": {"driver": 3},
        "known": {"new": 0},
        "heartbeat": {"alive": True},
        "sent_at": 1.0,
    }
    if draw.random() < 0.8:
        batch["events"] = [attack.hostile.changed(row, draw.randint(0, 2)) for row in chosen]
    else:
        batch = attack.hostile.changed(batch, draw.randint(1, 2))
    if attack.send("POST", f"/api/v1/ingest/attempts/{attempt}/batches", text_of(batch)) == 200:
        attack.look(run, 3)


def _import(attack: Attack) -> None:
    draw = attack.hostile.draw
    folder = attack.service.root / f"{draw.randrange(2**64):016x}"
    folder.mkdir()
    config = {
        "command": ["rhyme"],
        "settings": {"run": {"name": "made"}, "control": {"run_uid": folder.name}},
        "arguments": {},
    }
    rows = [attack.hostile.changed(row, draw.choice((0, 0, 0, 0, 1))) for row in attack.rows[:12]]
    config = attack.hostile.changed(config, draw.randint(0, 2))
    for name, text in (("config.json", text_of(config)), ("events.jsonl", "\n".join(map(text_of, rows)) + "\n")):
        (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    if attack.send("POST", "/api/v1/imports", json.dumps({"directory": str(folder)})) == 200:
        attack.look(folder.name, 3)


_SWEEP = {
    "name": "s",
    "command": "rhyme demo",
    "options": {"train.seed": "1,2", "actor.adam.lr": [1e-6, 2e-6]},
    "count": 2,
}
_FORM = {
    "arguments": {"vllm": {"num_engines": 2}},
    "options": {"train.seed": "1,2"},
    "count": 1,
    "seed": 0,
    "name": "a",
}
_FORMS: list[tuple[str, str, Any]] = [
    ("POST", "/ui/new-run/estimate", _FORM),
    ("POST", "/ui/new-run/panel", {**_FORM, "template": "demo"}),
    ("POST", "/ui/new-run/form", {"command": "rhyme demo"}),
    ("POST", "/api/v1/sweeps", _SWEEP),
    ("POST", "/api/v1/runs", {"command": "rhyme demo", "arguments": {"vllm": {"num_engines": 2}}, "tags": ["t"]}),
    ("POST", "/api/v1/views", {"name": "v", "filter": "reward > 1", "sort": "reward", "values": ["metric.loss"]}),
]


def _form(attack: Attack) -> None:
    draw = attack.hostile.draw
    method, path, body = draw.choice(_FORMS + _DESCRIBED) if draw.random() < 0.5 else draw.choice(_FORMS)
    headers = {}
    if draw.random() < 0.2:
        headers = {draw.choice(("Idempotency-Key", "If-Match", "Cookie")): draw.choice(TEXTS[4:6] + TEXTS[10:14])}
    attack.send(method, path, text_of(attack.hostile.changed(body, draw.randint(1, 2))), headers=headers)


def _query(attack: Attack) -> None:
    draw = attack.hostile.draw
    route = draw.choice(_ROUTES_WITH_QUERY)
    names = [one.alias for one in route.dependant.query_params]
    chosen = draw.sample(names, min(len(names), 2))
    asked = "&".join(f"{name}={quote(str(attack.hostile.value())[:600], errors='surrogatepass')}" for name in chosen)
    path = re.sub(r"\{[^}]*\}", lambda _: draw.choice(("1", UID, f"{draw.randrange(8):016x}")), route.path)
    attack.send("GET", f"/api/v1{path}?{asked}")


def _endless(route: APIRoute) -> bool:
    return "stream" in route.path or "live" in route.path


def _has_uid_alone(path: str) -> bool:
    return re.findall(r"\{[^}]*\}", path) == ["{uid}"]


_ROUTES = [
    route for router in ROUTERS for route in router.routes
    if isinstance(route, APIRoute) and "GET" in route.methods and not _endless(route)
]  # fmt: skip
_ROUTES_WITH_QUERY = [route for route in _ROUTES if route.dependant.query_params]
_READS = sorted({f"/api/v1{route.path}" for route in _ROUTES if _has_uid_alone(route.path)})
_READS += [f"/ui/runs/{{uid}}/figures/{name}" for name in RUN_FIGURES]
_DESCRIBED: list[tuple[str, str, Any]] = []
_ACTIONS: tuple[Callable[[Attack], None], ...] = (_announcement, _events, _import, _form, _query)


def _described(service: LaunchService) -> Iterator[tuple[str, str, Any]]:
    """Yield each operation with a body, and the example of it in the service's description."""
    described = service.viewer.get("/api/v1/openapi.json").json()
    schemas = described["components"]["schemas"]
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content is None or "/ingest/" in path or "/imports" in path:
                continue
            schema = schemas.get(content["schema"].get("$ref", "").rpartition("/")[2], content["schema"])
            example = (
                content.get("example")
                or next(iter(schema.get("examples", [])), None)
                or {name: "x" for name in schema.get("properties", {})}
            )
            yield method.upper(), path.replace("{uid}", UID).replace("{", "").replace("}", ""), example


@pytest.fixture(params=["sqlite", "postgresql"])
def attack(request: pytest.FixtureRequest, tmp_path: Path, make_run: Callable[..., Any]) -> Iterator[Attack]:
    url = request.getfixturevalue("postgresql_url") if request.param == "postgresql" else ""
    served = {"requests_per_second": 100_000.0, "request_burst": 100_000}
    with launch_service(tmp_path, url, served) as service:
        app: Any = service.operator.app
        install_dashboard(app)
        pages = [route.path for route in app.routes if isinstance(route, APIRoute) and "{uid}" in route.path]
        for page in sorted(set(pages)):
            if (
                re.findall(r"\{[^}]*\}", page) == ["{uid}"]
                and page.startswith(("/runs/", "/ui/"))
                and page not in _READS
            ):
                _READS.append(page)
        _DESCRIBED[:] = _described(service)
        client = TestClient(app, base_url="http://127.0.0.1:8420", raise_server_exceptions=False)
        client.portal = service.operator.portal
        client.headers.update(service.operator.headers)
        yield Attack(service, client, Hostile(ASKED), make_run(seed=3))


def test_hostile_requests_are_stored_or_refused_and_can_be_shown(attack: Attack) -> None:
    process = psutil.Process()
    grown = 0
    for number in range(COUNT):
        _ACTIONS[number % len(_ACTIONS)](attack)
        if number == COUNT // 5:
            grown = process.memory_info().rss
    print(sorted(attack.answers.items()), attack.slowest[0], attack.slowest[1][:200], process.memory_info().rss - grown)
    assert len(_READS) > 30 and len(_DESCRIBED) > 10
    successes = sum(count for (_, status), count in attack.answers.items() if status < 400)
    assert successes > COUNT / 10, attack.answers
    assert not ASKED or process.memory_info().rss - grown < MOST_GROWTH


@pytest.mark.parametrize("odd", ["text", [1], None, 5], ids=repr)
def test_a_record_that_an_earlier_version_stored_can_be_shown(attack: Attack, odd: Any) -> None:
    path, body = "/api/v1/ingest/attempts/1111111111111111", {"run": UID, "name": "a", "run_directory": "/"}
    assert attack.send("PUT", path, json.dumps({**body, "config": {}})) == 200
    assert attack.send("POST", f"{path}/batches", json.dumps({"events": attack.rows[:1]})) == 200
    with attack.service.service.database.writing() as session:
        session.execute(update(Run).values(config=dict.fromkeys(OBJECTS, odd)))
    attack.look(UID, len(_READS))
    assert attack.answers["GET", 200] > 25
