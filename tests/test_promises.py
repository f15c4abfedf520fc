"""Every promise of README.md and docs/reliability.md names a test in its text, and the test exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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
