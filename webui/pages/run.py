"""The page `/runs/<uid>`: how is the run doing now?

Every tab of a run shows its header (status, progress, actions); `run_context` returns the values for that template.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse
from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.http.fields import RunUid
from rhyme_openrlhf.api.read.curves import curves
from rhyme_openrlhf.api.read.phases import phases_of
from rhyme_openrlhf.api.read.runs import summary_of
from rhyme_openrlhf.api.read.verdict import verdict_of
from rhyme_openrlhf.api.store.bounds import INT32
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.models import Attempt, Run
from rhyme_openrlhf.api.store.status import ACTIVE, RESUMABLE
from rhyme_openrlhf.settings.recorded import object_at
from rhyme_openrlhf.webui.pages.rendering import Page, PageDep
from rhyme_openrlhf.webui.pages.tabs import CurveViewDep
from rhyme_openrlhf.webui.run.recent import RECENT, Change, recent_change, seconds_left, step_ends
from rhyme_openrlhf.webui.site import text

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class TileForm:
    """The definition of a tile: the run's figure `name`, its format, and whether more is better."""

    name: str
    title: str
    hint: str
    is_share: bool
    more_is_better: bool
    unit: str = ""
    window: str = "whole run"


@dataclass(frozen=True)
class Tile:
    """A tile as shown. `window`: the steps of its value. `change` from `compared`, both empty if unknown.

    `trend`: "better", "worse", or "" for a change within the noise of the steps.
    """

    title: str
    hint: str
    value: str
    change: str
    compared: str
    trend: str
    unit: str
    window: str


LEVEL_WORDS = {"healthy": "healthy", "look": "look here", "broken": "broken"}
TILES: tuple[TileForm, ...] = (
    TileForm("reward", "Reward", "Mean over the last epoch with rewards", False, True, window="last epoch"),
    TileForm("tokens_per_second", "Throughput", "Response tokens per second of rollout", False, True, "tokens/s"),
    TileForm("speculation_rate", "Speculation rate", "Share of response tokens that were accepted drafts", True, True),
    TileForm(
        "bubble_fraction",
        "Bubble fraction in rollouts",
        "Share of engine time with nothing to run; training is not counted",
        True,
        False,
    ),
)


@router.get("/runs/{uid}")
def run_page(uid: RunUid, page: PageDep, view: CurveViewDep) -> HTMLResponse:
    """Render the overview of a run."""
    with page.service.database.reading() as session:
        run = find_run(session, uid)
        context = {**run_context(page, session, run), **_verdict(session, run), "tiles": _tiles(session, run)}
    return page.render("run.html", uid=uid, view=view, switches=view.switches(page), **context)


@router.get("/ui/runs/{uid}/parts/header")
def run_header(uid: RunUid, page: PageDep) -> HTMLResponse:
    """Render status, progress, remaining time and actions."""
    with page.service.database.reading() as session:
        context = run_context(page, session, find_run(session, uid))
    return page.render("parts/run_header.html", uid=uid, **context)


@router.get("/ui/runs/{uid}/parts/tiles")
def run_tiles(uid: RunUid, page: PageDep) -> HTMLResponse:
    """Render the tiles of the overview."""
    with page.service.database.reading() as session:
        tiles = _tiles(session, find_run(session, uid))
    return page.render("parts/run_tiles.html", uid=uid, tiles=tiles)


@router.get("/ui/runs/{uid}/parts/verdict")
def run_verdict(uid: RunUid, page: PageDep) -> HTMLResponse:
    """Render whether the run is healthy, and why one should look."""
    with page.service.database.reading() as session:
        context = _verdict(session, find_run(session, uid))
    return page.render("parts/run_verdict.html", uid=uid, **context)


def _verdict(session: Session, run: Run) -> dict[str, Any]:
    """Return the values of the verdict. The header says already why a run ended, and what never arrived."""
    found = verdict_of(session, run, phases_of(session, run, usual=False))
    return {
        "verdict": found,
        "level_words": LEVEL_WORDS[found.level],
        "reasons": [one for one in found.reasons if one.text != run.message],
    }


def run_context(page: Page, session: Session, run: Run) -> dict[str, Any]:
    """Return the values of the header, which every tab shows."""
    active = run.status in ACTIVE
    left = seconds_left(step_ends(session, run), run.steps_total) if run.status == "running" else None
    summary = summary_of(session, run)
    return {
        "run": summary,
        "phases": [phase.text(page.now) for phase in phases_of(session, run)],
        "notes": run.notes,
        "progress": text.share(run.step, run.steps_total),
        "seconds_left": left,
        "seconds_so_far": summary.duration(page.now),
        "emulated": object_at(run.config, "settings", "emulate").get("profile", ""),
        "can_stop": active and run.status != "stopping",
        "can_resume": run.status in RESUMABLE and run.spec is not None,
        "can_clone": run.spec is not None or run.command[:2] == ["rhyme", "train"],
    }


def _tiles(session: Session, run: Run) -> list[Tile]:
    found = curves(
        session, run.uid, [form.name for form in TILES], max(0, run.step - 2 * RECENT + 1), INT32, 4 * RECENT
    )
    return [
        _tile(form, getattr(run, form.name), recent_change(curve.values))
        for form, curve in zip(TILES, found, strict=True)
    ]


def _tile(form: TileForm, value: float | None, change: Change | None) -> Tile:
    written = text.percent(value) if form.is_share else text.number(value)
    if change is None:
        return Tile(form.title, form.hint, written, "", "", "", form.unit, form.window)
    moved = text.change(change.by, form.is_share)
    trend = ""
    if change.is_clear and not moved.startswith("±"):
        trend = "better" if (change.by > 0) == form.more_is_better else "worse"
    compared = f"vs. {text.counted(change.steps, 'step')} before"
    return Tile(form.title, form.hint, written, moved, compared, trend, form.unit, form.window)


@dataclass(frozen=True)
class AttemptChoice:
    """An attempt with a `title` made of its number, whether it resumes another attempt, and its status."""

    number: int
    title: str


def attempts_of(session: Session, run: Run) -> list[AttemptChoice]:
    """Return the run's attempts, the newest first."""
    query = select(Attempt).where(Attempt.run_id == run.id).order_by(Attempt.number.desc())
    return [
        AttemptChoice(one.number, f"Attempt {one.number}{' (resumed)' if one.resumes else ''}: {one.status}")
        for one in session.scalars(query)
    ]
