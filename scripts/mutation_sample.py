"""Change a sample of the lines of some rooms, one at a time, and count how many of the changes their tests notice.

    pip install cosmic-ray
    python scripts/mutation_sample.py --mutants 100 --seed 1

cosmic-ray makes the changes in a copy of the last commit, so the working tree stays as it is. A change is tried on the
module's own test file first, and on all tests of its room if that file passes. The same seed and commit give the same
sample. The script prints the share of noticed changes, and every unnoticed one. A reader of that list judges whether a
test is missing, or whether the change makes no difference.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("scheduling", "latency", "drafting")
# Where our code meets what others wrote, or another process.
SEAMS = ("engine", "pipeline", "training", "weights", "run")
# Without the tests that start much.
FAST = "not slow and not engine and not e2e and not ray and not cluster and not service and not browser"
# `int | None` stands in annotations, which nothing evaluates.
LEFT_OUT = "core/ReplaceBinaryOperator_BitOr_"
# A change can make a loop endless.
TIMEOUT_S = 240
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-m", FAST)


def tests_of(module: str) -> tuple[str, str]:
    """Return the test file of a module of a room, and the room's folder of tests."""
    _, room, *folders, name = Path(module).parts
    return "/".join(("tests", room, *folders, f"test_{name}")), f"tests/{room}"


def sample(jobs: Sequence[str], count: int, seed: int) -> list[str]:
    """Return `count` of the jobs, the same ones for the same seed and order."""
    return random.Random(seed).sample(jobs, min(count, len(jobs)))


def notices(tree: Path) -> int:
    """Run the tests of what is changed in `tree`; return pytest's exit code, 0 where no test notices."""
    changed = subprocess.run(
        ["git", "diff", "--name-only", "--", "rhyme_openrlhf"], cwd=tree, capture_output=True, text=True, check=True
    ).stdout.split()
    for tests in (tests for module in changed for tests in tests_of(module)):
        if (tree / tests).exists():
            code = subprocess.run([*PYTEST, tests], cwd=tree).returncode
            if code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
                return code
    return 0


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Check the last commit out beside the working tree, with the compiled cores; remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="rhyme-mutants-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(tree)], cwd=ROOT, check=True)
        # Those of drafts and of decisions on TP switches.
        for core in (ROOT / "rhyme_openrlhf").glob("_*.so"):
            shutil.copy(core, tree / "rhyme_openrlhf")
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def keep_sample(session: Path, count: int, seed: int) -> int:
    """Delete all but a sample of a session's jobs; return how many there were."""
    with closing(sqlite3.connect(session)) as store, store:
        jobs = [
            job
            # Names of jobs are random: the order is that of what they change.
            for job, operator in store.execute(
                "SELECT job_id, operator_name FROM mutation_specs "
                "ORDER BY module_path, start_pos_row, start_pos_col, operator_name, operator_args, occurrence"
            )
            if not operator.startswith(LEFT_OUT)
        ]
        store.execute("CREATE TEMP TABLE kept (job_id TEXT PRIMARY KEY)")
        store.executemany("INSERT INTO kept VALUES (?)", [(job,) for job in sample(jobs, count, seed)])
        for table in ("mutation_specs", "work_items"):
            store.execute(f"DELETE FROM {table} WHERE job_id NOT IN (SELECT job_id FROM kept)")
    return len(jobs)


def show(session: Path, possible: int) -> None:
    """Print the share of noticed changes, and every change that was not noticed."""
    with closing(sqlite3.connect(session)) as store:
        rows = store.execute(
            "SELECT module_path, start_pos_row, operator_name, test_outcome, diff, output FROM work_results "
            "JOIN mutation_specs USING (job_id) ORDER BY module_path, start_pos_row"
        ).fetchall()
    unnoticed = [row for row in rows if row[3].lower().endswith("survived")]
    for module, line, operator, _, diff, _ in unnoticed:
        changed = [one for one in diff.splitlines() if one[:1] in "+-" and one[:3] not in ("+++", "---")]
        print(f"\nnot noticed: {module}:{line} ({operator.removeprefix('core/')})", *changed, sep="\n  ")
    # cosmic-ray counts these as noticed; on a busy machine right tests take long, too.
    late = [f"{module}:{line}" for module, line, *_, output in rows if output == "timeout"]
    if late:
        print(f"\nnot known, because the tests took longer than {TIMEOUT_S} s: {', '.join(late)}")
    noticed = len(rows) - len(unnoticed) - len(late)
    print(f"\n{noticed} of {len(rows)} changes noticed, of {possible} possible ones")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=100, help="how many changes are tried")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    parser.add_argument("--rooms", nargs="+", default=ROOMS, choices=ROOMS + SEAMS, help="of which folders")
    parser.add_argument("--notices", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.notices:
        sys.exit(notices(options.notices))
    if shutil.which("cosmic-ray") is None:
        sys.exit("mutation_sample: cosmic-ray is not installed: pip install cosmic-ray")
    with copied_tree() as tree:
        config, session = tree.parent / "config.toml", tree.parent / "session.sqlite"
        modules = [
            str(path.relative_to(tree))
            for room in options.rooms
            for path in sorted((tree / "rhyme_openrlhf" / room).rglob("*.py"))
            if path.name != "__init__.py"
        ]
        # The command's words are split by cosmic-ray; no path here has spaces but those of the temporary folder.
        command = f"{sys.executable} {Path(__file__)} --notices {tree}"
        config.write_text(
            f"[cosmic-ray]\nmodule-path = {json.dumps(modules)}\ntimeout = {TIMEOUT_S}\nexcluded-modules = []\n"
            f'test-command = {json.dumps(command)}\n[cosmic-ray.distributor]\nname = "local"\n'
        )
        os.environ["PYTHONPATH"] = str(tree)
        if subprocess.run([*PYTEST, *(f"tests/{room}" for room in options.rooms)], cwd=tree).returncode:
            sys.exit("mutation_sample: tests fail without any change, so they would seem to notice every change")
        subprocess.run(["cosmic-ray", "init", str(config), str(session)], cwd=tree, check=True)
        possible = keep_sample(session, options.mutants, options.seed)
        subprocess.run(["cosmic-ray", "exec", str(config), str(session)], cwd=tree, check=True)
        show(session, possible)


if __name__ == "__main__":
    main()
