"""Facts of this machine and this Python environment, as plain data for `rhyme doctor`.

Invariants:

- Nothing heavy is imported: versions come from package metadata, and torch and the driver are read in processes of
  their own, which may crash.
- Nothing is changed. An unavailable fact is an empty one, never an exception.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import canonicalize_name

from rhyme_openrlhf.drafting_core import instruction_set
from rhyme_openrlhf.platform.cpu_share import QuotaParent, quota_parent
from rhyme_openrlhf.platform.nvidia import VISIBLE, Driver, Gpu, Toolkit, deepspeed_is_compiled, toolkit
from rhyme_openrlhf.verify import record

GIB = 2**30

# Importing torch takes 2-5 s, on a cold disk or with several GPUs up to 30 s.
TORCH_TIMEOUT_S = 120
# The driver answers within a second or two; when it hangs it never does.
PROGRAM_TIMEOUT_S = 20

TORCH_QUESTION = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
nccl = ".".join(map(str, torch.cuda.nccl.version())) if names else ""
print(json.dumps({"cuda": torch.version.cuda or "", "gpus": names, "nccl": nccl}))
"""
DRIVER_QUESTION = """
import dataclasses, json
from rhyme_openrlhf.platform import nvidia
print(json.dumps(dataclasses.asdict(nvidia.read())))
"""


@dataclass(frozen=True)
class TorchFacts:
    """Torch's own facts. `cuda`: the CUDA version it was built for, empty for a CPU build; `nccl`: its NCCL."""

    cuda: str = ""
    gpus: tuple[str, ...] = ()
    error: str = ""
    nccl: str = ""


@dataclass(frozen=True)
class Facts:
    """One machine and environment, as far as training depends on them. Sizes in bytes, 0 where unknown.

    `versions` and `requires` are keyed by canonical package name. `driver_gpus` are the GPUs that the driver lists,
    whether torch sees them or not; `nvidia` is all that NVML says of them. `toolkit`: what DeepSpeed compiles with,
    unless `deepspeed_compiled` when it was installed. `tests_package`: a top-level package named `tests` is installed.
    `verified`: what `rhyme verify` has proved on this machine, with any version and device. `cpu_quota`: where history
    workers can be held to their CPUs, or why they cannot. `drafting_core`: what the compiled core was built for, None
    without it.
    """

    python: str = "3.11.0"
    versions: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    torch: TorchFacts = field(default_factory=TorchFacts)
    driver_gpus: tuple[str, ...] = ()
    driver: str = ""
    nvidia: Driver = field(default_factory=Driver)
    toolkit: Toolkit = field(default_factory=Toolkit)
    deepspeed_compiled: bool = False
    programs: Mapping[str, str] = field(default_factory=dict)
    python_header: bool = True
    libnuma: bool = True
    shm_free: int = 0
    ram: int = 0
    cores: int = 1
    disk_free: int = 0
    tests_package: bool = False
    in_checkout: bool = False
    is_root: bool = False
    verified: tuple[record.Entry, ...] = ()
    cpu_quota: QuotaParent | str = "there are no cgroups"
    drafting_core: str | None = None

    @property
    def has_gpu(self) -> bool:
        """True when torch or the driver lists a GPU."""
        return bool(self.torch.gpus or self.driver_gpus)

    @property
    def device(self) -> str:
        """Name the device that `rhyme verify` proves features for: this machine's (first) GPU, or its lack of one."""
        return (self.torch.gpus or self.driver_gpus or (record.NO_GPU,))[0]


def gather() -> Facts:
    """Look at this machine."""
    versions, requires = _packages()
    nvidia = _ask_driver()
    driver_gpus, driver = _listed(nvidia)
    return Facts(
        python=platform.python_version(),
        versions=versions,
        requires=requires,
        torch=_ask_torch() if "torch" in versions else TorchFacts(),
        driver_gpus=driver_gpus,
        driver=driver,
        nvidia=nvidia,
        toolkit=toolkit(),
        deepspeed_compiled=deepspeed_is_compiled(),
        programs={name: _program(name) for name in ("g++", "ninja")},
        python_header=(Path(sysconfig.get_path("include")) / "Python.h").exists(),
        libnuma=_can_load("libnuma.so.1"),
        shm_free=_free("/dev/shm"),
        ram=_memory(),
        # In a container or under taskset fewer cores may be ours than the machine has. (Not on every system.)
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        disk_free=_free("."),
        tests_package=_tests_package(),
        in_checkout=(Path(__file__).parents[2] / "scripts" / "setup_cpu.sh").exists(),
        is_root=hasattr(os, "geteuid") and os.geteuid() == 0,
        verified=tuple(record.read(record.path())),
        cpu_quota=quota_parent(),
        drafting_core=instruction_set(),
    )


def _packages() -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    versions: dict[str, str] = {}
    requires: dict[str, tuple[str, ...]] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        # A half removed package leaves metadata without a name. The first on sys.path is the one imports find.
        if name and canonicalize_name(name) not in versions:
            versions[canonicalize_name(name)] = distribution.version
            requires[canonicalize_name(name)] = tuple(distribution.requires or ())
    return versions, requires


def _ask_torch() -> TorchFacts:
    try:
        asked = subprocess.run(
            [sys.executable, "-c", TORCH_QUESTION], capture_output=True, text=True, timeout=TORCH_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"importing it took more than {TORCH_TIMEOUT_S} s")
    if asked.returncode != 0:
        lines = asked.stderr.strip().splitlines()
        return TorchFacts(error=lines[-1] if lines else f"importing it ended with exit code {asked.returncode}")
    # Last line: a site package may print something of its own before.
    answer = json.loads(asked.stdout.strip().splitlines()[-1])
    return TorchFacts(cuda=answer["cuda"], gpus=tuple(answer["gpus"]), nccl=answer["nccl"])


def _ask_driver() -> Driver:
    """Ask NVML in a process of its own, which may hang with the driver."""
    asked = _output(sys.executable, "-c", DRIVER_QUESTION)
    if not asked:
        return Driver()
    answer = json.loads(asked.splitlines()[-1])
    gpus = tuple(Gpu(**gpu) for gpu in answer["gpus"])
    return Driver(answer["version"], gpus, tuple((one, other) for one, other in answer["apart"]), answer["nvlinked"])


def _listed(nvidia: Driver) -> tuple[tuple[str, ...], str]:
    """Return the names of the driver's GPUs and its version; from nvidia-smi before nvidia-ml-py is installed."""
    if nvidia.gpus or VISIBLE in os.environ:
        return tuple(gpu.name for gpu in nvidia.gpus), nvidia.version
    version = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    return tuple(_output("nvidia-smi", "-L").splitlines()), version


def _output(*command: str) -> str:
    """Return what a program prints; "" where the program is missing, fails or hangs."""
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""


def _program(name: str) -> str:
    """Find a program on PATH or beside this Python, where `rhyme` looks too (cli/main.py)."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(name) or shutil.which(name, path=beside) or ""


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _free(path: str) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def _memory() -> int:
    """Memory of the machine, or of this container where that is less."""
    limits = []
    with contextlib.suppress(OSError, ValueError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    # cgroup v2, then v1. "max" stands for no limit, and raises ValueError here; v1 writes a huge number instead.
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(file).read_text()))
    return min(limits, default=0)


def _tests_package() -> bool:
    site = sysconfig.get_path("purelib")
    return (Path(site) / "tests" / "__init__.py").exists()
