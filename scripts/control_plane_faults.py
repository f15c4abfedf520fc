r"""Make everything around the control plane fail while runs report to it, and count what it has afterwards.

    python scripts/control_plane_faults.py [--only NAME ...] [--stores sqlite postgresql] [--seconds 60] [--write]
    python scripts/control_plane_faults.py --only server_killed workers_killed --times 24 --runs 10 --per-second 40 \
        --readers 10

Each fault gets a service (`rhyme serve`) and runs whose real reporters send what a writer adds to their logs. A client
sends one event at a time and notes each response; others read pages of runs. When the fault is over and the reporters
have ended:

- Every event of every log must be in the store once, as it was written.
- Derived rows must equal, row by row, those that a fresh service makes of the run directories.
- Each event that the service confirmed to the client must be stored.
- Every response was a success, or a 503 or 507 with Retry-After.

The script exits with 1 if anything of this does not hold.

Faults of two services on one database: runs are requested from both, and the service that starts them is killed or
frozen. A pretended Ray (`recording_ray.py`) records each start. No run may be started twice. Every run that left the
queue must be started with a token that opens. The other service must take over within 30 s.

--write puts the table into docs/reliability.md. A full disk needs root: it mounts a small one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import table_in_page
from recording_ray import RecordingRay
from reported_runs import ANSWER_SECONDS, ReportedRun, Service, count
from temporary_postgresql import Server, programs

DOCS = Path(__file__).parents[1] / "docs" / "reliability.md"
MARK = "control plane faults"
STORES = ("sqlite", "postgresql")
# What a run with some hundred engines writes.
EVENTS_PER_SECOND = 400.0
# Between two events of the client that sends one at a time.
SINGLE_SECONDS = 0.02
# Limit for a wait under a fault, or after it, on a machine that does much else.
LIMIT_SECONDS = 300.0
# A PostgreSQL cluster with its first write-ahead log has 40 MB; the rest is for what the runs write.
DISK_MB = 400
REFUSALS = (503, 507)
# What is left of a disk when it fills up: some hundred events.
LEFT_BYTES = 128 * 1024
# How long it stays full, and how far clocks jump.
FULL_SECONDS = 2.0
LONGEST_JUMP_SECONDS = 48 * 3600.0
# What is promised of a service whose holder of the lease has gone.
TAKEOVER_SECONDS = 30.0
# Runs that are asked for at once, through each of two services; and for how long late starts are waited for.
QUEUED_AT_ONCE = 3
LATE_SECONDS = 6.0


class Single(threading.Thread):
    """Sends one event at a time and never again; notes the answers, and what was said to be stored."""

    def __init__(self, service: Service) -> None:
        super().__init__(name="single")
        self.run_uid = secrets.token_hex(8)
        self.stored: set[int] = set()
        self.answers: Counter[str] = Counter()
        self.ending = threading.Event()
        self._service = service
        self._path = f"/ingest/attempts/{secrets.token_hex(8)}"
        who = {"run": self.run_uid, "name": "single", "run_directory": "/", "config": {}}
        service.client.put(self._path, json=who).raise_for_status()

    def run(self) -> None:
        """Run until `ending`."""
        number = 0
        while not self.ending.wait(SINGLE_SECONDS):
            note = {"kind": "note", "level": "info", "text": str(number), "source": "single", "sequence": number}
            try:
                answer = self._service.client.post(
                    f"{self._path}/batches", json={"events": [{**note, "time": time.time()}]}
                )
            except httpx.TransportError:
                self.answers["none"] += 1
            else:
                come_again = "" if answer.status_code not in REFUSALS or "retry-after" in answer.headers else " at once"
                self.answers[f"{answer.status_code}{come_again}"] += 1
                if answer.is_success:
                    self.stored.add(number)
            number += 1

    def refused(self) -> int:
        """Return how often the service asked the client to come again."""
        return sum(self.answers[str(status)] for status in REFUSALS)

    def lost(self) -> int:
        """Return how many confirmed events are missing in the store."""
        return len(self.stored - {int(row["text"]) for row in self._service.events(self.run_uid)})


class Reader(threading.Thread):
    """Reads runs, a run's curves, its events and its page, one after the other; notes the answers."""

    def __init__(self, service: Service, run: str, ending: threading.Event) -> None:
        super().__init__(name="reader", daemon=True)
        self.answers: Counter[str] = Counter()
        self._service = service
        self._ending = ending
        self._pages = [
            "/api/v1/runs", f"/api/v1/runs/{run}", f"/api/v1/runs/{run}/series?names=reward",
            f"/api/v1/runs/{run}/events?direction=desc", "/healthz",
        ]  # fmt: skip

    def run(self) -> None:
        """Run until `ending`."""
        headers = {"Authorization": f"Bearer {self._service.token}"}
        with httpx.Client(base_url=self._service.url, headers=headers, timeout=ANSWER_SECONDS) as client:
            while not self._ending.wait(SINGLE_SECONDS):
                for page in self._pages:
                    try:
                        self.answers[str(client.get(page).status_code)] += 1
                    except httpx.TransportError:
                        self.answers["none"] += 1


