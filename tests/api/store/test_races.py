"""Races: two requests take or delete the same thing at once; any other violated constraint is a defect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import delete, insert
from sqlalchemy.exc import IntegrityError

from rhyme_openrlhf.api.store import webhooks
from rhyme_openrlhf.api.store.base import Base
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.models import Experiment, Run, RunTag, SavedView, Token, Webhook, WebhookDelivery
from rhyme_openrlhf.api.store.races import RACED, again_if_raced, is_race, violated
from rhyme_openrlhf.api.store.record import RawEvent
from tests.api.webhooks.stored import webhook

stores = pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)
EXPERIMENT = {"name": "a", "description": "", "created_at": 1.0}
VIEW = {"owner": 1, "name": "a", "content": {}, "created_at": 1.0}
EVENT = {"run_id": 1, "attempt_id": 1, "source": "a", "sequence": 0, "time": 1.0, "kind": "note", "body": "{}"}
DELIVERY = {"webhook_id": 99, "key": "a", "event": "test", "content": {}, "created_at": 1.0, "tries": 0, "error": ""}


def refused(database: Database, table: Any, *rows: dict[str, Any]) -> IntegrityError:
    with pytest.raises(IntegrityError) as caught, database.writing() as session:
        for row in rows:
            session.execute(insert(table).values(**row))
    return caught.value


def test_a_name_that_is_taken_is_a_race_and_nothing_else(database: Database) -> None:
    assert violated(refused(database, Experiment, EXPERIMENT, EXPERIMENT)) == "uq_experiments_name"
    assert is_race(refused(database, SavedView, VIEW, VIEW))
    for defect in (
        refused(database, Experiment, {**EXPERIMENT, "id": 7}, {**EXPERIMENT, "id": 7, "name": "b"}),
        refused(database, Experiment, {**EXPERIMENT, "created_at": None}),
        refused(database, RawEvent, EVENT, EVENT),
        refused(database, RunTag, {"run_id": 99, "tag": "a"}),
        refused(database, Token, {"name": "a", "role": "king", "prefix": "", "digest": "", "created_at": 1.0}),
    ):
        assert not is_race(defect), violated(defect)
    # On SQLite, nobody deletes a row between a look and a write.
    assert is_race(refused(database, WebhookDelivery, DELIVERY)) == (not database.is_sqlite)


def test_every_race_is_of_a_constraint_that_exists() -> None:
    known = {constraint.name for table in Base.metadata.tables.values() for constraint in table.constraints}
    assert {str(name) for name in known} >= RACED


def test_a_defect_is_not_tried_again(database: Database) -> None:
    tries: list[int] = []

    def write(row: dict[str, Any]) -> None:
        tries.append(1)
        with database.writing() as session:
            session.execute(insert(Experiment).values(**row))

    with pytest.raises(IntegrityError):
        again_if_raced(lambda: write({**EXPERIMENT, "name": None}))
    assert len(tries) == 1


@stores
def test_a_batch_that_breaks_the_store_is_a_defect(api: Any, record: Callable[..., list[dict[str, Any]]]) -> None:
    """A reporter takes 409 for an unknown attempt: it would announce it again, without end."""
    api.announce()
    with api.service.database.writing() as session:
        # An event that its source's row knows nothing of.
        session.execute(insert(RawEvent).values(**{**EVENT, "source": "driver"}))
    answer = api.reporter.post(f"/api/v1/ingest/attempts/{'b' * 16}/batches", json={"events": record()})
    assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")


@pytest.mark.parametrize("store", ["postgresql"], indirect=True)
def test_a_webhook_that_is_deleted_meanwhile_costs_no_batch(
    api: Any, record: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    database, enqueue, looks = api.service.database, webhooks.enqueue, []
    webhook(database, "http://127.0.0.1:9/", "finished")
    kept = webhook(database, "http://127.0.0.1:9/", "finished")

    def enqueue_late(session: Any, rule: Webhook, *more: Any) -> None:
        looks.append(rule.id)
        if rule.id != kept.id:
            with database.writing() as another:
                another.execute(delete(Webhook).where(Webhook.id == rule.id))
        enqueue(session, rule, *more)

    monkeypatch.setattr(webhooks, "enqueue", enqueue_late)
    api.announce()
    rows = record()
    assert api.send(rows)["accepted"] == len(rows)
    assert len(looks) == 3
    with database.reading() as session:
        assert session.query(Run.status).scalar() == "succeeded"
        assert [one.webhook_id for one in session.query(WebhookDelivery)] == [kept.id]
