"""Routes for experiments: named sets of runs."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, ConfigDict
from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.fields import PAGE, Cursor, Limit, created_at
from rhyme_openrlhf.api.http.preconditions import TAGGED, IfMatch, require_match
from rhyme_openrlhf.api.http.problems import ProblemError, documented
from rhyme_openrlhf.api.read.pagination import Order
from rhyme_openrlhf.api.read.run_json import entity_tag
from rhyme_openrlhf.api.read.runs import page_of
from rhyme_openrlhf.api.store.bounds import INT32, Body, Name, Notes
from rhyme_openrlhf.api.store.lookup import NotFoundError
from rhyme_openrlhf.api.store.models import Experiment, Run

router = APIRouter(prefix="/experiments", tags=["experiments"], responses=documented(401, 403, 422, 429, 503))

NAME_TAKEN = "an experiment with this name already exists"
ExperimentId = Annotated[int, Path(ge=1, le=INT32)]


class ExperimentView(BaseModel):
    """An experiment and its number of runs."""

    id: int
    name: str
    description: str
    created_at: float
    runs: int


class ExperimentPage(BaseModel):
    """Experiments by name."""

    items: list[ExperimentView]
    next_cursor: str | None


class NewExperiment(Body):
    """A new experiment."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "ablation", "description": "Window sizes."}]})

    name: Name
    description: Notes = ""


class ExperimentChange(Body):
    """Changes of an experiment; missing fields stay unchanged."""

    name: Name | None = None
    description: Notes | None = None


@router.get("", summary="List experiments")
def list_experiments(
    who: auth.Viewer, service: ServiceDep, limit: Limit = PAGE, cursor: Cursor = None
) -> ExperimentPage:
    """List experiments by name."""
    with service.database.reading() as session:
        order = Order("name", Experiment.name, Experiment.id)
        rows, following = page_of(session, Experiment, [], order, limit, cursor)
        counts = _run_counts(session, [row.id for row in rows])
        return ExperimentPage(items=[_view(row, counts.get(row.id, 0)) for row in rows], next_cursor=following)


@router.get("/{experiment_id}", responses={200: TAGGED, **documented(404)}, summary="Show an experiment")
def get_experiment(
    experiment_id: ExperimentId, response: Response, who: auth.Viewer, service: ServiceDep
) -> ExperimentView:
    """Return an experiment."""
    with service.database.reading() as session:
        return _tagged(session, _find(session, experiment_id), response)


@router.post("", status_code=201, responses=documented(409), summary="Create an experiment")
def make_experiment(body: NewExperiment, response: Response, who: auth.Operator, service: ServiceDep) -> ExperimentView:
    """Create an experiment with a unique name."""
    try:
        with service.database.writing() as session:
            row = Experiment(name=body.name, description=body.description, created_at=time.time())
            session.add(row)
            session.flush()
            created_at(response, f"/experiments/{row.id}")
            return _tagged(session, row, response)
    except IntegrityError as error:
        raise ProblemError(409, NAME_TAKEN, code="name_taken") from error


@router.patch("/{experiment_id}", responses={200: TAGGED, **documented(404, 409, 412)}, summary="Change an experiment")
def change_experiment(
    experiment_id: ExperimentId,
    body: ExperimentChange,
    response: Response,
    who: auth.Operator,
    service: ServiceDep,
    if_match: IfMatch = None,
) -> ExperimentView:
    """Change the name or the description; with If-Match only if nobody else has changed them meanwhile."""
    try:
        with service.database.writing() as session:
            row = _find(session, experiment_id, lock=True)
            require_match(if_match, entity_tag(row.name, row.description))
            if body.name is not None:
                row.name = body.name
            if body.description is not None:
                row.description = body.description
            session.flush()
            return _tagged(session, row, response)
    except IntegrityError as error:
        raise ProblemError(409, NAME_TAKEN, code="name_taken") from error


@router.delete("/{experiment_id}", status_code=204, responses=documented(404), summary="Delete an experiment")
def delete_experiment(experiment_id: ExperimentId, who: auth.Operator, service: ServiceDep) -> Response:
    """Delete an experiment; its runs stay, without an experiment."""
    with service.database.writing() as session:
        row = _find(session, experiment_id)
        session.execute(update(Run).where(Run.experiment_id == row.id).values(experiment_id=None))
        session.delete(row)
    return Response(status_code=204)


def _find(session: Session, experiment_id: int, lock: bool = False) -> Experiment:
    row = session.get(Experiment, experiment_id, with_for_update=lock)
    if row is None:
        raise NotFoundError("experiment", experiment_id)
    return row


def _run_counts(session: Session, ids: list[int]) -> dict[int, int]:
    query = select(Run.experiment_id, func.count()).where(Run.experiment_id.in_(ids)).group_by(Run.experiment_id)
    return {experiment: count for experiment, count in session.execute(query) if experiment is not None}


def _tagged(session: Session, row: Experiment, response: Response) -> ExperimentView:
    response.headers["ETag"] = entity_tag(row.name, row.description)
    return _view(row, _run_counts(session, [row.id]).get(row.id, 0))


def _view(row: Experiment, runs: int) -> ExperimentView:
    return ExperimentView(id=row.id, name=row.name, description=row.description, created_at=row.created_at, runs=runs)
