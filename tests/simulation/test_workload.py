"""Traces and drawn workloads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from rhyme_openrlhf.simulation.presets import PRESETS
from rhyme_openrlhf.simulation.trace import parse_trace, read_trace
from rhyme_openrlhf.simulation.workload import WorkloadError, drawn

SHAPE = PRESETS["rhymerl-math"]
ROW = {"step": 1, "epoch": 1, "prompt": "a", "sample": 0, "prompt_tokens": 7, "length": 5}


def test_every_epoch_has_each_prompt_once_and_the_seed_decides() -> None:
    load = drawn(SHAPE, 6, 5, 3, 2, seed=4)
    assert [step.epoch for step in load.steps] == [1, 1, 2, 2, 3, 3]
    for epoch in (1, 2, 3):
        assert sorted(p.prompt for s in load.steps if s.epoch == epoch for p in s.prompts) == list(range(10))
    assert load == drawn(SHAPE, 6, 5, 3, 2, seed=4) != drawn(SHAPE, 6, 5, 3, 2, seed=5)
    assert all(1 <= length <= SHAPE.longest for s in load.steps for p in s.prompts for length in p.lengths)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    load = drawn(SHAPE, 4, 5, 3, 2, seed=4)
    rows = [
        {"step": n, "epoch": s.epoch, "prompt": f"p{p.prompt}", "sample": i, "prompt_tokens": 200, "length": length}
        for n, s in enumerate(load.steps, start=1)
        for p in s.prompts
        for i, length in enumerate(p.lengths)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row | {"reward": 1.0}) for row in rows) + "\n")
    found = read_trace(path)
    assert [[p.lengths for p in s.prompts] for s in found.steps] == [[p.lengths for p in s.prompts] for s in load.steps]
    names = {p.prompt for s in load.steps for p in s.prompts}
    assert len({p.prompt for s in found.steps for p in s.prompts}) == len(names)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{"], "line 1: no JSON"),
        ([json.dumps(ROW), json.dumps({"step": 1})], "line 2: lacks 'epoch'"),
        ([json.dumps(ROW | {"length": 0})], "line 1: length must be a whole number from 1, got 0"),
        ([json.dumps(ROW), json.dumps(ROW | {"epoch": 2})], "line 2: step 1 is in two epochs"),
        ([json.dumps(ROW | {"step": 2})], "numbered from 1 without gaps"),
        ([], "numbered from 1 without gaps"),
        (["[1]"], "line 1: lacks"),
    ],
)
def test_a_bad_trace_says_where(lines: list[str], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        parse_trace(lines, "t.jsonl")


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        dataclasses.replace(SHAPE, median=0)
    with pytest.raises(ValueError, match="within lies between"):
        dataclasses.replace(SHAPE, within=2)
