"""The page `/runs/<uid>/speculation`: is speculation faster than decoding without it?"""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.http.fields import RunUid
from rhyme_openrlhf.api.read.earlier_runs import earlier_runs_of
from rhyme_openrlhf.api.read.verdict import gain_of
from rhyme_openrlhf.api.store.bounds import INT32
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.settings.recorded import object_at
from rhyme_openrlhf.webui.figures.run_figure import MOST_STEPS_SHOWN, STEPS_SHOWN, StepsShown, shown_steps
from rhyme_openrlhf.webui.figures.subjects.timeline import RANGES, RANGES_LENGTH
from rhyme_openrlhf.webui.pages.rendering import PageDep
from rhyme_openrlhf.webui.pages.run import run_context
from rhyme_openrlhf.webui.pages.tabs import CurveViewDep

router = APIRouter(include_in_schema=False)
NO_GAIN = "This run has reported no gain against an engine without drafts."


@router.get("/runs/{uid}/speculation")
def speculation_page(
    uid: RunUid,
    page: PageDep,
    view: CurveViewDep,
    step: Annotated[int | None, Query(ge=1, le=INT32)] = None,
    steps: Annotated[int, Query(ge=1, le=MOST_STEPS_SHOWN)] = STEPS_SHOWN,
    engines: Annotated[str, Query(max_length=RANGES_LENGTH, pattern=RANGES)] = "",
) -> HTMLResponse:
    """Render rates over all steps, and single engines in the few steps that `step` and `steps` name."""
    with page.service.database.reading() as session:
        run = find_run(session, uid)
        context = run_context(page, session, run)
        first, last = shown_steps(session, run, StepsShown(step=step, steps=steps))
        earlier_runs = earlier_runs_of(session, run)
        gain, drafts = _gain(session, run), has_drafts(run)
    looks: dict[str, Any] = {"steps": steps}
    if step is not None:
        looks["step"] = step
    if engines:
        looks["engines"] = engines
    return page.render(
        "speculation.html",
        uid=uid,
        view=view,
        switches=view.switches(page),
        looks=f"?{urlencode(looks)}",
        first=first,
        last=last,
        earlier=page.url_with(step=max(1, last - steps)) if first > 1 else None,
        later=None if step is None else page.url_with(step=last + steps),
        latest=None if step is None else page.url_with(step=None),
        earlier_runs=earlier_runs,
        gain=gain,
        drafts=drafts,
        **context,
    )


@router.get("/ui/runs/{uid}/parts/gain")
def gain_piece(uid: RunUid, page: PageDep) -> HTMLResponse:
    """Render how much faster drafts make the run."""
    with page.service.database.reading() as session:
        gain = _gain(session, find_run(session, uid))
    return page.render("parts/gain.html", gain=gain)


def has_drafts(run: Run) -> bool:
    """Return False for a run whose record says that it has no drafts; a run without a record may have some."""
    drafts = object_at(run.config, "settings", "histospec").get("enable", True)
    return bool(drafts) or run.speculation_rate not in (None, 0.0)


def _gain(session: Session, run: Run) -> str:
    """Return the sentence of the run's gain."""
    found = gain_of(session, run)
    if found is None or not found.sentence:
        return NO_GAIN if run.step else "Not known yet: no step is over."
    return f"{found.sentence} {found.advice}".rstrip()


@router.get("/ui/runs/{uid}/parts/earlier-runs")
def earlier_runs_piece(uid: RunUid, page: PageDep) -> HTMLResponse:
    """Render the earlier runs that the run drafts from."""
    with page.service.database.reading() as session:
        earlier_runs = earlier_runs_of(session, find_run(session, uid))
    return page.render("parts/earlier_runs.html", earlier_runs=earlier_runs)
