"""The page `/runs/<uid>/learning`: does training improve the policy as expected?"""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from rhyme_openrlhf.api.http.fields import RunUid
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.webui.figures.subjects.metrics import GROUPS, grouped, metric_names
from rhyme_openrlhf.webui.pages.rendering import PageDep
from rhyme_openrlhf.webui.pages.run import run_context
from rhyme_openrlhf.webui.pages.tabs import CurveViewDep

router = APIRouter(include_in_schema=False)


@router.get("/runs/{uid}/learning")
def learning_page(uid: RunUid, page: PageDep, view: CurveViewDep) -> HTMLResponse:
    """Render reward, lengths, the trainer's metrics by group, and the metrics that no chart shows."""
    with page.service.database.reading() as session:
        run = find_run(session, uid)
        context = run_context(page, session, run)
        _, rest = grouped(metric_names(session, run))
    metrics = [(name, view.query_with(name=name)) for name in rest]
    return page.render(
        "learning.html", uid=uid, view=view, switches=view.switches(page), groups=GROUPS, metrics=metrics, **context
    )
