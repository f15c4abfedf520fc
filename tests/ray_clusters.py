"""Ray clusters of several nodes on this machine, in which a lost node is found soon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.cluster_utils import Cluster

from rhyme_openrlhf.ray_classes import WITHOUT_TORCH

# A node that does not answer for five seconds is lost; on a busy machine one takes a second or two.
SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 10}


@contextmanager
def two_nodes(node: Mapping[str, Any]) -> Iterator[Cluster]:
    """Have two nodes, each as in `node` (ray.cluster_utils), and this process as their driver."""
    cluster = Cluster(initialize_head=True, head_node_args={**node, "_system_config": SOON})
    cluster.add_node(**node)
    try:
        ray.init(
            address=cluster.address, log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": WITHOUT_TORCH}
        )
        cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
