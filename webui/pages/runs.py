"""The page `/`: which runs exist, how far and how fast are they, and how good are their rewards?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, cast, get_args

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse
from pydantic import BaseModel
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.http.fields import Cursor
from rhyme_openrlhf.api.read.pagination import Direction
from rhyme_openrlhf.api.read.run_json import RunSummary
from rhyme_openrlhf.api.read.run_query import MOST_LETTERS, QueryError, parse
from rhyme_openrlhf.api.read.run_values import CONFIG, FIELDS, METRIC, NAME_PATTERN
from rhyme_openrlhf.api.read.runs import RUN_SORTS, Archived, Origin, RunFilter, list_runs
from rhyme_openrlhf.api.read.saved_views import page_query, views_for
from rhyme_openrlhf.api.store.bounds import NO_NUL, TAG_LENGTH
from rhyme_openrlhf.api.store.models import NAME_LENGTH, Experiment, Run
from rhyme_openrlhf.api.store.status import PERHAPS_ACTIVE, RUN_STATUSES
from rhyme_openrlhf.telemetry.metrics import FIGURES
from rhyme_openrlhf.webui.pages.rendering import Page, PageDep, toggled, url_with
from rhyme_openrlhf.webui.run import sparkline
from rhyme_openrlhf.webui.run.recent import start_phases
from rhyme_openrlhf.webui.run.sparkline import reward_lines
from rhyme_openrlhf.webui.site import text as wording

router = APIRouter(include_in_schema=False)

# Rows per page: one screen of a wall monitor.
ROWS = 50
ORIGINS = (("launched", "Started here"), ("reported", "Reported"), ("imported", "Imported"))
# The same command as in README.md and docs/control-plane.md.
START_COMMAND = "rhyme runs start --name first -f -- rhyme demo"


@dataclass(frozen=True)
class Column:
    """A column of the table. `sort`: the order that a click on its head requests, "" if it has none.

    `value`: the setting that it shows, as `config.GROUP.OPTION`.
    """

    name: str
    title: str
    sort: str = ""
    is_number: bool = False
    hint: str = ""
    by_default: bool = True
    value: str = ""


MODEL, ALGORITHM = f"{CONFIG}actor.model_name_or_path", f"{CONFIG}algo.advantage.estimator"
COLUMNS: tuple[Column, ...] = (
    Column("status", "Status", "status"),
    Column("progress", "Progress", "step"),
    Column("model", "Model", MODEL, hint="The policy: a name on the hub, or a folder", value=MODEL),
    Column("algorithm", "Algorithm", ALGORITHM, hint="How advantages are estimated", value=ALGORITHM),
    Column("reward", "Reward", "reward", True, "Mean over the last epoch with rewards"),
    Column("curve", "Reward curve", "", False, "Mean reward of a few steps between the first and the last"),
    Column("tokens_per_second", "Tokens/s", "tokens_per_second", True, FIGURES["tokens_per_second"].sentence),
    Column("speculation", "Speculation", "speculation_rate", True, FIGURES["speculation_rate"].sentence),
    Column("bubbles", "Bubbles", "bubble_fraction", True, FIGURES["bubble_fraction"].sentence),
    Column("started", "Started", "started_at"),
    Column("duration", "Duration", "", True, "Time in which the run ran, until now if it still runs"),
    Column("finished", "Finished", "finished_at", by_default=False),
    Column("created", "Created", "created_at", hint="When the run was requested or imported", by_default=False),
    Column("heard", "Last event", "last_event_at", by_default=False),
    Column("epoch", "Epoch", "epoch", True, by_default=False),
    Column("engines", "Engines", "", True, by_default=False),
    Column("origin", "Origin", "origin", by_default=False),
    Column("uid", "Id", by_default=False),
)
TIMES = ("created_at", "started_at", "finished_at", "last_event_at")
NAME_COLUMN = Column("name", "Run", "name")
# Most names that the filter offers; the address accepts any.
EXPERIMENTS = 200
# Most metrics and settings shown as columns: more do not fit on a screen.
MOST_VALUES = 8

Words = Annotated[list[Annotated[str, Query(max_length=TAG_LENGTH, pattern=NO_NUL)]], Query(max_length=20)]
Text = Annotated[str, Query(max_length=NAME_LENGTH, pattern=NO_NUL)]
Condition = Annotated[str, Query(max_length=MOST_LETTERS, pattern=NO_NUL)]


class Asked(BaseModel):
    """The query parameters as the form sends them: a field without a choice is empty."""

    status: Words = []
    origin: Words = []
    columns: Words = []
    tag: Text = ""
    experiment: Text = ""
    text: Text = ""
    filter: Condition = ""
    values: Condition = ""
    archived: Text = "no"
    sort: Text = "created_at"
    direction: Text = "desc"
    cursor: Cursor = None

    @property
    def value_names(self) -> tuple[str, ...]:
        """The metrics and settings to show, which are separated by commas or spaces."""
        names = dict.fromkeys(self.values.replace(",", " ").split())
        return tuple(name for name in names if NAME_PATTERN.fullmatch(name))[:MOST_VALUES]

    @property
    def shown(self) -> tuple[Column, ...]:
        """The chosen columns in table order, or the default ones if none is chosen; then metrics and settings."""
        chosen = {name for name in self.columns if name}
        found = tuple(column for column in COLUMNS if column.name in chosen)
        found = found or tuple(column for column in COLUMNS if column.by_default)
        return found + tuple(
            Column(name, name.removeprefix(METRIC).removeprefix(CONFIG), name, True, name) for name in self.value_names
        )

    @property
    def wanted(self) -> RunFilter:
        """The filter; unknown values of a choice are ignored. Raises QueryError."""
        return RunFilter(
            statuses=tuple(word for word in self.status if word in RUN_STATUSES),
            origins=tuple(word for word in self.origin if word in get_args(Origin)),
            tags=(self.tag,) if self.tag else (),
            experiment=self.experiment or None,
            text=self.text or None,
            archived=cast(Archived, self.archived if self.archived in get_args(Archived) else "no"),
            query=parse(self.filter) if self.filter.strip() else None,
        )

    @property
    def order(self) -> tuple[str, Direction]:
        """The column and direction of sorting."""
        known = self.sort in RUN_SORTS or NAME_PATTERN.fullmatch(self.sort)
        return self.sort if known else "created_at", "asc" if self.direction == "asc" else "desc"

    @property
    def as_view(self) -> dict[str, Any]:
        """The query parameters as a saved view has them."""
        sort, direction = self.order
        return {
            "status": [word for word in self.status if word in RUN_STATUSES],
            "origin": [word for word in self.origin if word in get_args(Origin)],
            "tag": self.tag,
            "experiment": self.experiment,
            "text": self.text,
            "filter": self.filter.strip(),
            "archived": self.archived if self.archived in get_args(Archived) else "no",
            "sort": sort,
            "direction": direction,
            "columns": [name for name in self.columns if name],
            "values": list(self.value_names),
        }


@dataclass(frozen=True)
class Head:
    """A column's head: the link of a click, and how the table is sorted by it ("", "ascending", "descending")."""

    column: Column
    href: str
    sorted: str


