"""Print the lowest versions that pyproject.toml allows, as constraints for pip.

    python scripts/lowest_versions.py [EXTRA ...]

One line for each requirement of the package and of the extras named. Fails when a requirement has no lowest version.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


class NoLowestVersionError(ValueError):
    """A requirement without a lowest version; the message names it."""


def requirements(project: dict[str, Any], extras: Iterable[str]) -> list[Requirement]:
    """Return the requirements of a pyproject.toml's `project` table with those of its extras."""
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def lowest(requirement: Requirement) -> str:
    """Return `name==version` with the lowest version allowed. Raises NoLowestVersionError."""
    versions = [one.version for one in requirement.specifier if one.operator in (">=", "==")]
    if len(versions) != 1:
        raise NoLowestVersionError(f"{requirement} in pyproject.toml needs one '>=' or '=='")
    return f"{requirement.name}=={versions[0]}"


def main(argv: list[str]) -> int:
    """Print the constraints; 2 when a requirement has no lowest version."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="extras of pyproject.toml to include")
    extras = parser.parse_args(argv).extras
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    try:
        print(*sorted({lowest(one) for one in requirements(project, extras)}), sep="\n")
    except NoLowestVersionError as error:
        print(f"lowest_versions: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
