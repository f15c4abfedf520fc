"""One number, everywhere: page, figure, API, terminal and the run directory's own summary."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import pytest

from rhyme_openrlhf.api.demo.demonstration import LIVE
from rhyme_openrlhf.api.demo.synthetic_run import SyntheticRun, write_run_directory
from rhyme_openrlhf.api.ingest.importer import import_directory
from rhyme_openrlhf.telemetry import metrics
from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.events import DraftGain, EngineStep, Event, OffPolicyness, SampleMoved
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.webui.figures.drawing.timeline import CAUSE_WORDS
from rhyme_openrlhf.webui.figures.subjects.speculation import SOURCES
from rhyme_openrlhf.webui.site import text

ROOT = Path(__file__).parents[3]
# The store keeps seconds in whole multiples of `api/ingest/totals.py::QUANTUM`: of a minute's sum less than this.
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
    "bubble_fraction": "Bubble fraction in rollouts",
}


@pytest.mark.usefixtures("starts_python")
def test_every_place_says_the_same(demo_dashboard: Any, tmp_path: Path) -> None:
    uid, client = demo_dashboard.run_uid, viewer(demo_dashboard)
    summary = json.loads((tmp_path / "runs" / LIVE / "summary.json").read_text())
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


def test_drafts_and_off_policyness_are_what_the_record_says(demo_dashboard: Any, tmp_path: Path) -> None:
    uid, client = demo_dashboard.run_uid, viewer(demo_dashboard)
    recorded = record(tmp_path / "runs" / LIVE)

    # Where accepted drafts came from: what engines counted, the API's curves, the figure; together the rate.
    counted: dict[int, EngineCounters] = defaultdict(EngineCounters)
    for one in recorded:
        if isinstance(one, EngineStep):
            counted[one.step] += one.counters
    shares = (metrics.history_share, metrics.siblings_share, metrics.own_share, metrics.shared_share)
    drawn = {trace["name"]: trace for trace in figure(client, uid, "draft_sources")["data"]}
    for name, share in zip(SOURCES, shares, strict=True):
        trace = drawn[text.label(name)]
        curve = client.get(f"/api/v1/runs/{uid}/series", params={"names": name, "points": 500}).json()
        assert [list(pair) for pair in zip(trace["x"], trace["y"], strict=True)] == curve_points(curve)
        assert dict(curve_points(curve)) == pytest.approx({step: share(of) for step, of in counted.items()})
    (rate,) = (one for one in figure(client, uid, "speculation")["data"] if one["name"] == "Speculation rate")
    parts = zip(*(drawn[text.label(name)]["y"] for name in SOURCES), strict=True)
    assert [sum(of_step) for of_step in parts] == pytest.approx(rate["y"])

    # What drafts gain now.
    gains = [one for one in recorded if isinstance(one, DraftGain)]
    newest = [one for one in gains if one.step == max(one.step for one in gains)]
    ratio = mean(one.ratio for one in newest)
    told = [one for one in events(client, uid, "draft_gain") if one["step"] == newest[0].step]
    assert mean(one["ratio"] for one in told) == pytest.approx(ratio)
    # Of each step, what is no wider than a factor of 2.
    shown = figure(client, uid, "draft_gain")
    measured = {}
    for step in sorted({one.step for one in gains}):
        low, high = (mean(getattr(one, end) for one in gains if one.step == step) for end in ("low", "high"))
        if high <= 2 * low:
            measured[step] = mean(one.ratio for one in gains if one.step == step)
    lines = [one for one in shown["data"] if one["name"] == "Measured"]
    assert {x: y for one in lines for x, y in zip(one["x"], one["y"], strict=True)} == pytest.approx(measured)
    low, high = (mean(getattr(one, end) for one in newest) for end in ("low", "high"))
    said = f"Now: {ratio:.2f} times the tokens/s without (95 %: {low:.2f} to {high:.2f})."
    assert (said in shown["layout"]["meta"]["description"]) == (high <= 2 * low)

    # How old the weights were: of samples as the trainer counted them, of tokens as the engines' versions say.
    ages: Counter[int] = Counter()
    for one in recorded:
        if isinstance(one, OffPolicyness):
            ages.update(dict(zip(one.values, one.samples, strict=True)))
    told_ages: Counter[int] = Counter()
    for body in events(client, uid, "off_policyness"):
        told_ages.update(dict(zip(body["values"], body["samples"], strict=True)))
    assert told_ages == ages
    of_tokens: Counter[int] = Counter()
    for one in recorded:
        if isinstance(one, EngineStep) and one.weight_version is not None:
            of_tokens[one.step - one.weight_version - 1] += one.counters.response_tokens
    for name, what, amounts in (("", "samples", ages), ("_tokens", "response tokens", of_tokens)):
        total = sum(amounts.values())
        words = ", ".join(f"{text.percent(count / total)} at {age}" for age, count in sorted(amounts.items()))
        described = figure(client, uid, f"off_policyness{name}")["layout"]["meta"]["description"]
        assert f"Of all {what}: {words}." in described


def test_moves_are_the_same_everywhere(dashboard: Any, tmp_path: Path) -> None:
    write_run_directory(tmp_path / "moving", SyntheticRun(steps=9, engines=16, steps_per_epoch=3))
    uid = import_directory(dashboard.service.database, tmp_path / "moving", time.time()).run_uid
    client = viewer(dashboard)
    moved = [one for one in record(tmp_path / "moving") if isinstance(one, SampleMoved)]
    assert moved

    told = client.get(f"/api/v1/runs/{uid}/moves", params={"limit": 1000}).json()["items"]
    fields = ("step", "sample", "cause", "carrier", "outcome", "seconds", "downtime_seconds", "predicted_seconds")
    assert sorted(tuple(map(str, (one[name] for name in fields))) for one in told) == sorted(
        tuple(str(getattr(one, name)) for name in fields) for one in moved
    )
    causes = Counter(one.cause for one in moved)
    drawn = {trace["name"].lower(): sum(trace["y"]) for trace in figure(client, uid, "moves")["data"]}
    assert drawn == {CAUSE_WORDS[cause]: count for cause, count in causes.items()}

    # The table has a row of a cause, carrier and outcome.
    page = html.unescape(client.get(f"/ui/runs/{uid}/parts/moves").text)
    rows = [re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row) for row in page.split("<tr>")[2:]]
    kinds: dict[tuple[str, ...], list[SampleMoved]] = defaultdict(list)
    for one in moved:
        kinds[CAUSE_WORDS[one.cause], one.carrier.replace("_", " "), one.outcome].append(one)
    assert {tuple(row[:3]): row[3:7] for row in rows} == {
        kind: [
            text.number(len(of)),
            seconds(one.seconds for one in of),
            seconds(one.downtime_seconds for one in of),
            seconds(one.predicted_seconds for one in of),
        ]
        for kind, of in kinds.items()
    }

    # An arrow of the timeline says what its move cost.
    one = next(one for one in moved if one.downtime_seconds is not None and one.predicted_seconds is not None)
    address = f"/ui/runs/{uid}/figures/timeline"
    arrows = client.get(address, params={"step": one.step, "steps": 1}).json()["data"]
    (words,) = {words for trace in arrows for words in trace.get("text") or [] if f"Sample {one.sample}:" in words}
    assert f"{text.duration(one.seconds)}, " in words
    assert f"{text.duration(one.downtime_seconds)} without an engine" in words
    assert f"{text.duration(one.predicted_seconds)} expected" in words


def viewer(dashboard: Any) -> httpx.Client:
    """Signed in to see."""
    client: httpx.Client = dashboard.signed_in("viewer")
    return client


def record(directory: Path) -> list[Event]:
    """What a run wrote."""
    return [one.event for one in read_events(directory / "events.jsonl")]


def figure(client: httpx.Client, uid: str, name: str) -> Any:
    return client.get(f"/ui/runs/{uid}/figures/{name}").json()


def events(client: httpx.Client, uid: str, kind: str) -> list[dict[str, Any]]:
    """Of one kind, as the API tells them."""
    found = client.get(f"/api/v1/runs/{uid}/events", params={"kind": kind, "limit": 1000}).json()
    assert found["next_cursor"] is None
    return [one["body"] for one in found["items"]]


def seconds(values: Iterable[float | None]) -> str:
    """Their mean as the table writes it."""
    known = [value for value in values if value is not None]
    return f"{text.number(mean(known))} s" if known else text.number(None)


def tiles_of(page: str) -> dict[str, str]:
    """Value by title."""
    found = re.findall(r'tile-title">([^<]*)</span>\s*<span class="tile-value"[^>]*>([^<]*)</span>', page)
    return {html.unescape(title): html.unescape(value) for title, value in found}


def curve_points(answer: dict[str, Any]) -> list[list[float]]:
    """(x, value) of the one curve."""
    one = answer["curves"][0]
    return [list(pair) for pair in zip(one["x"], one["values"], strict=True)]
