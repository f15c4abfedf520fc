"""Samples, machines, logs and events of a recorded run, over HTTP."""

import html
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest


@pytest.fixture
def client(demo_dashboard: Any) -> httpx.Client:
    client: httpx.Client = demo_dashboard.signed_in("viewer")
    return client


def test_recorded_pages(client: httpx.Client, demo_dashboard: Any, tmp_path: Path) -> None:
    """One service for all: it takes longer to start than all questions together."""
    run = f"/runs/{demo_dashboard.run_uid}"
    api = f"/api/v1{run}"
    samples_show_what_was_drafted(client, run, api)
    samples_are_filtered(client, run, api)
    machines_have_figures(client, run)
    logs_are_listed_by_process(client, run)
    logs_are_searched_and_downloaded(client, api, tmp_path)
    events_are_filtered(client, run, api)


def samples_show_what_was_drafted(client: httpx.Client, run: str, api: str) -> None:
    records = client.get(f"{api}/sample-records/24").json()
    page = client.get(f"{run}/samples").text
    assert "Step 24" in page and "follows the newest" in page
    assert f"{records['matching']} responses" in page
    drafted = next(one for one in records["items"] if any(piece["source"] == "history" for piece in one["pieces"]))
    piece = next(piece for piece in drafted["pieces"] if piece["source"] == "history")
    assert f'">{html.escape(piece["text"])}</mark>' in page
    assert html.escape(drafted["prompt"]) in page


def samples_are_filtered(client: httpx.Client, run: str, api: str) -> None:
    good = client.get(f"{api}/sample-records/10", params={"min_reward": 1}).json()["matching"]
    page = client.get(
        f"{run}/samples", params={"step": 10, "min_reward": 1, "sort": "tokens", "direction": "desc"}
    ).text
    assert f"{good} responses match the filter" in page
    lengths = [int(found) for found in re.findall(r"<dt>Tokens</dt><dd>(\d+)</dd>", page)]
    assert lengths and lengths == sorted(lengths, reverse=True)
    assert "No response of this step" in client.get(f"{run}/samples", params={"step": 10, "text": "nowhere"}).text
    assert "Step 24" in client.get(f"{run}/samples", params={"step": 999}).text


def machines_have_figures(client: httpx.Client, run: str) -> None:
    figures = f"/ui{run}/figures"
    cpu = client.get(f"{figures}/system-cpu").json()
    assert len(cpu["data"]) == 1 and len(cpu["data"][0]["x"]) > 30 and max(cpu["data"][0]["y"]) <= 1
    processes = client.get(f"{figures}/system-process-cpu").json()
    assert {"engine 0", "engine 1", "trainer", "driver"} <= {trace["name"] for trace in processes["data"]}
    caches = client.get(f"{figures}/system-kv-cache").json()
    assert [trace["name"] for trace in caches["data"]] == ["engine 0", "engine 1"]
    assert client.get(f"{figures}/system-gpu").json()["layout"]["meta"]["empty"].startswith("No GPU was seen")
    nobody = client.get(f"{figures}/system-cpu", params={"node": "elsewhere"}).json()
    assert "--telemetry.system_s" in nobody["layout"]["meta"]["empty"]
    late = client.get(f"{figures}/system-cpu", params={"hours": 0.01}).json()
    assert 0 < len(late["data"][0]["x"]) < len(cpu["data"][0]["x"])
    page = client.get(f"{run}/system", params={"node": "10.0.0.1", "hours": "1"}).text
    assert f'data-figure="{figures}/system-cpu?node=10.0.0.1&amp;hours=1"' in page


def logs_are_listed_by_process(client: httpx.Client, run: str) -> None:
    page = client.get(f"{run}/logs").text
    assert 'data-log="/api/v1' in page and "RhymeRolloutActor" in page
    # The driver's first, and open.
    assert page.index("driver.log") < page.index("RhymeRolloutActor") and "/logs/driver.log" in page
    assert "This log does not exist" in client.get(f"{run}/logs", params={"file": "../config.json"}).text


def logs_are_searched_and_downloaded(client: httpx.Client, api: str, tmp_path: Path) -> None:
    logs = f"{api}/attempts/1"
    listed = client.get(f"{logs}/logs").json()
    assert {"driver.log", ""} < {listed[0]["name"], *(one["process"] for one in listed)}
    found = client.get(f"{logs}/log-search/driver.log", params={"text": "TRITON"}).json()
    whole = client.get(f"{logs}/log-files/driver.log")
    assert whole.headers["content-disposition"].startswith("attachment") and whole.headers["x-content-type-options"]
    lines = whole.content.splitlines(keepends=True)
    wanted = [sum(map(len, lines[:i])) for i, line in enumerate(lines) if b"triton" in line.lower()]
    assert [one["start"] for one in found["items"]] == wanted and found["scanned_to"] == found["size"]
    before = client.get(f"{logs}/logs/driver.log", params={"before": wanted[0], "tail": 1}).json()
    first = next(number for number, line in enumerate(lines) if b"triton" in line.lower())
    assert before["end"] == wanted[0] and before["text"].encode() == lines[first - 1]
    assert client.get(f"{logs}/log-search/none.log", params={"text": "x"}).status_code == 404
    assert client.get(f"{logs}/log-files/..%2fconfig.json").status_code == 404


def events_are_filtered(client: httpx.Client, run: str, api: str) -> None:
    steps = client.get(f"{api}/events", params={"kind": "train_step", "direction": "desc"}).json()["items"]
    page = client.get(f"{run}/events", params={"kind": "train_step"}).text
    assert [int(one) for one in re.findall(r'id="event-(\d+)"', page)] == [one["id"] for one in steps]
    shown = html.unescape(re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.DOTALL)[0])
    assert json.loads(shown) == steps[0]["body"]
    for level in ("info", "warning", "error"):
        rows = client.get(f"{api}/events", params={"level": level}).json()["items"]
        assert all(one["body"].get("level", "error") == level for one in rows)
    everything = client.get(f"{run}/events").text
    following = html.unescape(re.findall(r'href="([^"]*)" rel="next"', everything)[0])
    assert not set(re.findall(r'id="event-\d+"', client.get(following).text)) & set(
        re.findall(r'id="event-\d+"', everything)
    )
    assert "No event matches this filter" in client.get(f"{run}/events", params={"source": "nobody"}).text
    assert client.get(f"{api}/events", params={"attempt": 7}).status_code == 404
