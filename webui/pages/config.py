"""The page `/runs/<uid>/config`: which settings does a run have, and how do they differ from another run's?"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse

from rhyme_openrlhf.api.http.fields import RunUid
from rhyme_openrlhf.api.read.comparison import differing, everything_of
from rhyme_openrlhf.api.read.run_json import attempt_view, run_detail
from rhyme_openrlhf.api.read.runs import RunFilter, list_runs, names_around
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.models import UID_LENGTH
from rhyme_openrlhf.webui.pages.rendering import PageDep
from rhyme_openrlhf.webui.pages.run import run_context
from rhyme_openrlhf.webui.run.recorded_settings import commits_of, is_own, rows_of, sections

router = APIRouter(include_in_schema=False)

# Number of recent runs offered for comparison; the address accepts any run.
OFFERED = 30


@router.get("/runs/{uid}/config")
def config_page(
    uid: RunUid,
    page: PageDep,
    to: Annotated[str, Query(pattern=rf"^([0-9a-f]{{{UID_LENGTH}}})?$", description="A run to compare with.")] = "",
) -> HTMLResponse:
    """Render settings, code, versions and command of a run, and its notes."""
    with page.service.database.reading() as session:
        run = find_run(session, uid)
        other = find_run(session, to) if to and to != uid else None
        newest = list_runs(session, RunFilter(archived="all"), "created_at", "desc", OFFERED, None)[0]
        machine = run.config.get("machine")
        context = {
            **run_context(page, session, run),
            "detail": run,
            "other": other,
            "offered": [one for one in newest if one.uid != uid and (other is None or one.uid != other.uid)],
            "sections": sections(run, other),
            "command": shlex.join(run.command),
            "commits": commits_of(run),
            "versions": run.versions,
            "machine": machine if isinstance(machine, Mapping) else {},
            "attempts": [attempt_view(attempt) for attempt in run.attempts],
            "created_by": run.created_by,
            "tag": run_detail(run, *names_around(session, run)).etag,
        }
        if other is not None:
            recorded = [everything_of(run), everything_of(other)]
            names = [name for name in differing(recorded) if not is_own(name)]
            context["differences"] = rows_of(names, recorded)
        return page.render("config.html", uid=uid, **context)
