"""All pages by table: the addresses they refuse, what viewers do not see, and their words when there is nothing."""

import html
import json
import re
import time
from pathlib import Path
from typing import Any

from rhyme_openrlhf.api.ingest.importer import import_directory
from rhyme_openrlhf.api.launch.actions import Launching, LaunchSettings
from rhyme_openrlhf.api.launch.schema import by_flag
from rhyme_openrlhf.webui.figures.one_run import RUN_FIGURES

NOBODY = "0" * 16
# {uid}: the recorded run. {experiment}: one without runs.
REFUSED = {
    404: (
        f"/runs/{NOBODY}",
        "/nowhere",
        "/ui/runs/{uid}/figures/none",
        "/ui/runs/{uid}/sample-figures/none",
        "/ui/figures/none?run={uid}",
        f"/runs/{{uid}}/config?to={NOBODY}",
        f"/compare?run={NOBODY}&run={{uid}}",
        f"/runs/new?clone={NOBODY}",
        "/runs/new?template=nothing",
        "/experiments/12345",
        "/ui/experiments/12345/figures/reward?group={uid}",
        "/ui{experiment}/figures/none?group={uid}",
        f"/api/v1/runs/{NOBODY}/right-size",
    ),
    422: (
        "/?cursor=nonsense",
        "/ui/runs/{uid}/figures/reward?axis=sideways",
        "/ui/runs/{uid}/figures/reward?unknown=1",
        "/ui/figures/reward",
        "/ui{experiment}/figures/reward",
        "/runs/{uid}/config?to=x",
        "/runs/{uid}/samples?cursor=x",
        "/runs/{uid}/prompts?view=film",
        "/runs/{uid}/panels?" + "&".join(["panel=x"] * 25),
        "/compare?run=x",
        "/runs/new?clone=x",
        *(
            f"/runs/{{uid}}/timeline?{query}"
            for query in ("engines=one", "engines=0-9999999", "steps=100000", "view=3d", "unknown=1")
        ),
    ),
}
# What figures of chosen curves have to be asked with.
ASKED = {"metric": {"name": "x"}, "panel": {"curve": "x"}}


def experiment_of(dashboard: Any) -> str:
    made = dashboard.signed_in().post("/api/v1/experiments", json={"name": "empty"}).json()
    return f"/experiments/{made['id']}"


def test_what_a_page_cannot_show_is_refused(launching_dashboard: Any) -> None:
    client, names = launching_dashboard.signed_in(), {"uid": launching_dashboard.run_uid}
    names["experiment"] = experiment_of(launching_dashboard)
    wanted = {path.format(**names): status for status, paths in REFUSED.items() for path in paths}
    assert {path: client.get(path).status_code for path in wanted} == wanted
    # Problems of pages are pages; those of the API and of pieces are not.
    missing = client.get(f"/runs/{NOBODY}")
    assert f"there is no run {NOBODY}" in missing.text and missing.headers["content-type"].startswith("text/html")
    assert client.get("/api/v1/nowhere").headers["content-type"] == "application/problem+json"


def test_a_viewer_sees_no_action_and_no_secret(launching_dashboard: Any) -> None:
    operator, viewer = launching_dashboard.signed_in(), launching_dashboard.signed_in("viewer")
    hook = {"name": "team", "url": "https://hooks.example.org/secret-word", "events": ["failed"]}
    assert operator.post("/api/v1/webhooks", json=hook).status_code == 201
    made = operator.post("/api/v1/runs", json={"command": "rhyme demo"}).json()
    run, root = f"/runs/{made['uid']}", str(launching_dashboard.app.state.launching.roots[0])
    # What an operator finds on each of these pages, and a viewer does not.
    hidden = {
        "/": ["/runs/new"],
        run: [f'data-action="POST /api/v1{run}/stop', "/runs/new?clone="],
        f"{run}/config": ["PATCH /api/v1/runs/"],
        "/settings": ["the operator", "DELETE /api/v1/tokens/", root],
        "/ui/settings/parts/tokens": ["the operator", "DELETE /api/v1/tokens/"],
        "/webhooks": ["secret-word"],
        "/ui/webhooks/parts/webhooks": ["secret-word"],
    }
    for path, words in hidden.items():
        shown, left = operator.get(path).text, viewer.get(path).text
        assert [word for word in words if word not in shown] == [word for word in words if word in left] == [], path
        if path.startswith("/runs"):
            assert re.findall(r'data-action="([^"]*)"', left) == ["DELETE /api/v1/session"], path
    assert "the viewer" in operator.get("/settings").text and "--serve.body_mb" in viewer.get("/settings").text
    assert viewer.get("/runs/new").status_code == 403
    for part, body in (("panel", {"name": "a", "arguments": {}}), ("form", {"command": "rhyme demo"})):
        assert viewer.post(f"/ui/new-run/{part}", json=body).status_code == 403


