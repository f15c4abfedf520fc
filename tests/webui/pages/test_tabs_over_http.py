"""The tabs of a run: what they answer, what their address keeps, and that their numbers are the run's."""

from __future__ import annotations

import html
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from rhyme_openrlhf.api.ingest.importer import import_directory
from rhyme_openrlhf.webui.figures.one_run import RUN_FIGURES

TABS = ("", "/timeline", "/speculation", "/scheduling", "/learning")


@pytest.fixture
def client(dashboard: Any) -> httpx.Client:
    return dashboard.signed_in("viewer")


def figure(client: httpx.Client, dashboard: Any, kind: str, **query: Any) -> Any:
    answer = client.get(f"/ui/runs/{dashboard.run_uid}/figures/{kind}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("tab", TABS)
def test_every_figure_of_a_tab_answers(dashboard: Any, client: httpx.Client, tab: str) -> None:
    page = client.get(f"/runs/{dashboard.run_uid}{tab}", params={"axis": "time"})
    assert page.status_code == 200
    addresses = [html.unescape(one) for one in re.findall(r'data-figure="([^"]*)"', page.text)]
    assert addresses
    for address in addresses:
        meta = client.get(address).json()["layout"]["meta"]
        assert meta["description"].endswith("."), address
        assert meta["empty"] is None or meta["empty"].endswith("."), address


def test_every_figure_has_its_place(dashboard: Any, client: httpx.Client) -> None:
    pages = "".join(client.get(f"/runs/{dashboard.run_uid}{tab}").text for tab in TABS)
    pages += "".join(
        client.get(f"/runs/{dashboard.run_uid}/timeline", params={"view": v}).text for v in ("heat", "states")
    )
    placed = set(re.findall(r"/figures/(\w+)", pages))
    assert {"timeline", "timeline_heat", "timeline_states", "bubbles", "metric"} <= placed
    assert placed <= set(RUN_FIGURES)


def test_the_bubbles_of_the_stack_are_the_runs_bubble_fraction(dashboard: Any, client: httpx.Client) -> None:
    run = client.get(f"/api/v1/runs/{dashboard.run_uid}").json()
    engine_seconds = {
        step["step"]: step["engines"] * step["rollout_seconds"]
        for step in client.get(f"/api/v1/runs/{dashboard.run_uid}/steps").json()["items"]
    }
    found = figure(client, dashboard, "bubbles")
    points = [point for trace in found["data"] for point in zip(trace["x"], trace["y"], strict=True)]
    bubbles = sum(share * engine_seconds[round(step)] for step, share in points)
    assert bubbles / sum(engine_seconds.values()) == pytest.approx(run["bubble_fraction"], rel=1e-9)


def test_the_timeline_follows_the_newest_step_or_keeps_the_one_asked(dashboard: Any, client: httpx.Client) -> None:
    path = f"/runs/{dashboard.run_uid}/timeline"
    newest = client.get(path).text
    assert "Steps 8 to 10 of 10" in newest and "engine 0 waited longest" in newest
    assert f'data-figure="/ui/runs/{dashboard.run_uid}/figures/timeline"' in newest
    asked = client.get(path, params={"step": 2, "steps": 1, "engines": "1", "view": "heat"}).text
    assert "Step 2 of 10" in asked and "In step 2, engine 1 waited " in asked
    assert "figures/timeline_heat?step=2&amp;steps=1&amp;engines=1&amp;lanes=256" in asked
    piece = re.search(r'data-piece="(/ui/runs/\w+/parts/timeline\?[^"]*)"', asked)
    assert piece is not None and "In step 2, engine 1" in client.get(html.unescape(piece.group(1))).text


def test_a_form_with_empty_fields_is_the_usual_view(dashboard: Any, client: httpx.Client) -> None:
    path = f"/runs/{dashboard.run_uid}/timeline"
    sent = {"step": "", "steps": "3", "engines": "", "count": "16", "order": "worst"}
    assert "Steps 8 to 10 of 10" in client.get(path, params=sent).text


def test_trainer_stages_lie_beside_the_engines(dashboard: Any, client: httpx.Client) -> None:
    drawn = {trace["name"]: trace for trace in figure(client, dashboard, "timeline", step=3, steps=1)["data"]}
    assert {"Generating", "Trainer: train", "Trainer: experience", "Trainer: sync"} <= set(drawn)
    # The window begins with the wait for step 2's training. TrainStep has the seconds of step 3's; the stage's event is
    # written a moment after it began.
    train = drawn["Trainer: train"]
    assert [words.split("<br>")[0] for words in train["text"]] == ["Trainer, step 2", "Trainer, step 3"]
    assert train["x"][1] == pytest.approx(7.2366, abs=0.05)


def test_metrics_that_no_chart_groups_are_listed(dashboard: Any, client: httpx.Client) -> None:
    page = client.get(f"/runs/{dashboard.run_uid}/learning").text
    assert "<h3>ppo_<wbr>clip_<wbr>ratio</h3>" in page and "<h3>actor_<wbr>grad_<wbr>norm</h3>" not in page
    drawn = figure(client, dashboard, "metric", name="ppo_clip_ratio", scale="log")
    assert drawn["data"][0]["name"] == "ppo_clip_ratio"


def test_kinds_of_events_without_a_table_are_read_as_they_came(dashboard: Any, tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "groups"
    directory.mkdir()
    body = {"prompts": [4, 4], "engines": [1, 1], "predicted": [10.0, 20.0], "real": [10.0, 25.0]}
    events: list[dict[str, Any]] = [
        {"kind": "rank_groups", "step": 1, **body},
        # A resumed run does a step again: the newer one counts.
        {"kind": "rank_groups", "step": 1, **body, "predicted": [20.0, 20.0]},
        {"kind": "draft_budget", "step": 1, "engine": 0, "running": [1], "decode_steps": [2], "draft_length": [8.0],
         "predicted_ms": [5.0], "real_ms": [5.0]},
        {"kind": "off_policyness", "step": 1, "values": [0, 1], "samples": [3, 1], "tokens": [60, 40]},
        {"kind": "sample_moved", "step": 1, "sample": "s", "source_engine": 0, "destination_engine": 1,
         "cause": "reallocation", "carrier": "recompute", "outcome": "moved", "seconds": 0.25, "tokens": 900},
        {"kind": "rank_stability", "epoch": 2, "correlation": 0.5, "prompts": 4, "groups": 8, "responses": 4,
         "accurate": 0.75, "near_boundary": 0.25, "not_last": 0.25, "within_reach": 0.0, "migrated": 0.0},
        {"kind": "history_state", "step": 1, "worker": 0, "prompts": 4, "resident": 3, "spilled": 1,
         "memory_bytes": 2048, "disk_bytes": 1024, "hits": 1, "late": 0, "misses": 3},
    ]  # fmt: skip
    lines = [json.dumps({**e, "time": 100.0 + i, "source": "w", "sequence": i}) for i, e in enumerate(events)]
    (directory / "events.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "config.json").write_text(json.dumps({"settings": {"run": {"name": "groups"}}, "arguments": {}}))
    dashboard.run_uid = import_directory(dashboard.service.database, directory, time.time()).run_uid
    client = dashboard.signed_in()
    drawn = {trace["name"]: trace for trace in figure(client, dashboard, "predicted_length")["data"]}
    assert drawn["Group 1"]["x"] == [20.0] and drawn["Group 2"]["y"] == [25.0]
    assert figure(client, dashboard, "chosen_length")["data"][0]["y"] == [8.0]
    for name, words in (("", "samples: 75.0% at 0, 25.0% at 1"), ("_tokens", "tokens: 60.0% at 0, 40.0% at 1")):
        assert words in figure(client, dashboard, f"off_policyness{name}")["layout"]["meta"]["description"]
    assert figure(client, dashboard, "rank_stability")["data"][0]["y"] == [0.5]
    assert figure(client, dashboard, "rank_shares")["data"][0]["y"] == [0.75]
    assert figure(client, dashboard, "history_answers")["data"][0]["y"] == [0.25]
    assert figure(client, dashboard, "history_memory")["data"][0]["y"] == [2.0]
    table = client.get(f"/runs/{dashboard.run_uid}/scheduling").text
    assert '<td data-title="Carrier">recompute</td>' in table and "0.250 s" in table


def test_panels_are_in_the_address(dashboard: Any, client: httpx.Client) -> None:
    at = f"/runs/{dashboard.run_uid}/panels"
    assert "data-figure=" not in client.get(at).text
    asked = [("panel", "reward,never seen,reward"), ("panel", " "), ("panel", "<b>,tokens_per_second")]
    page = client.get(at, params=[*asked, ("smooth", "0.9")]).text
    addresses = [html.unescape(one) for one in re.findall(r'data-figure="([^"]*)"', page)]
    assert len(addresses) == 2 and "<b>" not in page
    one, other = [client.get(address).json() for address in addresses]
    # Each with its moving average; a curve that the run does not have has no line.
    assert len(one["data"]) == len(other["data"]) == 2 and one["layout"]["meta"]["empty"] is None
    # Without its last curve a panel is gone, and the browser's own do not come back.
    (last,) = re.findall(
        r'href="([^"]*)"[^>]*title="Take it out of this panel"', client.get(at, params={"panel": "kl"}).text
    )
    assert "data-figure=" not in client.get(html.unescape(last)).text and "panel=" in last


def test_the_speculation_tab_names_the_earlier_runs(dashboard: Any, client: httpx.Client) -> None:
    page = f"/runs/{dashboard.run_uid}/speculation"
    assert "<h2>Earlier runs</h2>" not in client.get(page).text
    events = [
        {
            "kind": "earlier_run", "time": time.time() + number, "source": "history-of-a-test", "sequence": number,
            "step": 1, "worker": 0, "run": "<b>math", "uid": uid, "directory": f"/runs/{number}", "prompts": prompts,
            "of": of, "epochs": 3, "drafted_from": 7, "judged": 100, "right": 64, "left_out": bool(number),
        }
        for number, (uid, prompts, of) in enumerate([(dashboard.run_uid, 372, 400), ("", 0, 0)])
    ]  # fmt: skip
    attempt = client.get(f"/api/v1/runs/{dashboard.run_uid}").json()["attempts"][0]["uid"]
    body = {"events": events, "heartbeat": {"alive": True}}
    sent = dashboard.signed_in().post(f"/api/v1/ingest/attempts/{attempt}/batches", json=body)
    assert sent.status_code == 200, sent.text
    for address in (page, f"/ui/runs/{dashboard.run_uid}/parts/earlier-runs"):
        shown = client.get(address).text
        assert f'<a href="/runs/{dashboard.run_uid}">&lt;b&gt;math</a>' in shown
        assert "372 of 400" in shown and "came later" in shown and "64.0%" in shown
        assert "left out" in shown
