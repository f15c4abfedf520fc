"""Events of a run that was never made: deterministic, of the schema, and saying what they are."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from rhyme_openrlhf.api.demo.synthetic_run import LABEL, SyntheticRun, synthetic_events, write_run_directory
from rhyme_openrlhf.telemetry.event_json import parse, to_json
from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.events import EVENT_CLASSES, EngineInterval, Note
from rhyme_openrlhf.telemetry.metrics import bubble_seconds
from rhyme_openrlhf.telemetry.summary import summarize

RUN = SyntheticRun(steps=48, engines=16, steps_per_epoch=12)
# Kinds that this generator has no use for.
LEFT_OUT = {
    "rollout_progress", "weights_loaded", "weights_checked", "stage_started", "process_ready", "process_died",
    "measuring", "evaluation_progress", "earlier_run",
}  # fmt: skip


def test_the_same_settings_give_the_same_events() -> None:
    assert list(synthetic_events(RUN)) == list(synthetic_events(RUN))
    other = SyntheticRun(steps=48, engines=16, steps_per_epoch=12, seed=2)
    assert list(synthetic_events(RUN)) != list(synthetic_events(other))


def test_every_event_passes_the_schema_and_every_kind_is_there() -> None:
    kinds = set()
    for one in synthetic_events(RUN):
        row = json.loads(json.dumps(to_json(one.event, one.time, one.source, one.sequence)))
        assert parse(row) == one
        kinds.add(one.event.kind)
    assert kinds == {cls.kind for cls in EVENT_CLASSES} - LEFT_OUT


@pytest.mark.parametrize("engines", [1, 3, 8, 64])
def test_an_engines_intervals_are_in_order_and_do_not_overlap(engines: int) -> None:
    lanes = defaultdict(list)
    for one in synthetic_events(SyntheticRun(steps=30, engines=engines, steps_per_epoch=10)):
        if isinstance(one.event, EngineInterval):
            lanes[one.event.engine].append(one.event)
    assert sorted(lanes) == list(range(engines))
    for lane in lanes.values():
        assert all(one.end > one.start for one in lane)
        assert all(first.end <= second.start for first, second in zip(lane, lane[1:], strict=False))
    causes = set(bubble_seconds(one for lane in lanes.values() for one in lane))
    assert causes >= {"weights", "sync", "trainer"} and "unexplained" not in causes
    if engines == 64:
        assert causes == {"weights", "sync", "trainer", "tail", "switch"}


def test_it_says_that_no_such_run_was_made(tmp_path: Path) -> None:
    write_run_directory(tmp_path / "run", RUN)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["command"] == [LABEL]
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert events == list(synthetic_events(RUN))
    assert any(isinstance(one.event, Note) and one.event.text == LABEL for one in events[:2])
    summary = summarize(iter(events)).to_dict()
    assert summary["message"] == LABEL
