"""The earlier runs that a run drafts from, as the API tells: added up over workers, newest reports only."""

from __future__ import annotations

from typing import Any

import pytest

from rhyme_openrlhf.telemetry.events import EarlierRun, EngineStep, Event
from rhyme_openrlhf.telemetry.metrics import EngineCounters

pytestmark = pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)

RUN, ATTEMPT, OTHER = "1" * 16, "2" * 16, "3" * 16


def earlier(step: int, worker: int, name: str, uid: str = "", **more: Any) -> EarlierRun:
    counts = {"prompts": 5, "of": 10, "epochs": 2, "drafted_from": step, "judged": 0, "right": 0, "left_out": False}
    return EarlierRun(step, worker, name, uid, f"/runs/{name}/history/archive", **{**counts, **more})


def test_workers_add_up_and_the_newest_report_of_each_counts(api: Any, numbered: Any) -> None:
    api.announce(OTHER, "4" * 16, name="math")
    api.announce(RUN, ATTEMPT)
    events: list[Event] = [
        earlier(0, 0, "math", OTHER),
        earlier(0, 1, "math", OTHER, prompts=4),
        earlier(0, 0, "gone", "5" * 16, epochs=3),
        earlier(3, 0, "math", OTHER, judged=100, right=60),
        earlier(4, 1, "math", OTHER, prompts=4, judged=300, right=40),
        earlier(4, 0, "gone", "5" * 16, drafted_from=1, judged=50, left_out=True),
    ]
    api.send(numbered([(1.0 + at, "history", event) for at, event in enumerate(events)]), ATTEMPT)
    math, gone = api.viewer.get(f"/api/v1/runs/{RUN}").json()["earlier_runs"]
    assert math == {
        "name": "math", "uid": OTHER, "directory": "/runs/math/history/archive", "prompts": 9, "of": 20, "epochs": 2,
        "drafted_from": 7, "right_share": 0.25, "left_out": False,
    }  # fmt: skip
    assert (gone["name"], gone["uid"], gone["right_share"], gone["left_out"]) == ("gone", None, 0.0, True)
    assert api.viewer.get(f"/api/v1/runs/{OTHER}").json()["earlier_runs"] == []


def test_their_share_of_the_tokens_is_a_curve(api: Any, numbered: Any) -> None:
    api.announce(RUN, ATTEMPT)
    counts = [(1, 0, 30, 6), (1, 1, 10, 4), (2, 0, 0, 0), (3, 0, 20, 5)]
    events = [
        EngineStep(step, engine, EngineCounters(response_tokens=tokens, accepted=9, accepted_earlier=of_them), None)
        for step, engine, tokens, of_them in counts
    ]
    api.send(numbered([(1.0 + at, "driver", event) for at, event in enumerate(events)]), ATTEMPT)
    curve = api.viewer.get(f"/api/v1/runs/{RUN}/series", params={"names": "earlier_share"}).json()["curves"][0]
    assert (curve["x"], curve["values"]) == ([1, 2, 3], [0.25, None, 0.25])
