"""The run's Ray actors, as Ray's control store knows them: which process each is, and which have died of what.

Adapter. Ray's public state API needs its dashboard, which small clusters run without, so this reads the table behind
it (`ray._private.state`, private; checked against Ray 2.55.0, `tests/run/test_supervisor.py` holds it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
import ray._private.state
from ray.core.generated.gcs_pb2 import ActorTableData

# Class names of actors, and what users call them; engines and history workers are told apart by a number.
NAMES = {
    "RhymePolicyModelActor": "policy actor",
    "RhymeCriticModelActor": "critic actor",
    "ReferenceModelActor": "reference actor",
    "RewardModelActor": "reward model actor",
    "RhymePPOTrainer": "trainer",
    "RhymePPOTrainerAsync": "trainer coordinator",
    "RhymeTrainingActor": "trainer",
    "RhymeGenerateSamplesActor": "samples generator",
    "PlainRecorder": "recorder",
    "PlainNodeWeights": "weight store",
    "SystemProbe": "system probe",
}
# Deaths that end nothing: the last reference went, or the process that owned the actor did (which has its own row).
HARMLESS = {"OUT_OF_SCOPE", "REF_DELETED", "OWNER_DIED"}
CAUSES = {
    "WORKER_DIED": "the process was killed, ran out of memory or crashed",
    "NODE_DIED": "its node is gone",
    "RAY_KILL": "it was killed through Ray",
}


@dataclass(frozen=True)
class ActorRow:
    """One actor. `alive` covers starting and restarting; `cause` is empty unless it died of something harmful.

    `node` is its machine's address, `node_id` Ray's name of it.
    """

    key: str
    name: str
    pid: int
    node: str
    alive: bool
    restarts: int
    cause: str
    node_id: str = ""


def read_actors(known: Mapping[str, str]) -> list[ActorRow]:
    """All actors of this job. `known` are names by actor id (hex), of those that are told apart by a number."""
    job = ray.get_runtime_context().get_job_id()
    return [
        ActorRow(
            key=row["ActorID"],
            name=known.get(row["ActorID"]) or NAMES.get(row["ActorClassName"], row["ActorClassName"]),
            pid=row["Pid"],
            node=row["Address"]["IPAddress"],
            alive=row["State"] != "DEAD",
            restarts=row["NumRestarts"],
            cause=_cause(row["DeathCause"]) if row["State"] == "DEAD" else "",
            node_id=row["Address"]["NodeID"],
        )
        for row in ray._private.state.actors().values()
        if row["JobID"] == job
    ]


def rank_jobs() -> list[str]:
    """Return the Ray jobs (hex) of vLLM's tensor-parallel ranks: of actors in placement groups that this job is in too.

    vLLM's engine core is a driver of its own in Ray, so its ranks belong to another job than the engine's actor.
    """
    job = ray.get_runtime_context().get_job_id()
    table = ray._private.state.state._connect_and_get_accessor().get_actor_table(None, None)
    rows = [ActorTableData.FromString(row) for row in table]
    ours = {row.placement_group_id for row in rows if row.job_id.hex() == job and row.placement_group_id}
    ours.discard(ray.PlacementGroupID.nil().binary())
    return sorted({row.job_id.hex() for row in rows if row.placement_group_id in ours} - {job})


def _cause(death: Any) -> str:
    if death.HasField("creation_task_failure_context"):
        lines = death.creation_task_failure_context.formatted_exception_string.strip().splitlines()
        return f"it could not start: {lines[-1] if lines else 'no message'}"
    context = death.actor_died_error_context
    reason = type(context).Reason.Name(context.reason)
    return "" if reason in HARMLESS else CAUSES.get(reason, reason.lower())
