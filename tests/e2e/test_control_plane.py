"""`rhyme serve` and `rhyme runs` over a real training run on a real Ray: started, watched, stopped, resumed, cloned."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.e2e.plane import RUN_TIMEOUT_S, Plane

pytest.importorskip("uvicorn")

pytestmark = pytest.mark.timeout(1200)

# So many that the run is still on its way when a slow machine has seen its first step and asked it to stop.
STEPS = 16


def test_a_run_is_started_watched_stopped_resumed_and_cloned(
    plane: Plane, small_options: list[str], small_prompts: Path, tmp_path: Path
) -> None:
    demo = ["rhyme", "demo", *small_options, "--data.prompt_dataset", str(small_prompts), "--vllm.num_engines", "1"]
    plane.runs("start", "--name", "first", "--", *demo, "--train.num_episodes", str(STEPS // 2))
    end = time.monotonic() + RUN_TIMEOUT_S
    while plane.show("first")["step"] < 1:
        assert time.monotonic() < end, plane.runs("logs", "first")
        time.sleep(0.5)
    plane.runs("stop", "first", "--wait")
    stopped = plane.show("first")
    assert (stopped["status"], stopped["message"]) == ("stopped", "stopped on request")
    assert 1 <= stopped["step"] < STEPS

    plane.runs("resume", "first")
    told = plane.runs("logs", "first", "-f")
    assert f"resumes from checkpoint global_step{stopped['step']}" in told
    resumed = plane.show("first")
    assert (resumed["status"], resumed["step"], len(resumed["attempts"])) == ("succeeded", STEPS, 2)
    steps = json.loads(plane.runs("export", "first", "--table", "steps", "--format", "json"))
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))

    plane.runs("clone", "first", "--name", "second", "--set", "train.num_episodes=1", "--set", "histospec.window_max=8")
    plane.runs("logs", "second", "-f")
    clone = plane.show("second")
    assert (clone["status"], clone["parent"], clone["step"]) == ("succeeded", resumed["uid"], 2)
    # The same figures as in the run's own record.
    record = json.loads((Path(clone["attempts"][0]["run_directory"]) / "summary.json").read_text())
    for name in ("tokens_per_second", "speculation_rate", "bubble_fraction"):
        assert clone[name] == pytest.approx(record[name], rel=1e-4, abs=1e-6), name
    assert clone["reward"] == pytest.approx(record["reward_last_epoch"])
    assert "histospec.window_max" in plane.runs("compare", "first", "second")

    plane.end()
    assert plane.service.returncode == 0
    assert not (tmp_path / "data" / "ray.json").exists(), "Ray was left running"
