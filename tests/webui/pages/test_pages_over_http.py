"""Access to each page, and its headers and parts."""

import json
import re
import time
from typing import Any

import pytest
from sqlalchemy import delete, text

from rhyme_openrlhf.api.store.models import Webhook
from rhyme_openrlhf.telemetry.event_json import to_json
from rhyme_openrlhf.telemetry.events import (
    Event,
    RolloutFinished,
    RolloutProgress,
    RolloutStarted,
    RunStarted,
    TrainStep,
)
from rhyme_openrlhf.webui.pages.sign_in import local_path
from tests.api.webhooks.stored import webhook


def test_without_a_session_pages_lead_to_sign_in_and_back(dashboard: Any) -> None:
    stranger = dashboard.client()
    answer = stranger.get("/?text=a%26b&sort=name")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/sign-in?next=%2F%3Ftext%3Da%2526b%26sort%3Dname"
    page = stranger.get(answer.headers["location"])
    assert page.status_code == 200 and 'data-next="/?text=a%26b&amp;sort=name"' in page.text


@pytest.mark.parametrize("path", ["/", "/sign-in", "/runs/{uid}", "/nothing", "/static/js/sign_in.js", "/readyz"])
def test_head_answers_as_get_does(dashboard: Any, path: str) -> None:
    client = dashboard.signed_in()
    address = path.format(uid=dashboard.run_uid)
    head, got = client.head(address), client.get(address)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    # Nobody who is not signed in sees that a page is there.
    stranger = dashboard.client()
    assert stranger.head(address).status_code == stranger.get(address).status_code


def test_a_webhook_that_sends_nothing_says_why(dashboard: Any) -> None:
    database, words = dashboard.service.database, "its maker is no operator any more: edit and save it to switch it on"
    piece = "/ui/webhooks/parts/webhooks"
    rows = [webhook(database, "https://example.org/", "failed", maker_id=maker) for maker in (None, 10**6)]
    try:
        assert dashboard.signed_in().get(piece).text.count(words) == 1
    finally:
        with database.writing() as session:
            session.execute(delete(Webhook).where(Webhook.id.in_([row.id for row in rows])))


@pytest.mark.parametrize("path", ["/ui/parts/runs", "/ui/runs/{uid}/parts/header", "/ui/runs/{uid}/figures/reward"])
def test_without_a_session_pieces_are_refused(dashboard: Any, path: str) -> None:
    answer = dashboard.client().get(path.format(uid=dashboard.run_uid))
    assert answer.status_code == 401 and answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    "address", ["//evil.example", "/\\evil.example", "https://evil.example", "/\t/evil.example", "javascript:x", ""]
)
def test_sign_in_leads_nowhere_else(address: str) -> None:
    assert local_path(address) == "/"


def test_sign_in_leads_to_paths_of_ours() -> None:
    assert local_path("/runs/0f3a?x=//y") == "/runs/0f3a?x=//y"


def test_no_page_shows_a_secret_that_an_earlier_version_stored(launching_dashboard: Any) -> None:
    dashboard, secret = launching_dashboard, "hunter2secret"
    command = ["rhyme", "train", "--logger.wandb.key", secret]
    config = {"arguments": {"logger": {"wandb": {"key": secret}}}}
    old = {"command": json.dumps(command), "config": json.dumps(config)}
    event = json.dumps({"name": "demo", "command": command})
    with dashboard.service.database.writing() as session:
        session.execute(text("UPDATE runs SET command = :command, config = :config"), old)
        session.execute(text("UPDATE events SET body = :event WHERE kind = 'run_started'"), {"event": event})
    client, run = dashboard.signed_in(), f"/runs/{dashboard.run_uid}"
    for path in (run, f"{run}/config", f"{run}/events?kind=run_started", f"/runs/new?clone={dashboard.run_uid}", "/"):
        page = client.get(path)
        assert page.status_code == 200 and secret not in page.text, path
    for path in (f"{run}/config", f"{run}/events?kind=run_started"):
        assert "***" in client.get(path).text, path


def test_pages_are_not_kept_and_static_files_are(dashboard: Any) -> None:
    page, stranger = dashboard.signed_in().get("/"), dashboard.client()
    assert page.headers["cache-control"] == "no-store"
    addresses = re.findall(r'(?:src|href|data-plotly)="(/static/[^"#]*)', page.text)
    assert len(addresses) > 5
    for address in addresses:
        answer = stranger.get(address)
        assert answer.status_code == 200 and "immutable" in answer.headers["cache-control"], address


