"""From the policy to every engine: publish a weight version, bring it to each node once, load it.

Invariants: the version that an engine reports is the one it was given; a version is loaded by all engines that are
there or the call raises; every wait has a limit and the error names what was waited for.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rhyme_openrlhf.rollout.node_weights import NodeWeights
from rhyme_openrlhf.telemetry.events import WeightsLoaded, WeightsPublished
from rhyme_openrlhf.training.recorder import RunServices
from rhyme_openrlhf.training.weight_buckets import WeightVersion

SOURCE = "trainer"


class WeightSyncError(RuntimeError):
    """A weight version did not reach an engine in time."""


def wait_for(refs: list[Any], timeout_s: float, what: str) -> list[Any]:
    """The results of `refs`; raises WeightSyncError, naming `what` was waited for, when they take too long."""
    try:
        return ray.get(refs, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise WeightSyncError(
            f"waited {timeout_s:g} s for {what}; raise --weights.timeout_s if that is too short"
        ) from None


class WeightSync:
    """The weight buffer as the trainer sees it. One per run."""

    def __init__(self, policy: Any, engines: list[Any], services: RunServices) -> None:
        self._policy = policy
        self._engines = engines
        self._services = services
        self._timeout_s = services.settings.weights.timeout_s
        self._nodes: list[str] = []
        self._stores: dict[str, Any] = {}

    def sync(self, version: int) -> None:
        """Publish the policy's weights as `version` and load them into every engine."""
        segments = self.bring(version)
        seconds = self._wait(
            [
                # A lost engine (rollout/lost_engines.py) may have had no node to tell.
                engine.load_weights.remote(segments.get(node))
                for engine, node in zip(self._engines, self._nodes, strict=True)
            ],
            f"{len(self._engines)} engines to load weight version {version}",
        )
        for engine, took in enumerate(seconds):
            if took is None:
                continue
            self._services.record(WeightsLoaded(version, engine, took), SOURCE)

    def bring(self, version: int) -> dict[str, Any]:
        """Publish the policy's weights as `version` and bring them to every node; each node's copy, by node id."""
        self.prepare()
        started = time.time()
        shares = self._wait(self._policy.async_run_method("publish_weights"), "the policy to publish its weights")
        weights = WeightVersion(version, tuple(bucket for share in shares for bucket in share))
        published = WeightsPublished(version, time.time() - started, weights.nbytes, len(weights.buckets))
        self._services.record(published, SOURCE)
        fetched = self._wait(
            [store.fetch.remote(weights) for store in self._stores.values()],
            f"weight version {version} to reach {len(self._stores)} nodes",
        )
        return dict(zip(self._stores, fetched, strict=True))

    def prepare(self) -> None:
        """Start what brings weights to the nodes, if that is not done; engines must be there."""
        if self._nodes:
            return
        self._nodes = self._wait([engine.node_id.remote() for engine in self._engines], "the engines' node ids")
        for node in dict.fromkeys(node for node in self._nodes if node is not None):
            pinned = NodeAffinitySchedulingStrategy(node, soft=False)
            self._stores[node] = NodeWeights.options(scheduling_strategy=pinned).remote()

    def _wait(self, refs: list[Any], what: str) -> list[Any]:
        return wait_for(refs, self._timeout_s, what)

    def close(self) -> None:
        """Remove the shared-memory copies."""
        self._wait([store.close.remote() for store in self._stores.values()], "the nodes to drop their weight copies")