AskedQuery = Annotated[Asked, Query()]


@router.get("/")
def runs_page(page: PageDep, asked: AskedQuery) -> HTMLResponse:
    """Render the table of runs; the address holds every filter."""
    with page.service.database.reading() as session:
        experiments = list(session.scalars(select(Experiment.name).order_by(Experiment.name).limit(EXPERIMENTS)))
    query = page.request.query_params.multi_items()
    return page.render(
        "runs.html",
        experiments=experiments,
        origins=ORIGINS,
        columns=[(column, column in asked.shown) for column in COLUMNS],
        kept=[(name, value) for name, value in query if name not in ("columns", "values", "cursor") and value],
        fields=", ".join(FIELDS),
        plain_url=url_with("/", query, {"columns": None, "values": None, "cursor": None})
        if any(asked.columns) or asked.values
        else "",
        **_views(page, asked),
        **_table(page, asked),
    )


@router.get("/ui/parts/runs")
def runs_table(page: PageDep, asked: AskedQuery) -> HTMLResponse:
    """Render the table alone, for reloading it in an open page."""
    return page.render("parts/runs_table.html", **_table(page, asked))


def _views(page: Page, asked: Asked) -> dict[str, Any]:
    now_shown = asked.as_view
    with page.service.database.reading() as session:
        views = views_for(session, page.who.token_id)
    queries = [page_query(view.model_dump()) for view in views]
    return {
        "views": [
            (view, url_with("/", query, {}), query == page_query(now_shown), page.may_act or not view.shared)
            for view, query in zip(views, queries, strict=True)
        ],
        "now_shown": now_shown,
        "now_url": page.url_with(cursor=None),
    }


