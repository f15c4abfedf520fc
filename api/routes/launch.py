"""Routes to start, stop, resume and clone runs, to list options, and to check specs and command lines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Header, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.launching import LaunchingDep, StartingDep
from rhyme_openrlhf.api.access.service import Service, ServiceDep
from rhyme_openrlhf.api.http.fields import AttemptNumber, RunUid, created_at
from rhyme_openrlhf.api.http.problems import FieldError, ProblemError, documented
from rhyme_openrlhf.api.launch import actions as launches
from rhyme_openrlhf.api.launch.actions import KeyReused, LaunchConflict, Launching
from rhyme_openrlhf.api.launch.earlier_runs import with_directories
from rhyme_openrlhf.api.launch.ray_jobs import ClusterUnreachable
from rhyme_openrlhf.api.launch.schema import TypedOption, options, upstream_version
from rhyme_openrlhf.api.launch.spec import (
    EXAMPLE,
    NAME_PATTERN,
    Arguments,
    Fault,
    Given,
    RunSpec,
    SpecError,
    check,
    gpus_needed,
    merged,
)
from rhyme_openrlhf.api.launch.spec_command import Command, from_command, to_command
from rhyme_openrlhf.api.read.run_json import RunDetail
from rhyme_openrlhf.api.read.runs import detail_of, names_around
from rhyme_openrlhf.api.store.bounds import Body, Name, Notes, Tags
from rhyme_openrlhf.api.store.lookup import NotFoundError, find_attempt, find_run
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.races import again_if_raced

router = APIRouter(tags=["launching"], responses=documented(401, 403, 422, 429, 503))

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        pattern=r"^[\x21-\x7e]+$",
        description="A text that is unique per request. Repeating the request with the same key does nothing more, and "
        "returns the same run.",
    ),
]
RunName = Annotated[
    str, Field(pattern=NAME_PATTERN, description="Letters, digits, '.', '_' and '-'.", examples=["grpo-gsm8k"])
]


# A JSON object; its nested dictionaries are too deep for pydantic's own type.
_NEW_RUN: dict[str, Any] = {"examples": [{"name": "grpo-gsm8k", "arguments": EXAMPLE}]}


class NewRun(Body):
    """A run to start, given by `arguments`, or by `command` with `arguments` taking precedence."""

    model_config = ConfigDict(json_schema_extra=_NEW_RUN)

    name: RunName | None = None
    experiment: Name | None = None
    notes: Notes = ""
    tags: Tags = []
    command: Command | None = Field(default=None, description="A command line to take the options from.")
    arguments: Given = {}


class Clone(Body):
    """Differences from the cloned run; an option of null is reset to its default."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"edits": {"histospec": {"enable": False}}}]})

    name: RunName | None = None
    experiment: Name | None = Field(default=None, description="If not given, the same.")
    notes: Notes = ""
    tags: Tags = []
    edits: Given = {}


class SpecText(Body):
    """A spec, or its command line."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"command": "rhyme train --train.seed 7"}]})

    name: RunName = "run"
    command: Command | None = None
    arguments: Given = {}


class OptionFault(BaseModel):
    """An error of one option, with the allowed values in words."""

    field: str = Field(examples=["arguments.histospec.window_max"])
    message: str
    allowed: str


class SpecVerdict(BaseModel):
    """The result of checking a spec."""

    valid: bool
    errors: list[OptionFault]
    arguments: dict[str, dict[str, Any]] | None = Field(description="In normal form, if valid.")
    gpus: int | None = Field(description="GPUs that the run needs, if valid.")
    command: str | None = Field(description="The same as a command line, if valid.")


class SpecForms(BaseModel):
    """A spec in both forms."""

    name: str
    arguments: dict[str, dict[str, Any]]
    command: str


class JobLog(BaseModel):
    """The end of a job's output."""

    text: str


class OptionList(BaseModel):
    """Every option, upstream's first."""

    openrlhf: str = Field(description="The OpenRLHF version whose options these are.")
    options: list[TypedOption]


@router.get("/schema", summary="Options of a run")
def get_schema(who: auth.Viewer) -> OptionList:
    """List every option of OpenRLHF and ours, with type, default, help and limits."""
    return OptionList(openrlhf=upstream_version(), options=list(options().values()))


@router.post("/specs/validate", summary="Check a spec")
def validate_spec(body: SpecText, who: auth.Viewer, launching: LaunchingDep) -> SpecVerdict:
    """Check a spec without starting it."""
    try:
        name, arguments = read_request(body.name, body.command, body.arguments)
        arguments = check(arguments, launching.roots)
    except SpecError as error:
        faults = [OptionFault(field=one.field, message=one.message, allowed=one.allowed) for one in error.faults]
        return SpecVerdict(valid=False, errors=faults, arguments=None, gpus=None, command=None)
    command = to_command(name or "run", with_directories(arguments, launching.runs_directory))
    return SpecVerdict(valid=True, errors=[], arguments=arguments, gpus=gpus_needed(arguments), command=command)


@router.post("/specs/command", summary="A spec as a command line, and back")
def convert_spec(body: SpecText, who: auth.Viewer, launching: LaunchingDep) -> SpecForms:
    """Return both forms of a valid spec."""
    with as_problem():
        name, arguments = read_request(body.name, body.command, body.arguments)
        arguments = check(arguments, launching.roots)
    command = to_command(name or "run", with_directories(arguments, launching.runs_directory))
    return SpecForms(name=name or "run", arguments=arguments, command=command)


