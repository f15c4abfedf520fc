"""`scripts/gpu_first_run.sh`: parts end alone, calls are merged, and all of it runs on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/gpu_first_run.sh"


def run(out: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The script itself, as a user starts it."""
    done = subprocess.run(
        [SCRIPT, "--out", out, *options], env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True
    )
    return done, json.loads(out.read_text()) if out.exists() else {}


def test_results_of_two_calls_are_one_file_and_one_table(tmp_path: Path, starts_python: None) -> None:
    out = tmp_path / "found.json"
    done, found = run(out, "--tiny", "--only", "memory,doctor")
    assert done.returncode == 0, done.stderr
    states = {name: part["state"] for name, part in found["parts"].items()}
    gpus = bool(found["machine"]["gpus"])
    assert states == {"doctor": "ok", "memory": "ok" if gpus else "skipped"}
    assert found["machine"]["versions"]["python"]

    # No time for what was asked for: it is said, and what was found before is kept.
    done, found = run(out, "--only", "proof,doctor", "--seconds", "0")
    assert done.returncode == 1
    assert found["parts"]["proof"]["state"] == "left" and found["parts"]["doctor"]["figures"]["checks"]
    rows = out.with_suffix(".md").read_text()
    assert "| doctor | what is installed | ok |" in rows and "| proof |" in rows and "no time was left" in rows


def part(script: Any, name: str, program: str, limit_s: float = 30) -> Any:
    """A part that is a small Python program; it is given the file to write."""
    return script.Part(
        name,
        "a test",
        limit_s,
        lambda context, out: [sys.executable, "-c", program, str(out)],
        script.read_json,
        str,
    )


def test_a_failed_part_and_a_late_one_do_not_stop_the_next(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts_python: None
) -> None:
    pids = tmp_path / "pids"
    hangs = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)"
    )
    good = "import sys; open(sys.argv[1], 'w').write('{\"value\": 7}')"
    parts = (
        part(script, "fails", "print('the reason'); raise SystemExit(3)"),
        part(script, "hangs", hangs, limit_s=10),
        part(script, "good", good),
    )
    monkeypatch.setattr(script, "PARTS", parts)
    monkeypatch.setattr(script, "LEAST_SECONDS", 1)
    monkeypatch.setattr(script, "END_SECONDS", 1)
    out = tmp_path / "found.json"
    assert script.main(["--out", str(out)]) == 1
    found = json.loads(out.read_text())["parts"]
    assert found["fails"]["state"] == "failed" and "exit code 3: the reason" in found["fails"]["why"]
    assert found["hangs"]["state"] == "failed" and "did not end within 10 s" in found["hangs"]["why"]
    assert found["good"]["state"] == "ok" and found["good"]["figures"] == {"value": 7}
    # Nothing that a part started is left.
    until = time.monotonic() + 30
    while left := [pid for pid in map(int, pids.read_text().split()) if psutil.pid_exists(pid)]:
        assert time.monotonic() < until, left
        time.sleep(0.1)


def test_an_earlier_calls_file_is_not_read_as_this_ones(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts_python: None
) -> None:
    good = "import sys; open(sys.argv[1], 'w').write('{}')"
    out = tmp_path / "found.json"
    monkeypatch.setattr(script, "PARTS", (part(script, "one", good),))
    assert script.main(["--out", str(out)]) == 0
    monkeypatch.setattr(script, "PARTS", (part(script, "one", "pass"),))
    assert script.main(["--out", str(out)]) == 1
    assert json.loads(out.read_text())["parts"]["one"]["state"] == "failed"


def test_results_of_another_device_are_refused(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], starts_python: None
) -> None:
    out = tmp_path / "found.json"
    out.write_text(json.dumps({"machine": {"device": "Some GPU"}, "parts": {}}))
    assert script.main(["--out", str(out)]) == 2
    assert "has results of Some GPU" in capsys.readouterr().err


def test_an_unknown_part_is_refused(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--only", "doctor,wheels"]) == 2
    assert "wheels: there is no such part; there are: doctor, proof" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_part_runs_here(tmp_path: Path, starts_e2e: None, starts_ray: None, starts_engine: None) -> None:
    done, found = run(tmp_path / "found.json", "--tiny")
    assert {name: part["why"] for name, part in found["parts"].items() if part["state"] == "failed"} == {}
    assert done.returncode == 0, done.stderr
    for name in ("speed-1.7b", "speed-8b"):
        loads = found["parts"][name]["figures"]["loads"]
        assert [load["running"] for load in loads] == [4, 1] and all(load["tokens_per_step"] > 1 for load in loads)
    assert found["parts"]["proof"]["figures"]["checks"][0]["result"] == "ok"
    assert {row["carrier"] for row in found["parts"]["moves"]["figures"]["rows"]} == {"kv_transfer", "recompute"}
    assert found["parts"]["real-model"]["figures"]["plain"]["steps"]
    for name in ("train-openrlhf", "train-buffer"):
        assert [step["epoch"] for step in found["parts"][name]["figures"]["steps"]] == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_memory_probe_has_long_drafts_of_one_sample_alone(
    script: Any, tmp_path: Path, starts_ray: None, starts_engine: None
) -> None:
    context = script.Context(0, True, tmp_path)
    out = tmp_path / "memory.json"
    done = subprocess.run(script.memory(context, out), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    # One sample drafts its own answer; what the others say is random.
    assert found["survived"] and found["accepted"] > 16
    assert "survived" in script.memory_words(found)
