"""Keeps a process within its share of the CPUs, so that history work never slows generation or training.

RhymeRL (section 5.3) limits history workers "using OS methods". Three hold here, from the softest on:

- environment variables cap threads where the worker is started;
- a low priority (nice);
- a cgroup of its own with a quota, where this user may make one: root in most containers of cgroup version 1, or a
  delegated cgroup of version 2.

Invariants: an unavailable limit is reported and left out, never an error; `quota_parent` changes nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
NAME = "rhyme-history-"
# The kernel's default period; a quota below a hundredth of it is refused.
PERIOD_US = 100_000
LEAST_QUOTA_US = 1_000


@dataclass(frozen=True)
class QuotaParent:
    """The cgroup below which one with a CPU quota can be made, and its version (1 or 2)."""

    path: Path
    version: int


def quota_parent(cgroups: Path = CGROUPS, own: Path = OWN) -> QuotaParent | str:
    """Find where a cgroup with a CPU quota can be made; or return why it cannot, as a clause."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError as error:
        return f"{own} cannot be read ({error.strerror})"
    for _, controllers, path in lines:
        if "cpu" in controllers.split(","):
            parent = cgroups / controllers / path.lstrip("/")
            if not parent.exists():
                parent = cgroups / "cpu" / path.lstrip("/")
            return QuotaParent(parent, 1) if os.access(parent, os.W_OK) else f"{parent} is not writable"
    for _, controllers, path in lines:
        if not controllers:
            parent = cgroups / path.lstrip("/")
            if not os.access(parent, os.W_OK):
                return f"{parent} is not writable"
            try:
                given = (parent / "cgroup.subtree_control").read_text().split()
            except OSError as error:
                return f"{parent} cannot be read ({error.strerror})"
            return QuotaParent(parent, 2) if "cpu" in given else f"{parent} does not hand the cpu controller down"
    return "there are no cgroups"


def limit_cpus(cpus: float, nice: int) -> str:
    """Give this process and its threads at most `cpus` CPUs (0: no quota) and priority `nice`; says what holds."""
    before = os.nice(0)
    os.nice(max(0, nice - before))
    held = f"nice {os.nice(0)}"
    if not cpus:
        return held
    parent = quota_parent()
    if isinstance(parent, str):
        return f"{held}, no CPU quota: {parent}"
    try:
        _enter(parent, cpus)
    except OSError as error:
        return f"{held}, no CPU quota: {parent.path} refused it ({error.strerror})"
    return f"{held}, quota of {cpus:g} CPUs"


def _enter(parent: QuotaParent, cpus: float) -> None:
    remove_empty(parent)
    own = parent.path / f"{NAME}{os.getpid()}"
    own.mkdir(exist_ok=True)
    quota = max(LEAST_QUOTA_US, round(cpus * PERIOD_US))
    try:
        if parent.version == 1:
            (own / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (own / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (own / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        (own / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        own.rmdir()
        raise


def remove_empty(parent: QuotaParent) -> None:
    """Remove what workers that ended left behind: the kernel refuses it for a cgroup with a process in it."""
    for left in parent.path.glob(f"{NAME}*"):
        try:
            left.rmdir()
        except OSError:
            continue
