"""Figures as JSON: `/ui/runs/<uid>/figures/<name>` for one run, `/ui/figures/<name>?run=...` for several runs.

`/ui/experiments/<id>/figures/<name>` has those of an experiment.

The query parameters are the figure's options.
"""

from __future__ import annotations

from typing import Annotated, Any, get_origin

from fastapi import APIRouter, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.fields import ExperimentId, RunUid
from rhyme_openrlhf.api.store.lookup import NotFoundError, find_experiment, find_run
from rhyme_openrlhf.webui.figures.drawing.base import figure_json
from rhyme_openrlhf.webui.figures.experiment import (
    EXPERIMENT_FIGURES,
    PARALLEL,
    ExperimentWindow,
    mean_curves,
    parallel,
)
from rhyme_openrlhf.webui.figures.one_run import RUN_FIGURES
from rhyme_openrlhf.webui.figures.several_runs import RUNS_FIGURES, RunsWindow
from rhyme_openrlhf.webui.pages.rendering import HEADERS

router = APIRouter(prefix="/ui", include_in_schema=False)
FigureName = Annotated[str, Path(max_length=64)]


@router.get("/runs/{uid}/figures/{name}")
def run_figure(uid: RunUid, name: FigureName, request: Request, who: auth.Viewer, service: ServiceDep) -> Response:
    """Return one figure of a run, without a theme."""
    figure = RUN_FIGURES.get(name)
    if figure is None:
        raise NotFoundError("figure", name)
    options = read_options(figure.options, request)
    with service.database.reading() as session:
        rows = figure.ask(session, find_run(session, uid), options)
        drawn = figure.draw(rows, options)
    return Response(figure_json(drawn), media_type="application/json", headers=HEADERS)


@router.get("/figures/{name}")
def runs_figure(name: FigureName, request: Request, who: auth.Viewer, service: ServiceDep) -> Response:
    """Return one figure of several runs, without a theme."""
    figure = RUNS_FIGURES.get(name)
    if figure is None:
        raise NotFoundError("figure", name)
    options = read_options(RunsWindow, request)
    with service.database.reading() as session:
        drawn = figure.draw(session, options)
    return Response(figure_json(drawn), media_type="application/json", headers=HEADERS)


@router.get("/experiments/{experiment_id}/figures/{name}")
def experiment_figure(
    experiment_id: ExperimentId, name: FigureName, request: Request, who: auth.Viewer, service: ServiceDep
) -> Response:
    """Return one figure of an experiment, without a theme."""
    figure = EXPERIMENT_FIGURES.get(name)
    if figure is None and name != PARALLEL:
        raise NotFoundError("figure", name)
    window = read_options(ExperimentWindow, request)
    with service.database.reading() as session:
        number = find_experiment(session, experiment_id).id
        drawn = mean_curves(session, number, figure, window) if figure else parallel(session, number)
    return Response(figure_json(drawn), media_type="application/json", headers=HEADERS)


def read_options(kind: type[BaseModel], request: Request) -> Any:
    """Return the query as a figure's options; a list field takes a repeated parameter. Invalid options raise a 422."""
    query = request.query_params
    values: dict[str, Any] = {}
    for name in query:
        field = kind.model_fields.get(name)
        is_list = field is not None and get_origin(field.annotation) in (list, tuple)
        values[name] = query.getlist(name) if is_list else query[name]
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        faults = [{**fault, "loc": ("query", *fault["loc"])} for fault in error.errors()]
        raise RequestValidationError(faults) from error
