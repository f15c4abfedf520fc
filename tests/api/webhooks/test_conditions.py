"""Conditions of running runs, found in their reports: stalled, reward fell, engines idle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

pytest.importorskip("fastapi")

from rhyme_openrlhf.api.store.curve_blocks import Points
from rhyme_openrlhf.api.store.models import WebhookDelivery
from rhyme_openrlhf.api.webhooks.conditions import WINDOW, Conditions, idle_percent, reward_fall
from rhyme_openrlhf.telemetry.events import RolloutProgress, SystemSample, TrainStep
from tests.api.http_service import START, Api
from tests.api.webhooks.stored import webhook

UID = "a" * 16
IDLE = SystemSample("node-a", 0.5, 1.5, 1, 2, 3, None, None, [], [], [], {}, {})
stores = pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)


class Reported:
    """A running run, and what it reports; `told` are the texts of messages that are new since the last look."""

    def __init__(self, api: Api, record: Any, *events: str, **limits: Any) -> None:
        self.api, self.clock = api, 0.0
        webhook(api.service.database, "http://127.0.0.1:9/", *events, **limits)
        # A second one that is about the ends of runs alone.
        webhook(api.service.database, "http://127.0.0.1:9/", "failed", "finished")
        self.conditions = Conditions(api.service.database, lambda: self.clock)
        self.following: dict[str, int] = {}
        self.known = 0
        api.announce()
        self.send(record(steps=1, ended=False))

    def send(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["sequence"] = self.following.get(row["source"], 0)
            self.following[row["source"]] = row["sequence"] + 1
        self.api.send(rows)

    def event(self, numbered: Any, event: Any) -> None:
        self.send(numbered([(START + 500, "driver", event)]))

    def told(self, minutes: float = 0.0) -> list[str]:
        self.clock += 60 * minutes
        self.conditions.check()
        rows = [one for one in self.log() if one.event != "finished"]
        fresh, self.known = rows[self.known :], len(rows)
        assert all(one.content["value"] > one.content["limit"] for one in fresh)
        return [one.content["text"] for one in fresh]

    def log(self) -> list[WebhookDelivery]:
        with self.api.service.database.reading() as session:
            return list(session.scalars(select(WebhookDelivery).order_by(WebhookDelivery.id)))


@stores
def test_a_run_that_does_nothing_is_stalled_though_its_clocks_report(api: Api, record: Any, numbered: Any) -> None:
    run = Reported(api, record, "stalled", stalled_minutes=10)
    assert run.told() == []
    for tokens in (100, 200, 300):
        run.event(numbered, RolloutProgress(2, 0, 8, tokens, 1.0, 0, 0))
        assert run.told(9) == []
    for _ in range(2):
        run.event(numbered, IDLE)
        run.event(numbered, RolloutProgress(2, 0, 8, 300, 1.0, 0, 0))
        assert run.told(4) == []
    run.event(numbered, IDLE)
    assert run.told(4) == ["Run “a run” has done nothing for 12 minutes, after step 1"]
    assert run.told(60) == []
    # It goes on, and stalls again in another step.
    run.event(numbered, TrainStep(2, 1, {}, {"reward": 0.5}))
    assert run.told(9) == [] and run.told(9) == []
    assert run.told(9) == ["Run “a run” has done nothing for 18 minutes, after step 2"]


@stores
def test_a_restart_of_the_service_makes_no_run_stalled(api: Api, record: Any) -> None:
    run = Reported(api, record, "stalled", stalled_minutes=10)
    assert run.told() == []
    run.clock += 3600
    run.conditions = Conditions(api.service.database, lambda: run.clock)
    assert run.told() == [] and run.told(9) == [] and len(run.told(2)) == 1
    # Another service has seen the same, and adds nothing.
    run.conditions = Conditions(api.service.database, lambda: run.clock)
    assert run.told() == [] and run.told(20) == []


@stores
def test_a_reward_that_fell_from_its_best_is_told_once_for_each_best(api: Api, record: Any, numbered: Any) -> None:
    run = Reported(api, record, "reward_fell", reward_fall=0.2)

    def trained(first: int, *rewards: float) -> None:
        for step, reward in enumerate(rewards, start=first):
            run.event(numbered, TrainStep(step, 1, {}, {"reward": reward}))

    trained(2, 0.1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.4, 0.4, 0.4)
    assert run.told() == []
    trained(11, 0.1, 0.1, 0.1)
    assert run.told() == ["The reward of run “a run” fell from 0.5 (step 7) to 0.22 (step 13), as means of 5 steps"]
    trained(14, 0.1, 0.1)
    assert run.told() == []
    trained(16, 0.9, 0.9, 0.9, 0.9, 0.9)
    assert run.told() == []
    trained(21, 0.1, 0.1, 0.1, 0.1, 0.1)
    assert [one.partition(" to ")[0] for one in run.told()] == ["The reward of run “a run” fell from 0.9 (step 20)"]


@stores
def test_engines_that_idle_are_told_once(api: Api, record: Any) -> None:
    # In its record, engines wait for 1.5 of 4 s: 2 s the one, 1 s the other.
    run = Reported(api, record, "engine_idle", idle_percent=37)
    run.send([row for row in record(steps=WINDOW, ended=False)[1:] if row.get("step", 0) > 1])
    assert run.told() == ["Engines of run “a run” were idle for 38 % of the last 5 rollouts, up to step 5"]
    run.send([row for row in record(steps=WINDOW + 2, ended=False)[1:] if row.get("step", 0) > WINDOW])
    assert run.told() == []


def test_the_webhook_of_who_is_no_operator_is_not_told(api: Api, record: Any) -> None:
    run = Reported(api, record, "stalled", stalled_minutes=10, maker_id=999)
    assert run.told(20) == []


@stores
def test_runs_within_their_limits_or_at_their_end_are_not_told(api: Api, record: Any) -> None:
    everything = ("stalled", "reward_fell", "engine_idle")
    run = Reported(api, record, *everything, idle_percent=38, stalled_minutes=1)
    run.send([row for row in record(steps=WINDOW, ended=True)[1:] if row.get("step", WINDOW) > 1])
    run.told(60)
    assert {one.event for one in run.log()} == {"finished"}


values = st.lists(st.one_of(st.just(float("nan")), st.floats(-5, 5)), max_size=40)


@given(values)
def test_means_are_of_steps_with_a_value(found: list[float]) -> None:
    points = Points.of(range(len(found)), found)
    known = [(step, one) for step, one in enumerate(found) if not np.isnan(one)]
    means = [
        (float(np.mean([one for _, one in known[i : i + WINDOW]])), known[i + WINDOW - 1][0])
        for i in range(len(known) - WINDOW + 1)
    ]
    if not means:
        assert reward_fall(points) is None and idle_percent(points) is None
        return
    fall = reward_fall(points)
    assert fall is not None
    best, now, at = fall
    assert now == pytest.approx(means[-1][0], abs=1e-9) and best == pytest.approx(max(means)[0], abs=1e-9)
    assert dict((step, mean) for mean, step in means)[at] == pytest.approx(best, abs=1e-9)
    assert idle_percent(points) == pytest.approx(100 * means[-1][0], abs=1e-6)
