"""The page `/runs/<uid>/timeline`: which engine waits, for what, and since when?"""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse
from pydantic import Field, model_validator
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.http.fields import RunUid
from rhyme_openrlhf.api.read.curves import Axis
from rhyme_openrlhf.api.read.timeline import MAX_LANES
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.engine_waits import NAMES, answer, waits
from rhyme_openrlhf.webui.figures.drawing.occupancy import LEVELS
from rhyme_openrlhf.webui.figures.run_figure import newest_step
from rhyme_openrlhf.webui.figures.subjects.timeline import (
    GRID_INTERVALS,
    LANE_INTERVALS,
    LANES,
    TimelineOptions,
    timeline_rows,
)
from rhyme_openrlhf.webui.pages.rendering import PageDep, url_with
from rhyme_openrlhf.webui.pages.run import run_context
from rhyme_openrlhf.webui.pages.tabs import CurveView

router = APIRouter(include_in_schema=False)

View = Literal["lanes", "heat", "states"]
VIEWS: dict[View, tuple[str, str]] = {
    "lanes": ("Lanes", "timeline"),
    "heat": ("Heat map", "timeline_heat"),
    "states": ("Engines by state", "timeline_states"),
}
STEP_CHOICES = (1, 3, 10, 30)
LANE_CHOICES = (8, 16, 32, 64, MAX_LANES)
# The figure's height (figures.css) by the largest number of lanes.
HEIGHTS = ((6, ""), (12, "tall"), (24, "taller"), (MAX_LANES, "tallest"))

# The bar chart is of steps; between them there is only time.
BAR_AXES: dict[Axis, str] = {"step": "Steps", "time": "Time"}

# Entries of the legend for windows too narrow for a legend within the figure: (name, colour).
STATE_LEGEND = [(NAMES[state], color) for state, color in palette.LANES.items()] + [("Trainer's stages", palette.STAGE)]
LEVEL_LEGEND = [(name, color) for name, _, color in LEVELS]


class Asked(TimelineOptions):
    """The page's query.

    `count`: most lanes, by default as many as the view can show; `axis`: the x axis of the bar chart.
    """

    view: View = "lanes"
    count: int | None = Field(default=None, ge=1, le=MAX_LANES)
    axis: Axis = "step"

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, given: Any) -> Any:
        """Drop empty values, which a form sends for fields without a choice."""
        return {name: value for name, value in given.items() if value != ""} if isinstance(given, dict) else given

    @property
    def most_lanes(self) -> int:
        """Number of lanes to show."""
        return self.count if self.count is not None else (LANES if self.view == "lanes" else MAX_LANES)

    def options(self) -> TimelineOptions:
        """Return the options of the figure."""
        return TimelineOptions(
            step=self.step, steps=self.steps, engines=self.engines, lanes=self.most_lanes, order=self.order
        )


AskedQuery = Annotated[Asked, Query()]


@router.get("/runs/{uid}/timeline")
def timeline_page(uid: RunUid, page: PageDep, asked: AskedQuery) -> HTMLResponse:
    """Render the lanes, the answer in words, and the bubble fraction of all steps."""
    with page.service.database.reading() as session:
        run = find_run(session, uid)
        context = {**run_context(page, session, run), **_answer(session, run, uid, asked)}
    shown = asked.options().model_dump(exclude_defaults=True)
    title, figure = VIEWS[asked.view]
    height = next(name for most, name in HEIGHTS if len(context["waits"]) <= most)
    return page.render(
        "timeline.html",
        uid=uid,
        asked=asked,
        figure=figure,
        legend=LEVEL_LEGEND if asked.view == "heat" else STATE_LEGEND,
        figure_query=f"?{urlencode(shown)}" if shown else "",
        height="tall" if asked.view == "states" else height,
        views=[(name, title, name == asked.view, page.url_with(view=name)) for name, (title, _) in VIEWS.items()],
        step_choices=sorted({*STEP_CHOICES, asked.steps}),
        lane_choices=sorted({*LANE_CHOICES, asked.most_lanes}),
        switches=[CurveView(asked.axis).axis_switch(page, BAR_AXES)],
        bars_query=CurveView(asked.axis).query,
        piece_url=url_with(f"/ui/runs/{uid}/parts/timeline", page.request.query_params.multi_items(), {}),
        **context,
    )


@router.get("/ui/runs/{uid}/parts/timeline")
def timeline_answer(uid: RunUid, page: PageDep, asked: AskedQuery) -> HTMLResponse:
    """Render the answer in words, and links to other steps."""
    with page.service.database.reading() as session:
        context = _answer(session, find_run(session, uid), uid, asked)
    return page.render("parts/timeline_answer.html", uid=uid, asked=asked, **context)


def _answer(session: Session, run: Run, uid: str, asked: Asked) -> dict[str, Any]:
    most = LANE_INTERVALS if asked.view == "lanes" else GRID_INTERVALS
    rows = timeline_rows(session, run, asked.options(), most)
    newest = newest_step(session, run)
    found = waits(rows.lanes)
    given = [(name, str(value)) for name, value in asked.model_dump(exclude_defaults=True).items()]

    def link(**changes: Any) -> str:
        return url_with(f"/runs/{uid}/timeline", given, changes)

    return {
        "sentences": answer(found, rows.first, rows.last, rows.engines),
        "waits": found,
        "engine_links": {one.engine: link(engines=str(one.engine)) for one in found},
        "first": rows.first,
        "last": rows.last,
        "newest": newest,
        "engines": rows.engines,
        "truncated": most if rows.truncated else None,
        "earlier": link(step=rows.first - 1) if rows.first > 1 else None,
        "later": link(step=min(newest, rows.last + asked.steps)) if rows.last < newest else None,
        "latest": link(step=None),
        "all_engines": link(engines=None) if asked.engines else None,
    }
