"""`rhyme serve` and `rhyme runs` over a real training run on a real Ray: started, watched, stopped, resumed, cloned."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

RHYME = [sys.executable, "-m", "rhyme_openrlhf.cli.main"]
# Three runs after each other, each of which loads everything; machines are not always idle.
RUN_TIMEOUT_S = 420
STEPS = 6


class Plane:
    """A service in `folder`, and the client signed in to it."""

    def __init__(self, folder: Path, roots: list[Path]) -> None:
        self.environment = {**os.environ, "XDG_CONFIG_HOME": str(folder / "config"), "PYTHONUNBUFFERED": "1"}
        self.environment.pop("RAY_ADDRESS", None)
        self.service = subprocess.Popen(
            [*RHYME, "serve", "--serve.port=0", f"--serve.data_dir={folder / 'data'}",
             f"--serve.roots={':'.join(map(str, roots))}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment, cwd=folder,
        )  # fmt: skip
        assert self.service.stdout is not None
        said = ""
        while not (link := re.search(r"http://\S+#token=\S+", said)):
            line = self.service.stdout.readline()
            assert line, f"the service ended: {said}"
            said += line
        self.runs("login", given=link[0] + "\n")

    def runs(self, *arguments: str, given: str | None = None) -> str:
        """What a `rhyme runs` command printed; it must succeed."""
        done = subprocess.run(
            [*RHYME, "runs", *arguments],
            input=given, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, env=self.environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def show(self, run: str) -> Any:
        return json.loads(self.runs("show", run, "--json"))

    def end(self) -> None:
        self.service.send_signal(signal.SIGINT)
        self.service.communicate(timeout=120)


@pytest.fixture
def plane(tmp_path: Path, small_prompts: Path) -> Iterator[Plane]:
    plane = Plane(tmp_path, [tmp_path, small_prompts.parent])
    yield plane
    plane.end()


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
