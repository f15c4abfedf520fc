"""Pack recorded runs for `rhyme serve --demo`: rhyme_openrlhf/embedded/recording/demo.tar.xz.

    rhyme demo --run.name NAME --run.dir RUNS/NAME ...
    python scripts/record_demo.py RUNS/NAME [RUNS/OTHER ...] [--replace OLD=NEW ...]

Each run's name in the recording is its directory's. The script replaces the folders of the package, the interpreter
and the runs, and the machine's name and addresses. Give other names of the machine as --replace, and read the result
before it is published.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import rhyme_openrlhf
from rhyme_openrlhf.api.demo.recording import pack, read_rows
from rhyme_openrlhf.embedded import RECORDING

# What ships in the package must stay small beside its model.
MOST_BYTES = 1_500_000
NODE = "10.0.0.1"


def replacements(run: Path) -> list[tuple[str, str]]:
    """Return the names of the machine that a run was made on, and their replacements."""
    config = json.loads((run / "config.json").read_text())
    nodes = {row["node"] for row in read_rows(run) if row["kind"] in ("system_sample", "process_died")}
    package = str(Path(rhyme_openrlhf.__file__).parent)
    found = [
        (package, "/opt/rhyme/rhyme_openrlhf"),
        (str(Path(sys.prefix).resolve()), "/opt/venv"),
        (sys.base_prefix, "/opt/python"),
        (str(run.resolve().parent), "/home/user/runs"),
        # Not wherever these letters occur: they may be any word.
        (json.dumps(config["machine"]["host"]), '"machine"'),
    ]
    return found + [(node, NODE) for node in sorted(nodes)]


def main() -> int:
    """Pack; 1 when the recording is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--replace", action="append", default=[], metavar="OLD=NEW")
    parser.add_argument("--output", type=Path, default=RECORDING)
    given = parser.parse_args()
    pairs = [tuple(one.split("=", 1)) for one in given.replace]
    for run in given.runs:
        pairs += replacements(run)
    given.output.parent.mkdir(exist_ok=True)
    size = pack(given.output, {run.name: run for run in given.runs}, [(old, new) for old, new in pairs])
    print(f"{given.output}: {size} bytes, {len(given.runs)} runs")
    return int(size > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
