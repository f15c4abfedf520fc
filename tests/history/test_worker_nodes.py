"""History workers on a cluster: one for each node, which goes on elsewhere when its node is lost."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")

import ray

from ray.cluster_utils import Cluster  # isort: skip
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # isort: skip

from rhyme_openrlhf.history.index import Piece
from rhyme_openrlhf.history.worker import PromptRollout
from rhyme_openrlhf.history.workers import checkpoint_file, start_history_workers, stop_history_workers
from rhyme_openrlhf.prompt_keys import owner, prompt_key
from rhyme_openrlhf.settings.history import HistorySettings
from tests.ray_clusters import two_nodes

pytestmark = pytest.mark.timeout(600)
LIMIT_SECONDS = 120.0
NODE = {"num_cpus": 1, "object_store_memory": 10**8}


@pytest.fixture(scope="module")
def cluster(starts_ray: None, starts_cluster: None) -> Iterator[Cluster]:
    with two_nodes(NODE) as cluster:
        yield cluster


@ray.remote(num_cpus=0, name="notes")
class Notes:
    """Stands for the run's recorder."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, event: Any, source: str, at: float) -> None:
        if hasattr(event, "text"):
            self.texts.append(event.text)

    def take(self) -> list[str]:
        return self.texts


def rollout(prompt: str) -> PromptRollout:
    tokens = np.arange(100_000)
    return PromptRollout(prompt_key(prompt), (Piece([1, 2, 3], tokens, 1.0),), (tokens.size,))


def node_of(worker: Any) -> str:
    found: str = ray.get(worker.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
    return found


def owned_by(number: int, workers: int) -> str:
    return next(f"prompt {n}" for n in range(1000) if owner(prompt_key(f"prompt {n}"), workers) == number)


def test_workers_follow_the_nodes_and_outlive_one(cluster: Cluster, tmp_path: Path) -> None:
    stays = NodeAffinitySchedulingStrategy(cluster.head_node.node_id, soft=False)
    node = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    notes = Notes.options(scheduling_strategy=stays).remote()
    settings = HistorySettings(cpus_per_worker=0, memory_gb=0.001)
    workers = start_history_workers(settings, tmp_path / "history", (), "notes")
    assert sorted(map(node_of, workers)) == sorted(found["NodeID"] for found in ray.nodes() if found["Alive"])
    for number, worker in enumerate(workers):
        ray.get(worker.record.remote(1, [rollout(owned_by(number, len(workers)))]))
    # What does not fit is in the node's own temporary directory, which nobody else may read, and not in the run's.
    spilled: Path = ray.get(workers[0].__ray_call__.remote(lambda worker: worker._spill))
    assert spilled.parent == Path(tempfile.gettempdir()) and list(spilled.glob("worker-*/*.index"))
    assert spilled.stat().st_mode & 0o777 == 0o700 and not list(tmp_path.rglob("*.index"))

    (lost,) = [number for number, worker in enumerate(workers) if node_of(worker) == node.node_id]
    # Not readable elsewhere, as in a run directory of the lost node alone.
    (tmp_path / "history" / f"worker-{lost}.journal").unlink()
    cluster.remove_node(node, allow_graceful=False)
    until = time.monotonic() + LIMIT_SECONDS
    known = 1
    # The process of the lost node may still answer for a moment.
    while known:
        assert time.monotonic() < until
        with suppress(ray.exceptions.RayActorError):
            known = ray.get(workers[lost].prompts.remote(), timeout=LIMIT_SECONDS)
        time.sleep(0.2)
    assert node_of(workers[lost]) != node.node_id
    told = [text for text in ray.get(notes.take.remote()) if "started again without its journal" in text]
    assert len(told) == 1 and told[0].startswith(f"history worker {lost} ")
    others = [worker for number, worker in enumerate(workers) if number != lost]
    assert ray.get([worker.prompts.remote() for worker in others]) == [1, 1]
    stop_history_workers(workers)
    assert not spilled.exists() or not list(spilled.rglob("*.index"))
    for one in (*workers, notes):
        ray.kill(one)


def test_of_as_many_workers_each_reads_its_own_file_of_a_checkpoint_alone(cluster: Cluster, tmp_path: Path) -> None:
    first = start_history_workers(HistorySettings(workers=2, cpus_per_worker=0), tmp_path / "first")
    for number, worker in enumerate(first):
        ray.get(worker.record.remote(1, [rollout(owned_by(number, 2))]))
    saved = [tmp_path / checkpoint_file(number, 2) for number in range(2)]
    ray.get([worker.save.remote(path, 1) for worker, path in zip(first, saved, strict=True)])
    second = start_history_workers(HistorySettings(workers=2, cpus_per_worker=0), tmp_path / "second", saved)
    place = ray.get([worker.__ray_call__.remote(lambda self: self._place.checkpoint) for worker in second])
    assert place == [(path,) for path in saved]
    three = start_history_workers(HistorySettings(workers=3, cpus_per_worker=0), tmp_path / "third", saved)
    place = ray.get([worker.__ray_call__.remote(lambda self: self._place.checkpoint) for worker in three])
    assert place == [tuple(saved)] * 3
    for worker in (*first, *second, *three):
        ray.kill(worker)
