"""Every kind of event survives its JSON form; what does not have the form of its kind is refused by name."""

import json
import math
import subprocess
import sys
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.telemetry.event_json import EventError, parse, to_json
from rhyme_openrlhf.telemetry.events import (
    EVENT_CLASSES,
    INT32_MAX,
    SCHEMA_VERSION,
    CheckpointSaved,
    EngineInterval,
    EngineStep,
    Event,
    Note,
    Recorded,
    RunStarted,
    TrainStep,
    WeightsChecked,
    WeightsLoaded,
)
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from tests.examples import examples

finite = st.floats(allow_nan=False, allow_infinity=False)
counters = st.builds(EngineCounters, busy_seconds=finite)


def events_of(cls: type[Event]) -> st.SearchStrategy[Event]:
    """Events of a kind, with whole numbers that the schema allows."""
    whole = {
        name: st.integers(-INT32_MAX, INT32_MAX)
        for name, hint in get_type_hints(cls).items()
        if hint in (int, int | None)
    }
    return st.builds(cls, **whole, **({"counters": counters} if cls is EngineStep else {}))


any_event = st.one_of(*map(events_of, EVENT_CLASSES))

STARTED = RunStarted(
    schema_version=SCHEMA_VERSION,
    name="demo",
    command=["rhyme", "train", "--run.name", "demo"],
    engines=2,
    tensor_parallel_size=1,
    epochs=6,
    steps_per_epoch=None,
    prompts_per_step=12,
    samples_per_prompt=8,
    asynchronous=False,
)


def row_of(event: Event, **changes: Any) -> dict[str, Any]:
    return to_json(event, time=1.5, source="trainer", sequence=3) | changes


@given(any_event, finite, st.text(), st.integers(min_value=0))
def test_every_kind_survives_its_json_form(event: Event, time: float, source: str, sequence: int) -> None:
    row = to_json(event, time, source, sequence)
    recorded = parse(json.loads(json.dumps(row, allow_nan=False)))
    assert recorded is not None and type(recorded.event) is type(event)
    # Events that hold a NaN are not equal to themselves, their JSON forms are.
    assert to_json(recorded.event, recorded.time, recorded.source, recorded.sequence) == row
    if "nan" not in json.dumps(row):
        assert recorded == Recorded(event, time, source, sequence)


@pytest.mark.parametrize("cls", EVENT_CLASSES)
def test_kinds_are_distinct_frozen_and_apart_from_the_envelope(cls: type[Event]) -> None:
    assert [other.kind for other in EVENT_CLASSES].count(cls.kind) == 1
    assert cls.__struct_config__.frozen
    assert not set(cls.__struct_fields__) & {"kind", "time", "source", "sequence"}


def test_json_form_of_one_event_is_what_other_programs_read() -> None:
    assert row_of(CheckpointSaved(step=4, path="checkpoints/step-4")) == {
        "kind": "checkpoint_saved",
        "time": 1.5,
        "source": "trainer",
        "sequence": 3,
        "step": 4,
        "path": "checkpoints/step-4",
    }
    counters_form = row_of(EngineStep(step=1, engine=0, counters=EngineCounters(drafts=2), weight_version=0))[
        "counters"
    ]
    assert counters_form["drafts"] == 2


def test_unknown_kinds_and_fields_are_a_newer_writers() -> None:
    assert parse({"kind": "kind_of_the_future", "time": "tomorrow"}) is None
    recorded = parse(row_of(STARTED, field_of_the_future=1))
    assert recorded is not None and recorded.event == STARTED


@pytest.mark.parametrize("cls", EVENT_CLASSES)
@settings(max_examples=examples(20))
@given(data=st.data())
def test_a_missing_field_is_named(cls: type[Event], data: st.DataObject) -> None:
    event = data.draw(events_of(cls))
    required = [f.name for f in msgspec.structs.fields(cls) if f.required]
    name = data.draw(st.sampled_from(["time", "source", "sequence", *required]))
    row = row_of(event)
    del row[name]
    with pytest.raises(EventError, match=f"event '{cls.kind}', field '{name}': is missing") as caught:
        parse(row)
    assert (caught.value.kind, caught.value.field) == (cls.kind, name)


def test_fields_with_a_default_may_be_missing() -> None:
    interval = EngineInterval(engine=0, state="generate", start=1.0, end=2.0, step=1)
    row = row_of(interval)
    del row["cause"], row["weight_version"]
    recorded = parse(row)
    assert recorded is not None and recorded.event == interval


