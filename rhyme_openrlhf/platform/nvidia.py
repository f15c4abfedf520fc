"""NVIDIA hardware and software of this machine: the driver, its GPUs (through NVML), and the CUDA toolkit that
compiles.

`read` and `toolkit` are the adapters, `unusable` and `cannot_compile` the judgements. Ray finds GPUs through NVML too,
so a machine whose GPUs torch cannot use has GPUs for Ray and none for torch. Invariants: nothing heavy is imported; an
unavailable fact is an empty one.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
# The oldest Linux driver that runs a CUDA release of this major version (NVIDIA's CUDA compatibility guide, table 2).
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}


NVCC_TIMEOUT_SECONDS = 20
_DEFAULT_TOOLKIT = Path("/usr/local/cuda")


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver lists; `memory` in bytes, of which programs hold `used`."""

    name: str
    memory: int
    used: int = 0


@dataclass(frozen=True)
class Driver:
    """The driver's version, "" without one, and the GPUs that CUDA_VISIBLE_DEVICES leaves visible.

    `apart`: pairs of them, by place in `gpus`, that cannot write each other's memory. `nvlinked`: NVLink joins each
    pair.
    """

    version: str = ""
    gpus: tuple[Gpu, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    nvlinked: bool = False


@dataclass(frozen=True)
class Toolkit:
    """The CUDA toolkit that torch's compiler finds: its folder, and the release of its nvcc; "" for what is missing."""

    home: str = ""
    release: str = ""


def nvml() -> Any:
    """Return the module of the package nvidia-ml-py, None without it."""
    try:
        with warnings.catch_warnings():
            # An older package of the same module's name warns of itself.
            warnings.simplefilter("ignore")
            import pynvml
    except ImportError:
        return None
    return pynvml


def read() -> Driver:
    """Ask NVML; an empty answer where the package nvidia-ml-py or a driver is missing."""
    if (pynvml := nvml()) is None:
        return Driver()
    try:
        pynvml.nvmlInit()
        handles = _visible([pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())], pynvml)
        memories = [(handle, pynvml.nvmlDeviceGetMemoryInfo(handle)) for handle in handles]
        gpus = tuple(
            Gpu(_text(pynvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.used))
            for handle, memory in memories
        )
        version = _text(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return Driver()
    pairs = [(one, other) for other in range(len(handles)) for one in range(other)]

    def status(pair: tuple[int, int], capability: int) -> bool | None:
        """Return None where the driver does not say."""
        with suppress(pynvml.NVMLError):
            found = pynvml.nvmlDeviceGetP2PStatus(handles[pair[0]], handles[pair[1]], capability)
            return bool(found == pynvml.NVML_P2P_STATUS_OK)
        return None

    apart = tuple(pair for pair in pairs if status(pair, pynvml.NVML_P2P_CAPS_INDEX_WRITE) is False)
    linked = all(status(pair, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) for pair in pairs)
    return Driver(version, gpus, apart, bool(pairs) and linked)


def smallest_memory(found: Driver) -> int | None:
    """Return the memory of the smallest GPU; None without one."""
    return min((gpu.memory for gpu in found.gpus), default=None)


def kinds(found: Driver) -> list[str]:
    """Return the names of the GPUs, each once."""
    return sorted({gpu.name for gpu in found.gpus})


def unusable(gpus: Sequence[str], version: str, cuda: str) -> str:
    """Return why torch, which sees no GPU, cannot use `gpus`, and what to do, in one sentence.

    `version` is the driver's, `cuda` the CUDA release that torch was built for, "" for a CPU build.
    """
    listed = f"the NVIDIA driver {version} lists {len(gpus)} GPU(s) ({gpus[0]}), but torch sees none"
    otherwise = f"or set {VISIBLE}= (empty) to run on the CPU"
    if not cuda:
        return (
            f"{listed}, because it is a CPU build: install the GPU stack (rhyme doctor shows the command), {otherwise}"
        )
    if too_old(version, cuda):
        return (
            f"{listed}, because the driver is too old for torch's CUDA {cuda}: install driver {oldest(cuda)} or newer, "
            f"{otherwise}"
        )
    return (
        f"{listed}, although the driver is new enough for torch's CUDA {cuda}: run `python -c 'import torch; "
        f"torch.cuda.init()'` for CUDA's reason, {otherwise}"
    )


def toolkit() -> Toolkit:
    """Look where torch looks (torch/utils/cpp_extension.py, `_find_cuda_home`, 2.13.0) and ask nvcc for its release."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or ""
    nvcc = shutil.which("nvcc")
    if not home and nvcc:
        home = str(Path(nvcc).parents[1])
    elif not home and _DEFAULT_TOOLKIT.exists():
        home = str(_DEFAULT_TOOLKIT)
    if not home:
        return Toolkit()
    try:
        asked = subprocess.run(
            [f"{home}/bin/nvcc", "-V"], capture_output=True, text=True, timeout=NVCC_TIMEOUT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return Toolkit(home)
    found = re.search(r"release (\d+\.\d+)", asked.stdout)
    return Toolkit(home, found[1] if found else "")


def cannot_compile(found: Toolkit, cuda: str) -> str:
    """Return why DeepSpeed cannot compile its optimizer at the first run, and what to do; "" where it can.

    `cuda` is the release that torch was built for. torch refuses to compile with another major version.
    """
    mend = f"install the CUDA toolkit {cuda} and set CUDA_HOME to its folder"
    if not found.home:
        return f"DeepSpeed compiles its optimizer with nvcc, but CUDA_HOME is not set and there is no nvcc: {mend}"
    if not found.release:
        return f"DeepSpeed compiles its optimizer with nvcc, but {found.home}/bin/nvcc does not run: {mend}"
    if _major(found.release) != _major(cuda):
        return (
            f"DeepSpeed compiles its optimizer with nvcc for torch's CUDA {cuda}, but {found.home} has CUDA "
            f"{found.release}: {mend}"
        )
    return ""


def deepspeed_is_compiled() -> bool:
    """Return whether DeepSpeed was installed with its optimizer compiled (DS_BUILD_FUSED_ADAM)."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return False
    recorded = Path(spec.origin).with_name("git_version_info_installed.py")
    return recorded.exists() and bool(re.search(r"'fused_adam': True", recorded.read_text()))


def oldest(cuda: str) -> int:
    """Return the oldest major version of the driver for a CUDA release such as "13.0"; 0 for an unknown release."""
    return OLDEST_DRIVER.get(_major(cuda), 0)


def too_old(version: str, cuda: str) -> bool:
    """Return whether a driver of this version cannot run a CUDA release; False where the version is not known."""
    return 0 < _major(version) < oldest(cuda)


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else 0


def _visible(handles: list[Any], nvml: Any) -> list[Any]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, by number or by UUID; parts of GPUs (MIG) count as all GPUs."""
    named = os.environ.get(VISIBLE)
    if named is None or "MIG" in named:
        return handles
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    chosen = []
    for name in named.split(","):
        places = [at for at, uuid in enumerate(uuids) if name == str(at) or (len(name) > 4 and uuid.startswith(name))]
        # CUDA ignores all that follows the first entry that it does not know.
        if not places:
            break
        chosen.append(handles[places[0]])
    return chosen


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
