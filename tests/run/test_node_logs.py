"""Logs of other nodes come into the run directory: pieces of what is new, of the run's own jobs alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rhyme_openrlhf.run import node_logs
from rhyme_openrlhf.run.node_logs import OtherNodes, PlainNodeLogs
from rhyme_openrlhf.run.process_logs import last_lines
from rhyme_openrlhf.run.supervisor import read_actors

LIMIT_S = 120.0


def test_what_is_new_is_read_and_no_other_jobs_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("a-01-1.out", "one\ntwo\n"), ("b-01-1.err", ""), ("c-02-1.out", "another run\n")):
        (tmp_path / f"worker-{name}").write_text(text)
    (tmp_path / "raylet.out").write_text("Ray's own\n")
    logs = PlainNodeLogs(str(tmp_path))
    assert logs.read(["01"], {}) == {"worker-a-01-1.out": (0, b"one\ntwo\n")}
    assert logs.read(["01"], {"worker-a-01-1.out": 4}) == {"worker-a-01-1.out": (4, b"two\n")}
    assert logs.read(["01"], {"worker-a-01-1.out": 8}) == {}
    # A log that was begun anew, and jobs of engines of several ranks.
    assert logs.read(["01", "02"], {"worker-a-01-1.out": 99}) == {
        "worker-a-01-1.out": (0, b"one\ntwo\n"),
        "worker-c-02-1.out": (0, b"another run\n"),
    }
    monkeypatch.setattr(node_logs, "AT_ONCE", 5)
    assert logs.read(["01", "02"], {}) == {"worker-a-01-1.out": (0, b"one\nt")}


@pytest.fixture(scope="module")
def cluster(starts_ray: None, starts_cluster: None) -> Iterator[Any]:
    """A Ray of two nodes; this process is a driver at the first."""
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2, resources={"other": 1})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def speaker() -> Any:
    """Made in a function, so that Ray sends it by value."""

    class Speaker:
        def say(self, text: str) -> None:
            print(text, flush=True)

        def die(self) -> None:
            import os

            os._exit(1)

    return ray.remote(num_cpus=0)(Speaker)


def test_last_words_of_a_process_on_another_node_are_quoted(cluster: Any, tmp_path: Path) -> None:
    there = speaker().options(resources={"other": 1}).remote()
    ray.get(there.say.remote("last words"))
    others, job = OtherNodes(tmp_path), ray.get_runtime_context().get_job_id()
    end = time.monotonic() + LIMIT_S
    while not any("last words" in path.read_text() for path in tmp_path.iterdir()):
        assert time.monotonic() < end
        others.copy([job])
    # What was copied is not copied again.
    ray.get(there.say.remote("and the very last"))
    others.copy_all([job])
    there.die.remote()
    key = there._actor_id.hex()
    while (row := next(row for row in read_actors({}) if row.key == key)).alive:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert last_lines([tmp_path], row.worker) == ["last words", "and the very last"]


def test_a_node_that_is_lost_costs_its_own_logs_alone(cluster: Any, tmp_path: Path) -> None:
    lost = cluster.add_node(num_cpus=1, resources={"lost": 1})
    kept = speaker().options(resources={"other": 1}).remote()
    gone = speaker().options(resources={"lost": 1}).remote()
    ray.get([kept.say.remote("kept"), gone.say.remote("gone")])
    others, job = OtherNodes(tmp_path), ray.get_runtime_context().get_job_id()
    others.copy([job])
    cluster.remove_node(lost, allow_graceful=False)
    ray.get(kept.say.remote("later"))
    end = time.monotonic() + LIMIT_S
    while not any("later" in path.read_text() for path in tmp_path.iterdir()):
        assert time.monotonic() < end
        others.copy([job])
