"""Runs side by side."""

import csv
import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from sqlalchemy import update

from rhyme_openrlhf.api.ingest.importer import import_directory
from rhyme_openrlhf.api.store.models import Run

RECORDED = Path(__file__).parents[2] / "data" / "recorded_run.jsonl"


@pytest.fixture
def compared(dashboard: Any, tmp_path: Path) -> Any:
    """The recorded run, and "slow": the same with half the rewards, rollouts of twice the time and another window."""
    directory = tmp_path / "runs" / "20261122-slow"
    directory.mkdir(parents=True)
    events = []
    for line in RECORDED.read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "train_step" and "reward" in event["metrics"]:
            event["metrics"]["reward"] /= 2
        if event["kind"] == "rollout_finished":
            event["seconds"] *= 2
            event["reward_mean"] /= 2
        events.append(json.dumps(event))
    (directory / "events.jsonl").write_text("\n".join(events) + "\n")
    settings = {"run": {"name": "slow"}, "histospec": {"enable": True, "window_max": 8}}
    (directory / "config.json").write_text(json.dumps({"settings": settings, "arguments": {}}))
    dashboard.slow_uid = import_directory(dashboard.service.database, directory, time.time()).run_uid
    return dashboard


def row(text: str, name: str) -> str:
    return next(part for part in re.findall(r"<tr>.*?</tr>", text, re.DOTALL) if f">{name}</a>" in part)


def test_ratios_are_to_the_first_run_and_say_which_way_is_better(compared: Any) -> None:
    client = compared.signed_in("viewer")
    uids = [compared.run_uid, compared.slow_uid]
    page = client.get("/compare", params={"run": uids}).text
    slow = row(page, "slow")
    assert re.search(r'data-title="Reward">[^<]* <span class="ratio worse">0.50×', slow)
    assert re.search(r'data-title="Tokens/s">[^<]* <span class="ratio worse">0.50×', slow)
    assert "×" not in row(page, "demo")
    turned = client.get("/compare", params={"run": uids[::-1]}).text
    assert re.search(r'data-title="Reward">[^<]* <span class="ratio better">2.00×', row(turned, "demo"))
    api = client.get("/api/v1/compare", params={"run": uids}).json()
    assert round(api["runs"][1]["ratios"]["reward"], 2) == 0.5


def test_only_what_differs_is_listed(compared: Any) -> None:
    page = compared.signed_in("viewer").get("/compare", params={"run": [compared.run_uid, compared.slow_uid]}).text
    assert "histospec.window_max" in page and "histospec.enable" not in page
    assert page.index("histospec.window_max") < page.index("Names and folders") < page.index("<code>run.name</code>")


def test_a_figure_of_several_runs(compared: Any) -> None:
    client = compared.signed_in("viewer")
    uids = [compared.run_uid, compared.slow_uid]
    figure = client.get("/ui/figures/reward", params={"run": uids}).json()
    assert [trace["name"] for trace in figure["data"]] == ["demo", "slow"]
    assert figure["data"][0]["line"] != figure["data"][1]["line"]
    assert figure["data"][1]["y"][0] == pytest.approx(figure["data"][0]["y"][0] / 2)
    assert "2 runs" in figure["layout"]["meta"]["description"]
    by_time = client.get("/ui/figures/reward", params={"run": uids, "axis": "time"}).json()
    assert by_time["layout"]["xaxis"]["title"]["text"] == "Seconds since the first step"
    none = client.get("/ui/figures/metric", params={"run": uids, "metric": "nothing"}).json()
    assert none["layout"]["meta"]["empty"] and none["data"] == []
    assert compared.client().get("/ui/figures/reward", params={"run": uids}).status_code == 401


def test_what_a_run_is_called_is_no_markup_in_a_figure_and_no_formula_in_its_file(
    compared: Any, browser_page: Any
) -> None:
    names = {compared.run_uid: '<a href="https://example.org">x</a> %{y} &lt;b&gt;', compared.slow_uid: "=1+1 <b>y</b>"}
    with compared.service.database.writing() as session:
        for uid, name in names.items():
            session.execute(update(Run).where(Run.uid == uid).values(name=name))
    page = browser_page
    address = f"/compare?run={compared.run_uid}&run={compared.slow_uid}"
    page.goto(compared.link("viewer", address))
    reward = page.locator("[data-name='compare-reward']")
    expect(reward).to_have_attribute("data-state", "drawn")
    assert reward.locator(".legendtext").all_text_contents() == list(names.values())
    reward.locator("[data-figure-plot]").evaluate(
        "(plot) => Plotly.Fx.hover(plot, [{ curveNumber: 0, pointNumber: 1 }])"
    )
    expect(reward.locator(".hoverlayer")).to_contain_text('<a href="...')
    assert page.locator("svg a").count() == 0
    with page.expect_download() as kept:
        reward.locator("[data-figure-csv]").click()
    rows = list(csv.reader(io.StringIO(Path(kept.value.path()).read_text())))
    assert {row[0] for row in rows[1:]} == {names[compared.run_uid], f"'{names[compared.slow_uid]}"}


def test_from_the_table_to_the_comparison_and_back(compared: Any, browser_page: Any) -> None:
    page = browser_page
    page.goto(compared.link("viewer"))
    page.get_by_role("checkbox", name="Select demo").check()
    bar = page.locator("#selection")
    expect(bar).to_contain_text("1 run selected")
    expect(bar.get_by_role("button", name="Compare")).to_be_disabled()
    expect(bar.get_by_role("button", name="Stop")).to_have_count(0)
    # The choice outlives an update of the table.
    page.evaluate("document.querySelector('#runs').dispatchEvent(new CustomEvent('rhyme:replaced', { bubbles: true }))")
    page.get_by_role("checkbox", name="Select slow").check()
    bar.get_by_role("button", name="Compare").click()
    expect(page).to_have_url(re.compile(r"/compare\?run=[0-9a-f]{16}&run=[0-9a-f]{16}$"))
    reward = page.locator("[data-name='compare-reward']")
    expect(reward).to_have_attribute("data-state", "drawn")
    assert reward.locator(".scatterlayer .trace path.js-line").count() == 2
    page.get_by_role("link", name="Time", exact=True).click()
    expect(page).to_have_url(re.compile("axis=time"))
    expect(reward).to_have_attribute("data-state", "drawn")
    expect(reward).to_contain_text("Seconds since the first step")
    address = page.url
    page.reload()
    expect(page.get_by_role("link", name="Time", exact=True)).to_have_attribute("aria-current", "true")
    page.go_back()
    expect(page.get_by_role("link", name="Steps", exact=True)).to_have_attribute("aria-current", "true")
    assert address != page.url
