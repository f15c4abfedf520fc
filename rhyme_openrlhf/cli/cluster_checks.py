"""Judge the nodes of a cluster by their reports: what differs or is missing on which node, and what mends it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rhyme_openrlhf.cli.doctor_checks import BLOCKING, BROKEN, LOW, MISSING, OK, SMALL, WRONG, Check
from rhyme_openrlhf.cli.node_report import OWN_VARIABLES, NodeReport
from rhyme_openrlhf.platform.cluster import Reply
from rhyme_openrlhf.run.resources import SHM_BYTES, memory

# The largest difference of nodes' clocks that is no fault; a report's own way takes longer than what it can show.
CLOCK_SECONDS = 2.0
SOCKET_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True)
class Wanted:
    """Requirements of a run for its nodes; empty without the options of one.

    `shm`: bytes of the weight buffer. `read`, `shared`: paths, each with the flag that names it; those of `shared`
    are written, and must be the same directory everywhere. `control_url`: "" for none.
    """

    shm: float = 0.0
    read: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    control_url: str = ""


@dataclass(frozen=True)
class NodeCheck:
    """One line of the table: a check of one node."""

    node: str
    check: Check


def judge(replies: Sequence[Reply], wanted: Wanted, variables: Mapping[str, str]) -> list[NodeCheck]:
    """Return a line for each thing that is not as it must be, and one for each node where all is.

    `variables` is the environment in which the run will start. Other nodes are compared with this one.
    """
    here = next((reply for reply in replies if reply.node.here and not reply.problem), None)
    found = []
    for reply in replies:
        checks = list(_checks(reply, here, wanted, variables))
        checks = checks or [Check("all", _summary(reply), "", OK)]
        found += [NodeCheck(reply.node.address, check) for check in checks]
    return found


def is_ready(checks: Iterable[NodeCheck]) -> bool:
    """Return whether nothing stops a run."""
    return not any(one.check.state in BLOCKING for one in checks)


def _summary(reply: Reply) -> str:
    report: NodeReport = reply.answer
    kinds = f" ({', '.join(report.gpus)})" if report.gpus else ""
    return f"{reply.node.gpus} GPUs{kinds}, {_way(reply)}, {memory(report.shm_free)} of /dev/shm free"


def _way(reply: Reply) -> str:
    """Return the interface with the address by which Ray knows the node."""
    names = [name for name, addresses in reply.answer.interfaces.items() if reply.node.address in addresses]
    return names[0] if names else "no interface"


def _checks(reply: Reply, here: Reply | None, wanted: Wanted, variables: Mapping[str, str]) -> Iterator[Check]:
    if reply.problem:
        mend = "install the same environment there (docs: start/gpu.md), and start Ray from it"
        yield Check("rhyme-openrlhf", reply.problem, "an answer", MISSING, mend)
        return
    report: NodeReport = reply.answer
    yield from _versions(report, here)
    if report.broken:
        yield Check("GPUs", report.broken, "usable by torch", BROKEN, "see what was found")
    yield from _shared_memory(reply, wanted)
    if late := _late(reply):
        yield Check("clock", f"{late:+.0f} s", "as here", LOW, "timedatectl set-ntp true")
    yield from _network(reply, variables)
    for name in OWN_VARIABLES:
        if variables.get(name) and name not in report.variables:
            yield Check(name, "not set", "set", LOW, f"{name}=... ray start ... (no run sends secrets)")
    yield from _control_plane(reply, wanted)
    yield from _paths(reply, here, wanted)


def _versions(report: NodeReport, here: Reply | None) -> Iterator[Check]:
    for name, version in (here.answer.versions if here else {}).items():
        other = report.versions.get(name, "")
        if other != version:
            state = WRONG if other else MISSING
            mend = f"install Python {version}" if name == "python" else f"pip install {name}=={version}"
            yield Check(name, other or "-", version, state, mend)


def _shared_memory(reply: Reply, wanted: Wanted) -> Iterator[Check]:
    report: NodeReport = reply.answer
    least = wanted.shm + SHM_BYTES
    size = memory(least)
    mend = f"mount -o remount,size={-(-int(least) >> 30)}G /dev/shm (Docker: --shm-size, Kubernetes: sizeLimit)"
    if least > report.shm:
        yield Check("/dev/shm", memory(report.shm), size, SMALL, mend)
    elif wanted.shm + reply.node.store > report.shm:
        found = f"{memory(report.shm)}, of which Ray may take {memory(reply.node.store)}"
        left = max(int(report.shm - wanted.shm), SHM_BYTES)
        yield Check("/dev/shm", found, size, LOW, f"ray start --object-store-memory={left} ...")
    elif least > report.shm_free:
        yield Check("/dev/shm", f"{memory(report.shm_free)} free", size, LOW, "rm what dead programs left in /dev/shm")


def _late(reply: Reply) -> float:
    """Return by how many seconds a node's clock is ahead at least, 0 where it may be right."""
    clock: float = reply.answer.clock
    if clock > reply.answered + CLOCK_SECONDS:
        return clock - reply.answered
    return clock - reply.asked if clock < reply.asked - CLOCK_SECONDS else 0.0


def _network(reply: Reply, variables: Mapping[str, str]) -> Iterator[Check]:
    report: NodeReport = reply.answer
    if _way(reply) == "no interface":
        found = ", ".join(sorted(report.interfaces))
        mend = "ray start --node-ip-address=<an address of the node> ..."
        yield Check("network", f"none of {found} has {reply.node.address}", "an address", BROKEN, mend)
    for name in SOCKET_VARIABLES:
        chosen = variables.get(name, "")
        if chosen and not _has(chosen, report.interfaces, prefixes=name.startswith("NCCL")):
            found = ", ".join(sorted(report.interfaces))
            yield Check(name, found, chosen, MISSING, f"export {name}=<names that every node has one of>")


def _has(chosen: str, interfaces: Iterable[str], prefixes: bool) -> bool:
    """Return whether an interface is among the chosen ones.

    NCCL takes beginnings of names, exact ones behind "=", and those to leave out behind "^"; gloo exact names.
    """
    if prefixes and chosen.startswith("^"):
        return True
    exact = not prefixes or chosen.startswith("=")
    names = [one for one in chosen.removeprefix("=").split(",") if one]
    return any(there == one if exact else there.startswith(one) for there in interfaces for one in names)


def _control_plane(reply: Reply, wanted: Wanted) -> Iterator[Check]:
    if wanted.control_url and reply.answer.unreachable:
        # A run reports from the node where it starts.
        state = MISSING if reply.node.here else LOW
        mend = f"curl {wanted.control_url}/healthz"
        yield Check("control plane", reply.answer.unreachable, wanted.control_url, state, mend)


def _paths(reply: Reply, here: Reply | None, wanted: Wanted) -> Iterator[Check]:
    for path, flag in wanted.read.items():
        if not reply.answer.paths[path].exists:
            yield Check(flag, "-", path, MISSING, "copy it there, or name a path on a file system that all nodes share")
    for path, flag in wanted.shared.items():
        facts = reply.answer.paths[path]
        if not facts.writable:
            yield Check(flag, "not writable", path, BROKEN, f"chown {path} on that node, or mount it writable")
        elif here and facts.identity != here.answer.paths[path].identity:
            mend = "name a path on a file system that all nodes share"
            yield Check(flag, "another directory than here", path, BROKEN, mend)
