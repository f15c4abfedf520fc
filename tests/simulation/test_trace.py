"""Traces: what is read, and what a bad line says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Cluster, Features
from rhyme_openrlhf.simulation.trace import parse_trace, read_trace
from rhyme_openrlhf.simulation.workload import WorkloadError, drawn
from tests.latency import formula
from tests.simulation.test_workload import SHAPE

ROW: dict[str, Any] = {"step": 1, "epoch": 1, "prompt": "a", "sample": 0, "prompt_tokens": 7, "length": 5}


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
        ([json.dumps(ROW), json.dumps(ROW)], "line 2: sample 0 of 'a' in step 1 is in line 1"),
        ([json.dumps(ROW | {"sample": -1})], "line 1: sample must be a whole number from 0, got -1"),
        ([json.dumps(ROW | {"reward": "good"})], "line 1: reward must be a number, got 'good'"),
        (['{"reward": NaN, ' + json.dumps(ROW)[1:]], "line 1: reward must be finite, got nan"),
        ([json.dumps(ROW), "", json.dumps(ROW | {"sample": 1, "hits": [1, 1, 1]})], "line 3: hits make 6 tokens"),
        ([json.dumps(ROW | {"hits": [1, -1]})], "line 1: hits must be a list of whole numbers from 0"),
        ([json.dumps(ROW | {"hits": [1, 1], "drafted": [0, 3]})], "line 1: drafted must have as many numbers as hits"),
        ([json.dumps(ROW | {"drafted": [1]})], "line 1: drafted needs hits"),
        ([json.dumps(ROW | {"lengths": [5, 5], "hits": [[1, 1]]})], "line 1: hits and drafted must be lists"),
        ([json.dumps(ROW | {"lengths": []})], "line 1: lengths must be a list"),
        ([json.dumps(ROW | {"step": 2})], "numbered from 1 without gaps"),
        ([], "numbered from 1 without gaps"),
        (["[1]"], "line 1: lacks"),
    ],
)
def test_a_bad_trace_says_where(lines: list[str], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        parse_trace(lines, "t.jsonl")


def test_hits_are_how_samples_draft() -> None:
    """One sample of 13 tokens in four decode steps of three each, another without any hit."""
    rows = [
        ROW | {"length": 13, "hits": [2, 2, 2, 2], "drafted": [4, 2, 2, 4]},
        ROW | {"sample": 1, "length": 13, "hits": [0] * 12},
    ]
    load = parse_trace([json.dumps(row) for row in rows], "t.jsonl")
    (prompt,) = load.steps[0].prompts
    assert prompt.drafting[0] == ((0.0, 3.0, 4.0), (4.0, 3.0, 2.0), (7.0, 3.0, 2.0), (10.0, 3.0, 4.0))
    # Without `drafted`: the smallest window, of two tokens, all along.
    assert {part[1:] for part in prompt.drafting[1]} == {(1.0, 2.0)}
    profiles, cluster = {1: formula.profile()}, Cluster(devices=1)
    drafted = Run(load, cluster, Features("sync", speculation="measured"), profiles).go()
    plain = Run(load, cluster, Features("sync"), profiles).go()
    assert plain.decode_steps == 13 and drafted.tokens_generated == pytest.approx(26)
    # The drafting one is gone after a third of the other's steps.
    assert drafted.sample_steps == pytest.approx(13 + 5) and drafted.drafts == pytest.approx(13 * 2 + 5 * 3, abs=4)


def test_without_hits_of_all_samples_drafts_are_not_known() -> None:
    load = parse_trace([json.dumps(ROW)], "t.jsonl")
    with pytest.raises(ValueError, match="traces with hits"):
        Run(load, Cluster(devices=1), Features(speculation="measured"), {1: formula.profile()})
