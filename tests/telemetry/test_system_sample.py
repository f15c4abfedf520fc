"""A look at this machine: sizes and shares that can be, and the processes that were named."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import psutil
import pytest

from rhyme_openrlhf.telemetry.event_json import parse, to_json
from rhyme_openrlhf.telemetry.events import SystemSample
from rhyme_openrlhf.telemetry.system_sample import Gpus, SystemProbe

BUSY = (
    "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while True: pass']); print(flush=True); input()"
)


def test_what_is_seen_can_be(tmp_path: Path) -> None:
    probe = SystemProbe("a machine", tmp_path)
    time.sleep(0.05)
    sample = probe.look([], [], 7)
    assert (sample.node, sample.object_store) == ("a machine", 7)
    assert 0 <= sample.cpu <= 1 and 0 < sample.memory_used < sample.memory_total and sample.load >= 0
    assert (sample.disk_free or 0) > 0 and (sample.shared_memory or 0) >= 0
    assert len(sample.gpu) == len(sample.gpu_memory_used) == len(sample.gpu_memory_total)
    assert SystemProbe("x", tmp_path / "none").look([]).disk_free is None
    recorded = parse(to_json(sample, 1.0, "system", 0))
    assert recorded is not None and isinstance(recorded.event, SystemSample)


@pytest.mark.usefixtures("starts_python")
def test_a_process_is_counted_with_those_below_it_unless_alone() -> None:
    parent = subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        parent.stdout.readline()
        probe = SystemProbe("x", None)
        probe.look([("tree", parent.pid)], [("alone", parent.pid)])
        # The child is in an endless loop: it needs processor time for as long as it takes.
        for _ in range(200):
            time.sleep(0.05)
            sample = probe.look([("tree", parent.pid), ("gone", 2**22 + 1)], [("alone", parent.pid)])
            if sample.process_cpu["tree"] > 0.01:
                break
        assert sample.process_cpu["tree"] > sample.process_cpu["alone"]
        assert sample.process_memory["tree"] > sample.process_memory["alone"] > 0
        assert sample.process_cpu.keys() == {"tree", "alone"}
    finally:
        for child in psutil.Process(parent.pid).children():
            child.kill()
        parent.kill()
        parent.wait()


def test_names_that_several_processes_share_are_summed() -> None:
    probe = SystemProbe("x", None)
    one = probe.look([], [("me", os.getpid())]).process_memory["me"]
    two = probe.look([], [("me", os.getpid()), ("me", os.getpid())]).process_memory["me"]
    assert two == pytest.approx(2 * one, rel=0.2)


def test_no_gpu_is_said_and_no_fault() -> None:
    gpus = Gpus()
    utilisation, used, total = gpus.look()
    assert len(utilisation) == len(used) == len(total)
    assert bool(gpus.missing) or total


class _FakeNvml(types.ModuleType):
    """Two GPUs as NVML gives them; the second is split, so that its use as a whole is not known."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(used=handle + 5, total=10)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle:
            raise self.NVMLError("Not Supported")
        return types.SimpleNamespace(gpu=75)


def test_gpus_as_nvml_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _FakeNvml("pynvml"))
    gpus = Gpus()
    utilisation, used, total = gpus.look()
    assert gpus.missing == "" and utilisation[0] == 0.75 and math.isnan(utilisation[1])
    assert (used, total) == ([5, 6], [10, 10])
