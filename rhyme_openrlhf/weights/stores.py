"""The nodes' stores of weights as the trainer sees them: one on each node, started again, or given up with its node.

Invariants:
- A store whose process died on a node that is there is replaced by a new one.
- A node that is gone is left out, with the engines that had ranks there, in a run that outlives engines; otherwise the
  call raises. A node of the policy is never left out.
- What was lost is said once.
- Every wait has a limit, and the error names what was waited for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rhyme_openrlhf.engine_errors import last_line
from rhyme_openrlhf.engine_losses import ASK_AGAIN_SECONDS, UNREACHED_SECONDS, LostEngine
from rhyme_openrlhf.telemetry.events import Note
from rhyme_openrlhf.telemetry.services import RunServices, is_lost
from rhyme_openrlhf.weights.buckets import Segment
from rhyme_openrlhf.weights.node import NodeWeights

SOURCE = "trainer"


class WeightSyncError(RuntimeError):
    """A weight version did not reach an engine in time."""


def wait_for(refs: Sequence[Any], timeout_s: float, what: str) -> list[Any]:
    """Return the results of `refs`; raises WeightSyncError, naming `what` was waited for, when they take too long."""
    try:
        return ray.get(refs, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise too_late(timeout_s, what) from None


def too_late(timeout_s: float, what: str) -> WeightSyncError:
    """Return the error that names what was waited for."""
    return WeightSyncError(f"waited {timeout_s:g} s for {what}; raise --weights.timeout_s if that is too short")


def settled(refs: Iterable[Any], timeout_s: float, what: str) -> None:
    """Wait until all of `refs` have a result or an error; raises WeightSyncError as `wait_for`."""
    waiting = list(refs)
    if waiting and ray.wait(waiting, num_returns=len(waiting), timeout=timeout_s, fetch_local=False)[1]:
        raise too_late(timeout_s, what)


class EngineNodes:
    """The engines that are left, with the nodes of their ranks.

    `engines` is the run's own list (engine_losses.py); `nodes`: of each engine those of its ranks, its actor's first.
    """

    def __init__(self, engines: list[Any], nodes: Sequence[Sequence[str] | None], services: RunServices) -> None:
        self._engines = engines
        self._nodes = [list(of_engine or ()) for of_engine in nodes]
        self._services = services

    def of(self, engine: int) -> list[str]:
        """Return the nodes of an engine, none of one that is lost."""
        return [] if isinstance(self._engines[engine], LostEngine) else self._nodes[engine]

    @property
    def all(self) -> list[str]:
        """Return every node that has a rank of an engine."""
        return list(dict.fromkeys(node for number in range(len(self._engines)) for node in self.of(number)))

    def lose(self, node: str) -> None:
        """Leave out the engines that had ranks on a node that is gone. Raises WeightSyncError where one must not be."""
        for number in range(len(self._engines)):
            if node in self.of(number) and not is_lost(self._engines, number, self._services):
                raise WeightSyncError(f"{node_name(node)} is gone, and ranks of engine {number} with it")


class NodeStores:
    """The stores of the nodes that have ranks of engines, or policy ranks that write buckets (`writing`).

    `plan` refers to the run's buckets.
    """

    def __init__(
        self, plan: Any, engines: EngineNodes, writing: Iterable[str], timeout_s: float, services: RunServices
    ) -> None:
        self._plan = plan
        self._engines = engines
        self._writing = frozenset(writing)
        self._timeout_s = timeout_s
        self._services = services
        self._stores = {node: self._start(node) for node in dict.fromkeys([*engines.all, *self._writing])}

    def _start(self, node: str) -> Any:
        pinned = NodeAffinitySchedulingStrategy(node, soft=False)
        return NodeWeights.options(scheduling_strategy=pinned).remote(self._plan)

    def begin(self, version: int) -> dict[str, Segment]:
        """Make room for a version on every node that is there; return each node's segment."""
        asked = {node: store.begin.remote(version) for node, store in self._stores.items()}
        settled(asked.values(), self._timeout_s, f"{len(asked)} nodes to make room for weight version {version}")
        made = {node: self._begun(node, ref, version) for node, ref in asked.items()}
        return {node: segment for node, segment in made.items() if segment is not None}

    def _begun(self, node: str, ref: Any, version: int) -> Segment | None:
        until = time.monotonic() + UNREACHED_SECONDS
        while True:
            try:
                segment: Segment = wait_for([ref], self._timeout_s, f"{node_name(node)} to make room")[0]
                return segment
            except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError) as error:
                if not is_alive(node):
                    self._lose(node)
                    return None
                if time.monotonic() > until:
                    raise
                if not isinstance(error, ray.exceptions.ActorUnavailableError):
                    self._say(f"the weight store of {node_name(node)} died and was started again")
                    self._stores[node] = self._start(node)
            time.sleep(ASK_AGAIN_SECONDS)
            ref = self._stores[node].begin.remote(version)

    def fetch(self, segments: Mapping[str, Segment], sources: Sequence[str]) -> dict[str, Any]:
        """Have nodes whose ranks write nothing fetch each bucket from the node in `sources`; return what to wait for.

        One object of Ray's store serves all of them.
        """
        fetching = [node for node in segments if node not in self._writing]
        if not fetching:
            return {}
        buckets = [self._stores[node].share.remote(segments[node], number) for number, node in enumerate(sources)]
        every = ray.put(buckets)
        return {node: self._stores[node].fetch.remote(segments[node], every) for node in fetching}

    def fetched(self, coming: Mapping[str, Any], version: int) -> None:
        """Wait until a version is on every node that fetches it."""
        settled(coming.values(), self._timeout_s, f"weight version {version} to reach {len(self._stores)} nodes")
        for node, ref in coming.items():
            try:
                ray.get(ref)
            except ray.exceptions.RayTaskError as error:
                # Of the node that it is fetched from.
                raise WeightSyncError(
                    f"{node_name(node)} could not fetch weight version {version}: {last_line(error)}"
                ) from error
            except ray.exceptions.RayActorError:
                until = time.monotonic() + UNREACHED_SECONDS
                while is_alive(node):
                    if time.monotonic() > until:
                        raise
                    time.sleep(ASK_AGAIN_SECONDS)
                self._lose(node)

    def _lose(self, node: str) -> None:
        if node in self._writing:
            raise WeightSyncError(f"{node_name(node)} is gone, and ranks of the policy with it")
        self._engines.lose(node)
        del self._stores[node]
        self._say(f"the run goes on without {node_name(node)}, and its copies of the weights")

    def _say(self, text: str) -> None:
        self._services.record(Note("warning", text), SOURCE)

    def close(self) -> None:
        """Remove the shared-memory copies of the nodes that are there."""
        closing = [store.close.remote() for store in self._stores.values()]
        settled(closing, self._timeout_s, "the nodes to drop their weight copies")


def is_alive(node: str) -> bool:
    """Return whether Ray knows a node as alive, by Ray's id of it."""
    return any(found["NodeID"] == node and found["Alive"] for found in ray.nodes())


def node_name(node: str) -> str:
    """Return a node's address for people, by Ray's id of it."""
    addresses = {found["NodeID"]: found["NodeManagerAddress"] for found in ray.nodes()}
    return f"node {addresses.get(node, node)}"
