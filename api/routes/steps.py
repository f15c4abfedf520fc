"""Routes for the steps of a run: steps, engines of a step, moves, switches, rank stability."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import create_model
from sqlalchemy import select

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.service import Service, ServiceDep
from rhyme_openrlhf.api.http.fields import PAGE, Cursor, FromStep, Limit, RunUid, StepNumber, ToStep
from rhyme_openrlhf.api.http.problems import documented
from rhyme_openrlhf.api.read.pagination import Column, Direction, Order, page_of
from rhyme_openrlhf.api.store.base import Base
from rhyme_openrlhf.api.store.bounds import INT32, View
from rhyme_openrlhf.api.store.lookup import find_run, of_run
from rhyme_openrlhf.api.store.record import EngineSampleRow, EngineStepRow, Move, RankStabilityRow, Step, Switch

router = APIRouter(prefix="/runs/{uid}", tags=["steps"], responses=documented(401, 403, 404, 422, 429, 503))

# Row numbers and references have no meaning outside the database.
_INSIDE = {"id", "run_id", "attempt_id"}


def _view_of(table: type[Base], name: str) -> Any:
    """Return the response model of a table: its columns, except internal ones."""
    fields: dict[str, Any] = {}
    for column in table.__table__.columns:
        if column.name not in _INSIDE:
            kind: Any = column.type.python_type
            fields[column.name] = (kind | None if column.nullable else kind, ...)
    return create_model(name, __base__=View, __doc__=table.__doc__, **fields)


StepView = _view_of(Step, "StepView")
EngineStepView = _view_of(EngineStepRow, "EngineStepView")
EngineSampleView = _view_of(EngineSampleRow, "EngineSampleView")
MoveView = _view_of(Move, "MoveView")
SwitchView = _view_of(Switch, "SwitchView")
RankStabilityList: Any = list[_view_of(RankStabilityRow, "RankStabilityView")]  # type: ignore[misc]


def _page_model(name: str, view: Any) -> Any:
    return create_model(
        name, __base__=View, __doc__="One page.", items=(list[view], ...), next_cursor=(str | None, ...)
    )


StepPage = _page_model("StepPage", StepView)
EngineStepPage = _page_model("EngineStepPage", EngineStepView)
EngineSamplePage = _page_model("EngineSamplePage", EngineSampleView)
MovePage = _page_model("MovePage", MoveView)
SwitchPage = _page_model("SwitchPage", SwitchView)


def _page(
    service: Service, uid: str, table: Any, key: Column, window: tuple[int, int], conditions: list[Any],
    direction: Direction, limit: int, cursor: str | None,
) -> dict[str, Any]:  # fmt: skip
    """Return a page of a table with `run_id` and `step`, inside a window of steps."""
    with service.database.reading(snapshot=False) as session:
        where = [of_run(table, uid), table.step >= window[0], table.step <= window[1], *conditions]
        rows, following = page_of(session, table, where, Order(key.key, key, key, direction), limit, cursor)
        if not rows:
            find_run(session, uid)
    return {"items": rows, "next_cursor": following}


@router.get("/steps", response_model=StepPage, summary="Steps")
def get_steps(
    uid: RunUid,
    who: auth.Viewer,
    service: ServiceDep,
    from_step: FromStep = 0,
    to_step: ToStep = INT32,
    direction: Direction = "asc",
    limit: Limit = PAGE,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """List the steps with all their values, over all engines."""
    return _page(service, uid, Step, Step.step, (from_step, to_step), [], direction, limit, cursor)


@router.get("/steps/{step}/engines", response_model=EngineStepPage, summary="Engines of a step")
def get_engines(
    uid: RunUid, step: StepNumber, who: auth.Viewer, service: ServiceDep, limit: Limit = PAGE, cursor: Cursor = None
) -> dict[str, Any]:
    """List the engines of one step's rollout stage."""
    return _page(service, uid, EngineStepRow, EngineStepRow.engine, (step, step), [], "asc", limit, cursor)


@router.get("/samples", response_model=EngineSamplePage, summary="Engine samples")
def get_samples(
    uid: RunUid,
    who: auth.Viewer,
    service: ServiceDep,
    engine: Annotated[int | None, Query(ge=0, le=INT32)] = None,
    from_step: FromStep = 0,
    to_step: ToStep = INT32,
    limit: Limit = PAGE,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """List samples of engines, about one per second while they generate: running samples, throughput, drafts."""
    conditions = [] if engine is None else [EngineSampleRow.engine == engine]
    window = (from_step, to_step)
    return _page(service, uid, EngineSampleRow, EngineSampleRow.id, window, conditions, "asc", limit, cursor)


@router.get("/moves", response_model=MovePage, summary="Moves")
def get_moves(
    uid: RunUid,
    who: auth.Viewer,
    service: ServiceDep,
    from_step: FromStep = 0,
    to_step: ToStep = INT32,
    limit: Limit = PAGE,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """List samples that moved from one engine to another."""
    return _page(service, uid, Move, Move.id, (from_step, to_step), [], "asc", limit, cursor)


@router.get("/switches", response_model=SwitchPage, summary="Layout switches")
def get_switches(
    uid: RunUid,
    who: auth.Viewer,
    service: ServiceDep,
    from_step: FromStep = 0,
    to_step: ToStep = INT32,
    limit: Limit = PAGE,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """List nodes that changed their tensor-parallel layout."""
    return _page(service, uid, Switch, Switch.id, (from_step, to_step), [], "asc", limit, cursor)


@router.get("/rank-stability", response_model=RankStabilityList, summary="Rank stability")
def get_rank_stability(uid: RunUid, who: auth.Viewer, service: ServiceDep) -> list[RankStabilityRow]:
    """List how similarly consecutive epochs rank the same prompts by length."""
    with service.database.reading() as session:
        run = find_run(session, uid)
        query = select(RankStabilityRow).where(RankStabilityRow.run_id == run.id).order_by(RankStabilityRow.epoch)
        return list(session.scalars(query))
