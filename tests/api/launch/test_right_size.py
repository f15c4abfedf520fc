"""A recommendation for a run directory that was made to do harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.api.launch.right_size import advise
from rhyme_openrlhf.telemetry.event_json import to_json
from rhyme_openrlhf.telemetry.events import RolloutFinished, TrainStep

LENGTHS = {"step": 1, "epoch": 1, "prompt": "p", "prompt_tokens": 5, "sample": 0, "length": 7}


@pytest.mark.parametrize("lengths", ["[" * 100_000, "9" * 5000, "{}", json.dumps(LENGTHS)])
def test_a_record_that_no_run_has_costs_a_sentence(tmp_path: Path, lengths: str) -> None:
    rows = [RolloutFinished(1, 1, 4.0, 8, 200, 0.5, 25.0, 24.0, 40.0, 50, 0), TrainStep(1, 1, {"train": 1.0}, {})]
    events = [to_json(event, float(number), "driver", number) for number, event in enumerate(rows)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    (tmp_path / "lengths.jsonl").write_text(lengths + "\n")
    found = advise(tmp_path, {}, ())
    assert found.missing and found.rows == []


def test_simulations_leave_processors_to_others(api: Any) -> None:
    api.announce()
    path = f"/api/v1/runs/{'a' * 16}/right-size"
    with api.service.limits.simulations.one(), api.service.limits.simulations.one():
        refused = api.viewer.get(path)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert api.viewer.get(path).status_code == 200
