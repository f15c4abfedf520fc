"""The page `/runs/<uid>/samples`: what does the policy write, and which parts of it were drafted?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast, get_args

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from rhyme_openrlhf.api.access.launching import LaunchingDep, readable_roots
from rhyme_openrlhf.api.http.fields import LARGEST_PAGE, Offset, RunUid
from rhyme_openrlhf.api.launch.actions import Launching
from rhyme_openrlhf.api.read.log_files import LogError
from rhyme_openrlhf.api.read.pagination import part_of
from rhyme_openrlhf.api.read.sample_files import (
    NONE_KEPT,
    SEARCH_LENGTH,
    SampleRecord,
    Sort,
    Wanted,
    recorded_steps,
    records_of_step,
    sample_folders,
)
from rhyme_openrlhf.api.store.bounds import NO_NUL
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.telemetry.draft_sources import TEXT_SOURCES
from rhyme_openrlhf.webui.pages.rendering import Page, PageDep, url_with, whole_number
from rhyme_openrlhf.webui.pages.run import run_context

router = APIRouter(include_in_schema=False)

# Responses per page; they are long, so a page is one to three screens.
ROWS = 20
SORTS: dict[str, str] = {"number": "As recorded", "reward": "Reward", "tokens": "Length", "accepted": "Accepted tokens"}

Text = Annotated[str, Query(max_length=SEARCH_LENGTH, pattern=NO_NUL)]
Word = Annotated[str, Query(max_length=40, pattern=NO_NUL)]


class Asked(BaseModel):
    """The query parameters as the form sends them: a field without a choice is empty."""

    step: Word = ""
    text: Text = ""
    group: Word = ""
    min_reward: Word = ""
    max_reward: Word = ""
    sort: Word = "number"
    direction: Word = "asc"
    cursor: Offset = None

    @property
    def is_filtered(self) -> bool:
        """True if the filter may leave out responses."""
        return bool(self.text or self.group or self.min_reward or self.max_reward)


@dataclass(frozen=True)
class Found:
    """One page of the matching responses. `matching`: their number; `unreadable`: lines of the file that are no
    records.
    """

    items: list[SampleRecord]
    next_cursor: str | None
    matching: int
    unreadable: int


@dataclass(frozen=True)
class SampleCard:
    """A response with the shares of its tokens. `shows_prompt`: the prompt differs from that of the response before."""

    sample: SampleRecord
    shows_prompt: bool
    accepted_share: float | None
    acceptance_rate: float | None
    group_url: str


AskedQuery = Annotated[Asked, Query()]


@router.get("/runs/{uid}/samples")
def samples_page(uid: RunUid, page: PageDep, launching: LaunchingDep, asked: AskedQuery) -> HTMLResponse:
    """Render the recorded responses of a step (the newest without `step`); the address holds every choice."""
    with page.service.database.reading() as session:
        context = run_context(page, session, find_run(session, uid))
    shown = _shown(page, launching, uid, asked)
    return page.render("samples.html", uid=uid, **context, **shown, asked=asked, sorts=SORTS)


@router.get("/ui/runs/{uid}/parts/samples")
def samples_part(uid: RunUid, page: PageDep, launching: LaunchingDep, asked: AskedQuery) -> HTMLResponse:
    """Render the responses alone, for reloading them in an open page."""
    return page.render("parts/samples.html", uid=uid, **_shown(page, launching, uid, asked), asked=asked)


def _shown(page: Page, launching: Launching, uid: str, asked: Asked) -> dict[str, Any]:
    folders = sample_folders(page.service.database, uid, readable_roots(launching))
    recorded = recorded_steps(folders)[:LARGEST_PAGE]
    query = page.request.query_params.multi_items()
    here = f"/runs/{uid}/samples"

    def link(**changes: Any) -> str:
        return url_with(here, query, {"cursor": None, **changes})

    steps = [one.step for one in reversed(recorded)]
    step = chosen_step(steps, asked.step)
    found = _records(folders, step, asked) if step is not None else None
    return {
        **step_links(steps, step, link),
        "missing": "" if recorded else NONE_KEPT,
        "is_newest": not asked.step,
        "newest_url": link(step=None),
        "all_url": url_with(here, [("step", asked.step)], {}),
        "found": found,
        "cards": _cards(found, uid) if found is not None else [],
        "next_url": url_with(here, query, {"cursor": found.next_cursor}) if found and found.next_cursor else None,
        "first_url": link() if asked.cursor else None,
        "sources": TEXT_SOURCES,
        "piece_url": url_with(f"/ui/runs/{uid}/parts/samples", query, {}),
    }


def chosen_step(steps: Sequence[int], asked: str) -> int | None:
    """Return the requested one of recorded steps in their order, else the one before it, else the oldest.

    Without `asked` the newest.
    """
    if not steps:
        return None
    wanted = whole_number(asked)
    return steps[-1] if wanted is None else max((one for one in steps if one <= wanted), default=steps[0])


def step_links(steps: Sequence[int], step: int | None, link: Callable[..., str]) -> dict[str, Any]:
    """Return what the links from step to step show; `link(step=...)`: the page of another step."""
    at = steps.index(step) if step is not None else 0
    return {
        "steps": steps,
        "step": step,
        "at": at,
        "previous_url": link(step=steps[at - 1]) if at > 0 else None,
        "following_url": link(step=steps[at + 1]) if at + 1 < len(steps) else None,
    }


def _records(folders: Sequence[tuple[int, Path]], step: int, asked: Asked) -> Found | None:
    wanted = Wanted(asked.text, asked.group, _number(asked.min_reward), _number(asked.max_reward))
    sort = cast(Sort, asked.sort if asked.sort in get_args(Sort) else "number")
    try:
        records, unreadable = records_of_step(folders, step, wanted, sort, asked.direction == "desc")
    except LogError:
        return None  # deleted since it was listed, because the oldest steps are removed
    shown, following = part_of(records, asked.cursor, ROWS)
    return Found(list(shown), following, len(records), unreadable)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _cards(found: Found, uid: str) -> list[SampleCard]:
    cards: list[SampleCard] = []
    for sample in found.items:
        before = cards[-1].sample if cards else None
        accepted = sample.accepted
        cards.append(
            SampleCard(
                sample=sample,
                shows_prompt=before is None or (before.group, before.prompt) != (sample.group, sample.prompt),
                accepted_share=accepted / sample.tokens if accepted is not None and sample.tokens else None,
                acceptance_rate=accepted / sample.drafted if accepted is not None and sample.drafted else None,
                group_url=url_with(f"/runs/{uid}/prompts", [], {"group": sample.group, "step": sample.step}),
            )
        )
    return cards
