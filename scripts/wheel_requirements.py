"""Print the requirements a wheel declares, without those that a machine lacking a GPU cannot have.

    python scripts/wheel_requirements.py WHEEL [--extra NAME] [--only NAME ...] [--without NAME ...]

Reads the wheel's own METADATA, so the pins stay upstream's: nothing is copied into this project. Requirements that
belong to an extra that was not asked for, or whose environment marker is false here, are left out, as pip would.
Prints one requirement a line; fails with one sentence when the file is no wheel, or when `--only` finds nothing.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from collections.abc import Collection
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


class WheelError(ValueError):
    """A file is no readable wheel, or declares nothing of what was asked for; the message names the file."""


def declared(wheel: Path) -> list[str]:
    """Return the `Requires-Dist` lines of `wheel`, as its METADATA writes them.

    Raises WheelError if the file is missing, no zip archive, or without exactly one METADATA file.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            if len(names) != 1:
                raise WheelError(f"{wheel} is no wheel: it holds {len(names)} METADATA files instead of one")
            text = archive.read(names[0]).decode()
    except FileNotFoundError:
        raise WheelError(f"{wheel} does not exist; download it first (pip wheel --no-deps)") from None
    except zipfile.BadZipFile:
        raise WheelError(f"{wheel} is no wheel: not a zip archive; download it again") from None
    return Parser().parsestr(text).get_all("Requires-Dist") or []


def requirements(
    wheel: Path, *, extra: str = "", only: Collection[str] = (), without: Collection[str] = ()
) -> list[str]:
    """Return the requirement lines of `wheel` that hold on this interpreter, markers resolved and removed.

    `extra`: what this extra adds is printed too. `only`: keep these names alone (empty: all). `without`: drop these.
    Names are compared in their canonical form. Raises WheelError, as `declared`.
    """
    wanted = {canonicalize_name(name) for name in only}
    unwanted = {canonicalize_name(name) for name in without}
    kept = []
    for line in declared(wheel):
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name in unwanted or (wanted and name not in wanted):
            continue
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        requirement.marker = None
        kept.append(str(requirement))
    return kept


def main(argv: list[str]) -> int:
    """Print the requirements; 0, or 2 with one sentence on standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="wheel file (.whl)")
    parser.add_argument("--extra", default="", metavar="NAME", help="also what this extra of the wheel requires")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="print these requirements alone")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="leave these requirements out")
    options = parser.parse_args(argv)
    try:
        lines = requirements(options.wheel, extra=options.extra, only=options.only, without=options.without)
        if options.only and not lines:
            raise WheelError(f"{options.wheel} requires none of: {', '.join(options.only)}")
    except WheelError as error:
        print(f"wheel_requirements: {error}", file=sys.stderr)
        return 2
    if lines:
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
