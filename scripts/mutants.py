"""Does each promise have a test that can fail? Breaks the product in small ways and shows which tests turn red.

    python scripts/mutants.py                        every mutant of tests/mutants.toml
    python scripts/mutants.py --only "KV block"      those of the promises with this text
    python scripts/mutants.py --fast                 without those that start engines or training runs
    python scripts/mutants.py --random 60 --seed 1   random ones at the seams, against the tests of their files

A mutant is a change of one place of one file, made in a copy of the source tree. Its tests run in the copy, with the
environment's own Python. *Red* is what should be: a test failed. *Green* is a promise whose tests see nothing. *Broken*
are tests that ran into no assertion: they could not be collected, or took too long. The exit code is 1 if a mutant of
the table is not red. Random mutants are only counted.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "mutants.toml"
# What tests read of a source tree.
COPIED = (
    "rhyme_openrlhf", "api", "webui", "migrations", "tests", "scripts", "benchmarks", "docs", "examples", "csrc",
    "pyproject.toml", "README.md", "requirements", "CHANGELOG.md",
)  # fmt: skip
# Where our code meets what others wrote, or another process.
SEAMS = ("engine", "pipeline", "training", "weights", "run")
# A training run takes one to four minutes; other tests of a promise seconds.
LIMIT_S = 900
FAST = "not slow and not engine and not e2e and not ray and not service and not browser"
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


# --- random ones

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


def changes(source: str) -> Iterator[tuple[str, str]]:
    """Yield (old line or lines, new ones) for each place that can be changed; only those whose old text is unique."""
    for node in ast.walk(ast.parse(source)):
        old = ast.get_source_segment(source, node) or ""
        if new := _changed(node, old):
            yield old, new


def _changed(node: ast.AST, old: str) -> str:
    """Return what stands in the place of an expression or statement, or "" where nothing is to."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        return ast.unparse(ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators))  # type: ignore[list-item]
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        changed = ast.parse(ast.unparse(node), mode="eval").body
        changed.op = SWAPS[type(node.op)]()  # type: ignore[attr-defined]
        return f"({ast.unparse(changed)})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
        return NAMES[node.func.id] + old.removeprefix(node.func.id)
    # A statement that is left out: a call, or what is kept in an object.
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if is_call or (isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute)):
        return "pass"
    return ""


def random_mutants(count: int, seed: int, rooms: Sequence[str]) -> list[Mutant]:
    """Return `count` random mutants of files that have tests of their own."""
    found = []
    for room in rooms:
        for file in sorted((ROOT / "rhyme_openrlhf" / room).rglob("*.py")):
            tests = tests_of(file)
            source = file.read_text()
            if tests:
                places = [(old, new) for old, new in changes(source) if source.count(old) == 1]
                name = str(file.relative_to(ROOT))
                found += [Mutant(name, "", name, old, new, tests) for old, new in places]
    return random.Random(seed).sample(found, min(count, len(found)))


def tests_of(file: Path) -> tuple[str, ...]:
    """Return the test files that stand where this file does, and those of the folder of its room that name it."""
    inside = file.relative_to(ROOT / "rhyme_openrlhf")
    mirrored = ROOT / "tests" / inside.parent / f"test_{file.name}"
    name = ".".join(["rhyme_openrlhf", *inside.with_suffix("").parts])
    naming = [path for path in (ROOT / "tests" / inside.parts[0]).rglob("test_*.py") if name in path.read_text()]
    return tuple(sorted({str(path.relative_to(ROOT)) for path in (mirrored, *naming) if path.exists()}))


# --- running them


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

    def test(
        self, mutant: Mutant | None, tests: Iterable[str], slow: bool, limit_s: float = LIMIT_S
    ) -> tuple[str, float]:
        """Return what the tests say of a mutant (None: of the product as it is), and after how many seconds."""
        path = self._root / mutant.file if mutant else None
        before = path.read_text() if path else ""
        if mutant and path:
            path.write_text(mutant.apply(before))
        try:
            return self._run(tests, slow, limit_s)
        finally:
            if path:
                path.write_text(before)

    def _run(self, tests: Iterable[str], slow: bool, limit_s: float) -> tuple[str, float]:
        environment = {**os.environ, "PYTHONPATH": str(self._root), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:randomly", "-p", "no:cacheprovider"]
        started = time.monotonic()
        try:
            done = subprocess.run(
                [*command, "-m", "" if slow else FAST, *tests], cwd=self._root, env=environment, capture_output=True,
                text=True, timeout=limit_s,
            )  # fmt: skip
            verdict = {0: GREEN, 1: RED}.get(done.returncode, BROKEN)
        except subprocess.TimeoutExpired:
            # A test that waits for ever for what the mutant left out sees it, too, but says nothing.
            verdict = BROKEN
        return verdict, time.monotonic() - started


def main() -> int:
    """Run the mutants that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose promise or file has this text")
    parser.add_argument("--fast", action="store_true", help="without those whose tests start engines or training runs")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N random mutants at the seams instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", default=",".join(SEAMS), help=f"rooms of random mutants ({','.join(SEAMS)})")
    chosen = parser.parse_args()
    rooms = chosen.rooms.split(",")
    mutants = random_mutants(chosen.random, chosen.seed, rooms) if chosen.random else table()
    mutants = [mutant for mutant in mutants if chosen.only in mutant.promise + mutant.file]
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
    return 0 if chosen.random or set(verdicts) == {RED} else 1


if __name__ == "__main__":
    sys.exit(main())
