"""The dashboard of a pretended Ray cluster: it answers Ray's client, runs nothing, and records what it is asked for.

For scripts and tests that count which service has started which attempt, with which token. Its jobs run for ever.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rhyme_openrlhf.telemetry.run_directory import TOKEN_VARIABLE

VERSION = {"version": "4", "ray_version": "2.55.0", "ray_commit": "none", "session_name": "session"}
# Room for every run that a test starts.
GPUS = 100_000
NODE = {"node_id": "ab" * 28, "node_ip": "127.0.0.1", "state": "ALIVE", "is_head_node": True}


class RecordingRay:
    """Listens at `address` from when it is made until `end`."""

    def __init__(self) -> None:
        # Attempt -> how often its job was asked for, and the token that its reporter would use.
        self.asked: Counter[str] = Counter()
        self.tokens: dict[str, str] = {}
        self._packages: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="recording ray", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def get(self, path: str) -> tuple[int, Any]:
        """Answer a GET: status and content."""
        nodes = [{**NODE, "resources_total": {"GPU": float(GPUS), "CPU": float(GPUS)}}]
        known: dict[str, Any] = {
            "/api/version": VERSION,
            "/api/v0/nodes": {"data": {"result": {"result": nodes}}},
            "/api/v0/actors": {"data": {"result": {"result": []}}},
            "/api/cluster_status": {"data": {"clusterStatus": None}},
            "/nodes": {"data": {"nodeLogicalResources": {}}},
        }
        if path in known:
            return 200, known[path]
        name = path.rpartition("/")[2]
        if path.startswith("/api/packages/"):
            return (200 if name in self._packages else 404), {}
        return (200, {"status": "RUNNING"}) if name in self.tokens else (404, {})

    def put(self, path: str, content: bytes) -> tuple[int, Any]:
        """Keep a job's working directory."""
        self._packages[path.rpartition("/")[2]] = content
        return 200, {}

    def post(self, path: str, content: bytes) -> tuple[int, Any]:
        """Take a job, once an id; nothing can be stopped."""
        if path != "/api/jobs/":
            return 404, {}
        job = json.loads(content)
        uid = job["submission_id"]
        with self._lock:
            self.asked[uid] += 1
            if uid in self.tokens:
                return 500, f"Job with submission_id {uid} already exists."
            self.tokens[uid] = job["runtime_env"]["env_vars"][TOKEN_VARIABLE]
        return 200, {"job_id": uid, "submission_id": uid}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        ray = self

        class Handler(BaseHTTPRequestHandler):
            # An answer is written in two parts: the second would wait 40 ms for the first one's acknowledgement.
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self._answer(*ray.get(self.path.partition("?")[0]))

            def do_PUT(self) -> None:
                self._answer(*ray.put(self.path, self._body()))

            def do_POST(self) -> None:
                self._answer(*ray.post(self.path, self._body()))

            def log_message(self, format: str, *args: Any) -> None:
                """Keep quiet."""

            def _body(self) -> bytes:
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))

            def _answer(self, status: int, content: Any) -> None:
                text = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        return Handler