@dataclass
class Pair:
    """Two services on one database, their clusters (one may be both's), and the runs that were asked for."""

    services: tuple[Service, Service]
    rays: tuple[RecordingRay, RecordingRay]
    attempts: list[str] = field(default_factory=list)
    takeovers: list[float] = field(default_factory=list)

    def ask(self, service: Service) -> None:
        """Ask for some runs."""
        for _ in range(QUEUED_AT_ONCE):
            run = service.client.post("/runs", json={"command": "rhyme demo"}).raise_for_status().json()
            self.attempts.append(run["attempts"][0]["uid"])

    def holder(self) -> tuple[Service, Service]:
        """Return the service that dispatches, and the other one. Both must agree on it."""
        first, second = self.services
        told = [one.client.get("/dispatcher").raise_for_status().json() for one in self.services]
        if told[0]["pid"] != told[1]["pid"] or told[0]["here"] == told[1]["here"]:
            raise RuntimeError(f"the services do not agree on who dispatches: {told}")
        return (first, second) if told[0]["here"] else (second, first)

    def started(self, attempt: str) -> int:
        """Return how often a cluster was asked to start it."""
        return sum(ray.asked[attempt] for ray in {id(ray): ray for ray in self.rays}.values())

    def count(self) -> tuple[dict[str, int], list[str]]:
        """Runs that were started once, twice and not; and what is wrong with them."""
        times = Counter(min(self.started(attempt), 2) for attempt in self.attempts)
        shown = self.services[0].client.get("/runs", params={"limit": 1000}).raise_for_status().json()["items"]
        problems = [f"{sum(run['status'] == 'queued' for run in shown)} runs are still queued"]
        closed = [uid for ray in self.rays for uid, token in ray.tokens.items() if not self._opens(uid, token)]
        problems += [f"the reporter's token of attempt {uid} opens nothing" for uid in closed]
        if times[2]:
            problems.append(f"{times[2]} runs were started twice")
        if max(self.takeovers, default=0.0) > TAKEOVER_SECONDS:
            problems.append(f"a takeover took more than {TAKEOVER_SECONDS:g} s: {self.takeovers}")
        return {"once": times[1], "twice": times[2], "not": times[0]}, problems[problems[0].startswith("0 ") :]

    def _opens(self, attempt: str, token: str) -> bool:
        path, headers = f"/ingest/attempts/{attempt}/batches", {"Authorization": f"Bearer {token}"}
        return self.services[0].client.post(path, json={"events": []}, headers=headers).is_success


