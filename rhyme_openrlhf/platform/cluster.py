"""The Ray cluster in RAY_ADDRESS, before a run starts on it: connect for a moment, and ask each node.

Invariant: every wait has a limit, and an error says what to do. A question takes neither a CPU slot nor a GPU, so it
waits for no other job.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rhyme_openrlhf.engine_errors import first_line, last_line
from rhyme_openrlhf.platform.error import PlatformError

CONNECT_SECONDS = 10.0
# A worker starts and imports torch from a shared disk.
ANSWER_SECONDS = 120
# What the problem of a node begins with that does not answer.
SILENT = "it does not answer"
# Ray hides all GPUs from a task that asks for none, unless this says otherwise (as engine/factory.py).
SEES_GPUS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class ClusterError(PlatformError):
    """The cluster cannot be used from here; one sentence."""


@dataclass(frozen=True)
class Node:
    """A living node: Ray's id of it, its address, GPUs, and bytes of its object store. `here`: this machine."""

    key: str
    address: str
    gpus: int
    store: int
    here: bool


@dataclass(frozen=True)
class Reply:
    """A node's answer, asked and answered at these times (unix seconds) by this machine's clock.

    `problem` says why there is no answer, "" where there is one.
    """

    node: Node
    answer: Any
    problem: str
    asked: float
    answered: float


@contextmanager
def connected() -> Iterator[None]:
    """Be a driver of the cluster for the block. Raises ClusterError."""
    import ray

    address = os.environ.get("RAY_ADDRESS", "")
    _check_address(address)
    try:
        context = ray.init(log_to_driver=False, logging_level="ERROR")
    # Ray has no error of its own for any of it, and raises a bare Exception, too.
    except Exception as error:
        raise ClusterError(
            f"RAY_ADDRESS {address} cannot be used from this machine ({first_line(error)}): it must be a node of the "
            f"cluster, so run `ray start --address={address} --num-gpus=0` here, or start the run on one that is"
        ) from error
    with context:
        yield


def _check_address(address: str) -> None:
    """Raise ClusterError where nothing listens: Ray's own attempt takes a minute, and ends the process."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()) or "://" in address:
        return  # "auto", or Ray's client
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray answers at RAY_ADDRESS {address} ({error.strerror or error}): start it with `ray start --head`, "
            "or give the address that `ray start` printed on the head"
        ) from error


def nodes() -> list[Node]:
    """Return the nodes that are alive, inside of `connected`."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            int(node["Resources"].get("GPU", 0)),
            int(node["Resources"].get("object_store_memory", 0)),
            node["NodeID"] == here,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def ask(asked: Sequence[Node], question: Callable[..., Any], *given: Any, timeout_s: float) -> list[Reply]:
    """Have each of these nodes answer `question(*given)`, inside of `connected`; a reply for each, in their order."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": SEES_GPUS})(question)
    began, end = time.time(), time.monotonic() + timeout_s
    tasks = {
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.key, soft=False)).remote(*given): node
        for node in asked
    }
    replies: dict[str, Reply] = {}
    left = list(tasks)
    while left:
        ready, left = ray.wait(left, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        for one in ready:
            replies[tasks[one].key] = _reply(tasks[one], one, began)
    silent = f"{SILENT} within {timeout_s:g} s"
    return [replies.get(node.key) or Reply(node, None, silent, began, time.time()) for node in asked]


def _reply(node: Node, task: Any, began: float) -> Reply:
    import ray

    try:
        answer, problem = ray.get(task), ""
    except ray.exceptions.RayError as error:
        answer, problem = None, f"is rhyme-openrlhf there? {last_line(error)}"
    return Reply(node, answer, problem, began, time.time())
