"""The page `/runs/<uid>/config`: which settings does a run have, and how do they differ from another run's?"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.access.launching import LaunchingDep, readable_roots
from rhyme_openrlhf.api.http.fields import RunUid
from rhyme_openrlhf.api.read.comparison import differing, everything_of
from rhyme_openrlhf.api.read.log_files import LogError
from rhyme_openrlhf.api.read.run_files import USUAL, Kind, list_files, places_of_attempt, sizes
from rhyme_openrlhf.api.read.run_json import attempt_view, run_tag
from rhyme_openrlhf.api.read.runs import RunFilter, list_runs
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.models import UID_LENGTH, Run
from rhyme_openrlhf.settings.recorded import is_own, object_at
from rhyme_openrlhf.webui.pages.rendering import PageDep
from rhyme_openrlhf.webui.pages.run import run_context
from rhyme_openrlhf.webui.run.recorded_settings import commits_of, rows_of, sections

router = APIRouter(include_in_schema=False)

# Number of recent runs offered for comparison; the address accepts any run.
OFFERED = 30


@dataclass(frozen=True)
class Files:
    """Files of a run's newest attempt. `kinds`: number and bytes by kind; `archive`: the address of the usual ones."""

    directory: str
    kinds: Mapping[Kind, tuple[int, int]]
    archive: str
    usual: Sequence[Kind]


@router.get("/runs/{uid}/config")
def config_page(
    uid: RunUid,
    page: PageDep,
    launching: LaunchingDep,
    to: Annotated[str, Query(pattern=rf"^([0-9a-f]{{{UID_LENGTH}}})?$", description="A run to compare with.")] = "",
) -> HTMLResponse:
    """Render settings, code, versions and command of a run, and its notes."""
    with page.service.database.reading() as session:
        run = find_run(session, uid)
        other = find_run(session, to) if to and to != uid else None
        newest = list_runs(session, RunFilter(archived="all"), "created_at", "desc", OFFERED, None)[0]
        context = {
            **run_context(page, session, run),
            "detail": run,
            "other": other,
            "offered": [one for one in newest if one.uid != uid and (other is None or one.uid != other.uid)],
            "sections": sections(run, other),
            "command": shlex.join(run.command),
            "commits": commits_of(run),
            "versions": run.versions,
            "machine": object_at(run.config, "machine"),
            "attempts": [attempt_view(attempt) for attempt in run.attempts],
            "created_by": run.created_by,
            "files": _files(session, run, readable_roots(launching)),
            "tag": run_tag(run),
        }
        if other is not None:
            recorded = [everything_of(run), everything_of(other)]
            names = [name for name in differing(recorded) if not is_own(name)]
            context["differences"] = rows_of(names, recorded)
        return page.render("config.html", uid=uid, **context)


def _files(session: Session, run: Run, roots: Sequence[Path]) -> Files | str:
    """Return the files of the run's newest attempt, or one sentence that says why there are none."""
    if not run.attempts:
        return "the run has not started yet"
    number = max(attempt.number for attempt in run.attempts)
    try:
        places = places_of_attempt(session, run.uid, number, roots)
    except LogError as error:
        return str(error)
    archive = f"/api/v1/runs/{run.uid}/attempts/{number}/archive"
    return Files(str(places[0].path), sizes(list_files(places)), archive, USUAL)
