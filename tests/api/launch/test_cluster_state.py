"""Ray's answers, in the form that Ray 2.55's dashboard gives them, as the cluster's state."""

from typing import Any

import pytest

pytest.importorskip("fastapi")

from rhyme_openrlhf.api.launch.cluster_state import cluster_state

GIB = 1024.0**3


def node(uid: str, address: str, **more: Any) -> dict[str, Any]:
    total = {"GPU": 4.0, "CPU": 16.0, "memory": 64 * GIB, "object_store_memory": 8 * GIB, f"node:{address}": 1.0}
    return {
        "node_id": uid,
        "node_ip": address,
        "state": "ALIVE",
        "is_head_node": False,
        "resources_total": total,
        **more,
    }


def test_nodes_and_their_sum() -> None:
    nodes = [node("b", "10.0.0.2"), node("a", "10.0.0.9", is_head_node=True), node("c", "10.0.0.3", state="DEAD")]
    state = cluster_state(nodes, [], None)
    assert [(one.uid, one.is_head) for one in state.nodes] == [("a", True), ("b", False)] and state.dead == 1
    assert (state.amount("GPU").total, state.amount("GPU").used) == (8.0, None)
    assert state.amount("memory").total == 128 * GIB and state.amount("TPU").total == 0
    assert {one.name for one in state.resources} == {"GPU", "CPU", "memory", "object_store_memory"}


def test_what_is_taken_comes_from_the_autoscaler() -> None:
    usage = {"GPU": [3.0, 8.0], "objectStoreMemory": [GIB, 16 * GIB]}
    status = {"loadMetricsReport": {"usage": usage, "usageByNode": {"a": {"CPU": [2.5, 16.0]}, "10.0.0.3": {}}}}
    state = cluster_state([node("a", "10.0.0.1"), node("b", "10.0.0.2")], [], status)
    assert state.amount("GPU").used == 3.0 and state.amount("object_store_memory").used == GIB
    used = {one.uid: {amount.name: amount.used for amount in one.resources} for one in state.nodes}
    assert used["a"]["CPU"] == 2.5 and used["b"]["CPU"] is None


def test_actors_are_counted_by_class() -> None:
    rows = [("Engine", "ALIVE", "1"), ("Engine", "ALIVE", "2"), ("Engine", "DEAD", "2"), ("History", "ALIVE", "1")]
    actors = [{"class_name": name, "state": state, "job_id": job} for name, state, job in rows]
    found = [(one.name, one.count, one.jobs) for one in cluster_state([], actors, {}).actors]
    assert found == [("Engine", 2, 2), ("History", 1, 1)]


def test_another_form_is_an_error() -> None:
    with pytest.raises(KeyError):
        cluster_state([{"node_id": "a"}], [], None)
