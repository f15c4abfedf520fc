"""Routes for experiments: named sets of runs."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.fields import PAGE, TAGGED, Cursor, ExperimentId, IfMatch, Limit, created_at, require_match
from rhyme_openrlhf.api.http.problems import ProblemError, documented
from rhyme_openrlhf.api.read.curves import MOST_POINTS
from rhyme_openrlhf.api.read.groups import MOST_RUNS, MOST_VALUES, GroupFigureView, figures_of, groups_of
from rhyme_openrlhf.api.read.pagination import Order, page_of
from rhyme_openrlhf.api.read.run_json import entity_tag
from rhyme_openrlhf.api.routes.series import DEFAULT_NAMES, Names, split_names
from rhyme_openrlhf.api.store.bounds import Body, Name, Notes
from rhyme_openrlhf.api.store.lookup import find_experiment
from rhyme_openrlhf.api.store.models import Experiment, Run
from rhyme_openrlhf.api.store.races import EXPERIMENT_NAME, violated

router = APIRouter(prefix="/experiments", tags=["experiments"], responses=documented(401, 403, 422, 429, 503))

NAME_TAKEN = "an experiment with this name already exists"


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


class GroupedRun(BaseModel):
    """A run of a group."""

    uid: str
    name: str
    status: str
    seed: Any = Field(description="Its `train.seed`; null if it is not recorded yet.")


class GroupView(BaseModel):
    """Runs whose settings are equal but for the seed."""

    options: dict[str, Any] = Field(
        description="The settings in which groups differ; one that is missing has its default."
    )
    runs: list[GroupedRun]
    figures: list[GroupFigureView]


class Groups(BaseModel):
    """The groups of an experiment, in the order of their first runs."""

    experiment: int
    groups: list[GroupView]
    truncated: bool = Field(description=f"True if older runs than the newest {MOST_RUNS} were left out.")


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
        return _tagged(session, find_experiment(session, experiment_id), response)


@router.get("/{experiment_id}/groups", responses=documented(404), summary="Groups of runs")
def get_groups(
    experiment_id: ExperimentId,
    who: auth.Viewer,
    service: ServiceDep,
    names: Names = DEFAULT_NAMES,
    points: Annotated[
        int, Query(ge=0, le=MOST_POINTS, description="Most points of a mean curve, fewer in many groups; 0: no curves.")
    ] = 0,
) -> Groups:
    """Group the experiment's runs whose settings are equal but for the seed, with mean and spread over them.

    Archived runs are left out.
    """
    wanted = split_names(names)
    with service.database.reading() as session:
        groups, truncated = groups_of(session, find_experiment(session, experiment_id).id)
        points = min(points, MOST_VALUES // max(1, len(groups) * len(wanted)))
        found = [
            GroupView(
                options=group.options,
                runs=[
                    GroupedRun(uid=run.uid, name=run.name, status=run.status, seed=seed)
                    for run, seed in zip(group.runs, group.seeds, strict=True)
                ],
                figures=figures_of(session, group, wanted, points),
            )
            for group in groups
        ]
        return Groups(experiment=experiment_id, groups=found, truncated=truncated)


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
        raise _name_taken(error) from error


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
            row = find_experiment(session, experiment_id, lock=True)
            require_match(if_match, entity_tag(row.name, row.description))
            if body.name is not None:
                row.name = body.name
            if body.description is not None:
                row.description = body.description
            session.flush()
            return _tagged(session, row, response)
    except IntegrityError as error:
        raise _name_taken(error) from error


@router.delete("/{experiment_id}", status_code=204, responses=documented(404), summary="Delete an experiment")
def delete_experiment(experiment_id: ExperimentId, who: auth.Operator, service: ServiceDep) -> Response:
    """Delete an experiment; its runs stay, without an experiment."""
    with service.database.writing() as session:
        row = find_experiment(session, experiment_id)
        session.execute(update(Run).where(Run.experiment_id == row.id).values(experiment_id=None))
        session.delete(row)
    return Response(status_code=204)


def _name_taken(error: IntegrityError) -> Exception:
    """Return the problem of a name that another experiment has; any other error as it is."""
    if violated(error) != EXPERIMENT_NAME:
        return error
    return ProblemError(409, NAME_TAKEN, code="name_taken")


def _run_counts(session: Session, ids: list[int]) -> dict[int, int]:
    query = select(Run.experiment_id, func.count()).where(Run.experiment_id.in_(ids)).group_by(Run.experiment_id)
    return {experiment: count for experiment, count in session.execute(query) if experiment is not None}


def _tagged(session: Session, row: Experiment, response: Response) -> ExperimentView:
    response.headers["ETag"] = entity_tag(row.name, row.description)
    return _view(row, _run_counts(session, [row.id]).get(row.id, 0))


def _view(row: Experiment, runs: int) -> ExperimentView:
    return ExperimentView(id=row.id, name=row.name, description=row.description, created_at=row.created_at, runs=runs)