@dataclass
class Bench:
    """One fault's service and what it stands on."""

    service: Service
    single: Single
    seconds: float
    disk: Path
    clocks: list[Path]
    postgresql: Server | None
    pair: Pair | None = None
    least: int = 1
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    times: int = 0

    @property
    def run_clock(self) -> Path | None:
        """The clock of runs and reporters, if it is not the machine's."""
        return self.clocks[1] if self.clocks else None

    def under_way(self) -> bool:
        """Return whether the fault is to happen (again)."""
        return time.monotonic() < self._end or self.times < self.least

    def begin(self) -> None:
        """Start counting `seconds`."""
        self._end = time.monotonic() + self.seconds

    def until(self, true: Callable[[], bool], what: str) -> None:
        """Raises RuntimeError after LIMIT_SECONDS."""
        end = time.monotonic() + LIMIT_SECONDS
        while not true():
            if time.monotonic() > end:
                raise RuntimeError(f"waited {LIMIT_SECONDS:g} s for {what}; answers: {dict(self.single.answers)}")
            time.sleep(0.02)

    def until_stored(self) -> None:
        """Wait until the service takes events (again)."""
        known = len(self.single.stored)
        self.until(lambda: len(self.single.stored) > known + 1, "the service to take events")


def kill_server(bench: Bench) -> None:
    """Also while it starts."""
    while bench.under_way():
        if bench.times % 4 != 3:
            bench.until_stored()
        time.sleep(bench.chance.random())
        bench.service.kill()
        bench.service.start()
        bench.times += 1
    bench.service.wait()


def kill_workers(bench: Bench) -> None:
    """Kill one of the processes in which the service stores batches."""
    while bench.under_way():
        bench.until_stored()
        time.sleep(bench.chance.random() / 2)
        with suppress(psutil.NoSuchProcess):
            below = psutil.Process(bench.service.process.pid).children()
            bench.chance.choice([one for one in below if "spawn_main" in " ".join(one.cmdline())]).kill()
            bench.times += 1
    bench.until_stored()


def kill_postgresql(bench: Bench) -> None:
    """Kill in turn all of PostgreSQL, then starting it again, and one of its processes, after which it recovers by
    itself.
    """
    assert bench.postgresql is not None
    while bench.under_way():
        bench.until_stored()
        time.sleep(bench.chance.random())
        main = psutil.Process(bench.postgresql.process)
        below = main.children()
        if bench.times % 2:
            try:
                bench.chance.choice(below).kill()
            except psutil.NoSuchProcess:  # its connection was closed since the look
                continue
        else:
            main.kill()
            # They see it and end; a server that starts before is refused.
            psutil.wait_procs(below, LIMIT_SECONDS)
            bench.postgresql.start()
        bench.times += 1
    bench.until_stored()


def fill_disk(bench: Bench) -> None:
    """Fill the disk; afterwards restart PostgreSQL if it stopped for lack of space."""
    ballast = bench.disk / "ballast"
    while bench.under_way():
        reader = _new_reader(bench)
        _fill(ballast)
        _until_refused(bench, reader)
        ballast.unlink()
        if bench.postgresql is not None and not psutil.pid_exists(bench.postgresql.process):
            bench.postgresql.start()
        bench.times += 1
        bench.until_stored()


def _fill(ballast: Path) -> None:
    """Others write meanwhile: what was free when it was asked may not be any more."""
    with ballast.open("wb") as file:
        while (free := shutil.disk_usage(ballast.parent).free - LEFT_BYTES) > 0:
            with suppress(OSError):
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), free)


