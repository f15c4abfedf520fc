"""One number, everywhere: page, figure, API, terminal and the run directory's own summary."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from rhyme_openrlhf.webui import text

ROOT = Path(__file__).parents[2]
# The store keeps seconds in whole multiples of `api/totals.py::QUANTUM`: of a minute's sum less than this.
STORED = 1e-6
# The run's figure -> its field in summary.json, and how the page writes it.
FIGURES = {
    "reward": ("reward_last_epoch", text.number),
    "tokens_per_second": ("tokens_per_second", text.number),
    "speculation_rate": ("speculation_rate", text.percent),
    "bubble_fraction": ("bubble_fraction", text.percent),
}
TITLES = {
    "reward": "Reward",
    "tokens_per_second": "Throughput",
    "speculation_rate": "Speculation rate",
    "bubble_fraction": "Bubble fraction",
}


def test_every_place_says_the_same(demo_dashboard: Any, tmp_path: Path) -> None:
    uid = demo_dashboard.run_uid
    client = httpx.Client(base_url=demo_dashboard.url)
    client.post("/api/v1/session", json={"token": demo_dashboard.tokens["viewer"]})
    summary = json.loads((tmp_path / "runs" / "sorting-and-arithmetic" / "summary.json").read_text())
    run = client.get(f"/api/v1/runs/{uid}").json()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RHYME_CONTROL_URL": demo_dashboard.url,
        "RHYME_CONTROL_TOKEN": demo_dashboard.tokens["viewer"],
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    command = [sys.executable, "-m", "rhyme_openrlhf.cli.main", "runs", "show", uid, "--json"]
    shown = json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    tiles = tiles_of(client.get(f"/ui/runs/{uid}/parts/tiles").text)
    table = html.unescape(client.get("/").text)
    for name, (field, written) in FIGURES.items():
        assert run[name] == pytest.approx(summary[field], rel=STORED), name
        assert shown[name] == run[name], name
        assert tiles[TITLES[name]] == written(run[name]), name
        assert (text.number(run[name], 3) if name == "reward" else written(run[name])) in table, name
    assert run["step"] == summary["steps"] and f"{summary['steps']} / {summary['steps_planned']}" in table

    # A figure's points are the API's curve, and the API's curve is what the steps say.
    traces = client.get(f"/ui/runs/{uid}/figures/reward").json()["data"]
    (points,) = (trace for trace in traces if trace["name"] == "Reward")
    curve = client.get(f"/api/v1/runs/{uid}/series", params={"names": "reward", "points": 500}).json()
    assert [list(pair) for pair in zip(points["x"], points["y"], strict=True)] == curve_points(curve)
    steps = client.get(f"/api/v1/runs/{uid}/steps", params={"limit": 1000}).json()["items"]
    rewards = {one["step"]: one["reward"] for one in steps}
    assert [rewards[int(x)] for x in points["x"]] == points["y"]


def tiles_of(page: str) -> dict[str, str]:
    """Value by title."""
    found = re.findall(r'tile-title">([^<]*)</span>\s*<span class="tile-value">([^<]*)</span>', page)
    return {html.unescape(title): html.unescape(value) for title, value in found}


def curve_points(answer: dict[str, Any]) -> list[list[float]]:
    """(x, value) of the one curve."""
    one = answer["curves"][0]
    return [list(pair) for pair in zip(one["x"], one["values"], strict=True)]
