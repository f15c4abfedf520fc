"""A control plane in a process of its own, runs that report to it, and the count of what it has of them.

For scripts that put the service under strain. A run here is what the service sees of one: a run directory that a
writer fills (a recorded run's events, again and again), and the real reporter beside it.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec

from rhyme_openrlhf.client import exchange
from rhyme_openrlhf.telemetry.event_json import parse
from rhyme_openrlhf.telemetry.event_log import EventLog
from rhyme_openrlhf.telemetry.events import Recorded, RunFinished
from rhyme_openrlhf.telemetry.reporter import NOT_SENT
from rhyme_openrlhf.telemetry.run_directory import CONFIG_FILE, EVENTS_FILE

RECORDED = Path(__file__).parents[1] / "tests" / "data" / "recorded_run.jsonl"
# Limits for a machine that does much else: there, the imports of a start alone have taken more than a minute.
START_SECONDS = 300.0
ANSWER_SECONDS = 120.0
REPORTER_SECONDS = 300.0
# Events asked for at once: the largest page.
PAGE = 1000
TABLES = ("steps", "metrics", "intervals", "engine_steps")
# Runs the program named second, with a clock that is off by the seconds that stand in the file named first.
OTHER_CLOCK = """
import runpy, sys, time
from pathlib import Path
true, file = time.time, Path(sys.argv.pop(1))
time.time = lambda: true() + float(file.read_text())
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def python(module: str, clock: Path | None) -> list[str]:
    """Return the command that runs a module, by the clock of a file if there is one."""
    if clock is None:
        return [sys.executable, "-m", module]
    return [sys.executable, "-c", OTHER_CLOCK, str(clock), module]


class Service:
    """`rhyme serve` on a port of its own, to be killed and started again; `client` is its operator."""

    def __init__(
        self,
        folder: Path,
        log: Path,
        *,
        database: str = "",
        roots: Path | None = None,
        clock: Path | None = None,
        ray: str = "",
    ) -> None:
        """`folder` is the data directory; `database` a URL, "" for SQLite in it; `log` takes what it prints.

        `ray`: the cluster's dashboard, "" for none.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._command = [
            *python("rhyme_openrlhf.cli.main", clock), "serve", f"--serve.port={port}",
            f"--serve.data_dir={folder}", f"--serve.database={database}", f"--serve.roots={roots or folder}",
            "--serve.requests_per_second=100000", "--serve.request_burst=100000", "--launch.max_runs=1000",
            *(
                [f"--ray-address={ray}", f"--launch.control_url={self.url}", f"--launch.dir={folder}"]
                if ray
                else ["--no-local"]
            ),
        ]  # fmt: skip
        self.start()
        self.wait()
        code = re.search(r"#code=(\S+)", self.log.read_text())
        assert code is not None
        self.token = exchange(self.url, code[1], "reported runs").token
        self.client = httpx.Client(
            base_url=f"{self.url}/api/v1", headers={"Authorization": f"Bearer {self.token}"}, timeout=ANSWER_SECONDS
        )

    def start(self) -> None:
        """Start it, without waiting."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def wait(self) -> None:
        """Wait until the service answers. Raises RuntimeError when it ends or takes more than START_SECONDS."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/readyz", timeout=ANSWER_SECONDS).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"the service was not ready within {START_SECONDS:g} s: {self.log.read_text()[-2000:]}")

    def end(self) -> None:
        """End the process as Ctrl-C does."""
        self.client.close()
        self.process.terminate()
        self.process.wait(ANSWER_SECONDS)

    def events(self, run: str) -> Iterator[dict[str, Any]]:
        """Return all events of a run in the service, as lines of the run's log."""
        cursor = None
        while True:
            asked = {"limit": PAGE, **({"cursor": cursor} if cursor else {})}
            page = self.client.get(f"/runs/{run}/events", params=asked).raise_for_status().json()
            for item in page["items"]:
                envelope = {name: item[name] for name in ("kind", "time", "source", "sequence")}
                yield {**envelope, **item["body"]}
            if not (cursor := page["next_cursor"]):
                return

    def derived(self, run: str) -> Counter[str]:
        """Return every row of every derived table that the service exports of a run."""
        rows: Counter[str] = Counter()
        for table in TABLES:
            exported = self.client.get(f"/export/runs/{run}/{table}", params={"format": "json"}).raise_for_status()
            rows.update(f"{table} {json.dumps(row, sort_keys=True)}" for row in exported.json())
        return rows


