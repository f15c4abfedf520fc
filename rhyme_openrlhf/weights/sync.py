"""The trainer's side of the weight buffer: publish a version, bring it to each node once, have every engine load it.

The three overlap. The policy's ranks write into their node's segment. Other nodes fetch a bucket as soon as it is
there, and every engine loads a parameter as soon as it is on its node. A node that has a rank of an engine has a copy.

Invariants:
- The version that an engine reports is the one it was given.
- All engines that are there load a version, or the call raises. One that is lost meanwhile is left out, in a run that
  outlives engines.
- Every wait has a limit, and the error names what was waited for.
- The messages of a version grow with nodes and ranks, not with their product, and not with the model.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import ray

from rhyme_openrlhf.engine_errors import EngineCoreError
from rhyme_openrlhf.telemetry.events import WeightsLoaded, WeightsPublished
from rhyme_openrlhf.telemetry.services import RunServices, is_lost
from rhyme_openrlhf.weights.buckets import Bucket, Segment, writers, written_by
from rhyme_openrlhf.weights.stores import SOURCE, EngineNodes, NodeStores, settled, wait_for


@dataclass(frozen=True)
class _Coming:
    """A version on its way: each node's segment by the node's id, and what is waited for until all of it is there."""

    version: int
    started: float
    segments: dict[str, Segment]
    published: list[Any]
    fetched: dict[str, Any]


class WeightSync:
    """The weight buffer as the trainer sees it. One per run."""

    def __init__(self, policy: Any, engines: list[Any], services: RunServices) -> None:
        self._policy = policy
        self._engines = engines
        self._services = services
        self._timeout_s = services.settings.weights.timeout_s
        self._nodes: EngineNodes | None = None
        self._buckets: tuple[Bucket, ...] = ()
        # The node of each rank of the policy, and the one that each bucket is fetched from.
        self._rank_nodes: list[str] = []
        self._sources: list[str] = []
        self._stores: NodeStores | None = None

    def sync(self, version: int) -> None:
        """Publish the policy's weights as `version` and load them into every engine."""
        coming = self._begin(version)
        loading = {
            number: self._engines[number].load_weights.remote(segment)
            for number, segment in enumerate(self._segments(coming))
            if segment is not None
        }
        self._arrive(coming)
        what = f"{len(loading)} engines to load weight version {version}"
        settled(loading.values(), self._timeout_s, what)
        for engine, ref in loading.items():
            try:
                took: float = ray.get(ref)
            except (ray.exceptions.RayActorError, EngineCoreError):
                # What an engine that is gone has loaded matters to nobody.
                if not is_lost(self._engines, engine, self._services):
                    raise
                continue
            self._services.record(WeightsLoaded(version, engine, took), SOURCE)

    def bring(self, version: int) -> list[Segment | None]:
        """Publish the policy's weights as `version` and bring them to every node; return each engine's segment."""
        coming = self._begin(version)
        self._arrive(coming)
        return self._segments(coming)

    @property
    def _ranks(self) -> list[Any]:
        ranks: list[Any] = self._policy._actor_handlers
        return ranks

    @property
    def _known_nodes(self) -> EngineNodes:
        assert self._nodes is not None
        return self._nodes

    def prepare(self) -> NodeStores:
        """Return what brings weights to the nodes, started if that is not done; engines must be there.

        What holds for the whole run is told here, so that a version's messages are small: paths and numbers.
        """
        if self._stores is not None:
            return self._stores
        asked = [engine.node_ids.remote() for engine in self._engines]
        self._nodes = EngineNodes(self._engines, self._wait(asked, "the nodes of the engines' ranks"), self._services)
        asked = [rank.weight_node.remote() for rank in self._ranks]
        self._rank_nodes = self._wait(asked, "the nodes of the policy's ranks")
        plan = self._ranks[0].weight_buckets.remote()
        (self._buckets,) = self._wait([plan], "the policy's plan of its weights")
        by_node = writers(self._buckets, self._rank_nodes, self._nodes.all)
        shares = written_by(by_node, len(self._ranks))
        told = [rank.write_buckets.remote(mine) for rank, mine in zip(self._ranks, shares, strict=True)]
        self._wait(told, "the policy's ranks to take their shares of the weights")
        # Buckets that several nodes have come from all of them in turn.
        self._sources = [sorted(ranks)[number % len(ranks)] for number, ranks in enumerate(by_node)]
        writing = dict.fromkeys(node for ranks in by_node for node in ranks)
        self._stores = NodeStores(plan, self._nodes, writing, self._timeout_s, self._services)
        return self._stores

    def _begin(self, version: int) -> _Coming:
        """Make room for a version on every node, and have it written there; waits for none of it to arrive."""
        stores = self.prepare()
        started = time.monotonic()
        segments = stores.begin(version)
        published = [
            rank.publish_weights.remote(segments.get(node))
            for rank, node in zip(self._ranks, self._rank_nodes, strict=True)
        ]
        return _Coming(version, started, segments, published, stores.fetch(segments, self._sources))

    def _arrive(self, coming: _Coming) -> None:
        """Wait until a version is on every node."""
        self._wait(coming.published, "the policy to publish its weights")
        took, nbytes = time.monotonic() - coming.started, sum(bucket.nbytes for bucket in self._buckets)
        self._services.record(WeightsPublished(coming.version, took, nbytes, len(self._buckets)), SOURCE)
        self.prepare().fetched(coming.fetched, coming.version)

    def _segments(self, coming: _Coming) -> list[Segment | None]:
        """Return what each engine loads, None of one that is lost."""
        return [self._segment_of(number, coming.segments) for number in range(len(self._engines))]

    def _segment_of(self, engine: int, segments: dict[str, Segment]) -> Segment | None:
        nodes = self._known_nodes.of(engine)
        if not nodes:
            return None
        paths = tuple((node, segments[node].path) for node in nodes[1:])
        return Segment(segments[nodes[0]].version, segments[nodes[0]].path, paths)

    def _wait(self, refs: list[Any], what: str) -> list[Any]:
        return wait_for(refs, self._timeout_s, what)

    def close(self) -> None:
        """Remove the shared-memory copies."""
        if self._stores is not None:
            self._stores.close()
