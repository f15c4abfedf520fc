"""Two helpers beside a driver: the reporter's process, and a thread that records what the run's machines do.

`Reporting` starts the reporter (telemetry/reporter.py), and starts it again when it died. `SystemWatch` records a
SystemSample of each machine every few seconds. It looks at the driver's machine itself; each other machine with actors
of the run gets a small actor that looks.

Invariants:
- The run never waits for either while it trains. At its end it waits for the reporter for at most END_SECONDS, so that
  a container that ends with its first process has its last events sent.
- A reporter that cannot start or does not stay up costs the run one line on the terminal.
- A machine that does not answer is left out until it does.
- Ray's own figures (`ray._private.internal_api`, checked against Ray 2.55.0) are left out where Ray gives none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import ray._private.internal_api
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rhyme_openrlhf.platform.job_variables import withdraw
from rhyme_openrlhf.ray_classes import WITHOUT_TORCH
from rhyme_openrlhf.run.reaper import spare
from rhyme_openrlhf.run.supervisor import read_actors
from rhyme_openrlhf.settings.control import ControlSettings
from rhyme_openrlhf.telemetry.events import Event, Note
from rhyme_openrlhf.telemetry.reporter import CANNOT_START, FLUSH_SECONDS
from rhyme_openrlhf.telemetry.run_directory import TOKEN_VARIABLE, RunDirectory
from rhyme_openrlhf.telemetry.services import RunServices
from rhyme_openrlhf.telemetry.system_sample import SystemProbe

END_SECONDS = 5.0
# A reporter that dies at once every time must not become a load.
RESTART_SECONDS = 10.0


class Reporting:
    """The reporter of one run, kept running until `close`. Without --control.url there is none."""

    def __init__(self, run: RunDirectory, settings: ControlSettings, reaper: subprocess.Popen[bytes]) -> None:
        """Start it. The token leaves the driver's environment here, before anything of the run inherits it."""
        self._run = run
        self._settings = settings
        self._reaper = reaper
        self._token = withdraw(TOKEN_VARIABLE, os.environ)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        if settings.url:
            self._start()
            threading.Thread(target=self._keep, name="reporter", daemon=True).start()

    def close(self) -> None:
        """Have the reporter send the rest and end. Returns at once."""
        with self._lock:
            self._closing.set()
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()

    def wait(self) -> None:
        """Give the reporter a moment; say so when it is not done."""
        if self._process is None:
            return
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            told = f"still sending the last events to {self._settings.url} (for {FLUSH_SECONDS:g} s at most)"
        else:
            if code == 0:
                return
            told = f"not everything was reported to {self._settings.url}"
        print(f"rhyme train: {told}; see {self._log}. Later: rhyme runs import {self._run.path}", file=sys.stderr)

    @property
    def _log(self) -> str:
        return str(self._run.logs / "reporter.log")

    def _start(self) -> None:
        """Start one, unless the run is over meanwhile."""
        command = [sys.executable, "-m", "rhyme_openrlhf.telemetry.reporter", str(self._run.path)]
        with self._lock:
            if self._closing.is_set():
                return
            try:
                with open(self._log, "ab") as log:
                    self._process = subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        env={**os.environ, TOKEN_VARIABLE: self._token},
                        start_new_session=True,
                    )
            except OSError as error:
                print(f"rhyme train: the reporter could not be started: {error.strerror}", file=sys.stderr)
                return
            spare(self._reaper, self._process.pid)

    def _keep(self) -> None:
        """Start it again whenever it died while the run goes on."""
        while not self._closing.is_set():
            started = time.monotonic()
            if self._process is not None and self._process.wait() == CANNOT_START:
                print(f"rhyme train: the run is not reported, see {self._log}", file=sys.stderr)
                return
            self._closing.wait(max(0.0, RESTART_SECONDS - (time.monotonic() - started)))
            self._start()


SOURCE = "system"
# A look takes milliseconds; a machine that needs longer is asked again the next time.
ANSWER_SECONDS = 2.0

NodeProbe = ray.remote(num_cpus=0, runtime_env={"env_vars": WITHOUT_TORCH})(SystemProbe)


class SystemWatch:
    """Watches from `start` to `stop`; does nothing with --telemetry.system_s 0."""

    def __init__(self, services: RunServices, run_directory: Path, names: Mapping[str, str]) -> None:
        """`names` are the run's actors by id, as in `read_actors`; it may grow."""
        self._services = services
        self._every = services.settings.telemetry.system_s
        self._names = names
        self._here = ray.get_runtime_context().get_node_id()
        self._probe = SystemProbe(ray.util.get_node_ip_address(), run_directory)
        self._others: dict[str, Any] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="system-watch", daemon=True)

    def start(self) -> None:
        """Begin, if there is anything to do."""
        if not self._every:
            return
        if self._services.on_gpus and self._probe.gpus.missing:
            self._services.record(Note("info", f"no figures of GPUs are recorded: {self._probe.gpus.missing}"), SOURCE)
        self._thread.start()

    def stop(self) -> None:
        """Stop looking."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(2 * ANSWER_SECONDS)

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self._services.record_all(self._look(), SOURCE)
            except (ray.exceptions.RayError, ConnectionError, TimeoutError, RuntimeError, OSError):
                # The supervisor meets the same and says what is wrong.
                continue

    def _look(self) -> list[Event]:
        on_node: dict[str, list[tuple[str, int]]] = defaultdict(list)
        addresses: dict[str, str] = {}
        for actor in read_actors(dict(self._names)):
            if actor.alive and actor.pid:
                on_node[actor.node_id].append((actor.name, actor.pid))
                addresses[actor.node_id] = actor.node
        here = on_node.pop(self._here, [])
        asked = [
            self._other(node_id, addresses[node_id]).look.remote(processes) for node_id, processes in on_node.items()
        ]
        found: list[Event] = [self._probe.look(here, [("driver", os.getpid())], self._object_store())]
        for answer in asked:
            try:
                found.append(ray.get(answer, timeout=ANSWER_SECONDS))
            except (ray.exceptions.RayError, TimeoutError):
                continue
        return found

    def _other(self, node_id: str, address: str) -> Any:
        if node_id not in self._others:
            there = NodeAffinitySchedulingStrategy(node_id, soft=False)
            self._others[node_id] = NodeProbe.options(scheduling_strategy=there).remote(address, None)
        return self._others[node_id]

    def _object_store(self) -> int | None:
        """Bytes used of this machine's part of Ray's object store."""
        try:
            import grpc
        except ImportError:  # Ray without the packages of its dashboard
            return None
        node = next((node for node in ray.nodes() if node["NodeID"] == self._here and node["Alive"]), None)
        if node is None:
            return None
        try:
            stats = ray._private.internal_api.node_stats(
                node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False
            )
        except grpc.RpcError:
            return None
        return int(stats.store_stats.object_store_bytes_used)
