"""The trainer's side of the weight buffer: publish a version, bring it to each node once, have every engine load it.

The three overlap. The policy's ranks write into their node's segment. Other nodes fetch a bucket as soon as it is
there, and every engine loads a parameter as soon as it is on its node. A node that has a rank of an engine has a copy.

Invariants:
- The version that an engine reports is the one it was given.
- All engines that are there load a version, or the call raises.
- Every wait has a limit, and the error names what was waited for.
- The messages of a version grow with nodes and ranks, not with their product, and not with the model.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rhyme_openrlhf.telemetry.events import WeightsLoaded, WeightsPublished
from rhyme_openrlhf.telemetry.services import RunServices
from rhyme_openrlhf.weights.buckets import Bucket, Segment, writers, written_by
from rhyme_openrlhf.weights.node import NodeWeights

SOURCE = "trainer"


class WeightSyncError(RuntimeError):
    """A weight version did not reach an engine in time."""


def wait_for(refs: list[Any], timeout_s: float, what: str) -> list[Any]:
    """Return the results of `refs`; raises WeightSyncError, naming `what` was waited for, when they take too long."""
    try:
        return ray.get(refs, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise WeightSyncError(
            f"waited {timeout_s:g} s for {what}; raise --weights.timeout_s if that is too short"
        ) from None


@dataclass(frozen=True)
class _Coming:
    """A version on its way: each node's segment by the node's id, and what is waited for until all of it is there."""

    version: int
    started: float
    segments: dict[str, Segment]
    published: list[Any]
    fetched: list[Any]


class WeightSync:
    """The weight buffer as the trainer sees it. One per run."""

    def __init__(self, policy: Any, engines: list[Any], services: RunServices) -> None:
        self._policy = policy
        self._engines = engines
        self._services = services
        self._timeout_s = services.settings.weights.timeout_s
        # Of each engine the nodes of its ranks, its actor's first; None of one that is lost.
        self._nodes: list[list[str] | None] = []
        self._buckets: tuple[Bucket, ...] = ()
        # The node of each rank of the policy, and which rank writes each bucket on which node.
        self._rank_nodes: list[str] = []
        self._writers: tuple[dict[str, int], ...] = ()
        self._stores: dict[str, Any] = {}

    def sync(self, version: int) -> None:
        """Publish the policy's weights as `version` and load them into every engine."""
        coming = self._begin(version)
        loading = [
            # A lost engine (engine_errors.py) may have had no node to tell.
            engine.load_weights.remote(self._segment_of(nodes, coming.segments))
            for engine, nodes in zip(self._engines, self._nodes, strict=True)
        ]
        self._arrive(coming)
        seconds = self._wait(loading, f"{len(self._engines)} engines to load weight version {version}")
        for engine, took in enumerate(seconds):
            if took is None:
                continue
            self._services.record(WeightsLoaded(version, engine, took), SOURCE)

    def bring(self, version: int) -> list[Segment | None]:
        """Publish the policy's weights as `version` and bring them to every node; return each engine's segment."""
        coming = self._begin(version)
        self._arrive(coming)
        return [self._segment_of(nodes, coming.segments) for nodes in self._nodes]

    @property
    def _ranks(self) -> list[Any]:
        ranks: list[Any] = self._policy._actor_handlers
        return ranks

    def prepare(self) -> None:
        """Start what brings weights to the nodes, if that is not done; engines must be there.

        What holds for the whole run is told here, so that a version's messages are small: paths and numbers.
        """
        if self._nodes:
            return
        nodes = self._wait([engine.node_ids.remote() for engine in self._engines], "the nodes of the engines' ranks")
        targets = dict.fromkeys(node for of_engine in nodes for node in of_engine or ())
        asked = [rank.weight_node.remote() for rank in self._ranks]
        self._rank_nodes = self._wait(asked, "the nodes of the policy's ranks")
        # One object of Ray's store serves all nodes.
        plan = self._ranks[0].weight_buckets.remote()
        (self._buckets,) = self._wait([plan], "the policy's plan of its weights")
        self._writers = writers(self._buckets, self._rank_nodes, targets)
        shares = written_by(self._writers, len(self._ranks))
        told = [rank.write_buckets.remote(mine) for rank, mine in zip(self._ranks, shares, strict=True)]
        self._wait(told, "the policy's ranks to take their shares of the weights")
        for node in targets | dict.fromkeys(node for ranks in self._writers for node in ranks):
            pinned = NodeAffinitySchedulingStrategy(node, soft=False)
            self._stores[node] = NodeWeights.options(scheduling_strategy=pinned).remote(plan)
        self._nodes = nodes

    def _begin(self, version: int) -> _Coming:
        """Make room for a version on every node, and have it written there; waits for none of it to arrive."""
        self.prepare()
        started = time.monotonic()
        made = self._wait(
            [store.begin.remote(version) for store in self._stores.values()],
            f"{len(self._stores)} nodes to make room for weight version {version}",
        )
        segments = dict(zip(self._stores, made, strict=True))
        published = [
            rank.publish_weights.remote(segments.get(node))
            for rank, node in zip(self._ranks, self._rank_nodes, strict=True)
        ]
        return _Coming(version, started, segments, published, self._fetch(segments))

    def _fetch(self, segments: dict[str, Segment]) -> list[Any]:
        """Have nodes without writers fetch the buckets; one object of Ray's store serves all of them."""
        written = {node for ranks in self._writers for node in ranks}
        fetching = {node: store for node, store in self._stores.items() if node not in written}
        if not fetching:
            return []
        shared = []
        for number, ranks in enumerate(self._writers):
            source = sorted(ranks)[number % len(ranks)]
            shared.append(self._stores[source].share.remote(segments[source], number))
        every = ray.put(shared)
        return [store.fetch.remote(segments[node], every) for node, store in fetching.items()]

    def _arrive(self, coming: _Coming) -> None:
        """Wait until a version is on every node."""
        self._wait(coming.published, "the policy to publish its weights")
        took, nbytes = time.monotonic() - coming.started, sum(bucket.nbytes for bucket in self._buckets)
        self._services.record(WeightsPublished(coming.version, took, nbytes, len(self._buckets)), SOURCE)
        self._wait(coming.fetched, f"weight version {coming.version} to reach {len(self._stores)} nodes")

    def _segment_of(self, nodes: list[str] | None, segments: dict[str, Segment]) -> Segment | None:
        """Return what an engine on these nodes loads."""
        if nodes is None:
            return None
        return dataclasses.replace(segments[nodes[0]], paths=tuple((node, segments[node].path) for node in nodes[1:]))

    def _wait(self, refs: list[Any], what: str) -> list[Any]:
        return wait_for(refs, self._timeout_s, what)

    def close(self) -> None:
        """Remove the shared-memory copies."""
        self._wait([store.close.remote() for store in self._stores.values()], "the nodes to drop their weight copies")
