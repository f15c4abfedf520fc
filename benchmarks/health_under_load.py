"""The time in which /healthz answers while many clients ask for everything that they may read.

    python benchmarks/health_under_load.py [--clients 20] [--seconds 30] [--out health.json]

A `rhyme serve` with recorded runs, in a process of its own, without a limit of requests per second. Two loads, one
after the other: `--clients` clients without any right, and as many with a viewer's token. Each sends the addresses of
the API's description and the pages, one after the other, and reads at most a megabyte of each answer. Meanwhile another
process asks /healthz twenty times a second. Exit status 1: its 95th percentile is 100 ms or more, or an answer was a
server's error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from reported_runs import Service  # noqa: E402

from rhyme_openrlhf import embedded  # noqa: E402
from rhyme_openrlhf.api.demo.recording import unpack  # noqa: E402

PROBE_SECONDS = 0.05
TARGET_MS = 100.0
MOST_BYTES = 2**20
WAIT_SECONDS = 60.0
PAGES = (
    "/",
    "/sign-in",
    "/runs/{uid}",
    "/runs/{uid}/learning",
    "/runs/{uid}/timeline",
    "/compare",
    "/cluster",
    "/nothing",
)


def addresses(service: Service) -> list[str]:
    """Return the address of every operation that only reads, and of pages; parts of paths are those of a run."""
    described = service.client.get("/openapi.json").raise_for_status().json()
    run = service.client.get("/runs").raise_for_status().json()["items"][0]["uid"]
    parts = {
        "uid": run,
        "number": "1",
        "attempt": "1",
        "name": "driver.log",
        "table": "steps",
        "step": "1",
        "figure": "1",
    }
    paths = [path for path, deeds in described["paths"].items() if "get" in deeds]
    return [re.sub(r"{(\w+)(:path)?}", lambda found: parts.get(found[1], "1"), path) for path in (*paths, *PAGES)]


class Client(threading.Thread):
    """Sends the addresses in turn, from another one on than its neighbours."""

    def __init__(self, service: Service, paths: list[str], token: str, first: int, ending: threading.Event) -> None:
        super().__init__(daemon=True)
        self.answers: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._url, self._paths, self._first, self._ending = service.url, paths, first, ending
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def run(self) -> None:
        """Run until `ending`."""
        with httpx.Client(base_url=self._url, headers=self._headers, timeout=WAIT_SECONDS, trust_env=False) as client:
            for path in itertools.islice(itertools.cycle(self._paths), self._first, None):
                if self._ending.is_set():
                    return
                with client.stream("GET", path) as answer:
                    self.answers[str(answer.status_code)] += 1
                    if answer.status_code >= 500 and "retry-after" not in answer.headers:
                        self.faults[path] += 1
                    # A stream goes on for an hour.
                    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                        left = MOST_BYTES
                        for piece in answer.iter_raw():
                            left -= len(piece)
                            if left < 0:
                                break


def probe(url: str, ending: Event, found: Any) -> None:
    """Put the milliseconds of each answer of /healthz into the queue `found`."""
    times = []
    with httpx.Client(base_url=url, timeout=WAIT_SECONDS, trust_env=False) as client:
        while not ending.wait(PROBE_SECONDS):
            began = time.perf_counter()
            client.get("/healthz").raise_for_status()
            times.append(1000 * (time.perf_counter() - began))
    found.put(times)


def load(service: Service, paths: list[str], token: str, clients: int, seconds: float) -> dict[str, Any]:
    """Return the times of /healthz under the load of these clients, and their answers."""
    context = multiprocessing.get_context("spawn")
    over, found, ending = context.Event(), context.Queue(), threading.Event()
    prober = context.Process(target=probe, args=(service.url, over, found))
    prober.start()
    asking = [
        Client(service, paths, token, number * len(paths) // max(1, clients), ending) for number in range(clients)
    ]
    for one in asking:
        one.start()
    time.sleep(seconds)
    over.set()
    times = sorted(found.get(timeout=2 * WAIT_SECONDS))
    prober.join()
    ending.set()
    for one in asking:
        one.join(2 * WAIT_SECONDS)
    return {
        "probes": len(times),
        "p50_ms": round(times[len(times) // 2], 1),
        "p95_ms": round(times[int(0.95 * len(times))], 1),
        "max_ms": round(times[-1], 1),
        "answers": dict(sum((one.answers for one in asking), Counter())),
        "faults": dict(sum((one.faults for one in asking), Counter())),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> int:
    """Measure; returns 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=Path("health.json"))
    chosen = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory(prefix="rhyme-health-") as name:
        folder = Path(name)
        service = Service(folder / "data", log=folder / "service.log")
        try:
            viewer = service.client.post("/tokens", json={"name": "viewer", "role": "viewer"}).json()["token"]
            for run in unpack(embedded.RECORDING, folder / "data" / "recorded"):
                service.client.post("/imports", json={"directory": str(run)}).raise_for_status()
            paths = addresses(service)
            for name, token, clients in (
                ("nobody", "", 0),
                ("anonymous", "", chosen.clients),
                ("viewers", viewer, chosen.clients),
            ):
                rows[name] = load(service, paths, token, clients, chosen.seconds)
                print(name, json.dumps(rows[name]), flush=True)
        finally:
            service.end()
    chosen.out.write_text(json.dumps(rows, indent=2) + "\n")
    return int(any(row["p95_ms"] >= TARGET_MS or row["faults"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