class ReportedRun:
    """A run directory that is being filled, and its reporter."""

    def __init__(self, path: Path, service: Service, per_second: float, clock: Path | None = None) -> None:
        """`per_second`: events; `clock` is that of writer and reporter."""
        self.path = path
        self.uid = secrets.token_hex(8)
        self._per_second = per_second
        self._clock = clock
        self._ending = threading.Event()
        path.mkdir()
        token = path.with_name(f"{path.name}.token")
        token.write_text(service.token)
        control = {
            "url": service.url, "token_file": str(token), "run_uid": self.uid, "attempt_uid": secrets.token_hex(8),
            "outbox_mb": 64,
        }  # fmt: skip
        config = {"command": ["rhyme", "train"], "settings": {"control": control, "run": {"name": path.name}}}
        (path / CONFIG_FILE).write_text(json.dumps(config))
        self._start_reporter()
        self._writer = threading.Thread(target=self._write, name=path.name)
        self._writer.start()

    def stop(self) -> None:
        """End the run; its reporter sends the rest."""
        self._ending.set()
        self._writer.join()
        assert self._reporter.stdin is not None
        self._reporter.stdin.close()

    def end(self) -> None:
        """End the run, and wait for its reporter. Raises RuntimeError when that has not sent everything."""
        end = time.monotonic() + REPORTER_SECONDS
        self.stop()
        while code := self._reporter.wait(REPORTER_SECONDS):
            if code != NOT_SENT or time.monotonic() > end:
                raise RuntimeError(f"the reporter of {self.path} ended with {code}, see its log")
            # A reporter gives up 30 s after its run's end, too early on a busy machine. The next goes on from there.
            self._start_reporter()
            self.stop()

    def _start_reporter(self) -> None:
        command = [*python("rhyme_openrlhf.telemetry.reporter", self._clock), str(self.path)]
        with self.path.with_name(f"{self.path.name}.log").open("ab") as log:
            self._reporter = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=log)

    def events(self) -> Iterator[dict[str, Any]]:
        """Return the lines of the run's log."""
        with (self.path / EVENTS_FILE).open("rb") as file:
            yield from map(json.loads, file)

    def _write(self) -> None:
        began = time.monotonic()
        written = 0
        with EventLog(self.path / EVENTS_FILE) as log:
            for recorded in _endless():
                if self._ending.is_set():
                    break
                log.write(recorded.event, recorded.source, self._now())
                written += 1
                ahead = written / self._per_second - (time.monotonic() - began)
                # Not after each: a sleep costs more than a line.
                if ahead > 0.01:
                    time.sleep(ahead)
            log.write(RunFinished("succeeded", "", time.monotonic() - began), "driver", self._now())

    def _now(self) -> float:
        return time.time() + (float(self._clock.read_text()) if self._clock else 0.0)


def _endless() -> Iterator[Recorded]:
    """Yield the recorded run without its end, and then its steps again and again, counting on."""
    found = [parse(json.loads(line)) for line in RECORDED.read_text().splitlines()]
    recorded = [one for one in found if one is not None]
    assert recorded[-1].event.kind == RunFinished.kind
    yield recorded[0]
    body = recorded[1:-1]
    steps = max(getattr(one.event, "step", 0) for one in body)
    for repetition in itertools.count():
        for one in body:
            if step := getattr(one.event, "step", 0):
                yield replace(one, event=msgspec.structs.replace(one.event, step=step + repetition * steps))
            else:
                yield one


@dataclass(frozen=True)
class Count:
    """Comparison of a service's data of a run with the run's own record.

    Events: written, missing, stored more than once, stored but not as written or never written. `derived`: rows of
    derived
    tables that differ from those of a service into which the run's directory was imported.
    """

    written: int
    missing: int
    doubled: int
    different: int
    derived: int
    dropped: int
    status: str

    @property
    def whole(self) -> bool:
        """Return whether nothing is lost, doubled or wrong."""
        wrong = self.missing + self.doubled + self.different + self.derived + self.dropped
        return not wrong and self.status == "succeeded"


def count(run: ReportedRun, service: Service, imported: Service) -> Count:
    """Count; `imported` is a service that knows nothing of the run yet."""
    written = {(row["source"], row["sequence"]): row for row in run.events()}
    stored: dict[tuple[str, int], dict[str, Any]] = {}
    doubled = 0
    for row in service.events(run.uid):
        key = (row["source"], row["sequence"])
        doubled += key in stored
        stored[key] = row
    imported.client.post("/imports", json={"directory": str(run.path)}, timeout=300.0).raise_for_status()
    ours, theirs = service.derived(run.uid), imported.derived(run.uid)
    assert theirs, "the imported run has no steps: the comparison shows nothing"
    shown = service.client.get(f"/runs/{run.uid}").raise_for_status().json()
    return Count(
        written=len(written),
        missing=len(written.keys() - stored.keys()),
        doubled=doubled,
        different=sum(row != written.get(key) for key, row in stored.items()),
        derived=((ours - theirs) + (theirs - ours)).total(),
        dropped=shown["dropped_events"],
        status=shown["status"],
    )
