"""Nodes lost in a real run, on Ray's own test cluster: one with an engine costs its engine, the policy's ends the run.

The head has no GPU, and each other node one pretended GPU: so the policy and each engine have a node of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openrlhf")

from ray.cluster_utils import Cluster  # isort: skip

from rhyme_openrlhf.telemetry.events import CheckpointSaved, HistoryState, Note, RolloutStarted, RunFinished, TrainStep
from tests.e2e.runs import RUN_TIMEOUT_S, FinishedRun, events_of
from tests.ray_clusters import SOON

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * RUN_TIMEOUT_S)]
Train = Callable[..., FinishedRun]
MOVES = ("--vllm.num_engines", "2", "--move.enable", "--move.news_s", "0.1", "--train.num_episodes", "3")


@pytest.fixture
def cluster(starts_ray: None, starts_cluster: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    head = {"num_cpus": 6, "num_gpus": 0, "object_store_memory": 3 * 10**8, "_system_config": SOON}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=2, num_gpus=1, object_store_memory=10**8)
        yield cluster
    finally:
        cluster.shutdown()


def nodes_of(cluster: Cluster, actor: str) -> list[Any]:
    """The nodes that have a process of an actor's class."""
    parents = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes().startswith(f"ray::{actor}".encode()):
                # The fourth field, behind a command name that may hold spaces.
                parents.add(int((process / "stat").read_text().rpartition(")")[2].split()[1]))
        except OSError:
            continue
    return [node for node in cluster.list_all_nodes() if node.all_processes["raylet"][0].process.pid in parents]


def lose_in_step(step: int, actor: str, cluster: Cluster, run: Path, lost_at: list[float]) -> threading.Thread:
    """Lose the last node that has a process of this class, once the rollout of `step` goes on."""

    def lose() -> None:
        end = time.monotonic() + RUN_TIMEOUT_S
        while time.monotonic() < end:
            if any(isinstance(event, RolloutStarted) and event.step == step for event in events_of(run)):
                lost_at.append(time.monotonic())
                cluster.remove_node(nodes_of(cluster, actor)[-1], allow_graceful=False)
                return
            time.sleep(0.1)

    thread = threading.Thread(target=lose, daemon=True)
    thread.start()
    return thread


def test_a_run_outlives_the_node_of_an_engine(train: Train, cluster: Cluster, tmp_path: Path) -> None:
    lost_at: list[float] = []
    lose_in_step(3, "RhymeRolloutActor", cluster, tmp_path / "run", lost_at)
    run = train(*MOVES, "--history.cpus_per_worker", "0.1")
    assert run.code == 0 and lost_at, run.output
    assert [event.status for event in run.of(RunFinished)] == ["succeeded"]
    assert [event.step for event in run.of(TrainStep)] == list(range(1, 7))
    warnings = [event.text for event in run.of(Note) if event.level == "warning"]
    assert any("the run goes on without engine" in text for text in warnings)
    assert any("the run goes on without node" in text for text in warnings)
    # One history worker for each node. That of the lost node was started elsewhere and kept its share of the prompts,
    # which return in every epoch.
    assert {event.worker for event in run.of(HistoryState) if event.step > 3} == set(range(4))
    assert any(text.startswith("history worker") and "was started again" in text for text in warnings)


def test_without_the_policys_node_the_run_ends_and_its_checkpoint_goes_on(
    train: Train, cluster: Cluster, tmp_path: Path
) -> None:
    lost_at: list[float] = []
    lose_in_step(3, "RhymePolicyModelActor", cluster, tmp_path / "run", lost_at)
    options = (*MOVES, "--history.cpus_per_worker", "0.1", "--ckpt.save_steps", "1")
    run = train(*options)
    assert run.code == 1, run.output
    last = run.output.strip().splitlines()[-1]
    assert last.startswith("rhyme train: failed: policy actor ") and "its node is gone" in last, run.output
    assert run.of(CheckpointSaved)
    cluster.add_node(num_cpus=2, num_gpus=1, object_store_memory=10**8)
    resumed = train(*options, "--ckpt.load_enable", name="resumed")
    assert resumed.code == 0, resumed.output
    assert [event.step for event in resumed.of(TrainStep)][-1] == 6
