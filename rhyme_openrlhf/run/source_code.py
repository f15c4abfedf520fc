"""The code that a run is made with: git commits of this package and of the folder that the run is started in.

Rewards, agents and scripts lie in that folder, so both decide what a run does. Invariant: a run never fails, and never
waits long, for the sake of this: what cannot be found out is left out.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# A repository on a busy network disk takes seconds to compare; a run's start takes minutes.
GIT_SECONDS = 10.0
PACKAGE = Path(__file__).resolve().parents[1]
_DIRTY = "-dirty"


@dataclass(frozen=True)
class Checkout:
    """The commit (40 digits) that is checked out; `dirty`: tracked files have changes that are not committed."""

    commit: str
    dirty: bool


def checkouts(directory: Path, package: Path = PACKAGE) -> dict[str, dict[str, Any]]:
    """Fields of `Checkout` of "package" and "directory", as far as each is in a git repository.

    An installed package has no commit, also where its environment lies inside of a repository; a folder of the
    package's own repository is that, and not told twice.
    """
    found: dict[str, dict[str, Any]] = {}
    is_tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    of_package = checkout(package) if is_tracked else None
    if of_package is not None:
        found["package"] = asdict(of_package)
    root = _git(directory, "rev-parse", "--show-toplevel")
    if root is not None and not (is_tracked and root == _git(package, "rev-parse", "--show-toplevel")):
        of_directory = checkout(directory)
        if of_directory is not None:
            found["directory"] = asdict(of_directory)
    return found


def checkout(directory: Path) -> Checkout | None:
    """None: not in a repository, no commit yet, or git does not answer."""
    said = _git(directory, "describe", "--always", "--exclude=*", "--abbrev=40", f"--dirty={_DIRTY}")
    if not said:
        return None
    return Checkout(said.removesuffix(_DIRTY), said.endswith(_DIRTY))


def _git(directory: Path, *arguments: str) -> str | None:
    """Return what git prints; None where it fails, is not there, or takes too long."""
    # It only reads: without locks it is in no other git's way.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True, text=True, timeout=GIT_SECONDS, env=environment, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