def limit_files(bench: Bench) -> None:
    """Forbid that any file grows beyond the database's present size, which every user can do to their own process."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    while bench.under_way():
        reader = _new_reader(bench)
        largest = max(path.stat().st_size for path in bench.disk.rglob("rhyme.sqlite*"))
        _limit_files(bench.service.process.pid, (largest, hard))
        _until_refused(bench, reader)
        _limit_files(bench.service.process.pid, (hard, hard))
        bench.times += 1
        bench.until_stored()


def _limit_files(service: int, limits: tuple[int, int]) -> None:
    """Limit files of the service and of its processes that take batches in."""
    for process in (service, *(child.pid for child in psutil.Process(service).children(recursive=True))):
        resource.prlimit(process, resource.RLIMIT_FSIZE, limits)


def _until_refused(bench: Bench, reader: dict[str, str]) -> None:
    known = bench.single.refused()
    bench.until(lambda: bench.single.refused() > known, "the disk to be full")
    time.sleep(FULL_SECONDS)
    # What is there can be seen all the while.
    for path in ("/runs", f"/runs/{bench.single.run_uid}/events"):
        bench.service.client.get(path, headers=reader).raise_for_status()


def _new_reader(bench: Bench) -> dict[str, str]:
    """Return the header of a new viewer, whose first use the store would like to record."""
    bench.until_stored()
    issued = bench.service.client.post("/tokens", json={"name": "reader", "role": "viewer"}).raise_for_status().json()
    return {"Authorization": f"Bearer {issued['token']}"}


def turn_clocks(bench: Bench) -> None:
    """Turn the clocks of the service, and of runs and reporters: forward and back, each by itself."""
    while bench.under_way():
        bench.until_stored()
        for clock in bench.clocks:
            new = clock.with_suffix(".new")
            new.write_text(str(bench.chance.uniform(-1, 1) * LONGEST_JUMP_SECONDS))
            new.replace(clock)
        time.sleep(bench.chance.random())
        bench.times += 1


def kill_holder(bench: Bench) -> None:
    """Kill the service that starts runs; it comes back when the other has taken over."""
    pair = bench.pair
    assert pair is not None
    while bench.under_way():
        holder, other = _ask_both(bench, pair)
        began = time.monotonic()
        holder.kill()
        _take_over(bench, pair, other, began)
        holder.start()
        holder.wait()
        bench.times += 1
    _until_started(bench, pair)


def freeze_holder(bench: Bench) -> None:
    """Freeze the service, like a suspended machine; it wakes when the other has taken over, and must not act."""
    pair = bench.pair
    assert pair is not None
    while bench.under_way():
        holder, other = _ask_both(bench, pair)
        began = time.monotonic()
        holder.process.send_signal(signal.SIGSTOP)
        try:
            _take_over(bench, pair, other, began)
        finally:
            holder.process.send_signal(signal.SIGCONT)
        if pair.holder()[0] is not other:
            raise RuntimeError("the service that was frozen dispatches again, without having waited for the lease")
        bench.times += 1
    _until_started(bench, pair)


def _ask_both(bench: Bench, pair: Pair) -> tuple[Service, Service]:
    """Ask for runs through both services; who dispatches and who does not, somewhere in a turn."""
    bench.until(lambda: any(one.client.get("/dispatcher").json()["here"] for one in pair.services), "a dispatcher")
    for one in pair.services:
        pair.ask(one)
    time.sleep(2 * bench.chance.random())
    return pair.holder()


def _take_over(bench: Bench, pair: Pair, other: Service, began: float) -> None:
    """Ask the other one for runs, and wait until it dispatches."""
    pair.ask(other)
    bench.until(lambda: other.client.get("/dispatcher").json()["here"], "the other service to take over")
    pair.takeovers.append(round(time.monotonic() - began, 1))


def _until_started(bench: Bench, pair: Pair) -> None:
    """Wait until no run is queued and late starts have arrived."""

    def queued() -> int:
        shown = pair.services[0].client.get("/runs", params={"status": "queued"}).raise_for_status()
        return len(shown.json()["items"])

    bench.until(lambda: not queued(), "the queue to be empty")
    time.sleep(LATE_SECONDS)


@dataclass(frozen=True)
class Fault:
    """One fault; `act` makes it happen again and again.

    `mounts`: on a disk of its own, which only root can mount; `refuses`: the service must have refused something;
    `turns_clocks`: service and runs have clocks of their own; `clusters`: number of clusters, with two services that
    share
    the database.
    """

    text: str
    act: Callable[[Bench], None]
    stores: tuple[str, ...] = STORES
    mounts: bool = False
    refuses: bool = False
    turns_clocks: bool = False
    clusters: int = 0


FAULTS = {
    "server_killed": Fault("kill -9 of the service", kill_server),
    "workers_killed": Fault("kill -9 of a process that stores batches", kill_workers),
    "postgresql_killed": Fault("kill -9 of PostgreSQL or one of its processes", kill_postgresql, ("postgresql",)),
    "disk_full": Fault("the store's disk is full", fill_disk, mounts=True, refuses=True),
    "file_limit": Fault("the store's files may not grow", limit_files, ("sqlite",), refuses=True),
    "clock_jumps": Fault("clocks jump by up to 48 hours, forward and back", turn_clocks, turns_clocks=True),
    "holder_killed": Fault("two services, one cluster: kill -9 of the one that starts runs", kill_holder, clusters=1),
    "holder_frozen": Fault("two services, two clusters: the one that starts runs is frozen", freeze_holder, clusters=2),
}


@dataclass(frozen=True)
class Clients:
    """Runs that report at the same time, the events per second of each, and clients that read."""

    runs: int
    per_second: float
    readers: int


def measure(name: str, store: str, seconds: float, times: int, clients: Clients, folder: Path) -> dict[str, Any]:
    """Make one fault happen for `seconds` and at least `times`, in an empty folder; the row of the table."""
    fault = FAULTS[name]
    with ExitStack() as stack:
        bench = _set_up(fault, store, seconds, folder, stack)
        imported = Service(folder / "imported", log=folder / "imported.log", roots=folder)
        stack.callback(imported.end)
        runs = []
        for number in range(clients.runs):
            run = ReportedRun(folder / f"run-{number}", bench.service, clients.per_second, bench.run_clock)
            stack.callback(run.stop)
            runs.append(run)
        readers = [Reader(bench.service, bench.single.run_uid, bench.single.ending) for _ in range(clients.readers)]
        for reader in readers:
            reader.start()
        bench.least = times
        bench.begin()
        fault.act(bench)
        bench.single.ending.set()
        for thread in (bench.single, *readers):
            thread.join()
        ended = time.monotonic()
        for run in runs:
            run.end()
        caught_up = time.monotonic() - ended
        counts = [count(run, bench.service, imported) for run in runs]
        lost = bench.single.lost()
        started, wrong = bench.pair.count() if bench.pair is not None else ({}, [])
        takeovers = bench.pair.takeovers if bench.pair is not None else []
    answers = sum((one.answers for one in readers), bench.single.answers)
    allowed = {"200", "none", *map(str, REFUSALS)}
    problems = [f"run {number}: {asdict(one)}" for number, one in enumerate(counts) if not one.whole]
    problems += [f"an answer {status}, {times} times" for status, times in answers.items() if status not in allowed]
    problems += wrong
    if fault.refuses and not bench.single.refused():
        problems.append("nothing was refused: the fault did not happen")
    if lost:
        problems.append(f"{lost} events that were answered with 200 are not stored")
    return {
        "fault": name,
        "store": store,
        "times": bench.times,
        "events": sum(one.written for one in counts),
        "lost": sum(one.missing + one.dropped for one in counts) + lost,
        "doubled": sum(one.doubled for one in counts),
        "different": sum(one.different + one.derived for one in counts),
        "answers": dict(answers),
        "caught_up_seconds": round(caught_up, 1),
        "started": started,
        "takeover_seconds": takeovers,
        "problems": problems,
    }


def _set_up(fault: Fault, store: str, seconds: float, folder: Path, stack: ExitStack) -> Bench:
    """Start the service, its store and its client; `stack` undoes it."""
    disk = folder / "disk"
    disk.mkdir()
    if fault.mounts:
        # Anyone may enter: PostgreSQL does not run as root.
        folder.chmod(0o755)
        options = f"size={DISK_MB}m,mode=0777"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True)
        stack.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=True)
    postgresql = None
    if store == "postgresql":
        found = programs()
        assert found is not None
        # As real servers have it: without, a killed server has lost what it had said is stored.
        postgresql = Server(found, fsync=True, folder=str(disk) if fault.mounts else "/tmp")
        stack.callback(postgresql.stop)
    clocks = [folder / "service.clock", folder / "run.clock"] if fault.turns_clocks else []
    for clock in clocks:
        clock.write_text("0")
    clusters = [RecordingRay() for _ in range(fault.clusters)]
    for cluster in clusters:
        stack.callback(cluster.end)
    service = Service(
        disk / "data",
        log=folder / "service.log",
        database=postgresql.url if postgresql is not None else "",
        clock=clocks[0] if clocks else None,
        ray=clusters[0].address if clusters else "",
    )
    stack.callback(service.end)
    pair = None
    if clusters:
        second = Service(
            folder / "second",
            log=folder / "second.log",
            database=postgresql.url if postgresql is not None else f"sqlite:///{disk}/data/rhyme.sqlite",
            ray=clusters[-1].address,
        )
        stack.callback(second.end)
        pair = Pair((service, second), (clusters[0], clusters[-1]))
    single = Single(service)
    stack.callback(single.ending.set)
    single.start()
    return Bench(service, single, seconds, disk, clocks, postgresql, pair)


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table of docs/reliability.md."""
    lines = [
        "| fault | store | times | events written | lost | doubled | rows that differ | "
        "answered 200 / 503 / not at all | queued runs started once / twice / not | longest takeover |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    names = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
    for row in rows:
        refused = sum(row["answers"].get(str(status), 0) for status in REFUSALS)
        answers = f"{row['answers'].get('200', 0):,} / {refused:,} / {row['answers'].get('none', 0):,}"
        lines.append(
            f"| {FAULTS[row['fault']].text} | {names[row['store']]} | {row['times']} | {row['events']:,} | "
            f"{row['lost']} | {row['doubled']} | {row['different']} | {answers} | {_of_two_services(row)} |"
        )
    return "\n".join(lines)


def _of_two_services(row: dict[str, Any]) -> str:
    if not row["started"]:
        return "– | –"
    started = " / ".join(str(row["started"][name]) for name in ("once", "twice", "not"))
    return f"{started} | {max(row['takeover_seconds'])} s"


def main() -> int:
    """Run the faults; returns 1 if one did not end as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each fault and store")
    parser.add_argument("--times", type=int, default=1, help="least number of faults, also if they take longer")
    parser.add_argument("--runs", type=int, default=4, help="that report at the same time")
    parser.add_argument("--readers", type=int, default=4, help="clients that read at the same time")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCS.name}")
    parser.add_argument("--out", type=Path, default=Path("control_plane_faults.json"))
    parser.add_argument("--per-second", type=float, default=EVENTS_PER_SECOND, help="events of each run")
    chosen = parser.parse_args()
    clients = Clients(chosen.runs, chosen.per_second, chosen.readers)
    rows = []
    for name in chosen.only:
        for store in FAULTS[name].stores:
            if store in chosen.stores:
                with tempfile.TemporaryDirectory(prefix="rhyme-faults-") as folder:
                    row = measure(name, store, chosen.seconds, chosen.times, clients, Path(folder))
                print(json.dumps(row), flush=True)
                rows.append(row)
    chosen.out.write_text(json.dumps(rows, indent=2) + "\n")
    print(markdown(rows))
    if chosen.write:
        table_in_page.put(DOCS, MARK, markdown(rows))
    return int(any(row["problems"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
