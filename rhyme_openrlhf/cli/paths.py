"""Relative paths among the options of a run: they mean the directory in which `rhyme train` was started.

A process on another node works in another directory. So paths are made absolute before anything is started.

In a job of Ray that has a working directory (`ray job submit --working-dir`), each node's processes work in a copy of
it. There, paths of what is read stay relative, and paths of what is written must be absolute, because Ray deletes the
copies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.platform.job_variables import has_working_directory
from rhyme_openrlhf.settings.latency import AUTO, NONE
from rhyme_openrlhf.settings.redaction import KINDS

# The kind of an option that names one path, of one that names several, and what follows a path behind an "@".
OUTPUT, SEVERAL, WITH_PART = "output", ("data", "reward", "profiles", "runs"), "data"
ON_NODES = ("model", "data", "reward", "agent")
READ = ("model", "agent", "file", "profile", *SEVERAL)


class RelativePathError(Exception):
    """A path must be absolute; one sentence."""


def make_absolute(args: SimpleNamespace, environment: Mapping[str, str]) -> None:
    """Make the paths in upstream's nested arguments, with ours among them, absolute. Raises RelativePathError."""
    is_copied = has_working_directory(environment)
    for flag, kind in KINDS.items():
        group, name = _place(args, flag)
        value = getattr(group, name, None)
        if kind == OUTPUT:
            if is_copied and _is_lost(flag, value):
                raise RelativePathError(
                    f"{flag} {value or '(not given)'} would be in Ray's copy of the job's working directory, which Ray "
                    "deletes: give an absolute path on a file system that all nodes share"
                )
            if value:
                setattr(group, name, os.path.abspath(value))
        elif kind in READ and value and not is_copied:
            setattr(
                group, name, [_read(part, kind) for part in value] if isinstance(value, list) else _read(value, kind)
            )


def read_by_nodes(args: SimpleNamespace) -> dict[str, str]:
    """Return the absolute paths that processes on any node read, each with the flag that names it."""
    found: dict[str, str] = {}
    for flag, kind in KINDS.items():
        value = getattr(*_place(args, flag), None) if kind in ON_NODES else None
        parts = value if isinstance(value, list) else (value or "").split(",")
        # A name on the hub, or the address of a reward server, is no path.
        for path in (part.strip().partition("@")[0] for part in parts):
            if os.path.isabs(path):
                found[path] = flag
    return found


def _place(args: SimpleNamespace, flag: str) -> tuple[Any, str]:
    """Return the group of arguments with an option, None without one, and the option's name there."""
    *groups, name = flag.removeprefix("--").split(".")
    group: Any = args
    for one in groups:
        group = getattr(group, one, None)
    return group, name


def _is_lost(flag: str, value: str | None) -> bool:
    """Return whether a directory is below the working directory; without --run.dir, the run's is."""
    return not os.path.isabs(value) if value else flag == "--run.dir"


def _read(value: str, kind: str) -> str:
    if kind not in SEVERAL:
        return _one(value)
    parts = [part.strip().partition("@" if kind == WITH_PART else "\0") for part in value.split(",")]
    found = [(_one(path), at + rest) for path, at, rest in parts]
    # Their reader would split an absolute path, too.
    if any(set("@," if kind == WITH_PART else ",") & set(path) for path, _ in found):
        return value
    return ",".join(path + rest for path, rest in found)


def _one(path: str) -> str:
    """Return the absolute path of what is there; what is not is a name on the hub, an address or a mistake."""
    return os.path.abspath(path) if path not in (AUTO, NONE) and os.path.exists(path) else path
