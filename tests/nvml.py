"""A stand-in for NVML: the module pynvml with pretended GPUs, for this process and those that it starts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

_MODULE = """
NVML_P2P_CAPS_INDEX_WRITE, NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 1, 2, 0
GPUS, APART, LINKED = {gpus}, {apart}, {nvlinked}

class NVMLError(Exception): pass
class Memory: total, used = {memory}, {used}

def nvmlInit():
    if not GPUS: raise NVMLError("no driver")
def nvmlDeviceGetCount(): return GPUS
def nvmlDeviceGetHandleByIndex(number): return number
def nvmlDeviceGetName(handle): return {names}[handle % len({names})]
def nvmlDeviceGetUUID(handle): return f"GPU-{{handle}}000"
def nvmlDeviceGetMemoryInfo(handle): return Memory
def nvmlDeviceGetUtilizationRates(handle): raise NVMLError
def nvmlSystemGetDriverVersion(): return "{driver}"
def nvmlDeviceGetP2PStatus(one, other, capability):
    there = LINKED if capability == NVML_P2P_CAPS_INDEX_NVLINK else sorted((one, other)) not in APART
    return NVML_P2P_STATUS_OK if there else 5
"""


def written(
    folder: Path,
    *,
    gpus: int = 1,
    driver: str = "580.65.06",
    memory: int = 80 * 2**30,
    used: int = 0,
    names: Sequence[str] = ("Pretended GPU",),
    apart: Sequence[Sequence[int]] = (),
    nvlinked: bool = False,
) -> Path:
    """Return a folder with the module, for the path of processes that are to have these GPUs."""
    place = folder / "nvml"
    place.mkdir()
    given = {"gpus": gpus, "driver": driver, "memory": memory, "used": used, "names": list(names)}
    given |= {"apart": [list(pair) for pair in apart]}
    (place / "pynvml.py").write_text(_MODULE.format(**given, nvlinked=nvlinked))
    return place


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, **given: Any) -> None:
    """Pretend these GPUs (`written`) until the test ends; `apart` are pairs without peer access."""
    place = written(folder, **given)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("PYTHONPATH", str(place), prepend=":")
    spec = importlib.util.spec_from_file_location("pynvml", place / "pynvml.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Not by importing it: the module would stay for the next test.
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
