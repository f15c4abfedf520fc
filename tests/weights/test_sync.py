"""A weight version reaches every node that has a rank of an engine: two pretended nodes of one real Ray cluster.

Policy and engines are stand-ins without torch; the nodes' stores and what brings a version to them are real.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

import ray

from ray.cluster_utils import Cluster  # isort: skip
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # isort: skip

from rhyme_openrlhf.engine_losses import EngineLosses, LostEngine
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.moves import MoveSettings
from rhyme_openrlhf.settings.weights import WeightSettings
from rhyme_openrlhf.telemetry.events import Event, Note, WeightsLoaded, WeightsPublished
from rhyme_openrlhf.weights.buckets import Parameter, Segment, lay_out, plan_buckets
from rhyme_openrlhf.weights.segment_file import SegmentFile
from rhyme_openrlhf.weights.stores import WeightSyncError
from rhyme_openrlhf.weights.sync import WeightSync
from tests.ray_clusters import two_nodes

# Eight ranks and an engine start one after the other on each node.
LIMIT_SECONDS = 240.0
pytestmark = pytest.mark.timeout(900)
NODE = {"num_cpus": 1, "num_gpus": 4, "object_store_memory": 10**8}
BUCKETS = plan_buckets([Parameter(f"p{i}", (64,), "uint8", 64) for i in range(4)], 128, 2)


def here() -> str:
    return str(ray.get_runtime_context().get_node_id())


def content(version: int, bucket: int) -> int:
    """What all bytes of a bucket are."""
    return 10 * version + bucket


class PolicyRank:
    """Writes its buckets as a rank of the policy does; the second one when all of `readers` have loaded the first."""

    def __init__(self, rank: int, heard: str, readers: int) -> None:
        self.rank, self.heard, self.readers = rank, Path(heard), readers

    def weight_node(self) -> str:
        return here()

    def weight_buckets(self) -> Any:
        return BUCKETS

    def write_buckets(self, mine: list[int]) -> None:
        self.mine = mine

    def publish_weights(self, segment: Segment) -> None:
        spans = lay_out(BUCKETS)[1]
        for number in self.mine:
            span = spans[number]
            if number:
                until = time.monotonic() + LIMIT_SECONDS
                while len(list(self.heard.glob(f"{segment.version}-*"))) < self.readers:
                    assert time.monotonic() < until, "no engine loads what is there before all of it is"
                    time.sleep(0.01)
            file = SegmentFile(segment.path)
            file.data[span.start : span.stop] = content(segment.version, number)
            file.mark(span.first, span.end, segment.version)


class EngineRank:
    """Loads as a tensor-parallel rank does: the copy of its own node, a bucket as soon as it is there."""

    def __init__(self, number: int, heard: str) -> None:
        self.number, self.heard = number, Path(heard)

    def node(self) -> str:
        return here()

    def load(self, segment: Segment) -> tuple[str, str, list[int]]:
        path = segment.path_on(here())
        file = SegmentFile(path)
        found = []
        for span in lay_out(BUCKETS)[1]:
            file.wait_for(segment.version, span.first, span.end)
            found += set(file.data[span.start : span.stop].tolist())
            (self.heard / f"{segment.version}-{self.number}").touch()
        file.check(segment.version)
        return here(), path, found


class Engine:
    """An engine over its ranks."""

    def __init__(self, ranks: list[Any]) -> None:
        self.ranks = ranks
        self.loaded: list[tuple[str, str, list[int]]] = []

    def alive(self) -> None:
        return

    def node_ids(self) -> list[str]:
        return list(dict.fromkeys(ray.get([rank.node.remote() for rank in self.ranks])))

    def load_weights(self, segment: Segment) -> float:
        self.loaded = ray.get([rank.load.remote(segment) for rank in self.ranks])
        return 1.0

    def found(self) -> list[tuple[str, str, list[int]]]:
        return self.loaded


@pytest.fixture(scope="module")
def cluster(starts_ray: None, starts_cluster: None) -> Iterator[Cluster]:
    # Ray's processes do not find the tests.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with two_nodes(NODE) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> list[str]:
    return sorted(found["NodeID"] for found in ray.nodes())


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heard")


@pytest.fixture(scope="module")
def engine_ranks(nodes: list[str], heard: Path) -> list[Any]:
    """Eight of them, four on each node, a GPU each."""
    kind = ray.remote(num_cpus=0, num_gpus=1)(EngineRank)
    return [
        kind.options(scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[i // 4], soft=False)).remote(
            i, str(heard)
        )
        for i in range(8)
    ]


def syncing(policy: list[Any], engines: list[Any], moves: bool = False) -> tuple[WeightSync, list[Event]]:
    """A weight sync, and the list that gets its events; `moves`: of a run that outlives engines."""
    recorded: list[Event] = []
    services: Any = SimpleNamespace(
        settings=RhymeSettings(weights=WeightSettings(timeout_s=LIMIT_SECONDS), move=MoveSettings(enable=moves)),
        record=lambda event, source: recorded.append(event),
        losses=EngineLosses(),
    )
    return WeightSync(SimpleNamespace(_actor_handlers=policy), engines, services), recorded


def synced(policy: list[Any], ranks: list[Any], versions: range) -> tuple[list[Any], list[Event], WeightSync]:
    """What one engine's ranks loaded at the last of these versions."""
    engine = ray.remote(num_cpus=0)(Engine).remote(ranks)
    sync, recorded = syncing(policy, [engine])
    for version in versions:
        sync.sync(version)
    return ray.get(engine.found.remote()), recorded, sync


