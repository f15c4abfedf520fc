"""The page `/runs/<uid>/panels`: curves that the reader puts together.

The address holds all panels, as `?panel=reward&panel=policy_loss,entropy`, so a link shows them to others. The browser
keeps the last ones and shows them where the address names none (static/js/panels.js).
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse

from rhyme_openrlhf.api.http.fields import RunUid
from rhyme_openrlhf.api.read.curves import curve_names
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.record import METRIC_LENGTH
from rhyme_openrlhf.webui.figures.subjects.metrics import MOST_CURVES
from rhyme_openrlhf.webui.pages.rendering import PageDep
from rhyme_openrlhf.webui.pages.run import run_context
from rhyme_openrlhf.webui.pages.tabs import CurveViewDep

router = APIRouter(include_in_schema=False)

# More than a reader overlooks on one page.
MOST_PANELS = 24
BETWEEN = ","
# In the address of a page without panels, so that the browser does not bring back those that it keeps.
NO_PANEL = " "
PanelText = Annotated[str, Query(max_length=MOST_CURVES * METRIC_LENGTH)]


@router.get("/runs/{uid}/panels")
def panels_page(
    uid: RunUid,
    page: PageDep,
    view: CurveViewDep,
    panel: Annotated[list[PanelText], Query(max_length=MOST_PANELS)] = [],  # noqa: B006 (FastAPI copies it)
) -> HTMLResponse:
    """Render the panels of the address, with a choice of curves for each, and for a new one."""
    chosen = [names for text in panel if (names := curves_in(text))]
    with page.service.database.reading() as session:
        run = find_run(session, uid)
        context = run_context(page, session, run)
        known = curve_names(session, run)
    panels = [
        {
            "names": names,
            "query": view.query_with(curve=names),
            "without": [(name, page.url_with(panel=_joined(_left(chosen, at, name)) or NO_PANEL)) for name in names],
            "removed": page.url_with(panel=_joined([*chosen[:at], *chosen[at + 1 :]]) or NO_PANEL),
            "before": _joined(chosen[:at]),
            "after": _joined(chosen[at + 1 :]),
            "text": BETWEEN.join(names),
            "is_full": len(names) == MOST_CURVES,
        }
        for at, names in enumerate(chosen)
    ]
    return page.render(
        "panels.html",
        uid=uid,
        view=view,
        switches=view.switches(page),
        panels=panels,
        panel_texts=_joined(chosen),
        known=known,
        is_full=len(chosen) >= MOST_PANELS,
        **context,
    )


def curves_in(text: str) -> list[str]:
    """Return the names of a panel's curves, each once, at most MOST_CURVES."""
    return list(dict.fromkeys(name for one in text.split(BETWEEN) if (name := one.strip())))[:MOST_CURVES]


def _joined(panels: list[list[str]]) -> list[str]:
    return [BETWEEN.join(names) for names in panels]


def _left(panels: list[list[str]], at: int, without: str) -> list[list[str]]:
    """Return the panels without one curve of the panel `at`; a panel without curves goes."""
    left = [name for name in panels[at] if name != without]
    return [*panels[:at], *([left] if left else []), *panels[at + 1 :]]
