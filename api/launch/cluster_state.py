"""The state of a Ray cluster, from the responses of its dashboard. Pure.

The responses are those of Ray 2.55: `/api/v0/nodes` and `/api/v0/actors` (state API), and `/api/cluster_status` (the
autoscaler's last report, a few seconds old; missing in a cluster without autoscaler).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Resources that users care about; the others are labels that Ray gives each node.
_SHOWN = ("GPU", "CPU", "memory", "object_store_memory")
# `/api/cluster_status` writes all names without underscores.
_IN_STATUS = {"object_store_memory": "objectStoreMemory"}


@dataclass(frozen=True)
class Amount:
    """One resource: `total`, and the `used` part (None if unknown). Both memories are in bytes."""

    name: str
    total: float
    used: float | None


@dataclass(frozen=True)
class Node:
    """A machine of the cluster that is alive."""

    uid: str
    address: str
    is_head: bool
    resources: tuple[Amount, ...]


@dataclass(frozen=True)
class ActorCount:
    """Number of actors of a class that are alive, and of the jobs that own them."""

    name: str
    count: int
    jobs: int


@dataclass(frozen=True)
class ClusterState:
    """The current state of the cluster. `dead`: nodes that have left."""

    nodes: tuple[Node, ...]
    dead: int
    resources: tuple[Amount, ...]
    actors: tuple[ActorCount, ...]

    def amount(self, name: str) -> Amount:
        """Return a resource of the whole cluster, with 0 as total if there is none."""
        return next((one for one in self.resources if one.name == name), Amount(name, 0.0, None))


def cluster_state(
    nodes: Sequence[Mapping[str, Any]], actors: Sequence[Mapping[str, Any]], status: Mapping[str, Any] | None
) -> ClusterState:
    """Build the state from rows of the state API and from `data.clusterStatus`. Raises KeyError for another form."""
    report = ((status or {}).get("loadMetricsReport")) or {}
    by_node: Mapping[str, Any] = report.get("usageByNode") or {}
    alive = [node for node in nodes if node["state"] == "ALIVE"]
    found = tuple(
        Node(
            node["node_id"],
            str(node.get("node_ip") or ""),
            bool(node.get("is_head_node")),
            # Ray identifies nodes by id if it starts them itself, else by address.
            _amounts(node["resources_total"], by_node.get(node["node_id"]) or by_node.get(str(node.get("node_ip")))),
        )
        for node in sorted(alive, key=lambda node: (not node.get("is_head_node"), str(node.get("node_ip"))))
    )
    totals: Counter[str] = Counter()
    for node in alive:
        totals.update({name: float(node["resources_total"].get(name, 0.0)) for name in _SHOWN})
    kinds: dict[str, list[str]] = {}
    for actor in actors:
        if actor["state"] == "ALIVE":
            kinds.setdefault(str(actor["class_name"]), []).append(str(actor.get("job_id")))
    counted = (ActorCount(name, len(jobs), len(set(jobs))) for name, jobs in kinds.items())
    return ClusterState(
        nodes=found,
        dead=len(nodes) - len(alive),
        resources=_amounts(totals, report.get("usage")),
        actors=tuple(sorted(counted, key=lambda one: (-one.count, one.name))),
    )


def _amounts(totals: Mapping[str, Any], usage: Mapping[str, Any] | None) -> tuple[Amount, ...]:
    """Return the shown resources. `usage`: resource -> [used, total]."""
    found = []
    for name in _SHOWN:
        if total := float(totals.get(name, 0.0)):
            pair = (usage or {}).get(_IN_STATUS.get(name, name))
            found.append(Amount(name, total, float(pair[0]) if pair else None))
    return tuple(found)
