"""The phases of a run, read from the store: from its newest events, and those of earlier runs of the same set-up."""

from __future__ import annotations

from typing import Any

import pytest

from rhyme_openrlhf.api.read import phases as reading
from rhyme_openrlhf.telemetry.events import (
    POLICY,
    EngineSample,
    Event,
    ProcessReady,
    RolloutFinished,
    RolloutProgress,
    RolloutStarted,
    RunFinished,
    RunStarted,
    StageStarted,
    TrainStep,
)

pytestmark = pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)

START = 1_760_000_000.0
CONFIG = {"arguments": {"actor": {"model_name_or_path": "qwen"}}, "machine": {"host": "node-a"}}


def report(api: Any, numbered: Any, run: int, events: list[tuple[float, Event]], **announced: Any) -> str:
    """Report a run with these events; returns its uid. `attempt`: its attempt's number."""
    uid, attempt = f"{run:016x}", f"{run:08x}{announced.pop('attempt', 1):08x}"
    api.announce(uid, attempt, **{"config": CONFIG, **announced})
    api.send(numbered([(START + at, "driver", event) for at, event in events]), attempt)
    return uid


def now(api: Any, uid: str) -> list[dict[str, Any]]:
    answer = api.viewer.get(f"/api/v1/runs/{uid}")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["phases"]
    return found


def begins(engines: int = 2) -> Event:
    return RunStarted(1, "a run", [], engines, 1, 1, 4, 12, 8, False)


def whole(engines: float, engine_count: int = 2) -> list[tuple[float, Event]]:
    """A run whose engines took these seconds to start."""
    ready = [(engines, ProcessReady(f"engine {number}")) for number in range(engine_count)]
    return [
        (0, begins(engine_count)), (2, ProcessReady(POLICY)), *ready, (engines + 1, RolloutStarted(1, 1, 12, 96)),
        (engines + 9, RolloutFinished.of(1, 1, 8.0, [3, 4], [], 0)), (engines + 9, StageStarted(1, "train")),
        (engines + 12, TrainStep(1, 1, {"train": 3.0}, {})), (engines + 13, RunFinished("succeeded", "", 99.0)),
    ]  # fmt: skip


def test_a_phase_has_its_count_and_the_time_it_usually_takes(api: Any, numbered: Any) -> None:
    for run, seconds in enumerate((30.0, 40.0, 90.0), 1):
        report(api, numbered, run, whole(seconds))
    uid = report(api, numbered, 9, [(0, begins()), (2, ProcessReady(POLICY)), (5, ProcessReady("engine 1"))])
    (phase,) = now(api, uid)
    assert phase.pop("text").startswith("starting engines: 1 of 2, for ")
    assert phase == {
        "name": "starting engines", "step": None, "done": 1, "total": 2, "slowest": "", "since": START,
        "usual_seconds": 40.0,
    }  # fmt: skip
    assert api.operator.patch(f"/api/v1/runs/{uid}", json={"notes": "x"}).json()["phases"][0]["usual_seconds"] == 40.0


@pytest.mark.parametrize(
    "other",
    [
        {"config": {**CONFIG, "arguments": {"actor": {"model_name_or_path": "llama"}}}},
        {"config": {**CONFIG, "machine": {"host": "node-b"}}},
        {"engine_count": 3},
    ],
    ids=["model", "machine", "engines"],
)
def test_runs_of_another_set_up_say_nothing_of_the_usual_time(api: Any, numbered: Any, other: dict[str, Any]) -> None:
    report(api, numbered, 1, whole(30.0, other.get("engine_count", 2)), config=other.get("config", CONFIG))
    uid = report(api, numbered, 9, [(0, begins())])
    assert [phase["usual_seconds"] for phase in now(api, uid)] == [None, None]


def test_a_later_run_and_one_without_a_machine_say_nothing(api: Any, numbered: Any) -> None:
    uid = report(api, numbered, 1, [(0, begins())])
    report(api, numbered, 2, whole(30.0))
    bare = report(api, numbered, 3, [(0, begins())], config={})
    assert [phase["usual_seconds"] for phase in (*now(api, uid), *now(api, bare))] == [None] * 4


def test_the_stage_under_way_is_found_behind_many_other_events(
    api: Any, numbered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "WINDOW", 50)
    steps: list[tuple[float, Event]] = [(0, begins())]
    for step in (1, 2):
        steps += [(step, RolloutStarted(step, 1, 12, 96)), (step, RolloutProgress(step, 96, 96, 9, 1.0, 0, 0))]
        steps += [(step, RolloutFinished.of(step, 1, 1.0, [3], [], 0)), (step, StageStarted(step, "experience"))]
        steps += [(step, TrainStep(step, 1, {}, {}))] if step == 1 else [(step, StageStarted(step, "sync"))]
    uid = report(api, numbered, 1, steps)
    assert [(phase["name"], phase["step"]) for phase in now(api, uid)] == [("loading weights", 2)]
    # Further than it is searched, what is indexed still says that the step is trained on.
    samples = [(3.0, EngineSample(2, 0, 4, 1.0, 50, 20, 10))] * 60
    uid = report(api, numbered, 2, [*steps, *samples])
    assert [(phase["name"], phase["step"]) for phase in now(api, uid)] == [("training", 2)]


def test_a_resumed_attempt_starts_anew_and_an_ended_run_does_nothing(api: Any, numbered: Any) -> None:
    uid = report(api, numbered, 1, whole(30.0)[:-1])
    assert now(api, uid) == []  # between two steps
    api.announce(uid, f"{1:08x}{2:08x}", config=CONFIG)
    assert [phase["name"] for phase in now(api, uid)] == ["starting Ray and the driver"]
    report(api, numbered, 1, [(200, begins()), (201, ProcessReady("engine 0"))], attempt=2)
    assert [(phase["name"], phase["done"]) for phase in now(api, uid)] == [
        ("starting engines", 1),
        ("loading the policy model", None),
    ]
    assert now(api, report(api, numbered, 2, whole(30.0))) == []
