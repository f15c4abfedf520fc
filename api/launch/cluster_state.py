"""What a Ray cluster is made of, out of its dashboard's answers. Pure.

Ray 2.55's answers: `/api/v0/nodes`, `/api/v0/actors` (state API) and `/api/cluster_status` (what its autoscaler last
saw, a few seconds old; missing in a cluster that has none).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What of a node's resources people ask for; the rest are labels that Ray gives each node.
_SHOWN = ("GPU", "CPU", "memory", "object_store_memory")
# `/api/cluster_status` writes all names without underscores.
_IN_STATUS = {"object_store_memory": "objectStoreMemory"}


@dataclass(frozen=True)
class Amount:
    """One resource: `total`, and what of it is taken (None: not known). Bytes for both memories."""

    name: str
    total: float
    used: float | None


@dataclass(frozen=True)
class Node:
    """One machine of the cluster that is alive."""

    uid: str
    address: str
    is_head: bool
    resources: tuple[Amount, ...]


@dataclass(frozen=True)
class ActorCount:
    """How many actors of a class are alive, and of how many jobs."""

    name: str
    count: int
    jobs: int


@dataclass(frozen=True)
class ClusterState:
    """The cluster now. `dead`: nodes that were there once."""

    nodes: tuple[Node, ...]
    dead: int
    resources: tuple[Amount, ...]
    actors: tuple[ActorCount, ...]

    def amount(self, name: str) -> Amount:
        """One resource of the whole cluster; 0 of it where there is none."""
        return next((one for one in self.resources if one.name == name), Amount(name, 0.0, None))


def cluster_state(
    nodes: Sequence[Mapping[str, Any]], actors: Sequence[Mapping[str, Any]], status: Mapping[str, Any] | None
) -> ClusterState:
    """`nodes`, `actors`: rows of the state API; `status`: `data.clusterStatus`. Raises KeyError for another form."""
    report = ((status or {}).get("loadMetricsReport")) or {}
    by_node: Mapping[str, Any] = report.get("usageByNode") or {}
    alive = [node for node in nodes if node["state"] == "ALIVE"]
    found = tuple(
        Node(
            node["node_id"],
            str(node.get("node_ip") or ""),
            bool(node.get("is_head_node")),
            # By id where Ray starts the nodes itself, else by address.
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
    """`usage`: resource -> [used, total]."""
    found = []
    for name in _SHOWN:
        if total := float(totals.get(name, 0.0)):
            pair = (usage or {}).get(_IN_STATUS.get(name, name))
            found.append(Amount(name, total, float(pair[0]) if pair else None))
    return tuple(found)