def test_plotly_is_sent_packed(dashboard: Any) -> None:
    stranger = dashboard.client()
    (address,) = re.findall(r'data-plotly="([^"]*)"', dashboard.signed_in().get("/").text)
    with stranger.stream("GET", address, headers={"Accept-Encoding": "gzip"}) as packed:
        sent = sum(map(len, packed.iter_raw()))
    plain = stranger.get(address, headers={"Accept-Encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
    assert sent < len(plain.content) / 2


def test_the_description_of_the_api_is_open_to_all_and_whole(dashboard: Any) -> None:
    page = dashboard.client().get("/docs")
    # The name of SVG's language, and the address in the example of a webhook, are read by nobody's browser.
    text = page.text.replace("https://www.w3.org", "").replace("&#34;https://example.org/hook&#34;", "")
    assert page.status_code == 200 and "https://" not in text
    operations = [one for methods in dashboard.app.openapi()["paths"].values() for one in methods.values()]
    for one in operations:
        assert f'id="{one["operationId"]}"' in page.text
    assert "from rhyme_openrlhf.client import Client" in page.text and "changed_meanwhile" in page.text


def test_runs_are_filtered_by_a_condition_and_show_any_value(dashboard: Any) -> None:
    client = dashboard.signed_in()
    query = {"filter": "config.histospec.enable = true", "values": "metric.rollout_seconds, config.run.name nonsense"}
    page = client.get("/", params={**query, "sort": "metric.rollout_seconds"}).text
    assert dashboard.run_uid in page and 'title="config.run.name"' in page and "nonsense</" not in page
    assert 'aria-sort="descending" title="metric.rollout_seconds"' in page


def test_errors_are_pages(dashboard: Any) -> None:
    client = dashboard.signed_in()
    missing = client.get(f"/runs/{'0' * 16}")
    assert missing.status_code == 404 and "there is no run 0000000000000000" in missing.text
    assert missing.headers["content-type"].startswith("text/html")
    assert client.get("/nowhere").headers["content-type"].startswith("text/html")
    assert client.get("/api/v1/nowhere").headers["content-type"] == "application/problem+json"
    assert client.get(f"/ui/runs/{dashboard.run_uid}/figures/none").status_code == 404


def test_a_figure_has_the_steps_that_are_asked(dashboard: Any) -> None:
    path, asked = f"/ui/runs/{dashboard.run_uid}/figures/reward", {"from_step": 3, "to_step": 5}
    assert dashboard.signed_in().get(path, params=asked).json()["data"][0]["x"] == [3.0, 4.0, 5.0]


def test_the_runs_page_filters_and_sorts(dashboard: Any) -> None:
    client = dashboard.signed_in()
    assert f"/runs/{dashboard.run_uid}" in client.get("/", params={"status": "succeeded", "text": "DEM"}).text
    assert f"/runs/{dashboard.run_uid}" not in client.get("/", params={"status": "failed"}).text
    assert 'aria-sort="ascending"' in client.get("/", params={"sort": "name", "direction": "asc"}).text


def test_names_are_shown_as_text(dashboard: Any) -> None:
    client = dashboard.signed_in()
    csrf = client.get("/api/v1/session").json()["csrf"]
    name = "<img src=x onerror=alert(1)>\"'"
    changed = client.patch(
        f"/api/v1/runs/{dashboard.run_uid}", json={"name": name, "tags": [name]}, headers={"X-CSRF-Token": csrf}
    )
    assert changed.status_code == 200
    for path in ("/", f"/runs/{dashboard.run_uid}"):
        found = client.get(path).text
        assert "<img" not in found and "&lt;img" in found


def test_a_run_says_what_it_does_now(dashboard: Any) -> None:
    client = dashboard.client("operator")
    uid, attempt = "a" * 16, "b" * 16
    body = {"run": uid, "name": "new", "run_directory": "", "config": {}}
    assert client.put(f"/api/v1/ingest/attempts/{attempt}", json=body).status_code == 200
    reader = dashboard.signed_in("viewer")

    def shown() -> list[str]:
        pages = [reader.get(f"/ui/runs/{uid}/parts/header").text, reader.get("/ui/parts/runs").text]
        return [re.sub(r"<[^>]*>", "", page) for page in pages]

    assert all("starting Ray and the driver" in page for page in shown())
    begun = time.time()
    # Each event, and what the header then says. The table says it until the first step is finished.
    said: list[tuple[Event, str]] = [
        (RunStarted(1, "new", [], 2, 1, 1, 4, 12, 8, False), "starting engines: 0 of 2"),
        (RolloutStarted(1, 1, 12, 96), "generating step 1: 0 of 96 samples"),
        (RolloutProgress(1, 40, 96, 9, 1.0, 0, 0, "c" * 32, 1, 812), "generating step 1: 40 of 96 samples"),
        (RolloutFinished.of(1, 1, 1.0, [3, 4], [], 0), "training on step 1"),
        (TrainStep(1, 1, {}, {}), ""),
        (RolloutStarted(2, 1, 12, 96), "generating step 2: 0 of 96 samples"),
    ]
    for number, (event, phase) in enumerate(said):
        rows = [to_json(event, begun + number, "driver", number)]
        assert client.post(f"/api/v1/ingest/attempts/{attempt}/batches", json={"events": rows}).status_code == 200
        header, table = shown()
        assert phase in header and ("Now: " in header) == bool(phase)
        assert number > 3 or phase in table
        if isinstance(event, RolloutProgress):
            assert "(slowest: prompt cccccccc on engine 1, 812 tokens)" in header
    assert "generating" not in table
