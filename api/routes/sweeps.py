"""Routes for sweeps: many runs at once that differ in some options, as one experiment.

A sweep is the experiment that its runs share, so the table of runs, filters, comparison and exports show it without
anything of their own. Invariant: all runs of a sweep are in the queue, or none is.
"""

from __future__ import annotations

import hashlib
import time
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.launching import StartingDep
from rhyme_openrlhf.api.access.service import Service, ServiceDep
from rhyme_openrlhf.api.http.fields import ExperimentId, created_at
from rhyme_openrlhf.api.http.problems import documented
from rhyme_openrlhf.api.launch import actions as launches
from rhyme_openrlhf.api.launch.actions import Launching
from rhyme_openrlhf.api.launch.spec import Given, RunSpec
from rhyme_openrlhf.api.launch.spec_command import Command
from rhyme_openrlhf.api.launch.sweep import (
    MAX_RUNS,
    MOST_OPTIONS,
    Configuration,
    Draws,
    DrawSeed,
    WrittenValues,
    configurations,
)
from rhyme_openrlhf.api.routes.launch import IdempotencyKey, RunName, as_problem, read_request
from rhyme_openrlhf.api.store.bounds import Body, Notes, Tags
from rhyme_openrlhf.api.store.lookup import find_experiment
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.races import again_if_raced
from rhyme_openrlhf.api.store.status import PERHAPS_ACTIVE
from rhyme_openrlhf.settings.varied import Range, Scale

router = APIRouter(prefix="/sweeps", tags=["launching"], responses=documented(401, 403, 422, 429, 503))

Value = bool | int | float | str | None
ValueList = Annotated[list[Value | list[Value]], Field(max_length=MAX_RUNS)]


class RangeOf(Body):
    """The values from `low` to `high` of a numeric option; "log": equal ratios are equally likely."""

    low: float
    high: float
    scale: Scale = "linear"


class NewSweep(Body):
    """Runs that differ in some options: all combinations of `options`, or `count` random draws of them."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "lr-and-seed",
                    "command": "rhyme demo",
                    "options": {"actor.adam.lr": [1e-6, 3e-6], "train.seed": [1, 2, 3]},
                }
            ]
        }
    )

    name: RunName = Field(description="Of the experiment; its runs are called by it and a number.")
    notes: Notes = ""
    tags: Tags = []
    command: Command | None = Field(default=None, description="A command line to take the other options from.")
    arguments: Given = {}
    options: dict[str, ValueList | RangeOf | WrittenValues] = Field(
        max_length=MOST_OPTIONS,
        description="The options that differ, as `group.name`, with values or a range, also as text: `1e-6,3e-6` or "
        "`log:1e-7..1e-5`.",
    )
    count: Draws | None = Field(
        default=None, description="The number of random draws; without it, every combination of the values."
    )
    seed: DrawSeed = Field(default=0, description="Of the random draws.")


class SweptRun(BaseModel):
    """A run of a sweep, and the values of its options that differ."""

    uid: str
    name: str
    options: dict[str, Value | list[Value]]


class Sweep(BaseModel):
    """The runs of a sweep, in its experiment."""

    experiment: int = Field(description="The experiment's id.")
    name: str
    runs: list[SweptRun]


class Stopped(BaseModel):
    """The number of runs that were asked to stop."""

    runs: int


@router.post(
    "",
    status_code=201,
    responses={200: {"model": Sweep, "description": "The sweep that this key started before"}, **documented(409)},
    summary="Start a sweep",
)
def start_sweep(
    body: NewSweep,
    response: Response,
    who: auth.Operator,
    service: ServiceDep,
    launching: StartingDep,
    key: IdempotencyKey = None,
) -> Sweep:
    """Add all runs of a sweep to the queue after checking each of them field by field."""
    with as_problem():
        _, arguments = read_request(body.name, body.command, body.arguments)
        values = {
            name: Range(given.low, given.high, given.scale) if isinstance(given, RangeOf) else given
            for name, given in body.options.items()
        }
        found = configurations(arguments, values, body.count, body.seed, launching.roots)
        return again_if_raced(lambda: _create(service, launching, response, body, found, who.name, key))


@router.post("/{experiment_id}/stop", responses=documented(404), summary="Stop the runs of an experiment")
def stop_sweep(experiment_id: ExperimentId, who: auth.Operator, service: ServiceDep) -> Stopped:
    """Ask every run of an experiment that has not ended to stop; those in the queue end at once."""
    with service.database.writing() as session:
        find_experiment(session, experiment_id)
        query = select(Run.id).where(Run.experiment_id == experiment_id, Run.status.in_(PERHAPS_ACTIVE))
        ids = list(session.scalars(query.order_by(Run.id)))
        for run_id in ids:
            launches.stop_run(session, run_id, time.time())
    for run_id in ids:
        service.news.publish(run_id)
    return Stopped(runs=len(ids))


def _create(
    service: Service,
    launching: Launching,
    response: Response,
    body: NewSweep,
    configurations: list[Configuration],
    by: str,
    key: str | None,
) -> Sweep:
    """Create the runs, or return those that the key created before."""
    now, digest = time.time(), launches.digest_of("sweep", body.model_dump())
    # Each run has a key of its own, of bounded length.
    stem = hashlib.sha256(key.encode()).hexdigest() if key is not None else None
    width = len(str(len(configurations)))
    with service.database.writing() as session:
        runs = []
        for number, one in enumerate(configurations, start=1):
            name = f"{body.name}-{number:0{width}d}"
            spec = RunSpec(name=name, experiment=body.name, notes=body.notes, tags=body.tags, arguments=one.arguments)
            own = f"{stem}/{number}" if stem is not None else None
            run, is_new = launches.find_or_create_run(session, launching, spec, launches.Request(by, now, own, digest))
            if not is_new:
                response.status_code = 200
            runs.append(run)
        experiment = runs[0].experiment_id
        assert experiment is not None
        created_at(response, f"/experiments/{experiment}")
        swept = [
            SweptRun(uid=run.uid, name=run.name, options=one.differences)
            for run, one in zip(runs, configurations, strict=True)
        ]
        return Sweep(experiment=experiment, name=body.name, runs=swept)
