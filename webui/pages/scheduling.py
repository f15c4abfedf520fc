"""The page `/runs/<uid>/scheduling`: are predicted lengths right, what was moved, and is the run of the right size?"""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from rhyme_openrlhf.api.access.launching import LaunchingDep, readable_roots
from rhyme_openrlhf.api.http.fields import RunUid
from rhyme_openrlhf.api.http.problems import ProblemError
from rhyme_openrlhf.api.launch.right_size import RightSizeView, advise, lacks
from rhyme_openrlhf.api.read.log_files import newest_directory
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.webui.figures.drawing.timeline import CAUSE_WORDS
from rhyme_openrlhf.webui.figures.subjects.scheduling import move_kinds
from rhyme_openrlhf.webui.pages.rendering import PageDep
from rhyme_openrlhf.webui.pages.run import run_context

router = APIRouter(include_in_schema=False)


@router.get("/runs/{uid}/scheduling")
def scheduling_page(uid: RunUid, page: PageDep, launching: LaunchingDep, right_size: bool = False) -> HTMLResponse:
    """Render ranks, groups, moves and layout switches; `right_size`: also simulate other engines and features."""
    roots = readable_roots(launching)
    with page.service.database.reading() as session:
        run = find_run(session, uid)
        context = {**run_context(page, session, run), "kinds": move_kinds(session, run)}
        directory, config = newest_directory(session, run, roots), run.config
    reason = lacks(directory)
    advice = RightSizeView.lacking(reason) if reason else None
    if right_size and not reason:
        try:
            with page.service.limits.simulations.one():
                advice = advise(directory, config, roots)
        except ProblemError as busy:
            # What was recorded needs no simulation.
            advice = RightSizeView.lacking(busy.detail)
    return page.render("scheduling.html", uid=uid, cause_words=CAUSE_WORDS, advice=advice, **context)


@router.get("/ui/runs/{uid}/parts/moves")
def moves_table(uid: RunUid, page: PageDep) -> HTMLResponse:
    """Render the moves, grouped by cause, carrier and outcome."""
    with page.service.database.reading() as session:
        kinds = move_kinds(session, find_run(session, uid))
    return page.render("parts/moves_table.html", uid=uid, kinds=kinds, cause_words=CAUSE_WORDS)
