"""Does each promise have a test that can fail? Breaks the product in small ways and shows which tests turn red.

    python scripts/mutants.py                        every mutant of tests/mutants.toml
    python scripts/mutants.py --only "KV block"      those of the promises with this text
    python scripts/mutants.py --fast                 without those that start engines or training runs

A mutant is a change of one place of one file, made in a copy of the source tree. Its tests run in the copy, with the
environment's own Python. *Red* is what should be: a test failed. *Green* is a promise whose tests see nothing. *Broken*
are tests that ran into no assertion: they could not be collected, or took too long. The exit code is 1 unless all
mutants are red. (Random ones: mutation_sample.py.)
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mutation_sample import FAST

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "mutants.toml"
# What tests read of a source tree.
COPIED = (
    "rhyme_openrlhf", "api", "webui", "migrations", "tests", "scripts", "benchmarks", "docs", "examples", "csrc",
    "pyproject.toml", "README.md", "requirements", "CHANGELOG.md",
)  # fmt: skip
# A training run takes one to four minutes; other tests of a promise seconds.
LIMIT_S = 900
RED, GREEN, BROKEN = "red", "GREEN", "BROKEN"


@dataclass(frozen=True)
class Mutant:
    """`old`, which stands once in `file`, becomes `new`; one of `tests` is to fail. `slow`: they start engines."""

    promise: str
    page: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    slow: bool = False

    def apply(self, source: str) -> str:
        """Return the mutated source. Raises ValueError unless `old` stands in it once."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.file} has {source.count(self.old)} times, not once: {self.old!r}")
        return source.replace(self.old, self.new)


def table(path: Path = TABLE) -> list[Mutant]:
    """Return the mutants of the promises."""
    rows = tomllib.loads(path.read_text())["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


class Copy:
    """A copy of the source tree, in which one mutant at a time is tested."""

    def __init__(self, folder: Path) -> None:
        self._root = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", ".hypothesis", "node_modules")
                shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
            else:
                shutil.copy(source, folder / name)

    def test(self, mutant: Mutant | None, tests: Iterable[str], slow: bool) -> tuple[str, float]:
        """Return what the tests say of a mutant (None: of the product as it is), and after how many seconds."""
        path = self._root / mutant.file if mutant else None
        before = path.read_text() if path else ""
        if mutant and path:
            path.write_text(mutant.apply(before))
        try:
            return self._run(tests, slow)
        finally:
            if path:
                path.write_text(before)

    def _run(self, tests: Iterable[str], slow: bool) -> tuple[str, float]:
        environment = {**os.environ, "PYTHONPATH": str(self._root), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:randomly", "-p", "no:cacheprovider"]
        command += ["--hypothesis-profile=fails"]
        command += ["-m", "" if slow else FAST, *tests]
        started, nowhere = time.monotonic(), subprocess.DEVNULL
        running = subprocess.Popen(
            command, cwd=self._root, env=environment, stdout=nowhere, stderr=nowhere, start_new_session=True
        )
        try:
            verdict = {0: GREEN, 1: RED}.get(running.wait(LIMIT_S), BROKEN)
        except subprocess.TimeoutExpired:
            # Tests that wait for ever for what the mutant left out see it, too, but say nothing.
            verdict = BROKEN
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        return verdict, time.monotonic() - started


def main() -> int:
    """Run the mutants that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose promise or file has this text")
    parser.add_argument("--fast", action="store_true", help="without those whose tests start engines or training runs")
    chosen = parser.parse_args()
    mutants = [mutant for mutant in table() if chosen.only in mutant.promise + mutant.file]
    mutants = [mutant for mutant in mutants if not (chosen.fast and mutant.slow)]
    if not mutants:
        parser.error(f"no mutant has {chosen.only!r} in its promise or file")
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="rhyme-mutants-") as folder:
        copy = Copy(Path(folder))
        right = functools.cache(lambda tests, slow: copy.test(None, tests, slow)[0])
        print("| promise | mutant | tests | verdict | seconds |\n|---|---|---|---|---|")
        for mutant in mutants:
            # Tests that fail anyhow say nothing of a mutant.
            verdict, seconds = BROKEN, 0.0
            if right(mutant.tests, mutant.slow) == GREEN:
                verdict, seconds = copy.test(mutant, mutant.tests, mutant.slow)
            verdicts.append(verdict)
            change = " ".join(f"{mutant.file}: {mutant.old} -> {mutant.new or 'nothing'}".split())
            shown = ", ".join(mutant.tests)
            print(f"| {mutant.promise} | `{change[:160]}` | {shown} | {verdict} | {seconds:.0f} |", flush=True)
    green, broken = verdicts.count(GREEN), verdicts.count(BROKEN)
    print(f"\n{verdicts.count(RED)} of {len(verdicts)} red, {green} green, {broken} broken")
    return 0 if set(verdicts) == {RED} else 1


if __name__ == "__main__":
    sys.exit(main())
