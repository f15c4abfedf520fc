"""Check: is there room for what a run with these flags keeps? Fails where weight versions do not fit in /dev/shm.

Two versions lie there at a time (weights/node.py). One more goes through Ray's object store where a node has engines
and no ranks of the policy. Mapped draft indexes stay until their prompt is done. Only this machine is checked, not
other nodes of a cluster.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from rhyme_openrlhf.shared_files import SHARED_MEMORY
from rhyme_openrlhf.verify.bench import Bench
from rhyme_openrlhf.verify.outcome import Outcome, Result
from rhyme_openrlhf.weights.node import KEPT

WHAT = "memory for weight versions, indexes and objects"
# What a run's policy publishes: its weights in --ds.param_dtype.
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# history/index.py: 15.25 bytes for every token, and some for every response.
INDEX_BYTES_PER_TOKEN = 16
# Ray's own threshold for killing workers is 95 % of the machine's memory; a run needs some GB beside its model.
LEAST_HOST_BYTES = 2 * 1024**3
MIB = 1024**2


@dataclass(frozen=True)
class Room:
    """Available and required memory in bytes; GPU figures are 0 where there is none."""

    host_free: int
    shm_free: int
    shm_needed: int
    object_store: int
    nodes: int
    weight_version: int
    indexes: int
    gpu_free: int = 0
    gpu_total: int = 0


def judge(room: Room, transport: str) -> tuple[Result, str]:
    """Return the result, and why if it is not "ok"."""
    problems = []
    if transport == "buffer":
        if room.shm_free < room.shm_needed:
            problems.append(
                f"{SHARED_MEMORY} has {_mib(room.shm_free)} free, but {KEPT} weight versions and draft indexes need "
                f"{_mib(room.shm_needed)}: enlarge it (docker: --shm-size) or use --weights.transport openrlhf"
            )
        if room.nodes > 1 and room.object_store < room.weight_version:
            problems.append(
                f"Ray's object store of {_mib(room.object_store)} does not hold a weight version of "
                f"{_mib(room.weight_version)}: start Ray with a larger --object-store-memory"
            )
    if problems:
        return "failed", "; ".join(problems)
    if room.host_free < LEAST_HOST_BYTES:
        return "informative", f"only {_mib(room.host_free)} of host memory are free: Ray may kill workers"
    return "ok", ""


def run(bench: Bench) -> Outcome:
    """Measure, and compare with what the flags ask for."""
    inputs = bench.inputs
    args = inputs.args
    bench.say("free memory, and what the flags ask for")
    weight_version = inputs.parameters * DTYPE_BYTES[args.ds.param_dtype]
    responses = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    tokens = responses * (args.rollout.max_new_tokens or args.data.max_len)
    indexes = tokens * INDEX_BYTES_PER_TOKEN * inputs.settings.history.rollouts
    status = os.statvfs(SHARED_MEMORY)
    room = Room(
        host_free=host_free(),
        shm_free=status.f_bavail * status.f_frsize,
        shm_needed=KEPT * weight_version + (indexes if inputs.settings.histospec.enable else 0),
        object_store=bench.engines.object_store_bytes(),
        nodes=bench.engines.nodes(),
        weight_version=weight_version,
        indexes=indexes,
    )
    if inputs.on_gpus:
        # As long as both engines live, what is left is what the check's own halves leave, not what a run leaves.
        facts = bench.run_pair().speculating.facts
        room = dataclasses.replace(room, gpu_free=facts.gpu_free_bytes, gpu_total=facts.gpu_total_bytes)
    result, why = judge(room, inputs.settings.weight_transport)
    lines = [
        f"a weight version is {_mib(weight_version)}, draft indexes of a step are {_mib(indexes)} at most",
        f"free: host {_mib(room.host_free)}, {SHARED_MEMORY} {_mib(room.shm_free)} (needs {_mib(room.shm_needed)}); "
        f"Ray's object store {_mib(room.object_store)}",
    ]
    if room.gpu_total:
        lines.append(f"GPU: {_mib(room.gpu_free)} of {_mib(room.gpu_total)} left beside this check's engines")
    return Outcome(WHAT, result, why, lines, dataclasses.asdict(room))


def host_free(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that new processes can have: of the machine, or of this container where that is less."""
    fields = dict(line.split(":", 1) for line in proc.read_text().splitlines() if ":" in line)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(0, free)


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"
