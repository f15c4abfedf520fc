"""A node's report on itself for `rhyme doctor --cluster`, gathered there, as far as it can be.

`report` runs on the node. Nothing is changed there, and an unavailable fact is an empty one.
"""

from __future__ import annotations

import http.client
import importlib.metadata
import os
import platform
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

# What must be alike everywhere, because Ray sends objects of these packages between nodes.
PACKAGES = ("rhyme-openrlhf", "openrlhf", "vllm", "torch", "ray", "deepspeed", "transformers")
SHM = "/dev/shm"
REACH_SECONDS = 10.0
# Variables that a node must have itself: they are secrets, which are not sent to it.
OWN_VARIABLES = ("HF_TOKEN",)


@dataclass(frozen=True)
class PathFacts:
    """A path as one node sees it.

    `identity`: what tells the directory that is there, or the one above it, from one of the same name elsewhere.
    """

    exists: bool
    writable: bool
    identity: tuple[int, int]


@dataclass(frozen=True)
class NodeReport:
    """One node. Sizes in bytes; `clock` in unix seconds; `interfaces`: addresses by the interface's name.

    `broken`: why its GPUs cannot train, "" where they can or there are none. `unreachable`: why the control plane is
    not reached, "" where it is, or none was named.
    """

    versions: Mapping[str, str]
    shm: int
    shm_free: int
    clock: float
    interfaces: Mapping[str, tuple[str, ...]]
    variables: frozenset[str] = frozenset()
    paths: Mapping[str, PathFacts] = field(default_factory=dict)
    broken: str = ""
    gpus: tuple[str, ...] = ()
    unreachable: str = ""


def report(paths: Sequence[str], control_url: str, has_gpus: bool) -> NodeReport:
    """Return this node's report on these paths and this control plane, "" for none; runs on the node."""
    broken, kinds = _gpus() if has_gpus else ("", ())
    disk = shutil.disk_usage(SHM)
    return NodeReport(
        versions=_versions(),
        shm=disk.total,
        shm_free=disk.free,
        clock=time.time(),
        interfaces=_interfaces(),
        variables=frozenset(name for name in OWN_VARIABLES if os.environ.get(name)),
        paths={path: _path(Path(path)) for path in paths},
        broken=broken,
        gpus=kinds,
        unreachable=_unreachable(control_url) if control_url else "",
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _gpus() -> tuple[str, tuple[str, ...]]:
    from rhyme_openrlhf.cli.preflight_gpus import facts

    found = facts()
    return found.broken, found.kinds


def _interfaces() -> dict[str, tuple[str, ...]]:
    import psutil

    found = psutil.net_if_addrs()
    # Link-local IPv6 addresses end in the interface's name.
    return {name: tuple(one.address.partition("%")[0] for one in addresses) for name, addresses in found.items()}


def _path(path: Path) -> PathFacts:
    there = path.absolute()
    # Path.exists raises where a folder may not be looked into.
    while not os.path.exists(there) and there != there.parent:
        there = there.parent
    status = there.stat()
    writable = os.access(there, os.W_OK | (os.X_OK if there.is_dir() else 0))
    return PathFacts(os.path.exists(path), writable, (status.st_ino, status.st_ctime_ns))


def _unreachable(control_url: str) -> str:
    try:
        with urllib.request.urlopen(f"{control_url.rstrip('/')}/healthz", timeout=REACH_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return f"it answers with status {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__
