"""Scripts beside the package import only names that the package has. Nothing is run, so no training stack is needed."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import rhyme_openrlhf

PACKAGE = Path(rhyme_openrlhf.__file__).parent
ROOT = Path(__file__).parents[2]
SCRIPTS = [*sorted((ROOT / "benchmarks").glob("*.py")), *sorted((ROOT / "scripts").glob("*.py"))]


@cache
def names_of(module: str) -> set[str]:
    """Return the names that a module of the package defines or imports at its top level, and its modules."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    found = {one.stem for one in path.iterdir()} if path.is_dir() else set()
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(file.read_text())) if file.is_file() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(one.asname or one.name).partition(".")[0] for one in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_what_scripts_import_is_there() -> None:
    imported = {
        (script.name, str(node.module), one.name)
        for script in SCRIPTS
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE.name
        for one in node.names
    }
    assert {one for one in imported if one[2] not in names_of(one[1])} == set()
