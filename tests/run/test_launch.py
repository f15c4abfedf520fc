"""The record of a run's start: everything but its secrets, which the run itself has; and its processes' logs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openrlhf")

from rhyme_openrlhf.history.lineage import Ancestors
from rhyme_openrlhf.run import launch
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.run import RunSettings
from rhyme_openrlhf.telemetry.services import Checkpoints

SECRET = "hunter2secret"
# As vLLM's engine core: a driver of its own, whose actor has a place in the placement group named on its command line.
ENGINE_CORE = """
import sys, ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
address, group, words = sys.argv[1:]
ray.init(address=address, namespace="engines", log_to_driver=False)

@ray.remote(num_cpus=1)
class RayWorkerWrapper:
    def say(self, words):
        print(words, flush=True)

place = PlacementGroupSchedulingStrategy(ray.util.get_placement_group(group))
ray.get(RayWorkerWrapper.options(scheduling_strategy=place).remote().say.remote(words))
"""


def test_neither_the_record_nor_the_first_event_has_a_secret() -> None:
    args: Any = SimpleNamespace(
        logger=SimpleNamespace(wandb=SimpleNamespace(key=SECRET)),
        data=SimpleNamespace(input_key="question"),
        vllm=SimpleNamespace(num_engines=1, tensor_parallel_size=1),
        train=SimpleNamespace(num_episodes=1, async_enable=False),
        rollout=SimpleNamespace(batch_size=1, n_samples_per_prompt=1),
    )
    command = ["rhyme", "train", f"--logger.wandb.key={SECRET}", "--data.input_key", "question"]
    job = SimpleNamespace(args=args, settings=RhymeSettings(), command=command)
    recorded = launch._config(job)  # type: ignore[arg-type]
    event = launch._run_started(job, SimpleNamespace(steps_per_epoch=1))  # type: ignore[arg-type]
    assert SECRET not in json.dumps(recorded) and SECRET not in str(event)
    assert recorded["arguments"]["data"]["input_key"] == "question"
    assert recorded["command"] == event.command == ["rhyme", "train", "--logger.wandb.key=***", *command[3:]]
    assert args.logger.wandb.key == SECRET


@pytest.fixture
def session(starts_ray: None) -> Iterator[Any]:
    """A Ray of this job."""
    import ray

    context = ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, namespace="engines")
    yield context.address_info
    ray.shutdown()


def test_ranks_of_an_engine_are_another_job_whose_logs_are_kept_and_strangers_are_not(
    session: Any, tmp_path: Path, starts_python: None
) -> None:
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    @ray.remote(num_cpus=1)
    class Engine:
        def start(self) -> None:
            print("an engine of the run", flush=True)

    ours, _ = (placement_group([{"CPU": 2}], name=name, lifetime="detached") for name in ("ours", "strange"))
    engine: Any = Engine.options(scheduling_strategy=PlacementGroupSchedulingStrategy(ours)).remote()  # type: ignore[attr-defined]
    ray.get(engine.start.remote(), timeout=60)
    for group, words in (("ours", "a rank of the run"), ("strange", "a rank of another run")):
        command = [sys.executable, "-c", ENGINE_CORE, session["address"], group, words]
        subprocess.run(command, check=True, timeout=120, capture_output=True)
    session_dir = Path(session["session_dir"])

    def printed() -> str:
        return "".join(log.read_text() for log in (session_dir / "logs").glob("worker-*.out"))

    # Ray writes what a process prints a little later.
    deadline = time.monotonic() + 60
    while not all(words in printed() for words in ("an engine of the run", "a rank of the run", "another run")):
        assert time.monotonic() < deadline, printed()
        time.sleep(0.1)
    jobs = launch._jobs()
    assert len(jobs) == 2 and jobs[0] == ray.get_runtime_context().get_job_id()
    logs = tmp_path / "logs"
    logs.mkdir()
    launch._keep_logs(session_dir, SimpleNamespace(logs=logs), jobs)  # type: ignore[arg-type]
    kept = "".join(log.read_text() for log in logs.glob("worker-*.out"))
    assert "an engine of the run" in kept and "a rank of the run" in kept and "another run" not in kept


def test_a_run_that_does_not_resume_is_refused_for_earlier_runs_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is made: --ckpt.load_enable may have found no checkpoint."""
    gone = Ancestors("a tokenizer", 9, (), ("--history.earlier: /gone is no run directory",))
    monkeypatch.setattr(launch, "prepare", lambda args, prompts: (Checkpoints(None, {}), []))
    settings = RhymeSettings(run=RunSettings(dir=str(tmp_path / "run")))
    with pytest.raises(launch.LaunchError, match=r"^--history\.earlier: /gone is no run directory$"):
        launch.run_training(SimpleNamespace(), settings, 1, None, False, [], gone)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