def _table(page: Page, asked: Asked) -> dict[str, Any]:
    sort, direction = asked.order
    with page.service.database.reading() as session:
        problem = ""
        try:
            values = [
                column.value or column.name
                for column in asked.shown
                if column.value or column.name in asked.value_names
            ]
            rows, following = list_runs(session, asked.wanted, sort, direction, ROWS, asked.cursor, values)
        except QueryError as error:
            rows, following, problem = [], None, str(error)
        # Without rows, the page says whether the store is empty or the filter too narrow.
        experiment = _experiment(session, asked.experiment) if asked.experiment else None
        any_run = bool(rows) or session.scalar(select(Run.id).limit(1)) is not None
        has_curves = any(column.name == "curve" for column in asked.shown)
        phases = start_phases(session, rows)
        lines = reward_lines(session, {run.uid: run.step for run in rows}) if has_curves else {}
    query = page.request.query_params.multi_items()

    def link(**changes: Any) -> str:
        return url_with("/", query, changes)

    return {
        "asked": asked,
        "problem": problem,
        "rows": [(run, progress(run), lines.get(run.uid), run.duration(page.now)) for run in rows],
        "phases": phases,
        "heads": [_head(column, sort, direction, link) for column in (NAME_COLUMN, *asked.shown)],
        "line_size": (sparkline.WIDTH, sparkline.HEIGHT),
        "next_url": link(cursor=following) if following else None,
        "first_url": link(cursor=None) if asked.cursor else None,
        "any_run": any_run,
        "experiment": experiment,
        "start_command": START_COMMAND,
        "piece_url": url_with("/ui/parts/runs", query, {}),
        "chips": [
            (word, word in asked.status, link(status=toggled(asked.status, word), cursor=None)) for word in RUN_STATUSES
        ],
    }


def _experiment(session: Session, name: str) -> Any:
    """Return an experiment's `id` and how many of its runs are `unfinished`; None if there is no such experiment."""
    unfinished = func.count(Run.id).label("unfinished")
    query = (
        select(Experiment.id, unfinished)
        .outerjoin(Run, (Run.experiment_id == Experiment.id) & Run.status.in_(PERHAPS_ACTIVE))
        .where(Experiment.name == name)
        .group_by(Experiment.id)
    )
    return session.execute(query).first()


def _head(column: Column, sort: str, direction: Direction, link: Any) -> Head:
    if not column.sort:
        return Head(column, "", "")
    if column.sort == sort:
        other = "asc" if direction == "desc" else "desc"
        return Head(column, link(direction=other, sort=sort, cursor=None), f"{direction}ending")
    # First click: names ascending, numbers and times descending.
    first = "desc" if column.is_number or column.sort == "step" or column.sort in TIMES else "asc"
    return Head(column, link(sort=column.sort, direction=first, cursor=None), "")


def progress(run: RunSummary) -> float | None:
    """Return the share of its steps that a run has done, or None if their number is unknown."""
    return wording.share(run.step, run.steps_total)
