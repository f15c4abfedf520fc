"""Right-sizing on a run's page and over the API: the same simulation, or a sentence why there is none."""

from __future__ import annotations

import html
import json
import time
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.api.ingest.importer import import_directory
from rhyme_openrlhf.latency.profile import Subject, folder, write
from rhyme_openrlhf.run.model_shape import read_shape
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.workload import drawn
from tests.latency import formula
from tests.simulation.recorded import CLUSTER, FEATURES, PROFILE, RATES, SHAPE, placed, record

MODEL = str(embedded.MODEL)


def test_the_page_and_the_api_recommend_the_same(
    empty_dashboard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "runs").mkdir(exist_ok=True)
    directory = tmp_path / "runs" / "recorded"
    workload = placed(drawn(SHAPE, 4, 6, 4, 2, seed=3))
    record(directory, workload, Run(workload, CLUSTER, FEATURES, {1: PROFILE}, RATES).go())
    config = {"settings": {"run": {"name": "recorded"}}, "arguments": {"actor": {"model_name_or_path": MODEL}}}
    (directory / "config.json").write_text(json.dumps(config))
    imported = import_directory(empty_dashboard.service.database, directory, time.time())
    client = empty_dashboard.signed_in("viewer")
    run = f"/runs/{imported.run_uid}"
    page = client.get(f"{run}/scheduling").text
    assert "Is the run of the right size?" in page and "?right_size=true#right-size" in page
    assert '<th scope="col">Features</th>' not in page
    missing = client.get(f"/api/v1{run}/right-size").json()
    assert missing["missing"].startswith("no profile of this run's engines exists here") and missing["rows"] == []
    assert "No recommendation: no profile" in html.unescape(client.get(f"{run}/scheduling?right_size=true").text)
    shape = read_shape(MODEL)
    assert shape is not None
    folder().mkdir(parents=True)
    write(formula.profile(subject=Subject(shape.name, "a machine of a test", "float32", 1)), folder() / "mine.json")
    found = client.get(f"/api/v1{run}/right-size").json()
    assert found["missing"] == "" and [row["recommended"] for row in found["rows"]].count(True) == 1
    assert found["rows"][0]["features"] == "as it was" and found["rows"][0]["ratio"] == 1.0
    page = html.unescape(client.get(f"{run}/scheduling", params={"right_size": "true"}).text)
    assert found["sentence"][1:] in page and "a machine of a test, float32 (measured)" in page
    assert page.count('data-title="Engines"') == len(found["rows"])
    assert found["settings"].startswith("rhyme train ... --vllm.num_engines")


def test_a_run_without_its_directory_has_no_recommendation(dashboard: Any, run_directory: Path) -> None:
    client = dashboard.signed_in("viewer")
    address = f"/api/v1/runs/{dashboard.run_uid}/right-size"
    assert "no lengths.jsonl" in client.get(address).json()["missing"]
    (run_directory / "lengths.jsonl").symlink_to("/etc/passwd")
    assert "is no regular file" in client.get(address).json()["missing"]
    for file in run_directory.iterdir():
        file.unlink()
    run_directory.rmdir()
    assert client.get(address).json()["missing"] == "the run has no directory that this service can read"
