"""A small control plane that fails on demand: what the reporter's tests send to, over real sockets."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "rhyme_test_0123456789"
RUN, ATTEMPT = "00000000000000aa", "00000000000000bb"
# What a request meets: "ok", an HTTP status, or one of the words of `Handler._meet`.
Fault = str | int


class ControlServer:
    """Keeps what arrives by (source, sequence); `fault(number)` says what the number-th batch meets."""

    def __init__(self, fault: Callable[[int], Fault] = lambda number: "ok", port: int = 0) -> None:
        self.fault = fault
        self.bad: set[str] = set()
        self.most_events = 10**9
        self.token = TOKEN
        self.stop = False
        self.known = False
        self.stored: dict[tuple[str, int], dict[str, Any]] = {}
        self.times: Counter[tuple[str, int]] = Counter()
        self.dropped: Counter[str] = Counter()
        self.heartbeats: list[bool] = []
        self.announced: list[dict[str, Any]] = []
        self.batches = 0
        # Answers that were lost after their batch was stored.
        self.lost = 0
        self.retry_after = "0"
        self.released = threading.Event()
        server = self

        class BoundHandler(Handler):
            control = server

        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), BoundHandler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self._http.shutdown()
        self._http.server_close()

    def take(self, body: dict[str, Any]) -> int:
        """Store a batch, all or nothing; the status."""
        with self._lock:
            if not self.known:
                return 409
            if any(event.get("text") in self.bad for event in body["events"]):
                return 422
            if len(body["events"]) > self.most_events:
                return 413
            for event in body["events"]:
                key = (event["source"], event["sequence"])
                assert self.stored.setdefault(key, event) == event, "another event with the same number"
                self.times[key] += 1
            # Totals since the attempt began: telling them again counts nothing twice.
            self.dropped = Counter(body["dropped"])
            self.heartbeats.append(body["heartbeat"]["alive"])
            return 200


class Handler(BaseHTTPRequestHandler):
    control: ControlServer
    protocol_version = "HTTP/1.1"
    # An answer is written in two parts: without this, the second waits 40 ms for the first one's acknowledgement.
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_PUT(self) -> None:
        body = self._body()
        assert self.path == f"/api/v1/ingest/attempts/{ATTEMPT}"
        if not self._authorised():
            return self._answer(401, {"title": "who are you?"})
        self.control.announced.append(body)
        self.control.known = True
        self._answer(200, {"run": RUN, "attempt": 1})

    def do_POST(self) -> None:
        body = self._body()
        assert self.path == f"/api/v1/ingest/attempts/{ATTEMPT}/batches"
        if not self._authorised():
            return self._answer(401, {"title": "who are you?"})
        self.control.batches += 1
        fault = self.control.fault(self.control.batches)
        if isinstance(fault, int):
            return self._answer(fault, {"title": "made to fail"})
        if fault == "cut":
            return self._cut()
        if fault == "hang":
            self.control.released.wait(30)
            return self._cut()
        if fault == "slow":
            time.sleep(0.1)
        status = self.control.take(body)
        if fault == "lose" and status == 200:
            self.control.lost += 1
            return self._cut()
        if fault == "nonsense":
            return self._answer(200, None)
        self._answer(status, {"accepted": len(body["events"]), "duplicates": 0, "stop": self.control.stop})

    def _authorised(self) -> bool:
        return self.headers["Authorization"] == f"Bearer {self.control.token}"

    def _body(self) -> dict[str, Any]:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        body = json.loads(data)
        assert isinstance(body, dict)
        return body

    def _cut(self) -> None:
        self.close_connection = True

    def _answer(self, status: int, content: Any) -> None:
        data = b"<html>" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status in (429, 503):
            self.send_header("Retry-After", self.control.retry_after)
        self.end_headers()
        self.wfile.write(data)


def make_run(path: Path, url: str, name: str = "trial", **control: Any) -> Path:
    """A run directory that reports to `url`, as `rhyme train` makes one."""
    path.mkdir(exist_ok=True)
    (path / "logs").mkdir(exist_ok=True)
    settings = {"url": url, "token_file": "", "run_uid": RUN, "attempt_uid": ATTEMPT, "outbox_mb": 64, **control}
    config = {"command": ["rhyme", "train"], "settings": {"control": settings, "run": {"name": name}}}
    (path / "config.json").write_text(json.dumps(config))
    return path


def written(run: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Every event of a run's log by (source, sequence)."""
    rows = [json.loads(line) for line in (run / "events.jsonl").read_bytes().splitlines(keepends=True)]
    found = {(row["source"], row["sequence"]): row for row in rows}
    assert len(found) == len(rows)
    return found
