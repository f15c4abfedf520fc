"""`rhyme serve` and `rhyme runs` over a real training run on a real Ray: started, watched, stopped, resumed, cloned.

The clone trains asynchronously, with rollouts that new weights interrupt, so no other run has to.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rhyme_openrlhf.telemetry.events import OffPolicyness, TrainStep
from rhyme_openrlhf.telemetry.run_directory import STOP_REQUEST
from tests.e2e.plane import RUN_TIMEOUT_S, Plane
from tests.e2e.runs import FinishedRun, check_weights, events_of

pytest.importorskip("uvicorn")

pytestmark = pytest.mark.timeout(4 * RUN_TIMEOUT_S)

# Two of an epoch; the run is asked to stop within the third.
STEPS = 4
# Of a step (SMALL in runs.py).
SAMPLES = 16
# What the clone has instead of the first run's.
CHANGED = (
    "vllm.num_engines=2", "train.async_enable=true", "train.partial_rollout_enable=true", "weights.check_syncs=1000",
    "histospec.window_max=8",
)  # fmt: skip
# The embedded reward; a run goes on after step 2 only when the file `go` is there.
HELD_REWARD = """
import time
from pathlib import Path
from rhyme_openrlhf.embedded import reward

def reward_func(queries, prompts, labels, **more):
    with Path({asked!r}).open("a") as asked:
        asked.write("." * len(queries))
    end = time.monotonic() + {limit}
    while Path({asked!r}).stat().st_size > {samples} and not Path({go!r}).exists() and time.monotonic() < end:
        time.sleep(0.05)
    return reward.reward_func(queries, prompts, labels, **more)
"""


def check_asynchronous(directory: Path) -> None:
    """All samples of all steps are trained, at most one step off policy, and each engine has each version."""
    run = FinishedRun(directory, 0, "", events_of(directory))
    check_weights(run, engines=2, steps=STEPS)
    steps = list(range(1, STEPS + 1))
    assert [event.step for event in run.of(TrainStep)] == steps
    assert all(set(event.values) <= {0, 1} and sum(event.samples) == SAMPLES for event in run.of(OffPolicyness))
    assert {path.name for path in (directory / "samples").iterdir()} == {
        f"step-{n:06d}.{kind}" for n in steps for kind in ("jsonl", "parquet")
    }


def test_a_run_is_started_watched_stopped_resumed_and_cloned(
    plane: Plane, small_options: list[str], small_prompts: Path, tmp_path: Path
) -> None:
    demo = ["rhyme", "demo", *small_options, "--data.prompt_dataset", str(small_prompts), "--vllm.num_engines", "1"]
    go, reward = tmp_path / "go", small_prompts.parent / "held_reward.py"
    places = {"asked": str(tmp_path / "asked"), "go": str(go)}
    reward.write_text(HELD_REWARD.format(limit=RUN_TIMEOUT_S, samples=2 * SAMPLES, **places))
    held = ["--reward.remote_url", str(reward), "--limits.reward_s", str(RUN_TIMEOUT_S)]
    plane.runs("start", "--name", "first", "--", *demo, "--train.num_episodes", str(STEPS // 2), *held)
    end = time.monotonic() + RUN_TIMEOUT_S
    while plane.show("first")["step"] < 2:
        assert time.monotonic() < end, plane.runs("logs", "first")
        time.sleep(0.5)
    request = Path(plane.show("first")["attempts"][0]["run_directory"]) / STOP_REQUEST
    # One command asks and waits: a second one would be refused when the run ends before it is sent.
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(plane.runs, "stop", "first", "--wait")
        while not request.exists():
            assert time.monotonic() < end and not stopping.done(), plane.show("first")
            time.sleep(0.1)
        go.touch()
        stopping.result()
    stopped = plane.show("first")
    assert (stopped["status"], stopped["message"]) == ("stopped", "stopped on request")
    assert stopped["step"] == STEPS - 1

    plane.runs("resume", "first")
    told = plane.runs("logs", "first", "-f")
    assert f"resumes from checkpoint global_step{stopped['step']}" in told
    resumed = plane.show("first")
    assert (resumed["status"], resumed["step"], len(resumed["attempts"])) == ("succeeded", STEPS, 2)
    steps = json.loads(plane.runs("export", "first", "--table", "steps", "--format", "json"))
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))

    plane.runs("clone", "first", "--name", "second", *(word for one in CHANGED for word in ("--set", one)))
    plane.runs("logs", "second", "-f")
    clone = plane.show("second")
    assert (clone["status"], clone["parent"], clone["step"]) == ("succeeded", resumed["uid"], STEPS)
    directory = Path(clone["attempts"][0]["run_directory"])
    check_asynchronous(directory)
    # The same figures as in the run's own record.
    record = json.loads((directory / "summary.json").read_text())
    for name in ("tokens_per_second", "speculation_rate", "bubble_fraction"):
        assert clone[name] == pytest.approx(record[name], rel=1e-4, abs=1e-6), name
    assert clone["reward"] == pytest.approx(record["reward_last_epoch"])
    compared = plane.runs("compare", "first", "second")
    assert all(change.partition("=")[0] in compared for change in CHANGED)

    plane.end()
    assert plane.service.returncode == 0
    assert not (tmp_path / "data" / "ray.json").exists(), "Ray was left running"
