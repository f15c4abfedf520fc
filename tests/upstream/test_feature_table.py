"""The guide's table of features that go together is what the checks before a run decide."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("openrlhf")
SCRIPT = Path(__file__).parents[2] / "scripts" / "feature_table.py"


def test_the_page_says_what_is_refused(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("feature_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.table(tmp_path)
    assert f"{module.BEGIN}{made}{module.END}" in module.PAGE.read_text(), "python scripts/feature_table.py --write"
    assert "does not go with --reallocation.enable" in made and "| yes |" in made
