"""Route for a run's machines: processors, memory, disk, GPUs, and engines' KV caches."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import ConfigDict, Field

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.fields import Moment, RunUid
from rhyme_openrlhf.api.http.problems import documented
from rhyme_openrlhf.api.read.system import NodeView, SystemCurveView, SystemName, system_curves
from rhyme_openrlhf.api.store.bounds import LAST_TIME, View
from rhyme_openrlhf.api.store.lookup import find_run

router = APIRouter(prefix="/runs/{uid}/system", tags=["series"], responses=documented(401, 403, 404, 422, 429, 503))

NONE_RECORDED = "the run recorded nothing about its machines: --telemetry.system_s above 0 records them"


class SystemView(View):
    """Samples of a run's machines."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "curves": [{"of": "10.0.0.1", "name": "cpu", "x": [1760000000.0], "values": [0.5], "count": 1}],
                    "nodes": [
                        {
                            "node": "10.0.0.1",
                            "time": 1760000000.0,
                            "memory_total": 68719476736,
                            "gpus": 0,
                            "processes": [{"name": "engine 0", "cores": 1.2, "memory": 2147483648}],
                        }
                    ],
                    "missing": "",
                }
            ]
        }
    )

    curves: list[SystemCurveView]
    nodes: list[NodeView]
    missing: str = Field(description="Empty, or one sentence with the flag that switches this on.")


@router.get("", summary="Machines")
def get_system(
    uid: RunUid,
    who: auth.Viewer,
    service: ServiceDep,
    name: Annotated[
        list[SystemName] | None,
        Query(
            max_length=9,
            description="Names of curves; all by default. `cpu`, `gpu` (mean over the machine's GPUs) and `kv_cache` "
            "(of each engine) are shares from 0 to 1; all others but `load` are bytes.",
        ),
    ] = None,
    from_time: Moment = None,
    to_time: Moment = None,
    points: Annotated[int, Query(ge=10, le=2000, description="Most points per curve.")] = 300,
) -> SystemView:
    """Return curves of each machine over time, and the processes of its last sample."""
    names = list(dict.fromkeys(name)) if name else list(SystemName.__args__)  # type: ignore[attr-defined]
    with service.database.reading() as session:
        run = find_run(session, uid)
        curves, nodes = system_curves(
            session, run, names, from_time or 0.0, LAST_TIME if to_time is None else to_time, points
        )
    return SystemView(curves=curves, nodes=nodes, missing="" if nodes else NONE_RECORDED)
