"""Finding runs by any field, metric or setting: filters, sorting and columns over HTTP, on both databases."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rhyme_openrlhf.api.store.models import Run, RunParameter
from rhyme_openrlhf.api.store.parameters import keep_all_parameters
from rhyme_openrlhf.telemetry.events import RolloutFinished, RunStarted, TrainStep

RUNS = "/api/v1/runs"
pytestmark = pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture
def several(api: Any, numbered: Any) -> Any:
    """Runs "r0" to "r4"; r4 has no metric, r3 no learning rate."""
    for number in range(5):
        arguments: dict[str, Any] = {"data": {"prompt_dataset": f"d{number % 2}"}}
        if number != 3:
            arguments["actor"] = {"adam": {"lr": 10.0 ** -(number + 4)}}
        settings = {"histospec": {"enable": number > 2}, "control": {"token": "secret"}}
        config = {"arguments": arguments, "settings": settings}
        api.announce(f"{number:016x}", f"{number + 16:016x}", f"r{number}", config=config)
        rows: list[Any] = [(1.0, "driver", RunStarted(1, f"r{number}", ["rhyme"], 2, 1, 1, 3, 4, 2, False))]
        for step in (1, 2) if number < 4 else ():
            loss = {"policy_loss": 1.0 - 0.2 * number if step == 2 else 9.0}
            rollout = RolloutFinished(step, 1, 1.0 + number, 8, 100, 0.1 * number, 1.0, 1.0, 1.0, 1, 0)
            rows.append((2.0 + step, "rollout", rollout))
            rows.append((2.0 + step, "trainer", TrainStep(step, 1, {"train": 1.0}, loss)))
        api.send(numbered(rows), f"{number + 16:016x}")
    api.operator.patch(f"{RUNS}/{1:016x}", json={"tags": ["base line", "b"]})
    return api


def found(api: Any, filter: str, **more: Any) -> list[str]:
    answer = api.viewer.get(RUNS, params={"filter": filter, "sort": "name", "direction": "asc", **more})
    assert answer.status_code == 200, answer.text
    return [run["name"] for run in answer.json()["items"]]


FILTERS = [
    ("reward > 0.15", ["r2", "r3"]),
    ("not reward > 0.15", ["r0", "r1", "r4"]),
    ("metric.policy_loss <= 0.8 and metric.policy_loss > 0.5", ["r1", "r2"]),
    ("metric.nothing > 0", []),
    ("config.actor.adam.lr = 1e-5", ["r1"]),
    ("config.actor.adam.lr < 1e-5 or name = r0", ["r0", "r2", "r4"]),
    ("not config.actor.adam.lr > 0", ["r3"]),
    ("config.data.prompt_dataset = d1", ["r1", "r3"]),
    ("config.data.prompt_dataset ~ D", ["r0", "r1", "r2", "r3", "r4"]),
    ("config.histospec.enable = true", ["r3", "r4"]),
    ("tag = 'base line'", ["r1"]),
    ("tag != b and status = running", ["r0", "r2", "r3", "r4"]),
    ("name ~ 'R' and (step >= 2 and step < 3)", ["r0", "r1", "r2", "r3"]),
    ("created_at > 2026-01-01 and created_at > 5", ["r0", "r1", "r2", "r3", "r4"]),
    ("""name = "'; drop table runs; --" """, []),
    ("experiment = none", []),
]


def test_runs_are_found_by_fields_metrics_and_settings(several: Any) -> None:
    # A service takes longer to make than to ask: one for all.
    for filter, names in FILTERS:
        assert found(several, filter) == names, filter


WRONG = [
    ("rewrad > 1", "there is no 'rewrad'"),
    ("reward = high", "reward is a number"),
    ("name > a", "compared with a text"),
    ("config.actor.adam.lr ~ 5 and created_at > yesterday", "created_at is a time"),
    ("reward >", "expected a value"),
    ("name = \ud800".encode("utf-8", "surrogatepass").decode("latin-1"), ""),
]


def test_a_wrong_filter_is_a_sentence(several: Any) -> None:
    for filter, says in WRONG:
        answer = several.viewer.get(RUNS, params={"filter": filter})
        if says:
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid_filter"), filter
            assert says in answer.json()["errors"][0]["message"], filter
        assert answer.status_code in (200, 422), filter


ORDERS = [
    ("metric.policy_loss", ["r3", "r2", "r1", "r0", "r4"]),
    ("metric.rollout_seconds", ["r0", "r1", "r2", "r3", "r4"]),
    ("config.actor.adam.lr", ["r4", "r2", "r1", "r0", "r3"]),
    ("config.data.prompt_dataset", ["r0", "r2", "r4", "r1", "r3"]),
]


def test_runs_are_sorted_by_any_value_page_by_page(several: Any) -> None:
    for (sort, names), direction in itertools.product(ORDERS, ("asc", "desc")):
        seen: list[str] = []
        cursor: dict[str, str] = {}
        while True:
            params = {"sort": sort, "direction": direction, "limit": 2, "column": sort, **cursor}
            page = several.viewer.get(RUNS, params=params).json()
            seen += [run["name"] for run in page["items"]]
            assert all(set(run["values"]) == {sort} for run in page["items"])
            if page["next_cursor"] is None:
                break
            cursor = {"cursor": page["next_cursor"]}
        assert sorted(seen) == sorted(names), sort
        if direction == "asc":
            assert seen == names, sort
    assert several.viewer.get(RUNS, params={"sort": "nonsense"}).status_code == 422


def test_columns_have_the_values_of_the_last_step(several: Any) -> None:
    params = {"column": ["metric.policy_loss", "config.data.prompt_dataset", "config.histospec.enable"], "sort": "name"}
    rows = {run["name"]: run["values"] for run in several.viewer.get(RUNS, params=params).json()["items"]}
    assert rows["r2"] == {
        "metric.policy_loss": pytest.approx(0.6), "config.data.prompt_dataset": "d0", "config.histospec.enable": "false"
    }  # fmt: skip
    assert rows["r4"]["metric.policy_loss"] is None


def test_settings_are_kept_once_and_without_secrets(several: Any) -> None:
    database = several.service.database
    with database.writing() as session:
        kept = {(row.run_id, row.name): row.text for row in session.query(RunParameter)}
        assert "secret" not in "".join(kept.values())
        session.query(RunParameter).delete()
        keep_all_parameters(session)
        assert {(row.run_id, row.name): row.text for row in session.query(RunParameter)} == kept
        assert session.query(Run).count() == 5
