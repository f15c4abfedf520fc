"""Events that pass `prepare` fit into both databases; others are refused by position and name."""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.api.ingest.validation import BadEventError, from_store, prepare
from rhyme_openrlhf.api.store.json_values import storable
from rhyme_openrlhf.telemetry.event_json import parse
from rhyme_openrlhf.telemetry.events import Note

NOTE = {"kind": "note", "time": 1.5, "source": "driver", "sequence": 0, "level": "info", "text": "hello"}
STEP = {"kind": "checkpoint_saved", "time": 1.5, "source": "trainer", "sequence": 0, "step": 1, "path": "p"}
TRAIN: dict[str, Any] = {
    "kind": "train_step", "time": 1.5, "source": "trainer", "sequence": 0, "step": 1, "epoch": 1,
    "seconds_by_part": {}, "metrics": {},
}  # fmt: skip
MOVED = {
    "kind": "sample_moved", "time": 1.5, "source": "rollout", "sequence": 0, "step": 1, "sample": "a",
    "source_engine": 0, "destination_engine": 1, "cause": "reallocation", "carrier": "recompute", "outcome": "moved",
    "seconds": 0.5, "tokens": 3,
}  # fmt: skip


def nested(levels: int) -> list[Any]:
    return [nested(levels - 1)] if levels else []


def test_bodies_are_the_events_without_their_envelope(make_run: Callable[..., list[dict[str, Any]]]) -> None:
    rows = make_run(seed=21)
    for row, one in zip(rows, prepare(rows), strict=True):
        envelope = {"kind": one.kind, "time": one.time, "source": one.source, "sequence": one.sequence}
        assert {**envelope, **json.loads(one.body)} == row
        recorded = parse(row)
        assert repr(one.event) == repr(recorded.event if recorded else None)


ODD = [
    None, True, 0, -1, 3.5, 2**31, 2**60, 10**400, 1e300, math.nan, "", "nan", "a\0b", "\ud800", "x" * 200, [], [1], {},
    {"a": None}, {"a": math.inf}, {"a": 1}, {"x" * 129: 1.0}, {"x" * 124: 1.0}, {"a\0": 1.0}, {1: 1.0},
]  # fmt: skip


def test_what_is_taken_can_be_stored_and_is_read_again_as_it_was(make_run: Callable[..., list[dict[str, Any]]]) -> None:
    rows = {row["kind"]: row for row in [*make_run(seed=4), NOTE, STEP, TRAIN, MOVED]}
    taken = 0
    for row in rows.values():
        odd = [{**row, name: value} for name in [*row, "colour"] for value in ODD]
        odd += [{key: value for key, value in row.items() if key != name} for name in row]
        if "counters" in row:
            counters = row["counters"]
            odd += [{**row, "counters": {**counters, name: value}} for name in [*counters, "new"] for value in ODD]
            odd += [{**row, "counters": {k: v for k, v in counters.items() if k != name}} for name in counters]
        for one in odd:
            with suppress(BadEventError):
                (arrived,) = prepare([one])
                taken += 1
                assert repr(from_store(*arrived[:5])) == repr(arrived)
    assert taken > len(rows)


def test_unknown_kinds_and_fields_are_kept_raw() -> None:
    new = {"kind": "from_the_future", "time": 1, "source": "driver", "sequence": 0, "x": {"y": [1, None]}}
    known, future = prepare([{**NOTE, "colour": "red"}, new])
    assert json.loads(known.body) == {"level": "info", "text": "hello", "colour": "red"}
    assert known.event == Note("info", "hello")
    assert (future.event, json.loads(future.body)) == (None, {"x": {"y": [1, None]}})


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([], "must be an object"),
        ({}, "'kind'"),
        ({**NOTE, "sequence": -1}, "'sequence': must be from 0"),
        ({**NOTE, "sequence": 2**60}, "'sequence': must be from 0"),
        ({**NOTE, "source": ""}, "'source': must be plain text of 1 to 64"),
        ({**NOTE, "source": "x" * 65}, "'source'"),
        ({**NOTE, "source": "a\0"}, "'source'"),
        ({**NOTE, "time": 1e300}, "'time': must be unix seconds"),
        ({**NOTE, "time": "now"}, "'time'"),
        ({**NOTE, "more": math.nan}, "not strict JSON"),
        ({**NOTE, "more": {"deep": [math.inf]}}, "not strict JSON"),
        ({**NOTE, "text": "\ud800"}, "'text': must be plain text"),
        ({**NOTE, "more": "\ud800"}, "not strict JSON"),
        ({"kind": "future", "time": 1.0, "source": "a"}, "'sequence': is missing"),
        ({"kind": "f" * 33, "time": 1.0, "source": "a", "sequence": 0}, "'kind'"),
        ({**STEP, "step": 2**31}, "'step': expected `int` <= 2147483647"),
        ({**STEP, "path": "a\0b"}, "'path'"),
        ({**TRAIN, "metrics": {"x" * 129: 1.0}}, "must have a name of at most 128"),
        ({**TRAIN, "metrics": {"a\0": 1.0}}, "must have a name"),
        ({**TRAIN, "seconds_by_part": {"train": 1e300}}, "seconds_by_part.train"),
        ({**MOVED, "sample": "x" * 65}, "'sample'"),
        ({**MOVED, "tokens": 2**60}, "'tokens'"),
        ({**MOVED, "seconds": 1e12}, "'seconds'"),
        ({**NOTE, "more": nested(40)}, "nested deeper than 32 levels"),
        ({**NOTE, "kind": "future", "more": nested(40)}, "nested deeper than 32 levels"),
        ({**NOTE, "kind": "evaluation", "step": 1, "metrics": {"x" * 124: 1.0}}, "at most 123"),
    ],
)
def test_what_a_store_cannot_hold_is_refused(row: Any, says: str) -> None:
    with pytest.raises(BadEventError, match=f"^event 1 of the batch: .*{says}") as error:
        prepare([NOTE, row])
    assert error.value.position == 1


def test_no_size_in_bytes_is_too_large() -> None:
    sizes = {"memory_bytes": 2**40, "disk_bytes": 2**40}
    counts = dict.fromkeys(("step", "worker", "prompts", "resident", "spilled", "hits", "late", "misses"), 1)
    (arrived,) = prepare([{**NOTE, "kind": "history_state", **counts, **sizes}])
    assert {name: getattr(arrived.event, name) for name in sizes} == sizes


@given(st.text())
def test_storable_text_is_utf8_without_nul(text: str) -> None:
    try:
        plain = b"\0" not in text.encode()
    except UnicodeEncodeError:
        plain = False
    assert storable(text) == plain
