"""Config, cluster, settings, and the columns and filters of the runs."""

import dataclasses
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect
from sqlalchemy import update

from rhyme_openrlhf.api.ingest.importer import import_directory
from rhyme_openrlhf.api.launch.lease import Candidate, Lease
from rhyme_openrlhf.api.store.models import Run


def started(client: httpx.Client, name: str, **more: Any) -> str:
    answer = client.post("/api/v1/runs", json={"command": f"rhyme demo --run.name {name}", **more})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["uid"])


def test_the_config_of_a_run_and_its_difference_to_another(launching_dashboard: Any) -> None:
    client = launching_dashboard.signed_in()
    first = started(client, "first")
    second = started(client, "second", arguments={"actor": {"adam.lr": 1e-5}})
    page = client.get(f"/runs/{first}/config").text
    assert "actor.adam.lr" in page and "--actor.adam.lr=0.0004" in page and "Different from" not in page
    page = client.get(f"/runs/{first}/config", params={"to": second}).text
    assert re.search(
        r"<code>actor.adam.lr</code></th><td[^>]*><code>0.0004</code></td><td[^>]*><code>1e-05</code>", page
    )
    assert "histospec" not in page.partition("Different from")[2].partition("</table>")[0]


def test_the_commits_of_a_run_are_shown_and_compared(dashboard: Any, tmp_path: Path) -> None:
    client = dashboard.signed_in()
    assert "<h3>Code</h3>" not in client.get(f"/runs/{dashboard.run_uid}/config").text  # an older record
    directory = tmp_path / "runs" / "committed"
    directory.mkdir()
    shutil.copy(tmp_path / "runs" / "20261121-demo" / "events.jsonl", directory / "events.jsonl")
    commits = {"package": {"commit": "a" * 40, "dirty": True}, "directory": {"commit": "b" * 40, "dirty": False}}
    config = {"settings": {"run": {"name": "committed"}}, "arguments": {}, "git": commits}
    (directory / "config.json").write_text(json.dumps(config))
    uid = import_directory(dashboard.service.database, directory, time.time()).run_uid
    page = client.get(f"/runs/{uid}/config", params={"to": dashboard.run_uid}).text
    code = page.partition("<h3>Code</h3>")[2].partition("</dl>")[0]
    assert re.findall(r'title="(\w{40})"', code) == ["a" * 40, "b" * 40]
    assert code.count("with uncommitted changes") == 1
    assert "<code>git.package.commit</code>" in page


def test_the_column_started_is_sorted_by_what_it_shows(launching_dashboard: Any) -> None:
    client = launching_dashboard.signed_in()
    started(client, "waits")
    for direction in ("asc", "desc"):
        page = client.get("/", params={"sort": "started_at", "direction": direction, "columns": "started"}).text
        shown = re.findall(r'data-title="Started">(.*?)</td>', page)
        # What has not started comes last, and has no time.
        assert len(shown) == 2 and "<time" in shown[0] and "<time" not in shown[1]
        assert f'aria-sort="{direction}ending"' in page
    assert "sort=started_at&amp;direction=desc" in client.get("/").text


def test_notes_and_tags_are_saved(dashboard: Any, browser_page: Any) -> None:
    page = browser_page
    page.goto(dashboard.link())
    expect(page).to_have_url(f"{dashboard.url}/")
    page.goto(f"{dashboard.url}/runs/{dashboard.run_uid}/config")
    page.get_by_label("Tags").fill("paper, baseline, paper")
    page.get_by_label("Notes").fill("figure 3")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("[data-toasts]")).to_contain_text("Saved")
    run = dashboard.signed_in().get(f"/api/v1/runs/{dashboard.run_uid}").json()
    assert (run["tags"], run["notes"]) == (["baseline", "paper"], "figure 3")


def test_the_queue_says_what_each_run_waits_for(launching_dashboard: Any) -> None:
    client = launching_dashboard.signed_in("operator")
    cluster = launching_dashboard.app.state.launching.launcher
    started(client, "large", arguments={"vllm": {"num_engines": 20}})
    small = started(client, "small")
    page = client.get("/ui/cluster/parts/state").text
    assert "it will be refused: the run needs 21 GPUs, the cluster has 8" in page
    assert "it starts in a moment" in page and "10.0.0.1" in page
    assert "8 GPUs" in client.get("/ui/cluster/parts/room").text
    cluster.reachable = False
    page = client.get("/ui/cluster/parts/state").text
    assert "Ray does not respond" in page and "small" in page
    assert "waits in the queue" in client.get("/ui/cluster/parts/room").text
    assert client.get("/cluster").status_code == 200
    link = '<a href="/cluster">'
    assert link in client.get(f"/ui/runs/{small}/parts/header").text
    assert link not in client.get(f"/ui/runs/{launching_dashboard.run_uid}/parts/header").text


def test_the_cluster_page_says_which_service_starts_runs(launching_dashboard: Any) -> None:
    client = launching_dashboard.signed_in("viewer")
    assert "No service dispatches now" in client.get("/ui/cluster/parts/state").text
    other = Lease(launching_dashboard.service.database, Candidate("ab" * 8, True, "trainer-7", 4321))
    other.keep()
    page = client.get("/ui/cluster/parts/state").text
    assert "This service does not dispatch" in page and "process 4321 on trainer-7, since 20" in page
    other.release()
    own = Lease(launching_dashboard.service.database, Candidate(launching_dashboard.service.uid, True))
    own.keep()
    assert "dispatch" not in client.get("/ui/cluster/parts/state").text


