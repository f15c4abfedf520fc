"""Route for importing a run directory of a run that was not reported, or whose reporter dropped events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.launching import LaunchingDep, readable_roots
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.problems import FieldError, ProblemError, documented
from rhyme_openrlhf.api.ingest.imported_files import ImportingError
from rhyme_openrlhf.api.ingest.importer import import_directory
from rhyme_openrlhf.api.store.bounds import NO_NUL, Body
from rhyme_openrlhf.api.store.models import Attempt

router = APIRouter(prefix="/imports", tags=["ingest"], responses=documented(401, 403, 422, 429, 503))


class Import(Body):
    """A run directory to import."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"directory": "/home/me/runs/20251009-math-7b"}]})

    directory: Annotated[str, Field(min_length=1, max_length=4096, pattern=NO_NUL)]


class ImportReceipt(BaseModel):
    """The result of an import. `replaced`: missing events were filled in.

    `removed`: uids of newer attempts that another reporter than the run's had announced.
    """

    run: str
    attempt: str
    accepted: int
    duplicates: int
    replaced: bool
    removed: list[str]


@router.post("", summary="Import a run directory")
def make_import(body: Import, who: auth.Operator, service: ServiceDep, launching: LaunchingDep) -> ImportReceipt:
    """Import a run directory on the service's machine, below its roots; repeating it changes nothing."""
    directory = _below_roots(body.directory, readable_roots(launching))
    with service.limits.imports.one():
        try:
            done = import_directory(service.database, directory, time.time(), service.ending.is_set)
        except ImportingError as error:
            raise ProblemError(422, str(error), code="import_refused") from error
    with service.database.reading() as session:
        run_id = session.scalar(select(Attempt.run_id).where(Attempt.uid == done.attempt_uid))
    if run_id is not None:
        service.news.publish(run_id)
    return ImportReceipt(
        run=done.run_uid,
        attempt=done.attempt_uid,
        accepted=done.accepted,
        duplicates=done.duplicates,
        replaced=done.replaced,
        removed=list(done.removed),
    )


def _below_roots(directory: str, roots: Sequence[Path]) -> Path:
    problem = "must be a directory below the service's roots (--serve.roots)"
    refused = ProblemError(
        422, "the request is not valid", errors=[FieldError(field="body.directory", message=problem)]
    )
    try:
        path = Path(directory).resolve()
        # Checked in this order, so that a client learns nothing about paths outside of the roots.
        if not any(path.is_relative_to(root) for root in roots) or not path.is_dir():
            raise refused
    except (OSError, RuntimeError, ValueError) as error:
        raise refused from error
    return path
