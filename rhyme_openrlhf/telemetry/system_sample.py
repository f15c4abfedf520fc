"""One look at a machine: processors, memory, disk, GPUs, and the run's processes on it. For Linux.

Invariants: a look takes milliseconds and waits for nothing; what cannot be known here is None or left out, and a
process that ends meanwhile is no fault.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rhyme_openrlhf.platform import nvidia
from rhyme_openrlhf.telemetry.events import SystemSample

SHARED_MEMORY = Path("/dev/shm")
PERCENT = 100.0
# A list that is far longer than any run's is an error in who asks.
MOST_NAMES = 2000


class Gpus:
    """The GPUs of this machine through NVML (package nvidia-ml-py); none where that, or a driver, is missing."""

    def __init__(self) -> None:
        self.missing = ""
        self._nvml: Any = None
        self._handles: list[Any] = []
        if (pynvml := nvidia.nvml()) is None:
            self.missing = "the package nvidia-ml-py is not installed"
            return
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            self.missing = f"NVML gives no GPUs: {error}"
            return
        self._nvml = pynvml

    def look(self) -> tuple[list[float], list[int], list[int]]:
        """Utilisation (0 to 1; nan where it is not known), bytes used and bytes in all, an entry a GPU."""
        utilisation, used, total = [], [], []
        for handle in self._handles:
            with suppress(self._nvml.NVMLError):
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                busy = math.nan
                # A GPU that is split (MIG) has no utilisation of the whole.
                with suppress(self._nvml.NVMLError):
                    busy = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / PERCENT
                utilisation.append(busy)
                used.append(int(memory.used))
                total.append(int(memory.total))
        return utilisation, used, total


class SystemProbe:
    """Looks at the machine it is made on: `node` is what that is called, `disk` a folder on the disk to watch."""

    def __init__(self, node: str, disk: Path | None) -> None:
        self._node = node
        self._disk = disk
        self.gpus = Gpus()
        self._cpu = psutil.cpu_times()
        self._at = time.monotonic()
        # Seconds of processor time that each process had used, by process id and when it began.
        self._used: dict[tuple[int, float], float] = {}

    def look(
        self,
        processes: Sequence[tuple[str, int]],
        alone: Sequence[tuple[str, int]] = (),
        object_store: int | None = None,
    ) -> SystemSample:
        """Return the machine's state now.

        `processes` as (name, id) are counted with those below them, those of `alone` without.
        """
        now = time.monotonic()
        seconds, self._at = max(now - self._at, 1e-3), now
        cpu, memory = self._processes(processes, alone, seconds)
        virtual = psutil.virtual_memory()
        utilisation, used, total = self.gpus.look()
        return SystemSample(
            node=self._node,
            cpu=self._busy(),
            load=psutil.getloadavg()[0],
            memory_used=virtual.total - virtual.available,
            memory_total=virtual.total,
            disk_free=_disk(self._disk, "free"),
            shared_memory=_disk(SHARED_MEMORY, "used"),
            object_store=object_store,
            gpu=utilisation,
            gpu_memory_used=used,
            gpu_memory_total=total,
            process_cpu=cpu,
            process_memory=memory,
        )

    def _busy(self) -> float:
        """Share of all cores' time since the last look that was not idle."""
        before, self._cpu = self._cpu, psutil.cpu_times()
        spent = [after - earlier for after, earlier in zip(self._cpu, before, strict=True)]
        # Linux counts guests' time in user time too.
        whole = sum(spent) - sum(getattr(self._cpu, n) - getattr(before, n) for n in ("guest", "guest_nice"))
        idle = self._cpu.idle - before.idle + self._cpu.iowait - before.iowait
        return min(max(1 - idle / whole, 0.0), 1.0) if whole > 0 else 0.0

    def _processes(
        self, trees: Sequence[tuple[str, int]], alone: Sequence[tuple[str, int]], seconds: float
    ) -> tuple[dict[str, float], dict[str, int]]:
        below: Mapping[int, list[psutil.Process]] = _children() if trees else {}
        cpu: dict[str, float] = defaultdict(float)
        memory: dict[str, int] = defaultdict(int)
        used: dict[tuple[int, float], float] = {}
        named = [(name, pid, True) for name, pid in trees] + [(name, pid, False) for name, pid in alone]
        for name, pid, with_children in named[:MOST_NAMES]:
            for process in _tree(pid, below if with_children else {}):
                with suppress(psutil.Error), process.oneshot():
                    key = (process.pid, process.create_time())
                    times = process.cpu_times()
                    used[key] = times.user + times.system
                    # What a new process used before this look was used since the last one.
                    cpu[name] += max(used[key] - self._used.get(key, 0.0 if self._used else used[key]), 0.0) / seconds
                    memory[name] += process.memory_info().rss
        self._used = used
        return dict(cpu), dict(memory)


def _children() -> dict[int, list[psutil.Process]]:
    found: dict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found[process.ppid()].append(process)
    return found


def _tree(pid: int, below: Mapping[int, list[psutil.Process]]) -> list[psutil.Process]:
    try:
        found = [psutil.Process(pid)]
    except psutil.Error:
        return []
    for process in found:
        found += below.get(process.pid, ())
    return found


def _disk(path: Path | None, part: str) -> int | None:
    if path is None:
        return None
    try:
        return int(getattr(shutil.disk_usage(path), part))
    except OSError:
        return None
