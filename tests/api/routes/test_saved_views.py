"""Saved views of the list of runs through the API: for one token or for everyone."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rhyme_openrlhf.api.read.saved_views import MOST_VIEWS, Shown, page_query
from rhyme_openrlhf.api.store.models import SavedView

stores = pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)
VIEWS = "/api/v1/views"
GOOD = {
    "status": ["succeeded"], "origin": ["reported"], "filter": "reward > 0.5", "sort": "metric.policy_loss",
    "direction": "asc", "columns": ["status", "reward"], "values": ["config.actor.adam.lr"],
}  # fmt: skip


def saved(client: Any, name: str, **more: Any) -> Any:
    answer = client.post(VIEWS, json={"name": name, **more})
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == f"{VIEWS}/{answer.json()['id']}"
    return answer.json()


def names(client: Any) -> list[tuple[str, bool]]:
    return [(one["name"], one["shared"]) for one in client.get(VIEWS).json()["items"]]


@stores
def test_a_view_is_kept_renamed_replaced_and_deleted(api: Any) -> None:
    view = saved(api.viewer, "good", **GOOD)
    assert {name: view[name] for name in GOOD} == GOOD and (view["archived"], view["shared"]) == ("no", False)
    place = f"{VIEWS}/{view['id']}"
    assert api.viewer.get(place).json() == view
    taken = api.viewer.post(VIEWS, json={"name": "good"})
    assert (taken.status_code, taken.json()["code"]) == (409, "name_taken")
    replaced = saved(api.viewer, "good", replace=True, text="math")
    assert (replaced["id"], replaced["text"], replaced["filter"]) == (view["id"], "math", "")
    saved(api.viewer, "other")
    assert api.viewer.patch(place, json={"name": "other"}).json()["code"] == "name_taken"
    assert api.viewer.patch(place, json={"name": "better"}).json()["name"] == "better"
    assert names(api.viewer) == [("other", False), ("better", False)]
    assert api.viewer.delete(place).status_code == 204
    assert api.viewer.delete(place).status_code == api.viewer.get(place).status_code == 404


def test_a_view_of_one_is_nobody_elses(api: Any) -> None:
    mine = f"{VIEWS}/{saved(api.operator, 'mine')['id']}"
    assert names(api.viewer) == []
    answers = [api.viewer.get(mine), api.viewer.patch(mine, json={"name": "x"}), api.viewer.delete(mine)]
    assert {answer.status_code for answer in answers} == {404}
    # The same name is free for others.
    saved(api.viewer, "mine")


def test_views_for_everyone_are_read_by_all_and_changed_by_operators(api: Any) -> None:
    assert api.viewer.post(VIEWS, json={"name": "ours", "shared": True}).status_code == 403
    ours = f"{VIEWS}/{saved(api.operator, 'ours', shared=True)['id']}"
    assert names(api.viewer) == [("ours", True)]
    assert api.viewer.patch(ours, json={"name": "x"}).status_code == api.viewer.delete(ours).status_code == 403
    assert api.operator.patch(ours, json={"name": "all"}).status_code == 200
    assert api.operator.delete(ours).status_code == 204
    log = api.operator.get("/api/v1/audit").json()["items"]
    # A view of one's own is nobody else's concern.
    assert [one["action"] for one in log] == ["Delete a saved view", "Rename a saved view", "Save a view"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("filter", "reward >"),
        ("sort", "nothing"),
        ("values", ["reward"]),
        ("values", ["metric.x"] * 11),
        ("status", ["odd"]),
        ("columns", ["<b>"]),
        ("name", ""),
        ("unknown", 1),
    ],
)
def test_what_no_list_could_show_is_refused(api: Any, field: str, value: Any) -> None:
    answer = api.viewer.post(VIEWS, json={"name": "x", field: value})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"].startswith(f"body.{field}")


def test_there_is_a_most_of_views(api: Any) -> None:
    with api.service.database.writing() as session:
        session.add_all(
            SavedView(owner=0, name=f"view {n}", content={}, created_at=time.time()) for n in range(MOST_VIEWS)
        )
    assert api.operator.post(VIEWS, json={"name": "one more", "shared": True}).status_code == 409
    saved(api.operator, "view 7", shared=True, replace=True)
    saved(api.operator, "my own")


def test_a_view_of_another_version_is_shown_as_far_as_it_is_known(api: Any) -> None:
    with api.service.database.writing() as session:
        content = {"text": "x", "colour": "red", "status": ["failed", "asleep"], "filter": "reward >>> 1"}
        session.add(SavedView(owner=0, name="newer", content=content, created_at=1.0))
    (view,) = api.viewer.get(VIEWS).json()["items"]
    assert (view["text"], view["sort"], "colour" in view) == ("x", "created_at", False)
    assert (view["status"], view["filter"]) == ([], "")


def test_an_address_has_what_is_not_usual() -> None:
    assert page_query(Shown().model_dump()) == []
    assert page_query(Shown(**GOOD).model_dump()) == [  # type: ignore[arg-type]
        ("status", "succeeded"), ("origin", "reported"), ("filter", "reward > 0.5"), ("sort", "metric.policy_loss"),
        ("direction", "asc"), ("columns", "status"), ("columns", "reward"), ("values", "config.actor.adam.lr"),
    ]  # fmt: skip


@stores
def test_one_name_saved_many_times_at_once_is_there_once(api: Any) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: api.viewer.post(VIEWS, json={"name": "good"}), range(20)))
        assert sorted(one.status_code for one in answers) == [201] + 19 * [409]
        assert {one.json()["code"] for one in answers if one.status_code == 409} == {"name_taken"}
        others = [saved(api.viewer, f"view {number}")["id"] for number in range(10)]
        answers = list(pool.map(lambda one: api.viewer.patch(f"{VIEWS}/{one}", json={"name": "new"}), others))
        assert sorted(one.status_code for one in answers) == [200] + 9 * [409]
        replaced = pool.map(lambda _: api.viewer.post(VIEWS, json={"name": "again", "replace": True}), range(20))
        assert {one.status_code for one in replaced} == {201}
