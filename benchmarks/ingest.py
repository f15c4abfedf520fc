"""How fast does the control plane take events in, and how fast are its pages meanwhile? Measured on this machine.

    python benchmarks/ingest.py --out ingest.json                            # SQLite, and a temporary PostgreSQL
    python benchmarks/ingest.py --stores sqlite --rows 2000000               # smaller
    python benchmarks/ingest.py --url http://127.0.0.1:8000 --token-file F   # a running service, over HTTP

Reporters send a recorded run's events (tests/data/recorded_run.jsonl: its mix and sizes), again and again with later
times, steps and sequences, one run each, until the store holds `--rows` rows. Without --url a thread for each reporter
decodes, checks and stores the batches as the service does, all in one process; what the batches are made of is made
before the clock runs. While they write, two readers ask what a run's page asks, one question after the other.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from sqlalchemy import text

from rhyme_openrlhf.api.announce import Announcement, announce
from rhyme_openrlhf.api.base import Base
from rhyme_openrlhf.api.batch import prepare
from rhyme_openrlhf.api.database import Database
from rhyme_openrlhf.api.ingest import ingest

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "tests" / "data" / "recorded_run.jsonl"
# What the reporter sends at most (telemetry/reporter.py).
BATCH_EVENTS = 2000
# Events each reporter sends between two looks at the clock: some seconds' work.
ROUND_BATCHES = 5
READERS = 2
# A page is looked at about this often by one person.
READER_PAUSE_SECONDS = 0.05
TARGET_EVENTS_PER_SECOND = 20_000
TARGET_P95_MS = 50.0

# What a run's page asks. {run}: its row number, {step}: a step of it, {width}: steps a point of a curve stands for.
QUESTIONS = {
    "runs": "SELECT id, uid, name, status, step, steps_total, reward, tokens_per_second, speculation_rate, "
    "bubble_fraction FROM runs WHERE archived_at IS NULL ORDER BY created_at DESC LIMIT 50",
    "epochs": "SELECT * FROM epochs WHERE run_id = {run} ORDER BY epoch",
    "last steps": "SELECT * FROM steps WHERE run_id = {run} ORDER BY step DESC LIMIT 100",
    "curve": "SELECT min(step), avg(reward), avg(rollout_seconds) FROM steps WHERE run_id = {run} "
    "GROUP BY step / {width}",
    "metric": "SELECT min(step), avg(value) FROM metrics WHERE run_id = {run} AND name = 'policy_loss' "
    "GROUP BY step / {width}",
    "engines": "SELECT * FROM engine_steps WHERE run_id = {run} AND step BETWEEN {step} AND {step} + 20",
    "timeline": 'SELECT engine, state, cause, start, "end" FROM engine_intervals WHERE run_id = {run} '
    "AND step BETWEEN {step} AND {step} + 20 ORDER BY step, engine",
    "samples": "SELECT * FROM engine_samples WHERE run_id = {run} AND step BETWEEN {step} AND {step} + 20",
    "notes": "SELECT id, time, source, body FROM events WHERE run_id = {run} AND kind = 'note' "
    "ORDER BY id DESC LIMIT 50",
}
# The same over HTTP.
PAGES = {
    "runs": "/api/v1/runs",
    "run": "/api/v1/runs/{uid}",
    "last steps": "/api/v1/runs/{uid}/steps?limit=100",
    "curve": "/api/v1/runs/{uid}/series?names=reward,rollout_seconds",
    "engines": "/api/v1/runs/{uid}/steps/{step}/engines",
    "timeline": "/api/v1/runs/{uid}/timeline?from_step={step}&to_step={step}",
    "notes": "/api/v1/runs/{uid}/events?kind=note",
}


class Recording:
    """The recorded run as a template that is filled in for each repetition."""

    def __init__(self, path: Path = RECORDED) -> None:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [row for row in rows if row["kind"] not in ("run_started", "run_finished")]
        self.events = len(rows)
        self.steps = max(row.get("step", 0) for row in rows)
        self._lines = []
        counts: dict[str, int] = defaultdict(int)
        first = rows[0]["time"]
        self._seconds = rows[-1]["time"] - first
        for row in rows:
            fields = {"time": "%.6f", "sequence": "%d"}
            values = [row["time"], counts[row["source"]]]
            counts[row["source"]] += 1
            for name in ("step", "start", "end"):
                if name in row:
                    fields[name] = "%d" if name == "step" else "%.6f"
                    values.append(row[name])
            marked = {key: f"@{fields[key]}@" if key in fields else value for key, value in row.items()}
            template = json.dumps(marked).replace("%", "%%")
            for form in set(fields.values()):
                template = template.replace(f'"@%{form}@"', form)
            # In the order in which they stand in the line.
            names = [name for name in row if name in fields]
            of = dict(zip(fields, values, strict=True))
            kinds = [row["source"] if name == "sequence" else name for name in names]
            self._lines.append((template, [of[name] for name in names], kinds))
        self._per_source = dict(counts)

    def lines(self, repetition: int) -> Iterator[str]:
        """The JSON lines of one repetition, each counting on where the one before ended."""
        steps, seconds = repetition * self.steps, repetition * self._seconds
        shifts = {"step": steps, "time": seconds, "start": seconds, "end": seconds}
        for source, count in self._per_source.items():
            shifts[source] = repetition * count
        for template, values, kinds in self._lines:
            yield template % tuple(value + shifts[kind] for value, kind in zip(values, kinds, strict=True))


@dataclass
class Reporter:
    """One run's sender: an endless stream of batches."""

    run_uid: str = field(default_factory=lambda: secrets.token_hex(8))
    attempt_uid: str = field(default_factory=lambda: secrets.token_hex(8))
    steps: int = 0

    def batches(self, recording: Recording) -> Iterator[bytes]:
        """Bodies of requests."""
        lines: list[str] = []
        for repetition in range(1_000_000_000):
            lines += recording.lines(repetition)
            self.steps = (repetition + 1) * recording.steps
            while len(lines) >= BATCH_EVENTS:
                yield ('{"events": [' + ", ".join(lines[:BATCH_EVENTS]) + "]}").encode()
                del lines[:BATCH_EVENTS]


