"""The bytes of a sync's messages grow with nodes and ranks, not with their product or with the model.

Ray, policy, engines and nodes' stores are stand-ins that pickle what they are sent; 64 nodes do not run here.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.weights import stores, sync
from rhyme_openrlhf.weights.buckets import Bucket, Parameter, Segment, plan_buckets
from rhyme_openrlhf.weights.sync import WeightSync

RANKS = 8
OBJECT_BYTES = 100


class Reference:
    """Stands for Ray's: what travels is its name."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return bytes, (bytes(OBJECT_BYTES),)


class Wire:
    """Counts the bytes of all calls."""

    def __init__(self) -> None:
        self.sent = 0

    def handle(self, actor: Any) -> Any:
        """A handle that pickles each call's arguments, once for each call, as Ray does."""
        return Handle(self, actor)

    def put(self, value: Any) -> Reference:
        self.sent += len(pickle.dumps(value))
        return Reference(value)

    @staticmethod
    def get(refs: Any, timeout: float | None = None) -> Any:
        return [ref.value for ref in refs] if isinstance(refs, list) else refs.value

    @staticmethod
    def wait(refs: list[Reference], **_: Any) -> tuple[list[Reference], list[Reference]]:
        return refs, []


class Handle:
    def __init__(self, wire: Wire, actor: Any) -> None:
        self.wire, self.actor = wire, actor

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Reference:
            self.wire.sent += len(pickle.dumps(arguments))
            plain = [one.value if isinstance(one, Reference) else one for one in arguments]
            return Reference(getattr(self.actor, method)(*plain))

        return SimpleNamespace(remote=remote)


class Rank:
    def __init__(self, node: str, buckets: tuple[Bucket, ...]) -> None:
        self.node, self.buckets = node, buckets

    def weight_node(self) -> str:
        return self.node

    def weight_buckets(self) -> tuple[Bucket, ...]:
        return self.buckets

    def write_buckets(self, mine: list[int]) -> None:
        self.mine = mine

    def publish_weights(self, segment: Segment) -> None:
        assert segment.path == self.node


class Engine:
    def __init__(self, node: str) -> None:
        self.node = node

    def node_ids(self) -> list[str]:
        return [self.node]

    def load_weights(self, segment: Segment) -> float:
        assert segment.path == self.node
        return 1.0


class Store:
    def __init__(self, node: str) -> None:
        self.node = node

    def begin(self, version: int) -> Segment:
        return Segment(version, self.node)

    def share(self, segment: Segment, number: int) -> bytes:
        return b""

    def fetch(self, segment: Segment, buckets: list[Any]) -> None:
        return None


def bytes_of_a_sync(monkeypatch: pytest.MonkeyPatch, nodes: int, parameters: int, apart: bool = False) -> int:
    """Bytes of one sync's messages, after the first. `apart`: the policy has one more node, for itself."""
    wire = Wire()
    buckets = plan_buckets([Parameter(f"layers.{n}.mlp.weight", (64,), "uint8", 64) for n in range(parameters)], 640, 8)
    names = [f"{node:056x}" for node in range(nodes)]

    def options(scheduling_strategy: Any) -> Any:
        return SimpleNamespace(remote=lambda plan: wire.handle(Store(scheduling_strategy.node_id)))

    monkeypatch.setattr(stores, "NodeWeights", SimpleNamespace(options=options))
    stand_in = SimpleNamespace(get=wire.get, put=wire.put, wait=wire.wait, nodes=list, exceptions=sync.ray.exceptions)
    for module in (sync, stores):
        monkeypatch.setattr(module, "ray", stand_in)
    on = ["a" * 56] if apart else names
    policy = SimpleNamespace(_actor_handlers=[wire.handle(Rank(node, buckets)) for node in on for _ in range(RANKS)])
    engines = [wire.handle(Engine(node)) for node in names for _ in range(RANKS)]
    services: Any = SimpleNamespace(settings=RhymeSettings(), record=lambda event, source: None)
    syncing = WeightSync(policy, engines, services)
    syncing.sync(1)
    before = wire.sent
    syncing.sync(2)
    return wire.sent - before


@pytest.mark.parametrize("apart", [False, True])
def test_eight_times_the_nodes_are_eight_times_the_bytes(monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
    few, many = (bytes_of_a_sync(monkeypatch, nodes, 100, apart) for nodes in (4, 32))
    assert many <= 8 * few


def test_a_model_of_many_tensors_sends_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bytes_of_a_sync(monkeypatch, 4, 4000) == bytes_of_a_sync(monkeypatch, 4, 40)
