"""The papers' figures from their own published inputs, simulated: the tables of docs/papers.md.

    python benchmarks/papers.py --write                  # all tables and the page's stamp, about 3 minutes of one core
    python benchmarks/papers.py [--only TABLE] [--json FILE]

The stamp is a hash of the code that makes the tables: the `papers_` scripts and all modules of the package that they
import, without comments and texts for readers. `tests/benchmarks/test_papers.py` fails if the page has another one.

Everything here is simulated. What a paper does not print is an assumption, named in the table's page; where it is the
speed of the hardware, a band of data-sheet efficiencies is given. No constant is fitted to a result.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from papers_inputs import SEED, say
from papers_pat import pat, pat_others
from papers_rhymerl import rhymerl, rhymerl_batches, rhymerl_models, rhymerl_ranks
from papers_rlhfspec import arithmetic, rlhfspec, rlhfspec_breakdown
from papers_rows import every_figure

from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.simulation.settings import Cluster, Features

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from table_in_page import put

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "papers.md"
# Its scripts, in this folder.
SCRIPTS = ("papers", "papers_inputs", "papers_pat", "papers_rhymerl", "papers_rlhfspec", "papers_rows", "roofline")


def sources() -> list[Path]:
    """Return the files that decide the tables: these scripts, and all modules of the package that they import.

    Settings are left out: most of their options are of live runs. Those of simulated runs are in `stamp`.
    """
    found = [Path(__file__).with_name(f"{name}.py") for name in SCRIPTS]
    for path in found:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
            elif isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            for name in names:
                other = ROOT / Path(*name.split(".")).with_suffix(".py")
                decides = name.startswith("rhyme_openrlhf.") and not name.startswith("rhyme_openrlhf.settings.")
                if decides and other.exists() and other not in found:
                    found.append(other)
    return [*found[: len(SCRIPTS)], *sorted(found[len(SCRIPTS) :])]


def stamp() -> str:
    """Return a hash of the sources, the defaults of simulated runs, the compiled core's sources and the profiles.

    What only readers see does not count.
    """
    drafting = dataclasses.asdict(HistoSpecSettings())
    windows = {name: value for name, value in drafting.items() if name.startswith("window")}
    total = hashlib.sha256(repr((Features(), Cluster(), windows)).encode())
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            # Docstrings, help and messages have spaces; names and keys have none.
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                node.value = ""
        total.update(ast.unparse(tree).encode())
    profiles = sorted((ROOT / "rhyme_openrlhf" / "simulation" / "profiles").glob("*.json"))
    for path in [ROOT / "csrc" / "budget.h", ROOT / "csrc" / "stage.cpp", *profiles]:
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def main() -> None:
    """Simulate, print, and put the tables where they belong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {
        "rhymerl": rhymerl,
        "rhymerl-batches": rhymerl_batches,
        "rhymerl-models": rhymerl_models,
        "rhymerl-ranks": rhymerl_ranks,
        "pat": pat,
        "pat-others": pat_others,
        "rlhfspec": rlhfspec,
        "rlhfspec-breakdown": rlhfspec_breakdown,
        # These two are made of the tables above.
        "arithmetic": arithmetic,
        "every-figure": every_figure,
    }
    parser.add_argument("--only", choices=sorted(set(tables) - {"arithmetic", "every-figure"}), help="one table")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/papers.md")
    options = parser.parse_args()
    if options.only and options.write:
        parser.error("--write makes all tables, so that the page is of one state of the code")
    found: dict[str, Any] = {"kind": "simulated", "seed": SEED}
    for name, table in tables.items():
        if options.only in (None, name):
            text = table(found)
            say(text)
            if options.write:
                put(PAGE, name, text)
    if options.write:
        put(PAGE, "stamp", f"<!-- {stamp()} -->")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
