"""Trace files, and how samples drafted that were recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Cluster, Features
from rhyme_openrlhf.simulation.speculation import Rates
from rhyme_openrlhf.simulation.trace import drafting_of_step, from_hits, from_record, parse_trace, read_trace
from rhyme_openrlhf.simulation.workload import PRESETS, Drafting, PromptLoad, WorkloadError, drawn
from tests.latency import formula

ROW: dict[str, Any] = {"step": 1, "epoch": 1, "prompt": "a", "sample": 0, "prompt_tokens": 7, "length": 5}


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    load = drawn(PRESETS["rhymerl-math"], 4, 5, 3, 2, seed=4)
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


def record(pieces: list[list[str]], tokens: int, accepted: int, drafted: int | None) -> dict[str, Any]:
    return {"pieces": pieces, "tokens": tokens, "accepted": accepted, "drafted": drafted, "cut": False}


def steps(drafting: Drafting, length: int) -> float:
    ends = [part[0] for part in drafting[1:]] + [float(length)]
    return sum((end - begin) / gained for (begin, gained, _), end in zip(drafting, ends, strict=True))


def test_a_response_that_drafts_well_at_first_only() -> None:
    """Half of it drafted at 5 tokens a step, the other half the model's own."""
    head = [[source, text] for _ in range(10) for source, text in (("", "x"), ("history", "y" * 4))]
    found = from_record(record([*head, ["", "z" * 50]], 100, 40, 60))
    assert [gained for _, gained, _ in found] == pytest.approx([5.0, 5.0, 1.0, 1.0], rel=0.02)
    # The first token is the prefill's.
    assert steps(found, 100) == pytest.approx(100 - 40 - 1, rel=0.03)


def test_nothing_noted_is_nothing_known() -> None:
    assert from_record(record([["", "abc"]], 3, 0, None)) == ()
    assert from_record({**record([["", "abc"]], 3, 0, 0), "cut": True}) == ()


def test_what_was_not_kept_drafts_as_its_neighbour_and_the_step_comes_out() -> None:
    """Two of three responses were kept; the third's steps are what is missing of the step's."""
    prompts = [PromptLoad(0, 10, (41, 100)), PromptLoad(1, 10, (90,))]
    kept = {
        "a": [
            record([["", "x" * 10], ["own", "y" * 31]], 41, 31, 40),
            record([["", "x" * 50], ["history", "y" * 50]], 100, 50, 50),
        ]
    }
    known = 9 + 49
    missing = 60
    rates = Rates((40 + 99 + 89) / (known + missing), 1.0, 4.0)
    found = drafting_of_step(prompts, ["a", "b"], kept, rates)
    assert [len(prompt.drafting) for prompt in found] == [2, 1]
    total = sum(
        steps(drafting, length)
        for prompt in found
        for drafting, length in zip(prompt.drafting, prompt.lengths, strict=True)
    )
    assert total == pytest.approx(known + missing, rel=0.03)
    # The one of 90 tokens drafts as that of 100: well at its end.
    (borrowed,) = found[1].drafting
    assert borrowed[0][1] < borrowed[-1][1]


def test_without_kept_responses_prompts_stay_as_they_are() -> None:
    prompts = (PromptLoad(0, 10, (41,)),)
    assert drafting_of_step(prompts, ["a"], {}, Rates(2.0, 1.0, 2.0)) == prompts


def test_hits_that_do_not_make_the_response_are_refused() -> None:
    with pytest.raises(ValueError, match="hits make 3 tokens"):
        from_hits([1, 0], 5)
