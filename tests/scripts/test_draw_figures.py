"""The figures of the documentation are what the script draws."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_files_are_what_the_script_draws(script: ModuleType, tmp_path: Path) -> None:
    script.write(tmp_path)
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert {file.name: file.read_text() for file in (DOCS / "images" / "how").iterdir()} == drawn


def test_a_page_shows_each_figure(script: ModuleType) -> None:
    shown = {
        name for page in DOCS.glob("*.md") for name in re.findall(r"\(images/how/([\w-]+)\.svg\)", page.read_text())
    }
    assert shown == set(script.FIGURES)


def test_text_that_does_not_fit_is_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="wider than its box of 100"):
        script.box(0, 0, 100, 60, "a title that is far too long")
    with pytest.raises(ValueError, match="lower than its 3 lines"):
        script.box(0, 0, 100, 30, "a", "b", "c")
