"""The groups of an experiment: table, mean curves with a band, and the way there."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from rhyme_openrlhf.api.ingest.importer import import_directory
from rhyme_openrlhf.api.read.groups import Group
from rhyme_openrlhf.webui.figures.experiment import group_name

RECORDED = Path(__file__).parents[2] / "data" / "recorded_run.jsonl"
# (window, seed, factor of the rewards) of each run.
RUNS = ((32, 1, 1.0), (32, 2, 0.9), (8, 1, 0.5))


@pytest.fixture
def experiment(launching_dashboard: Any, tmp_path: Path) -> Any:
    """A dashboard with the experiment "window": two seeds of one window, one of another."""
    client = launching_dashboard.signed_in()
    made = client.post("/api/v1/experiments", json={"name": "window", "description": "Two windows."})
    launching_dashboard.path = f"/experiments/{made.json()['id']}"
    launching_dashboard.uids = []
    for window, seed, factor in RUNS:
        name = f"window-{window}-{seed}"
        directory = tmp_path / "runs" / name
        directory.mkdir(parents=True)
        events = [json.loads(line) for line in RECORDED.read_text().splitlines()]
        for event in events:
            if event["kind"] == "train_step" and "reward" in event["metrics"]:
                event["metrics"]["reward"] *= factor
        (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        settings = {"run": {"name": name}, "histospec": {"window_max": window}}
        config = {"settings": settings, "arguments": {"train": {"seed": seed}}}
        (directory / "config.json").write_text(json.dumps(config))
        uid = import_directory(launching_dashboard.service.database, directory, time.time()).run_uid
        assert client.patch(f"/api/v1/runs/{uid}", json={"experiment": "window"}).status_code == 200
        launching_dashboard.uids.append(uid)
    return launching_dashboard


def test_the_table_and_the_api_say_the_same(experiment: Any) -> None:
    client = experiment.signed_in("viewer")
    page = client.get(experiment.path).text
    first, second = re.findall(r"<tr>.*?</tr>", page.partition("<tbody>")[2], re.DOTALL)
    groups = client.get(f"/api/v1{experiment.path}/groups").json()["groups"]
    final = groups[0]["figures"][0]["final"]
    assert f'data-title="Reward">{final["mean"]:.3f} ± {final["deviation"]:.3f}<br>' in first
    assert ">2 runs</a>" in first and "2 succeeded" in first and "<code>32</code>" in first
    # A single run has no spread, and its link leads to itself.
    assert f'href="/runs/{experiment.uids[2]}">1 run</a>' in second and "±" not in second
    assert "3 runs, 2 groups" in page and "Two windows." in page and "Stop all" not in page


def test_a_mean_curve_has_a_band_where_there_are_several_runs(experiment: Any) -> None:
    client = experiment.signed_in("viewer")
    shown = {"group": [experiment.uids[0], experiment.uids[2], "0" * 16]}
    figure = client.get(f"/ui{experiment.path}/figures/reward", params=shown).json()
    high, low, mean, alone = figure["data"]
    assert [trace["name"] for trace in (mean, alone)] == ["window_max 32", "window_max 8"]
    assert low["fill"] == "tonexty" and low["y"][0] < mean["y"][0] < high["y"][0]
    assert mean["line"]["color"] != alone["line"]["color"]
    assert "2 groups" in figure["layout"]["meta"]["description"]
    # A group keeps its colour when another one is gone.
    gone = {"group": ["0" * 16, experiment.uids[2]]}
    again = client.get(f"/ui{experiment.path}/figures/reward", params=gone).json()
    assert [trace["line"] for trace in again["data"]] == [alone["line"]]


def test_each_run_is_a_line_from_its_options_to_its_results(experiment: Any) -> None:
    client = experiment.signed_in("viewer")
    figure = client.get(f"/ui{experiment.path}/figures/parallel", params={"group": experiment.uids[:1]}).json()
    best, *others, values = figure["data"]
    assert best["name"] == "Best quarter" and len(others) == 2 and values["mode"] == "text"
    assert best["x"] == ["histospec.window_max", "Throughput (tokens/s)", "Reward", None]
    assert (best["y"][0], best["y"][2]) == (1, 1) and best["text"][0] == "window-32-1<br>histospec.window_max 32"
    assert "The best is window-32-1" in figure["layout"]["meta"]["description"]


def test_a_group_is_named_by_few_options_and_the_end_of_long_values() -> None:
    path = "/srv/data/with/a/very/long/name.jsonl"
    group = Group({"actor.adam.lr": 1.23456e-7, "data.prompt_dataset": path, "ckpt.load_enable": False}, [], [])
    name = group_name(group, list(group.options))
    assert name == "lr 1.235e-07, prompt_dataset …/very/long/name.jsonl, load_enable off"
    other = Group({"train.agent_func_path": None}, [], [])
    assert group_name(other, ["actor.adam.lr", "train.agent_func_path"]) == "lr 1e-06 (default), agent_func_path –"
    assert group_name(other, [f"a.option{at}" for at in range(6)]).endswith("option3 default, …")
    assert group_name(other, []) == "all runs"


def test_from_the_table_of_runs_to_the_groups(experiment: Any, browser_page: Any) -> None:
    page = browser_page
    page.goto(experiment.link("operator", "/?experiment=window"))
    page.get_by_role("link", name="Groups of “window”").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("window")
    figure = page.locator("[data-name='experiment-reward']")
    expect(figure).to_have_attribute("data-state", "drawn")
    expect(figure.locator(".legendtext")).to_have_text(["window_max 32", "window_max 8"])
    assert figure.locator("path.js-fill").count() == 1
    # The open page keeps its colours when a run of another seed comes first.
    piece = page.locator("#groups").get_attribute("data-piece")
    table = experiment.signed_in().get(piece).text
    drawn = figure.locator("[data-figure-plot]").evaluate("plot => plot.data.slice(2).map((one) => one.line.color)")
    assert re.findall(r'stroke="(#\w+)"', table) == drawn
    page.get_by_role("link", name="2 runs").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Compare")