def test_a_password_of_the_store_is_not_shown(launching_dashboard: Any) -> None:
    service = launching_dashboard.service
    service.settings = dataclasses.replace(service.settings, database="postgresql://rhyme:secret-word@db/rhyme")
    page = launching_dashboard.signed_in().get("/settings").text
    assert "postgresql://rhyme:***@db/rhyme" in page and "secret-word" not in page


def test_a_token_is_shown_once_and_revoked(dashboard: Any, browser_page: Any) -> None:
    page = browser_page
    page.goto(dashboard.link())
    expect(page).to_have_url(f"{dashboard.url}/")
    page.goto(f"{dashboard.url}/settings")
    page.get_by_label("Name").fill("grafana")
    page.get_by_label("Works for").select_option("90 days")
    page.get_by_role("button", name="Create token").click()
    shown = page.locator("[data-issued-token]")
    expect(shown).to_have_text(re.compile("^rhyme_"))
    secret = shown.text_content()
    robot = dashboard.client()
    robot.headers["Authorization"] = f"Bearer {secret}"
    assert robot.get("/api/v1/runs").status_code == 200
    row = page.get_by_role("row").filter(has_text="grafana")
    expect(row).to_have_count(1)
    until = time.strftime("%Y-%m-%d", time.gmtime(time.time() + 90 * 86_400))
    expect(row.locator("[data-title='Works until'] time")).to_have_attribute("datetime", re.compile(f"^{until}"))
    page.reload()
    expect(page.locator("[data-issued]")).to_be_hidden()
    assert secret not in page.content()
    row.get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(row).to_have_count(0)
    assert robot.get("/api/v1/runs").status_code == 401
    # Both are in the log at once, and are found there.
    log = page.locator("#audit").get_by_role("row")
    expect(log.nth(1)).to_contain_text("Revoke a token")
    expect(log.nth(2)).to_contain_text("Create a token")
    page.get_by_label("Action or target").fill("revoke")
    page.get_by_role("button", name="Find").click()
    expect(log).to_have_count(2)
    expect(log.nth(1)).to_contain_text("browser")


def test_columns_filters_and_curves_of_the_runs(launching_dashboard: Any) -> None:
    client = launching_dashboard.signed_in()
    started(client, "of-ablation", experiment="ablation")
    page = client.get("/").text
    assert 'class="sparkline"' in page and "<option>ablation</option>" in page
    page = client.get("/", params={"columns": ["uid", "engines"], "experiment": "ablation"}).text
    heads = [re.sub("<[^>]*>", "", head).strip() for head in re.findall(r'<th scope="col".*?</th>', page, re.DOTALL)]
    assert heads == ["", "Run", "Engines", "Id"]
    assert "of-ablation" in page and f"/runs/{launching_dashboard.run_uid}" not in page
    # The choice stays when the table is sorted, filtered or shown again.
    assert re.search(r'href="/\?[^"]*columns=uid[^"]*sort=name', page)
    assert re.findall('type="hidden" name="columns" value="(.*?)"', page) == ["uid,engines", "uid", "engines"]
    assert "columns=uid" in re.findall(r'data-piece="([^"]*)"', page)[0]
    only = client.get("/", params={"origin": "imported"}).text
    assert "of-ablation" not in only.partition("<tbody>")[2] and 'value="imported" selected' in only


def test_chosen_runs_are_archived(launching_dashboard: Any, browser_page: Any) -> None:
    client = launching_dashboard.signed_in()
    uids = [started(client, name) for name in ("one", "two")]
    page = browser_page
    page.goto(launching_dashboard.link())
    for name in ("one", "two"):
        page.get_by_role("checkbox", name=f"Select {name}").check()
    page.locator("#selection").get_by_role("button", name="Archive").click()
    page.get_by_role("dialog").get_by_role("button", name="Archive").click()
    expect(page.get_by_role("checkbox", name="Select one")).to_have_count(0)
    expect(page.locator("#selection")).to_be_hidden()
    assert all(client.get(f"/api/v1/runs/{uid}").json()["archived_at"] for uid in uids)


@pytest.mark.parametrize(("status", "offered"), [("stopped", True), ("succeeded", False), ("lost", False)])
def test_resume_is_offered_where_the_api_takes_it(launching_dashboard: Any, status: str, offered: bool) -> None:
    client = launching_dashboard.signed_in()
    uid = started(client, "ended")
    with launching_dashboard.service.database.writing() as session:
        session.execute(update(Run).where(Run.uid == uid).values(status=status))
    resume = f"/api/v1/runs/{uid}/resume"
    assert (resume in client.get(f"/runs/{uid}").text) is offered
    assert client.post(resume).status_code == (200 if offered else 409)


def test_the_runs_of_an_experiment_are_stopped_together(launching_dashboard: Any, browser_page: Any) -> None:
    client = launching_dashboard.signed_in()
    options = {"actor.adam.lr": [1e-6, 3e-6], "train.seed": [1, 2]}
    answer = client.post("/api/v1/sweeps", json={"name": "lr", "command": "rhyme demo", "options": options})
    assert answer.status_code == 201, answer.text
    page = browser_page
    page.goto(launching_dashboard.link(path="/?experiment=lr&columns=status&values=config.actor.adam.lr"))
    notice = page.get_by_text("4 runs of the experiment “lr” have not ended.")
    expect(notice).to_be_visible()
    expect(page.get_by_role("row").filter(has_text="lr-4")).to_contain_text("3.00e-06")
    page.get_by_role("button", name="Stop all").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop all").click()
    expect(notice).to_have_count(0)
    expect(page.get_by_role("row").filter(has_text="stopped")).to_have_count(4)
    # Who only reads, and who looks at all runs, sees no button.
    assert "Stop all" not in launching_dashboard.signed_in("viewer").get("/", params={"experiment": "lr"}).text
    assert "Stop all" not in client.get("/").text
