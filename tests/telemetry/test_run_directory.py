"""Files that several processes read are strict JSON, whole or not there."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rhyme_openrlhf.telemetry.run_directory import write_json


def test_numbers_that_are_not_finite_are_written_as_in_events(tmp_path: Path) -> None:
    content = {"max_mem": math.inf, "low": [-math.inf, (math.nan, 1.5)], "name": "x"}
    write_json(tmp_path / "config.json", content)

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    read = json.loads((tmp_path / "config.json").read_text(), parse_constant=refuse)
    assert read == {"max_mem": "inf", "low": ["-inf", ["nan", 1.5]], "name": "x"}
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
