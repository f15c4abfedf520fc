"""Speed of the control plane's ingestion, and of its pages meanwhile. Measured on this machine.

    python benchmarks/ingest.py --out ingest.json            # SQLite and a temporary PostgreSQL, 10 million rows each
    python benchmarks/ingest.py --stores sqlite --rows 500000 --seconds 20                      # smaller
    python benchmarks/ingest.py --url http://127.0.0.1:8420 --token-file F --rows 500000        # a running service

First the ingestion itself fills the store to `--rows` rows, of all tables, with nobody reading. Then the clock runs,
for about `--seconds` each way:

- `http`: a `rhyme serve` on that store with its own defaults;
- `functions`: the service's functions called by threads of this process, which share one interpreter with the readers.

Each time 8 reporters send a recorded run's events (`recorded_load.py`), one run each, as fast as the service takes
them. Meanwhile two readers send the queries of a run's page, one after the other. The load is made before the clock
runs. Exit status 1: a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
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
from pathlib import Path
from typing import Any

from recorded_load import BATCH_EVENTS, Recording, Reporter
from run_pages import PAGES, Way, by_functions, over_http
from sqlalchemy import text

from rhyme_openrlhf.api.store.base import Base
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.client import exchange

ROOT = Path(__file__).parents[1]
# Batches each reporter sends between two looks at the clock: some seconds' work.
ROUND_BATCHES = 20
# While nobody reads: one prepares its batch while the other's is written.
FILLERS = 2
READERS = 2
# A page is looked at about this often by one person.
READER_PAUSE_SECONDS = 0.05
TARGET_EVENTS_PER_SECOND = 20_000
TARGET_P95_MS = 50.0
# Rows that one event of the recording leaves in all tables, for a service whose store cannot be counted.
ROWS_PER_EVENT = 2.29
START_SECONDS = 60.0


@contextmanager
def serving(store_url: str, workers: int) -> Iterator[tuple[str, str]]:
    """Yield the address of a `rhyme serve` on this store, without Ray, and an operator's token."""
    with tempfile.TemporaryDirectory(prefix="rhyme-ingest-") as data:
        arguments = ["serve", "--no-local", "--serve.port", "0", "--serve.data_dir", data]
        arguments += ["--serve.database", store_url, "--serve.ingest_workers", str(workers)]
        program = "import sys; from rhyme_openrlhf.cli.main import main; sys.exit(main(sys.argv[1:]))"
        # So that its own log is seen, and what it prints comes at once.
        server = subprocess.Popen([sys.executable, "-uc", program, *arguments], stdout=subprocess.PIPE, text=True)
        timer = threading.Timer(START_SECONDS, server.kill)
        timer.start()
        try:
            assert server.stdout is not None
            link = next((line.split()[-1] for line in server.stdout if "#code=" in line), None)
            timer.cancel()
            if link is None:
                raise RuntimeError(f"rhyme serve gave no link to sign in within {START_SECONDS:.0f} s")
            url, _, code = link.partition("/#code=")
            yield url, exchange(url, code, "benchmark").token
        finally:
            timer.cancel()
            server.terminate()
            server.wait(60)


class Readers:
    """Ask one question after the other while others write; seconds of each answer."""

    def __init__(self, reporters: list[Reporter], ask: Callable[[Reporter, str], None]) -> None:
        self._reporters, self._ask, self._names = reporters, ask, list(PAGES)
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
        turn = number * len(self._names) // READERS
        while not self._stop.wait(READER_PAUSE_SECONDS):
            # Another run each time round the questions.
            name, run = self._names[turn % len(self._names)], turn // len(self._names) % len(self._reporters)
            begin = time.perf_counter()
            self._ask(self._reporters[run], name)
            self.seconds[name].append(time.perf_counter() - begin)
            turn += 1