def test_a_page_with_nothing_to_show_says_why(dashboard: Any) -> None:
    """No cluster, no logs, no kept responses, no runs that match."""
    client, run = dashboard.signed_in(), f"/runs/{dashboard.run_uid}"
    said = {
        "/ui/cluster/parts/state": "cannot start runs",
        "/runs/new": "cannot start runs",
        "/?status=failed": "No run matches this filter",
        "/?filter=reward > 1e9": "No run matches",
        "/?filter=reward >": "Expected a value at the end of the filter.",
        f"{run}/samples": "--telemetry.sample_groups",
        f"{run}/prompts": "--telemetry.sample_groups",
        f"{run}/logs": "No logs here",
        f"{run}/timeline?step=999": "Steps 997 to 999 of 10",
        "/compare": "Which runs?",
        f"/compare?run={dashboard.run_uid}": "Compare demo with",
        experiment_of(dashboard): "This experiment has no runs",
    }
    for path, words in said.items():
        answer = client.get(path)
        assert answer.status_code == 200 and words in html.unescape(answer.text), path
    assert "data-start>" not in client.get("/runs/new").text


def imported(dashboard: Any, directory: Path, settings: Any) -> str:
    directory.mkdir(parents=True)
    note = {"kind": "note", "level": "info", "text": "hello", "time": 100.0, "source": "w", "sequence": 0}
    (directory / "events.jsonl").write_text(json.dumps(note) + "\n")
    arguments = {"actor": {"model_name_or_path": "/opt/models/small"}}
    (directory / "config.json").write_text(json.dumps({"settings": settings, "arguments": arguments}))
    return import_directory(dashboard.service.database, directory, time.time()).run_uid


def test_a_run_without_drafts_gets_a_sentence_instead_of_figures(empty_dashboard: Any, tmp_path: Path) -> None:
    client = empty_dashboard.signed_in("viewer")
    pages = {}
    for name, enabled in (("with", True), ("without", False)):
        uid = imported(empty_dashboard, tmp_path / name, {"run": {"name": name}, "histospec": {"enable": enabled}})
        pages[name] = client.get(f"/runs/{uid}/speculation").text
    assert "This run has no drafts" in pages["without"] and "data-figure=" not in pages["without"]
    assert "This run has no drafts" not in pages["with"]
    # The gain stands before what explains it.
    assert 0 < pages["with"].index("figures/draft_gain") < pages["with"].index("figures/draft_sources")
    assert "models/<wbr>small</span>" in client.get("/").text


def test_a_demonstration_says_that_it_starts_no_runs(empty_dashboard: Any) -> None:
    client = empty_dashboard.signed_in()
    before = client.get("/ui/cluster/parts/state").text
    launching = Launching(LaunchSettings(), Path("/nowhere"), (Path("/nowhere"),), "http://127.0.0.1", demo=True)
    empty_dashboard.app.state.launching = launching
    for path in ("/ui/cluster/parts/state", "/runs/new"):
        shown = client.get(path).text
        assert "This demonstration shows recordings" in shown and "--no-local" not in shown, path
    assert "--no-local" in before and ">Ready" not in shown


def test_the_api_description_keeps_the_menu_of_a_reader(dashboard: Any) -> None:
    assert 'class="menu"' in dashboard.signed_in("viewer").get("/docs").text
    assert 'class="menu"' not in dashboard.client().get("/docs").text


def test_no_simulation_is_offered_without_its_files(dashboard: Any) -> None:
    shown = dashboard.signed_in().get(f"/runs/{dashboard.run_uid}/scheduling").text
    assert "No recommendation: " in shown and "right_size=true" not in shown


def test_every_figure_of_a_run_without_events_is_a_sentence(empty_dashboard: Any, tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "emulated"
    directory.mkdir(parents=True)
    note = {"kind": "note", "level": "info", "text": "hello", "time": 100.0, "source": "w", "sequence": 0}
    (directory / "events.jsonl").write_text(json.dumps(note) + "\n")
    settings = {"run": {"name": "emulated"}, "emulate": {"profile": "<a40>.json", "train_s": 1.0}}
    (directory / "config.json").write_text(json.dumps({"settings": settings, "arguments": {}}))
    uid = import_directory(empty_dashboard.service.database, directory, time.time()).run_uid
    client = empty_dashboard.signed_in("viewer")
    for name in RUN_FIGURES:
        found = client.get(f"/ui/runs/{uid}/figures/{name}", params=ASKED.get(name, {})).json()
        empty = found["layout"]["meta"]["empty"]
        assert found["data"] == [] and empty.endswith("."), name
        assert {flag.rstrip(".") for flag in re.findall(r"--[\w.-]+", empty)} <= set(by_flag()), name
    # An emulated run says so on each of its tabs.
    for tab in ("", "/timeline", "/speculation", "/scheduling", "/learning"):
        page = client.get(f"/runs/{uid}{tab}").text
        assert "Emulated: the decode steps" in page and "&lt;a40&gt;.json" in page, tab