Send = Callable[[Reporter, bytes], None]
Ask = Callable[[Reporter, str], None]


def direct(database: Database) -> tuple[Callable[[Reporter], None], Send, Ask, Callable[[], int]]:
    """Announce, send and ask by the service's own functions, and count rows."""
    decode = msgspec.json.Decoder().decode
    numbers: dict[str, int] = {}

    def start(reporter: Reporter) -> None:
        with database.writing() as session:
            attempt = announce(
                session, Announcement(reporter.attempt_uid, reporter.run_uid, "benchmark", "/", {}), time.time()
            )
            numbers[reporter.run_uid] = attempt.run_id

    def send(reporter: Reporter, body: bytes) -> None:
        arrived = prepare(decode(body)["events"])
        with database.writing() as session:
            ingest(session, reporter.attempt_uid, arrived, time.time())

    def ask(reporter: Reporter, name: str) -> None:
        values = {"run": numbers[reporter.run_uid], "step": reporter.steps // 2, "width": max(1, reporter.steps // 500)}
        with database.reading() as session:
            session.execute(text(QUESTIONS[name].format(**values))).all()

    def count() -> int:
        with database.reading() as session:
            tables = [table.name for table in Base.metadata.sorted_tables]
            return sum(session.execute(text(f'SELECT count(*) FROM "{name}"')).scalar_one() for name in tables)

    return start, send, ask, count


def over_http(url: str, token: str) -> tuple[Callable[[Reporter], None], Send, Ask]:
    """The same through a running service."""
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

    def start(reporter: Reporter) -> None:
        body = {"run_uid": reporter.run_uid, "name": "benchmark", "run_directory": "/", "config": {}}
        request("PUT", f"/api/v1/ingest/attempts/{reporter.attempt_uid}", json.dumps(body).encode())

    def send(reporter: Reporter, body: bytes) -> None:
        request("POST", f"/api/v1/ingest/attempts/{reporter.attempt_uid}/batches", body)

    def ask(reporter: Reporter, name: str) -> None:
        request("GET", PAGES[name].format(uid=reporter.run_uid, step=max(1, reporter.steps // 2)))

    return start, send, ask


class Readers:
    """Ask one question after the other while others write; seconds of each answer."""

    def __init__(self, reporters: list[Reporter], ask: Ask, names: list[str]) -> None:
        self._reporters, self._ask, self._names = reporters, ask, names
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._stop = threading.Event()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read as long as the block runs."""
        self._stop.clear()
        with ThreadPoolExecutor(READERS) as pool:
            readers = [pool.submit(self._read, number) for number in range(READERS)]
            try:
                yield
            finally:
                self._stop.set()
            for reader in readers:
                reader.result()

    def _read(self, number: int) -> None:
        turn = number
        while not self._stop.wait(READER_PAUSE_SECONDS):
            name = self._names[turn % len(self._names)]
            begin = time.perf_counter()
            self._ask(self._reporters[turn % len(self._reporters)], name)
            self.seconds[name].append(time.perf_counter() - begin)
            turn += 1


def measure(
    start: Callable[[Reporter], None],
    send: Send,
    ask: Ask,
    names: list[str],
    chosen: argparse.Namespace,
    rows_per_event: Callable[[int], float],
) -> dict[str, Any]:
    """Fill a store and watch; returns the record."""
    recording = Recording()
    reporters = [Reporter() for _ in range(chosen.reporters)]
    for reporter in reporters:
        start(reporter)
    streams = [reporter.batches(recording) for reporter in reporters]
    readers = Readers(reporters, ask, names)
    rates: list[float] = []
    sent, rows, seconds = 0, 0.0, 0.0
    with ThreadPoolExecutor(chosen.reporters) as pool:
        while rows < chosen.rows:
            rounds = [[next(stream) for _ in range(ROUND_BATCHES)] for stream in streams]
            # Only what was asked of the full store counts.
            readers.seconds.clear()
            begin = time.perf_counter()
            with readers.reading():
                done = [
                    pool.submit(lambda r=reporter, b=bodies: [send(r, body) for body in b])  # type: ignore[misc]
                    for reporter, bodies in zip(reporters, rounds, strict=True)
                ]
                for one in done:
                    one.result()
            took = time.perf_counter() - begin
            events = chosen.reporters * ROUND_BATCHES * BATCH_EVENTS
            sent, seconds = sent + events, seconds + took
            rates.append(events / took)
            if len(rates) % 10 == 1:
                rows = sent * rows_per_event(sent)
                print(f"  {sent:>11,} events, {rows:>12,.0f} rows, {rates[-1]:>9,.0f} events/s", flush=True)
    with readers.reading():  # at least as many answers as make a p95, while the last rounds are sent again
        readers.seconds.clear()
        end = time.perf_counter() + chosen.page_seconds
        with ThreadPoolExecutor(chosen.reporters) as pool:
            while time.perf_counter() < end:
                rounds = [[next(stream)] for stream in streams]
                list(pool.map(lambda pair: send(pair[0], pair[1][0]), zip(reporters, rounds, strict=True)))
    return {
        "events": sent,
        "rows": round(sent * rows_per_event(sent)),
        "events_per_second": sent / seconds,
        "slowest_round": min(rates),
        "pages_ms": {name: _latency(values) for name, values in sorted(readers.seconds.items())},
    }


def _latency(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median": 1000 * statistics.median(ordered),
        "p95": 1000 * ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "answers": len(ordered),
    }


def run_direct(url: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """One store, by the service's own functions."""
    database = Database(url)
    database.upgrade()
    start, send, ask, count = direct(database)
    ratios: list[float] = []

    def rows_per_event(sent: int) -> float:
        # Counting millions of rows takes seconds, and the ratio does not change.
        if not ratios:
            ratios.append(count() / sent)
        return ratios[0]

    try:
        return measure(start, send, ask, list(QUESTIONS), chosen, rows_per_event)
    finally:
        database.dispose()


@contextmanager
def store(kind: str) -> Iterator[str]:
    """URL of an empty store of this kind."""
    if kind == "sqlite":
        with tempfile.TemporaryDirectory(prefix="rhyme-ingest-") as folder:
            yield f"sqlite:///{folder}/store.db"
        return
    command = [sys.executable, str(ROOT / "scripts" / "temporary_postgresql.py"), "--fsync"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.stdin.close()
        server.wait(60)


def table(results: dict[str, dict[str, Any]]) -> str:
    """A line for each store and a line for each question."""
    lines = ["store       events/s  slowest        events          rows"]
    for name, result in results.items():
        lines.append(
            f"{name:10s}{result['events_per_second']:10,.0f}{result['slowest_round']:9,.0f}"
            f"{result['events']:14,}{result['rows']:14,}"
        )
    lines.append("store       page             median ms    p95 ms  answers")
    for name, result in results.items():
        for page, latency in result["pages_ms"].items():
            lines.append(
                f"{name:10s}  {page:15s}{latency['median']:11.1f}{latency['p95']:10.1f}{latency['answers']:9,}"
            )
    return "\n".join(lines)


def main() -> int:
    """Run and report; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", nargs="+", choices=("sqlite", "postgresql"), default=["sqlite", "postgresql"])
    parser.add_argument("--reporters", type=int, default=8)
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows, of all tables, that a store gets")
    parser.add_argument("--page-seconds", type=float, default=30.0, help="how long pages are asked for at the end")
    parser.add_argument("--url", help="a running service; without it, the stores themselves")
    parser.add_argument("--token-file", type=Path, help="an operator's token for --url")
    parser.add_argument("--out", type=Path, default=Path("ingest.json"))
    chosen = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    if chosen.url:
        start, send, ask = over_http(chosen.url, chosen.token_file.read_text().strip())
        # As counted by the direct measurement.
        results["http"] = measure(start, send, ask, list(PAGES), chosen, lambda sent: 2.3)
    for kind in [] if chosen.url else chosen.stores:
        print(f"{kind}:", flush=True)
        with store(kind) as url:
            results[kind] = run_direct(url, chosen)
    chosen.out.write_text(json.dumps({"kind": "measured", "cpus": os.cpu_count(), "results": results}, indent=1) + "\n")
    print(table(results))
    met = all(
        result["events_per_second"] >= TARGET_EVENTS_PER_SECOND
        and all(latency["p95"] <= TARGET_P95_MS for latency in result["pages_ms"].values())
        for result in results.values()
    )
    print("targets met" if met else "targets missed")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
