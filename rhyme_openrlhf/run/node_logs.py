"""Logs of a run's processes on other nodes, copied into the run directory a piece at a time.

Ray writes a process's log on the disk of its node, which may be lost with the node. So an actor on each other node of
the run reads what is new there, and the driver writes it beside the logs of its own node. Names of logs have the
worker's id, so no two are equal.

Invariants:
- A node that does not answer costs its own logs alone, and at most ANSWER_SECONDS of a look.
- A node sends at most AT_ONCE bytes at a look.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import ray._private.worker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rhyme_openrlhf.ray_classes import WITHOUT_TORCH
from rhyme_openrlhf.run.live_logs import job_of
from rhyme_openrlhf.run.supervisor import read_actors

AT_ONCE = 2**20
ANSWER_SECONDS = 5.0
# For the rest of the logs when the run has ended.
END_SECONDS = 30.0


class PlainNodeLogs:
    """The Ray actor of one node: reads what is new in logs of a run's jobs. `folder`: Ray's, for tests another."""

    def __init__(self, folder: str = "") -> None:
        self._folder = Path(folder or ray._private.worker._global_node.get_logs_dir_path())

    def read(self, jobs: Sequence[str], have: Mapping[str, int]) -> dict[str, tuple[int, bytes]]:
        """Return pieces of the logs of these jobs and where each begins; `have`: bytes of each that are there."""
        found: dict[str, tuple[int, bytes]] = {}
        room = AT_ONCE
        for log in sorted(self._folder.glob("worker-*")):
            # Ray may remove a log at any time.
            with suppress(OSError):
                if not room or job_of(log) not in jobs:
                    continue
                begin = have.get(log.name, 0)
                if begin > log.stat().st_size:
                    begin = 0  # the log was begun anew
                with log.open("rb") as file:
                    file.seek(begin)
                    piece = file.read(room)
                if piece:
                    found[log.name] = (begin, piece)
                    room -= len(piece)
        return found


NodeLogs = ray.remote(num_cpus=0, runtime_env={"env_vars": WITHOUT_TORCH})(PlainNodeLogs)


class OtherNodes:
    """Copies logs of the run's processes on nodes other than this one into `target`."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._here = ray.get_runtime_context().get_node_id()
        self._readers: dict[str, Any] = {}

    def copy(self, jobs: Sequence[str]) -> bool:
        """Copy a piece of what is new in the logs of these jobs; return whether there was any. Raises OSError."""
        asked = {reader.read.remote(list(jobs), self._have()): node for node, reader in self._on_nodes().items()}
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS) if asked else ([], [])
        new = False
        for one in ready:
            try:
                pieces = ray.get(one)
            except ray.exceptions.RayError:
                # The node is gone, or its reader died: the next look starts another.
                self._readers.pop(asked[one], None)
                continue
            for name, (begin, piece) in pieces.items():
                new = True
                self._write(name, begin, piece)
        return new

    def copy_all(self, jobs: Sequence[str]) -> None:
        """Copy all that is new, for at most END_SECONDS. Raises OSError."""
        end = time.monotonic() + END_SECONDS
        while time.monotonic() < end and self.copy(jobs):
            pass

    def _have(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self._target.glob("worker-*")}

    def _on_nodes(self) -> dict[str, Any]:
        """Return a reader for each living node with actors of the run, but this one."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        others = ({actor.node_id for actor in read_actors({})} & alive) - {self._here}
        self._readers = {node: reader for node, reader in self._readers.items() if node in others}
        for node in others - set(self._readers):
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            self._readers[node] = NodeLogs.options(scheduling_strategy=there).remote()
        return self._readers

    def _write(self, name: str, begin: int, piece: bytes) -> None:
        # A name comes from another machine, and must lead nowhere else.
        if name != os.path.basename(name):
            return
        with (self._target / name).open("ab") as copy:
            copy.truncate(begin)
            copy.write(piece)