def test_a_weight_check_of_an_older_writer_has_no_movement() -> None:
    row = row_of(WeightsChecked(version=1, engine=0, max_difference=0.01))
    del row["moved"], row["policy_moved"]
    recorded = parse(row)
    assert recorded is not None and recorded.event == WeightsChecked(1, 0, 0.01, None, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("time", "1.5"),
        ("time", True),
        ("time", math.nan),
        ("source", 1),
        ("sequence", 1.0),
        ("name", None),
        ("command", "rhyme train"),
        ("engines", 2.0),
        ("engines", True),
        ("engines", None),
        ("steps_per_epoch", "4"),
        ("asynchronous", 1),
    ],
)
def test_a_wrong_type_is_named(field: str, value: object) -> None:
    with pytest.raises(EventError, match=f"event 'run_started', field '{field}'"):
        parse(row_of(STARTED, **{field: value}))


@pytest.mark.parametrize(
    ("event", "change", "field"),
    [
        (STARTED, {"command": ["rhyme", 1]}, "command[1]"),
        (TrainStep(1, 1, {}, {}), {"metrics": {"reward": "good"}}, "metrics.reward"),
        (TrainStep(1, 1, {}, {}), {"metrics": {"reward": 10**400}}, "metrics.reward"),
        (TrainStep(1, 1, {}, {}), {"seconds_by_part": [1.0]}, "seconds_by_part"),
        (Note("info", "hello"), {"level": "loud"}, "level"),
        (Note("info", "hello"), {"level": []}, "level"),
        (EngineStep(1, 0, EngineCounters(), 0), {"counters": 1}, "counters"),
        (EngineStep(1, 0, EngineCounters(), 0), {"counters": {}}, "counters.response_tokens"),
        (EngineInterval(0, "idle", 1.0, 2.0, 1), {"cause": "weather"}, "cause"),
    ],
)
def test_a_wrong_value_inside_a_field_is_named(event: Event, change: dict[str, Any], field: str) -> None:
    with pytest.raises(EventError) as caught:
        parse(row_of(event, **change))
    assert (caught.value.kind, caught.value.field) == (event.kind, field)


def test_a_bad_event_fails_where_it_is_made() -> None:
    with pytest.raises(EventError, match="weights_loaded.*seconds"):
        row_of(WeightsLoaded(version=1, engine=0, seconds="fast"))  # type: ignore[arg-type]


@pytest.mark.parametrize("row", [{}, {"kind": 7}])
def test_without_a_kind_it_is_no_event(row: dict[str, Any]) -> None:
    with pytest.raises(EventError, match="kind"):
        parse(row)


def test_numbers_of_numpy_become_plain_and_whole_seconds_floats() -> None:
    numpy = pytest.importorskip("numpy")
    row = row_of(TrainStep(numpy.int64(3), 1, {"train": 2}, {"reward": numpy.float32(0.5)}))
    assert json.loads(json.dumps(row)) == row
    assert (type(row["step"]), type(row["seconds_by_part"]["train"]), type(row["metrics"]["reward"])) == (
        int,
        float,
        float,
    )


def test_numbers_that_json_lacks_are_strict_json_all_the_same() -> None:
    values = {"a": math.nan, "b": math.inf, "c": -math.inf}
    row = json.loads(json.dumps(row_of(TrainStep(1, 1, {}, values)), allow_nan=False))
    assert row["metrics"] == {"a": "nan", "b": "inf", "c": "-inf"}
    recorded = parse(row)
    assert recorded is not None and isinstance(recorded.event, TrainStep)
    read = recorded.event.metrics
    assert math.isnan(read["a"]) and read["b"] == math.inf and read["c"] == -math.inf


FIRST_IN_THREADS = """
import sys, threading
sys.setswitchinterval(1e-6)
from rhyme_openrlhf.telemetry.event_json import EventError, read
from rhyme_openrlhf.telemetry.events import EVENT_CLASSES
together = threading.Barrier(12)
def meet(first):
    kinds = EVENT_CLASSES[first:] + EVENT_CLASSES[:first]
    # Those with counters first: they share a class, which all threads meet through one of them or another.
    kinds = sorted(kinds, key=lambda cls: "counters" not in cls.__struct_fields__)
    together.wait()
    for cls in kinds:
        try:
            read({"kind": cls.kind, "time": 1.0, "source": "e", "sequence": 0, "counters": {}})
        except EventError:
            continue
threads = [threading.Thread(target=meet, args=(first,)) for first in range(12)]
for each in threads: each.start()
for each in threads: each.join()
"""


@pytest.mark.usefixtures("starts_python")
def test_threads_may_read_the_first_events_of_a_process() -> None:
    """Each class is known before: msgspec ends a process in which two threads meet a class at once."""
    done = [subprocess.run([sys.executable, "-c", FIRST_IN_THREADS], timeout=120, check=False) for _ in range(3)]
    assert [one.returncode for one in done] == [0, 0, 0]