def policy_on(node: str, ranks: int, heard: Path, readers: int) -> list[Any]:
    kind = ray.remote(num_cpus=0)(PolicyRank).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
    )
    return [kind.remote(rank, str(heard), readers) for rank in range(ranks)]


def test_an_engine_of_eight_gpus_on_two_nodes_loads_each_nodes_copy(
    nodes: list[str], engine_ranks: list[Any], heard: Path
) -> None:
    """And while it arrives: the policy writes its second bucket only when all ranks have loaded the first."""
    loaded, recorded, sync = synced(policy_on(nodes[0], 2, heard, 8), engine_ranks, range(1, 4))
    assert [node for node, _, _ in loaded] == [nodes[0]] * 4 + [nodes[1]] * 4
    paths = {node: path for node, path, _ in loaded}
    assert len(set(paths.values())) == 2, "each node has a copy of its own"
    assert all(path == paths[node] for node, path, _ in loaded)
    assert all(found == [content(3, 0), content(3, 1)] for _, _, found in loaded)
    kinds = [type(event) for event in recorded]
    assert kinds == [WeightsPublished, WeightsLoaded] * 3
    sync.close()
    assert not any(Path(path).exists() for path in paths.values())


def test_a_policy_whose_engines_are_elsewhere_sends_each_bucket_once(
    nodes: list[str], engine_ranks: list[Any], heard: Path
) -> None:
    loaded, _, sync = synced(policy_on(nodes[0], 2, heard, 4), engine_ranks[4:], range(11, 13))
    assert [node for node, _, _ in loaded] == [nodes[1]] * 4
    assert all(found == [content(12, 0), content(12, 1)] for _, _, found in loaded)
    sync.close()


def warnings(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note) and event.level == "warning"]


def loads(events: list[Event]) -> list[tuple[int, int]]:
    return [(event.version, event.engine) for event in events if isinstance(event, WeightsLoaded)]


def pinned(kind: type, node: str, *arguments: Any) -> Any:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0)(kind).options(scheduling_strategy=there).remote(*arguments)


def engine_on(node: str, number: int, heard: Path) -> Any:
    """An engine of one rank, both on the node."""
    return pinned(Engine, node, [pinned(EngineRank, node, number, str(heard))])


def test_a_store_whose_process_died_is_started_again(nodes: list[str], heard: Path) -> None:
    sync, recorded = syncing(policy_on(nodes[0], 2, heard, 1), [engine_on(nodes[0], 20, heard)])
    sync.sync(21)
    store = sync.prepare()._stores[nodes[0]]
    process = ray.get(store.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(process, signal.SIGKILL)
    sync.sync(22)
    assert loads(recorded) == [(21, 0), (22, 0)]
    assert len(warnings(recorded)) == 1 and "died and was started again" in warnings(recorded)[0]
    sync.close()


def test_a_lost_node_costs_its_engine_and_the_others_get_every_version(
    cluster: Cluster, nodes: list[str], heard: Path
) -> None:
    """As it is lost between two syncs: its weight store, and an engine that Ray still takes for out of reach."""
    node = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    engines = [engine_on(nodes[0], 30, heard), engine_on(node.node_id, 31, heard), engine_on(nodes[1], 32, heard)]
    sync, recorded = syncing(policy_on(nodes[0], 2, heard, 0), engines, moves=True)
    sync.sync(14)
    cluster.remove_node(node, allow_graceful=False)
    sync.sync(15)
    sync.sync(16)
    assert [isinstance(engine, LostEngine) for engine in engines] == [False, True, False]
    assert loads(recorded) == [(14, 0), (14, 1), (14, 2), (15, 0), (15, 2), (16, 0), (16, 2)]
    told = warnings(recorded)
    assert len(told) == 2 and "without engine 1" in told[0] and "its copies of the weights" in told[1]
    sync.close()


def test_without_moves_a_lost_node_ends_the_sync(cluster: Cluster, nodes: list[str], heard: Path) -> None:
    node = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    sync, _ = syncing(policy_on(nodes[0], 2, heard, 0), [engine_on(node.node_id, 40, heard)])
    sync.sync(17)
    cluster.remove_node(node, allow_graceful=False)
    # The second one as long as Ray has not found the store gone.
    with pytest.raises((WeightSyncError, ray.exceptions.RayActorError)):
        sync.sync(18)
