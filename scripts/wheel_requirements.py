"""Print the requirements a wheel declares, without those that a machine lacking a GPU cannot have.

    python scripts/wheel_requirements.py WHEEL --without NAME [NAME ...]

Reads the wheel's own METADATA, so the pins stay upstream's: nothing is copied into this project. Requirements that
belong to an extra, or whose environment marker is false here, are left out, as pip would.
"""

import argparse
import zipfile
from email.parser import Parser

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def requirements(wheel: str, without: set[str]) -> list[str]:
    """The requirement lines of `wheel` that hold on this interpreter, less the names in `without`."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        declared = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist") or []
    kept = []
    for line in declared:
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) in without:
            continue
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        requirement.marker = None
        kept.append(str(requirement))
    return kept


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME")
    options = parser.parse_args()
    print("\n".join(requirements(options.wheel, {canonicalize_name(n) for n in options.without})))