class Load:
    """The reporters and what they send; what is counted of it."""

    def __init__(self, reporters: int) -> None:
        recording = Recording()
        self.reporters = [Reporter() for _ in range(reporters)]
        self._streams = [reporter.batches(recording) for reporter in self.reporters]
        self.sent = 0

    def fill(self, way: Way, events: int) -> float:
        """Send this many further events, with nobody reading; return the seconds it took."""
        seconds = 0.0
        rounds = -(-events // (len(self.reporters) * BATCH_EVENTS))
        for _ in range(rounds):
            seconds += self._round(way, 1, FILLERS)
        return seconds

    def clocked(self, way: Way, seconds: float) -> dict[str, Any]:
        """Send for so long while readers read; what came of it."""
        readers = Readers(self.reporters, way.ask)
        took: list[float] = []
        sent = self.sent
        while sum(took) < seconds:
            took.append(self._round(way, ROUND_BATCHES, len(self.reporters), readers))
        events = (self.sent - sent) / len(took)
        return {
            "events": self.sent - sent,
            "events_per_second": (self.sent - sent) / sum(took),
            "slowest_round": events / max(took),
            "pages_ms": {name: _latency(values) for name, values in sorted(readers.seconds.items())},
        }

    def _round(self, way: Way, batches: int, threads: int, readers: Readers | None = None) -> float:
        bodies = [[next(stream) for _ in range(batches)] for stream in self._streams]

        def send(reporter: Reporter, mine: list[bytes]) -> None:
            for body in mine:
                way.send(reporter, body)

        def send_all() -> None:
            with ThreadPoolExecutor(threads) as pool:
                for one in [pool.submit(send, *pair) for pair in zip(self.reporters, bodies, strict=True)]:
                    one.result()

        begin = time.perf_counter()
        if readers is None:
            send_all()
        else:
            with readers.reading():
                send_all()
        took = time.perf_counter() - begin
        self.sent += len(self.reporters) * batches * BATCH_EVENTS
        return took


def _latency(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median": 1000 * statistics.median(ordered),
        "p95": 1000 * ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "answers": len(ordered),
    }


def count(database: Database) -> int:
    """Rows of all tables."""
    with database.reading() as session:
        tables = [table.name for table in Base.metadata.sorted_tables]
        return sum(session.execute(text(f'SELECT count(*) FROM "{name}"')).scalar_one() for name in tables)


def measure_store(kind: str, chosen: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Fill a store of this kind and measure every way; results by way."""
    results = {}
    with store(kind) as url:
        database = Database(url)
        database.upgrade()
        load, way = Load(chosen.reporters), by_functions(database)
        for reporter in load.reporters:
            way.announce(reporter)
        # A first part says how many rows an event makes, so that the second ends at the number asked for.
        seconds = load.fill(way, len(load.reporters) * BATCH_EVENTS)
        rows = count(database)
        seconds += load.fill(way, int((chosen.rows - rows) * load.sent / rows))
        rows = count(database)
        filled = load.sent / seconds
        print(f"{kind}: {rows:,} rows of {load.sent:,} events, filled with {filled:,.0f} events/s", flush=True)
        services = [("http", workers) for workers in chosen.workers]
        for name, workers in [one for one in [*services, ("functions", 0)] if one[0] in chosen.ways]:
            if name == "http":
                with serving(url, workers) as (address, token):
                    result = load.clocked(over_http(address, token), chosen.seconds)
            else:
                result = load.clocked(way, chosen.seconds)
            rows_after = count(database)
            label = f"{kind} {name}" + (f" workers={workers}" if workers else "")
            results[label] = {**result, "rows": rows, "rows_after": rows_after, "filled_per_second": filled}
            print(table({label: results[label]}), flush=True)
            rows = rows_after
        database.dispose()
    return results


def measure_service(chosen: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Fill and measure a running service."""
    load, way = Load(chosen.reporters), over_http(chosen.url, chosen.token_file.read_text().strip())
    for reporter in load.reporters:
        way.announce(reporter)
    events = int(chosen.rows / ROWS_PER_EVENT)
    filled = events / load.fill(way, events)
    rows = round(load.sent * ROWS_PER_EVENT)
    result = load.clocked(way, chosen.seconds)
    rows_after = round(load.sent * ROWS_PER_EVENT)
    return {"url": {**result, "rows": rows, "rows_after": rows_after, "filled_per_second": filled}}


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
    """Return a line for each store and way, and a line for each query."""
    lines = ["store and way               events/s  slowest        events   rows before    rows after"]
    for name, result in results.items():
        lines.append(
            f"{name:26s}{result['events_per_second']:10,.0f}{result['slowest_round']:9,.0f}"
            f"{result['events']:14,}{result['rows']:14,}{result['rows_after']:14,}"
        )
    lines.append("store and way               page             median ms    p95 ms  answers")
    for name, result in results.items():
        for page, latency in result["pages_ms"].items():
            lines.append(
                f"{name:26s}  {page:15s}{latency['median']:11.1f}{latency['p95']:10.1f}{latency['answers']:9,}"
            )
    return "\n".join(lines)


def main() -> int:
    """Run and report; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", nargs="+", choices=("sqlite", "postgresql"), default=["sqlite", "postgresql"])
    parser.add_argument("--ways", nargs="+", choices=("http", "functions"), default=["http"])
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[0], help="--serve.ingest_workers of the service, one after the other"
    )
    parser.add_argument("--reporters", type=int, default=8)
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows, of all tables, before the clock runs")
    parser.add_argument("--seconds", type=float, default=75.0, help="how long the clock runs, each way")
    parser.add_argument("--url", help="a running service; without it, stores and services of the benchmark's own")
    parser.add_argument("--token-file", type=Path, help="an operator's token for --url")
    parser.add_argument("--out", type=Path, default=Path("ingest.json"))
    chosen = parser.parse_args()
    if chosen.url and chosen.token_file is None:
        parser.error("--url needs --token-file")
    results: dict[str, dict[str, Any]] = measure_service(chosen) if chosen.url else {}
    for kind in [] if chosen.url else chosen.stores:
        results.update(measure_store(kind, chosen))
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
