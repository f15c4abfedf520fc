"""The chart of results is what the script draws, from figures that stand on the pages."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest


def test_the_chart_is_what_the_script_draws(script: ModuleType, tmp_path: Path) -> None:
    script.write(tmp_path / "results" / "chart.svg")
    assert script.FILE.read_text() == (tmp_path / "results" / "chart.svg").read_text()


def test_bars_are_the_figures_of_the_pages(script: ModuleType) -> None:
    assert script.ratio("**1.67** (1.67, 1.60, 2.12)") == (1.67, 1.60, 2.12)
    for bar in script.bars():
        assert bar.ratio.low <= bar.ratio.value <= bar.ratio.high < script.MOST


def test_a_row_that_is_gone_is_named(script: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("| one | 1.0 |\n")
    assert script.cells(page, "one") == ["one", "1.0"]
    with pytest.raises(ValueError, match="page.md has 0 rows that begin with 'two', not one"):
        script.cells(page, "two")
