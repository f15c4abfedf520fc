"""Routes for runs: list, show, describe, archive, delete. `routes/launch.py` starts and stops them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.fields import (
    PAGE,
    TAGGED,
    AttemptNumber,
    Cursor,
    IfMatch,
    Limit,
    Moment,
    RunUid,
    require_match,
)
from rhyme_openrlhf.api.http.problems import ProblemError, documented
from rhyme_openrlhf.api.ingest import deletion
from rhyme_openrlhf.api.read.pagination import Direction
from rhyme_openrlhf.api.read.run_json import (
    ArtifactView,
    AttemptView,
    RunDetail,
    RunSummary,
    artifact_view,
    attempt_view,
    run_tag,
)
from rhyme_openrlhf.api.read.run_query import MOST_LETTERS, parse
from rhyme_openrlhf.api.read.runs import RUN_SORTS, Archived, Origin, RunFilter, detail_of, list_runs
from rhyme_openrlhf.api.store.bounds import NO_NUL, Body, Name, Notes, Tag, Tags
from rhyme_openrlhf.api.store.lookup import find_experiment, find_run
from rhyme_openrlhf.api.store.models import Artifact, Attempt, Run, RunTag
from rhyme_openrlhf.api.store.status import RunStatus

router = APIRouter(prefix="/runs", tags=["runs"], responses=documented(401, 403, 422, 429, 503))

SearchText = Annotated[
    str | None, Query(max_length=200, pattern=NO_NUL, description="In name, notes or uid; case does not matter.")
]


_VALUE = r"(metric|config)\.[^\x00]{1,190}"
FilterText = Annotated[
    str | None,
    Query(
        max_length=MOST_LETTERS,
        pattern=NO_NUL,
        description="A condition such as `reward > 0.5 and not tag = test`: names compared by = != < <= > >= or ~ "
        "(contains), with and, or, not and brackets.",
        examples=["reward > 0.5 and config.actor.adam.lr = 1e-6"],
    ),
]
Columns = Annotated[
    list[Annotated[str, Field(pattern=f"^{_VALUE}$")]],
    Query(max_length=10, description="Further values: metric.NAME (of the last step) or config.GROUP.OPTION."),
]
Sort = Annotated[
    str,
    Query(
        pattern=f"^({'|'.join(RUN_SORTS)}|{_VALUE})$",
        description="A field, metric.NAME or config.GROUP.OPTION.",
    ),
]


class RunPage(BaseModel):
    """A page of runs."""

    items: list[RunSummary]
    next_cursor: str | None = Field(description="For the next page; None on the last.")


class RunChange(Body):
    """Changes of a run; missing fields stay unchanged. `experiment` null removes the run from its experiment."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "math-7b", "tags": ["baseline"]}]})

    name: Name | None = None
    notes: Notes | None = None
    tags: Tags | None = None
    experiment: Name | None = None


@router.get("", summary="List runs")
def get_runs(
    who: auth.Viewer,
    service: ServiceDep,
    status: Annotated[list[RunStatus], Query(max_length=20, description="Any of these.")] = [],  # noqa: B006 (FastAPI copies it)
    origin: Annotated[list[Origin], Query(max_length=20, description="Any of these.")] = [],  # noqa: B006
    tag: Annotated[list[Tag], Query(max_length=10, description="All of these.")] = [],  # noqa: B006
    experiment: Annotated[str | None, Query(max_length=200, pattern=NO_NUL, description="Its name.")] = None,
    text: SearchText = None,
    archived: Archived = "no",
    created_from: Moment = None,
    created_to: Moment = None,
    filter: FilterText = None,
    column: Columns = [],  # noqa: B006
    sort: Sort = "created_at",
    direction: Direction = "desc",
    limit: Limit = PAGE,
    cursor: Cursor = None,
) -> RunPage:
    """List runs that match all conditions. Runs without a value in the sorted field come last.

    `filter` compares fields, metrics and settings: `reward > 0.5 and config.actor.adam.lr = 1e-6`.
    """
    wanted = RunFilter(
        statuses=tuple(status),
        origins=tuple(origin),
        tags=tuple(tag),
        experiment=experiment,
        text=text,
        archived=archived,
        created_from=created_from,
        created_to=created_to,
        query=parse(filter) if filter and filter.strip() else None,
    )
    with service.database.reading(snapshot=False) as session:
        items, following = list_runs(session, wanted, sort, direction, limit, cursor, column)
    return RunPage(items=items, next_cursor=following)