@router.post(
    "/runs",
    status_code=201,
    responses={200: {"model": RunDetail, "description": "The run that this key created before"}, **documented(409)},
    summary="Start a run",
)
def start_run(
    body: NewRun,
    response: Response,
    who: auth.Operator,
    service: ServiceDep,
    launching: StartingDep,
    key: IdempotencyKey = None,
) -> RunDetail:
    """Add a run to the queue after checking it field by field."""
    with as_problem():
        name, arguments = read_request(body.name, body.command, body.arguments)
        spec = RunSpec(
            name=name or "run",
            experiment=body.experiment,
            notes=body.notes,
            tags=body.tags,
            arguments=check(arguments, launching.roots),
        )
    asked = launches.Request(who.name, time.time(), key, launches.digest_of("run", body.model_dump()))
    return _create(_Creation(service, launching, response, spec, asked))


@router.post(
    "/runs/{uid}/clone",
    status_code=201,
    responses={
        200: {"model": RunDetail, "description": "The run that this key created before"},
        **documented(404, 409),
    },
    summary="Clone a run",
)
def clone_run(
    uid: RunUid,
    body: Clone,
    response: Response,
    who: auth.Operator,
    service: ServiceDep,
    launching: StartingDep,
    key: IdempotencyKey = None,
) -> RunDetail:
    """Clone this run with edits. The clone starts at the beginning, with its own checkpoints."""
    with service.database.reading() as session, as_problem():
        parent = find_run(session, uid)
        base = launches.arguments_of(parent)
        experiment, _ = names_around(session, parent)
        arguments = check(merged(base, body.edits), launching.roots)
        name = body.name or launches.clone_name(session, parent)
    place = arguments.get("ckpt", {}).get("path")
    if place is not None and place == base.get("ckpt", {}).get("path"):
        message = "the clone would overwrite this run's checkpoints: set another path, or null"
        raise _invalid([Fault("edits.ckpt.path", message)])
    spec = RunSpec(
        name=name,
        experiment=body.experiment or experiment,
        notes=body.notes,
        tags=body.tags,
        arguments=arguments,
    )
    asked = launches.Request(who.name, time.time(), key, launches.digest_of(f"clone {uid}", body.model_dump()))
    return _create(_Creation(service, launching, response, spec, asked, parent))


@router.post("/runs/{uid}/stop", responses=documented(404, 409), summary="Stop a run")
def stop_run(uid: RunUid, who: auth.Operator, service: ServiceDep) -> RunDetail:
    """Ask the run to end after its step, with a checkpoint; a run that takes too long is ended.

    Repeating it changes nothing.
    """
    return _change(service, uid, lambda session, run: launches.stop_run(session, run.id, time.time()))


@router.post("/runs/{uid}/resume", responses=documented(404, 409), summary="Resume a run")
def resume_run(
    uid: RunUid, who: auth.Operator, service: ServiceDep, launching: StartingDep, key: IdempotencyKey = None
) -> RunDetail:
    """Add an attempt that continues from the run's last checkpoint, or from the beginning if it has none.

    With a key that has resumed this run before, nothing happens.
    """
    return _change(service, uid, lambda session, run: launches.resume_run(session, launching, run.id, time.time(), key))


@router.get(
    "/runs/{uid}/attempts/{number}/job-log", responses=documented(404, 409), summary="Output of an attempt's job"
)
def get_job_log(
    uid: RunUid, number: AttemptNumber, who: auth.Viewer, service: ServiceDep, launching: StartingDep
) -> JobLog:
    """Return the last lines of the job's output from Ray.

    It is the only output of a run that failed before it had a run directory.
    """
    assert launching.launcher is not None
    with service.database.reading() as session:
        submission = find_attempt(session, find_run(session, uid), number).submission_id
    if submission is None:
        raise NotFoundError("job of attempt", number)
    try:
        return JobLog(text=launching.launcher.log_tail(submission))
    except ClusterUnreachable as error:
        raise ProblemError(503, str(error), code="cluster_unreachable") from error


def read_request(name: str | None, command: str | None, given: Arguments) -> tuple[str | None, Arguments]:
    """Return name and arguments of a request. Raises SpecError."""
    if command is None:
        return name, given
    named, arguments = from_command(command)
    return (named if name in (None, "run") else name), merged(arguments, given)


@dataclass(frozen=True)
class _Creation:
    """A run to create: its spec, its request, and its parent if it is a clone; `response` is the route's."""

    service: Service
    launching: Launching
    response: Response
    spec: RunSpec
    asked: launches.Request
    parent: Run | None = None


def _create(creation: _Creation) -> RunDetail:
    with as_problem():
        return again_if_raced(lambda: _create_once(creation))


def _create_once(creation: _Creation) -> RunDetail:
    with creation.service.database.writing() as session:
        run, is_new = launches.find_or_create_run(
            session, creation.launching, creation.spec, creation.asked, creation.parent
        )
        if not is_new:
            creation.response.status_code = 200
        created_at(creation.response, f"/runs/{run.uid}")
        return detail_of(session, run)


def _change(service: Service, uid: str, change: Callable[[Session, Run], None]) -> RunDetail:
    with service.database.writing() as session, as_problem():
        run = find_run(session, uid, lock=True)
        change(session, run)
        session.flush()
        session.expire(run)
        detail = detail_of(session, run)
    service.news.publish(run.id)
    return detail


@contextlib.contextmanager
def as_problem() -> Iterator[None]:
    """Convert refusals of specs and launching to problems."""
    try:
        yield
    except SpecError as error:
        raise _invalid(error.faults) from error
    except KeyReused as error:
        raise ProblemError(409, str(error), code="idempotency_key_reused") from error
    except LaunchConflict as error:
        raise ProblemError(409, str(error)) from error


def _invalid(faults: Sequence[Fault]) -> ProblemError:
    errors = [FieldError(field=f"body.{fault.field}", message=fault.message) for fault in faults]
    detail = "the run cannot be started: correct the fields below"
    return ProblemError(422, detail, code="invalid_run", errors=errors)
