"""The logs of a run's processes, copied into the run directory while the run lasts.

Ray writes them on each node's own disk, outside of the run directory. The control plane reads a run directory alone and
follows no link out of it, so without copies a live run would show its driver's log and no other.

Invariants:

- A copy is a beginning of its log. The run's end copies the rest (`launch.py`), also of engines of several ranks, whose
  processes belong to other jobs of Ray.
- Only logs of the run's own job are copied, because on a shared cluster there are others.
- Copying leaves ROOM on the disk, takes AT_ONCE of a log at each look, and is waited for at most CLOSE_SECONDS.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import ray

# Seconds between two looks at the logs, and for the end of one.
LOOK_SECONDS, CLOSE_SECONDS = 3.0, 10.0
# Bytes of a log at each look, and those that stay free for events and checkpoints.
AT_ONCE, ROOM = 16 * 2**20, 2**30
# A log's first line is read so far.
FIRST_LINE = 1000
# Errors of a cluster that is going, or of a full disk.
_PASSING = (ray.exceptions.RayError, ConnectionError, TimeoutError, RuntimeError, OSError)
# The job in names of workers that Ray 2.55 has started before their job.
NO_JOB = "ffffffff"


class LiveLogs:
    """A thread that copies what Ray's job `job` writes to `source` into `target`, until it is closed."""

    def __init__(self, source: Path, target: Path, job: str, others: Callable[[], object] = lambda: None) -> None:
        """`others` copies what other nodes have (run/node_logs.py)."""
        self._others = others
        self._lock = threading.Lock()
        self._source = source
        self._target = target
        self._job = job
        # A log's job never changes once its first line is there.
        self._job_of: dict[str, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._copy_until_closed, name="live-logs", daemon=True)

    def start(self) -> None:
        """Begin to copy."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after what it copies now."""
        self._ended.set()
        self._thread.join(CLOSE_SECONDS)

    def copy(self) -> None:
        """Copy what is new in all logs of the job, on all nodes."""
        with self._lock:
            self._copy()

    def _copy(self) -> None:
        try:
            names = sorted(name for name in os.listdir(self._source) if name.startswith("worker-"))
            room = shutil.disk_usage(self._target).free > ROOM
        except OSError:  # Ray's session is gone
            return
        if not room:
            return
        for name in names:
            try:
                if self._job_named(name) == self._job:
                    copy_rest(self._source / name, self._target / name, AT_ONCE)
            except OSError:  # a full disk, or a log that Ray has removed; the next look tries again
                continue
        if not self._ended.is_set():
            with suppress(*_PASSING):
                self._others()

    def _job_named(self, name: str) -> str:
        job = self._job_of.get(name) or job_of(self._source / name)
        if job:
            self._job_of[name] = job
        return job

    def _copy_until_closed(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.copy()


def copy_rest(log: Path, copy: Path, most: int | None = None) -> None:
    """Append to `copy` what `log` has beyond it, at most `most` bytes (None: all). Raises OSError."""
    with log.open("rb") as source, copy.open("ab") as target:
        if target.tell() > os.fstat(source.fileno()).st_size:
            # The log was begun anew.
            target.truncate(0)
        source.seek(os.fstat(target.fileno()).st_size)
        if most is None:
            shutil.copyfileobj(source, target)
        else:
            target.write(source.read(most))


def job_of(log: Path) -> str:
    """Return the Ray job of a worker's log, "" for an empty one: worker-<worker>-<job>-<process>.

    Ray 2.55 starts some workers before their job, and names these logs so. Its first line then says which job it was.
    """
    with log.open(errors="replace") as file:
        first = file.readline(FIRST_LINE)
    parts = log.name.split("-")
    if not first or len(parts) < 4:
        return ""
    if parts[2] != NO_JOB:
        return parts[2]
    # A line without its end is still being written.
    return first.strip().removeprefix(":job_id:") if first.endswith("\n") else ""