@router.get("/{uid}", responses={200: TAGGED, **documented(404)}, summary="Show a run")
def get_run(uid: RunUid, response: Response, who: auth.Viewer, service: ServiceDep) -> RunDetail:
    """Return a run with its configuration and attempts."""
    with service.database.reading(snapshot=False) as session:
        return _tagged(session, find_run(session, uid), response)


@router.patch("/{uid}", responses={200: TAGGED, **documented(404, 412)}, summary="Describe a run")
def change_run(
    uid: RunUid, body: RunChange, response: Response, who: auth.Operator, service: ServiceDep, if_match: IfMatch = None
) -> RunDetail:
    """Change name, notes, tags or experiment; with If-Match only if nobody else has changed them meanwhile."""
    given = body.model_fields_set
    with service.database.writing() as session:
        run = find_run(session, uid, lock=True)
        require_match(if_match, run_tag(run))
        if body.name is not None:
            run.name = body.name
        if body.notes is not None:
            run.notes = body.notes
        if body.tags is not None:
            kept = {tag.tag: tag for tag in run.tags}
            run.tags = [kept.get(word) or RunTag(tag=word) for word in sorted(set(body.tags))]
        if "experiment" in given:
            run.experiment_id = find_experiment(session, body.experiment).id if body.experiment else None
        session.flush()
        return _tagged(session, run, response)


@router.post("/{uid}/archive", responses=documented(404), summary="Archive a run")
def archive_run(uid: RunUid, who: auth.Operator, service: ServiceDep) -> RunDetail:
    """Hide a run from the default list; nothing is deleted."""
    with service.database.writing() as session:
        run = find_run(session, uid, lock=True)
        run.archived_at = run.archived_at or time.time()
        return detail_of(session, run)


@router.post("/{uid}/unarchive", responses=documented(404), summary="Unarchive a run")
def unarchive_run(uid: RunUid, who: auth.Operator, service: ServiceDep) -> RunDetail:
    """Show an archived run in the default list again."""
    with service.database.writing() as session:
        run = find_run(session, uid, lock=True)
        run.archived_at = None
        return detail_of(session, run)


@router.delete("/{uid}", status_code=204, responses=documented(404, 409), summary="Delete a run")
def delete_run(uid: RunUid, who: auth.Operator, service: ServiceDep) -> Response:
    """Delete an archived run that has ended, with everything it reported. Its run directory stays."""
    with _refusing():
        deletion.delete_run(service.database, uid)
    service.callers.forget()  # its reporter's token was deleted too
    return Response(status_code=204)


@router.get("/{uid}/attempts", responses=documented(404), summary="Attempts of a run")
def get_attempts(uid: RunUid, who: auth.Viewer, service: ServiceDep) -> list[AttemptView]:
    """List every start and resume of the run, the oldest first."""
    with service.database.reading() as session:
        return [attempt_view(attempt) for attempt in find_run(session, uid).attempts]


@router.delete("/{uid}/attempts/{number}", status_code=204, responses=documented(404, 409), summary="Remove an attempt")
def remove_attempt(uid: RunUid, number: AttemptNumber, who: auth.Operator, service: ServiceDep) -> Response:
    """Remove an attempt that was reported by mistake; steps that it replaced belong to older attempts again."""
    # Removal costs as much as an import.
    with service.limits.batches.one(), _refusing():
        run_id = deletion.remove_attempt(service.database, uid, number)
    service.news.publish(run_id)
    return Response(status_code=204)


@router.get("/{uid}/artifacts", responses=documented(404), summary="Artifacts of a run")
def get_artifacts(uid: RunUid, who: auth.Viewer, service: ServiceDep) -> list[ArtifactView]:
    """List checkpoints and other files of the run, in order of arrival."""
    with service.database.reading() as session:
        run = find_run(session, uid)
        rows = session.execute(
            select(Artifact, Attempt.number)
            .join(Attempt, Attempt.id == Artifact.attempt_id)
            .where(Artifact.run_id == run.id)
            .order_by(Artifact.created_at, Artifact.id)
        )
        return [artifact_view(artifact, number) for artifact, number in rows]


def _tagged(session: Session, run: Run, response: Response) -> RunDetail:
    detail = detail_of(session, run)
    response.headers["ETag"] = detail.etag
    return detail


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Convert refusals of deletions to problems (409)."""
    try:
        yield
    except deletion.DeletionRefusedError as error:
        raise ProblemError(409, str(error)) from error
