"""Every promise of README.md and of the pages names a test, and a change of the product that turns it red."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import mutants

ROOT = Path(__file__).parents[1]
MUTANTS = mutants.table()
# `tests/folder/test_file.py` or `tests/folder/test_file.py::test_name`.
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
HEADING = "## What is promised"


def bullets(text: str) -> list[str]:
    """Return the items of a page's lists, each with the lines that belong to it."""
    return re.findall(r"^- .*(?:\n  .*)*", text, re.MULTILINE)


def section(text: str, heading: str) -> str:
    """Return what stands below a heading."""
    assert f"\n{heading}\n" in text, f"there is no heading {heading!r}"
    return re.split(r"^#+ ", text.partition(f"\n{heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def promises(readme: str, reliability: str) -> list[str]:
    """Return the promises: each item of a list; of docs/reliability.md each section too, whose tables have no items."""
    sections = re.split(r"^## .*\n", reliability, flags=re.MULTILINE)
    return [*bullets(section(readme, HEADING)), *bullets(reliability), *sections]


def missing(promise: str, root: Path) -> list[str]:
    """Return what is wrong with a promise's tests: none is named, or one does not exist."""
    named = NAMED.findall(promise)
    wrong = [] if named else ["no test is named"]
    for path, name in named:
        if not (root / path).is_file():
            wrong.append(f"there is no {path}")
        elif name and name not in names_in(root / path):
            wrong.append(f"there is no test {name} in {path}")
    return wrong


def names_in(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


# Sections of other pages, each item of which is a promise.
STATED = {"docs/history.md": "### What it promises", "docs/weights.md": "## Invariants"}
ITEMS = [(page, item) for page, head in STATED.items() for item in bullets(section((ROOT / page).read_text(), head))]
PROMISES = promises((ROOT / "README.md").read_text(), (ROOT / "docs" / "reliability.md").read_text())


def test_promises_are_found() -> None:
    assert len(PROMISES) >= 20
    assert any(one.startswith("- **Lossless.**") for one in PROMISES)
    assert any(one.startswith("- **Nothing hangs.**") for one in PROMISES)


@pytest.mark.parametrize("number", range(len(PROMISES)))
def test_a_promise_names_a_test_that_exists(number: int) -> None:
    promise = PROMISES[number]
    assert missing(promise, ROOT) == [], f"name the test behind this promise: {promise[:200]}"


def test_a_promise_without_its_test_is_found() -> None:
    page = "# R\n\n- **A.** One.\n  `tests/test_promises.py::test_promises_are_found`.\n- **B.** Two.\n"
    first, second = bullets(page)
    assert missing(first, ROOT) == [] and missing(second, ROOT) == ["no test is named"]
    assert missing("`tests/test_gone.py`", ROOT) == ["there is no tests/test_gone.py"]
    assert missing("`tests/test_promises.py::gone`", ROOT) == ["there is no test gone in tests/test_promises.py"]
    readme = f"# X\n\n{HEADING}\n\n- **A.** x\n\n## Next\n\n- not one\n"
    assert promises(readme, page)[0] == "- **A.** x" and "- not one" not in promises(readme, page)


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("number", range(len(PROMISES)))
def test_a_promise_has_a_mutant(number: int) -> None:
    promise = words(PROMISES[number])
    assert not promise.startswith("- **") or any(words(mutant.promise) in promise for mutant in MUTANTS), promise[:200]


@pytest.mark.parametrize(("page", "item"), ITEMS)
def test_each_item_of_a_pages_promises_has_a_test_and_a_mutant(page: str, item: str) -> None:
    """The mutant names the tests."""
    assert [one for one in MUTANTS if one.page == page and words(one.promise) in words(item) and one.tests], item


@pytest.mark.parametrize("number", range(len(MUTANTS)))
def test_a_mutant_is_of_a_promise_and_of_the_product_as_it_is(number: int) -> None:
    mutant = MUTANTS[number]
    assert words(mutant.promise) in words((ROOT / mutant.page).read_text())
    changed = mutant.apply((ROOT / mutant.file).read_text())
    if mutant.file.endswith(".py"):
        ast.parse(changed)
    named = " ".join(f"`{test}`" for test in mutant.tests)
    assert missing(named, ROOT) == []


def run_mutants(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "mutants.py"), *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_mutant_is_red_and_a_change_of_nothing_is_green(starts_python: None, tmp_path: Path) -> None:
    done = run_mutants("--only", "run/stage_watch.py", "--fast")
    assert done.returncode == 0 and "3 of 3 red" in done.stdout, done.stdout + done.stderr
    watch = "rhyme_openrlhf/run/stage_watch.py"
    harmless = dataclasses.replace(MUTANTS[0], file=watch, old="Decides whether a run", new="Says whether a run")
    copy = mutants.Copy(tmp_path)
    verdict, _ = copy.test(harmless, ["tests/run/test_stage_watch.py"], slow=False)
    assert verdict == mutants.GREEN and (tmp_path / harmless.file).read_text() == (ROOT / harmless.file).read_text()
    assert copy.test(harmless, ["tests/run/no_such_test.py"], slow=False)[0] == mutants.BROKEN


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_every_mutant_is_red(starts_engine: None, starts_ray: None, starts_e2e: None) -> None:
    done = run_mutants()
    assert done.returncode == 0, done.stdout + done.stderr
