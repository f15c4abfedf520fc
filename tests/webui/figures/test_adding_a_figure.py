"""An ordinary figure is one declaration and its query: what such a figure has without a line of drawing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import Step
from rhyme_openrlhf.webui.figures.drawing.chart import Content
from rhyme_openrlhf.webui.figures.drawing.series import Bars
from rhyme_openrlhf.webui.figures.one_run import RUN_FIGURES
from rhyme_openrlhf.webui.figures.run_figure import RunChart, Window


def _steps(session: Session, run: Run, window: Window) -> Sequence[Step]:
    query = select(Step).where(Step.run_id == run.id, Step.step >= window.from_step, Step.step <= window.to_step)
    return session.scalars(query.order_by(Step.step)).all()


ADDED = RunChart(
    "samples", "Samples of each step", _steps, y="Samples", empty="No step is finished yet.",
    content=lambda steps: Content([Bars("Samples", [one.step for one in steps], [one.samples for one in steps])]),
    description="Samples that each step trained on.",
)  # fmt: skip


def test_an_added_figure_answers_like_any_other(dashboard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RUN_FIGURES, ADDED.name, ADDED)
    client, address = dashboard.signed_in("viewer"), f"/ui/runs/{dashboard.run_uid}/figures/{ADDED.name}"
    figure = client.get(address, params={"to_step": 4}).json()
    (bars,), layout = figure["data"], figure["layout"]
    assert (bars["type"], bars["x"], bars["name"]) == ("bar", [1, 2, 3, 4], "Samples") and all(bars["y"])
    assert layout["xaxis"]["dtick"] == 1 and layout["yaxis"]["title"]["text"] == "Samples"
    assert layout["meta"] == {"description": "Samples that each step trained on.", "empty": None}
    nothing = client.get(address, params={"from_step": 100}).json()
    assert nothing["data"] == [] and nothing["layout"]["meta"]["empty"] == "No step is finished yet."
    assert client.get(address, params={"unknown": 1}).status_code == 422
