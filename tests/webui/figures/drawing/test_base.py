"""A figure as JSON: nothing that a run wrote is markup there, wherever plotly.js reads some."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import plotly.graph_objects as go
import pytest

from rhyme_openrlhf.api.read.curves import Axis
from rhyme_openrlhf.api.read.system import MachineSample
from rhyme_openrlhf.webui.figures.drawing import timeline
from rhyme_openrlhf.webui.figures.drawing.axes import x_axis
from rhyme_openrlhf.webui.figures.drawing.base import blank, figure_json, plain
from rhyme_openrlhf.webui.figures.drawing.parallel import Line, Place, parallel_coordinates
from rhyme_openrlhf.webui.figures.run_figure import Window
from tests.webui.figure_rows import curve, curves, draw, move, rows

LINK = '<a href="https://example.org">x</a> %{y}'
SHOWN = '&lt;a href="https://example.org"&gt;x&lt;/a&gt; &#37;{y}'


@pytest.mark.parametrize("make", [list, lambda words: words[0]])
def test_no_name_label_or_hover_is_markup(make: object) -> None:
    figure = blank(f"A description with {LINK}.")
    texts = make([f"{LINK}<br>line"])  # type: ignore[operator]
    figure.add_trace(
        go.Bar(x=[LINK], y=[1.5], name=LINK, text=texts, hovertext=texts, hovertemplate="%{text}<extra></extra>")
    )
    figure.update_layout(
        title={"text": LINK},
        legend={"title": {"text": LINK}},
        xaxis={"title": {"text": LINK}, "tickvals": [0], "ticktext": [LINK]},
        annotations=[{"text": LINK, "hovertext": LINK}],
    )
    found = json.loads(figure_json(figure))
    meta = found["layout"].pop("meta")
    (trace,) = found["data"]
    assert "<a" not in json.dumps(found) and meta["description"] == f"A description with {LINK}."
    assert (trace["name"], trace["x"]) == (SHOWN, [SHOWN])
    assert trace["text"] == trace["hovertext"] == make([f"{SHOWN}<br>line"])  # type: ignore[operator]
    # Our own stays.
    assert trace["hovertemplate"] == "%{text}<extra></extra>"


def test_what_is_plain_already_stays() -> None:
    figure = blank("A figure.")
    figure.add_trace(go.Scatter(x=[1, 2], y=[0.5, None], name=plain("a & <b> %{x}")))
    assert json.loads(figure_json(figure)) == json.loads(figure.to_json())


NAMED: list[Callable[[], str]] = [
    lambda: curves(curve("<b>&lt;", 1.0)).data[0].name,
    lambda: draw("system-cpu", [MachineSample("<b>&lt;", 60.0, 0.5, 1, 2)]).data[0].name,
    lambda: timeline.lanes(rows(moves=[move(3, 0, 5, sample="<b>&lt;")]), None).data[-1].text[0],
    lambda: parallel_coordinates(["<b>&lt;", "y"], [Line("x", (Place(1, "1"), Place(2, "2")))]).data[0].text[0],
    lambda: parallel_coordinates(["x", "y"], [Line("<b>&lt;", (Place(1, "1"), Place(2, "2")))]).data[0].text[0],
]


@pytest.mark.parametrize("written", NAMED)
def test_names_read_as_they_were_written(written: Callable[[], str]) -> None:
    assert "&lt;b&gt;&amp;lt;" in written()


def test_a_moving_average_is_drawn_over_its_faint_curve() -> None:
    raw = curve("reward", 0.0, 1.0, 0.5)
    shown = [replace(raw, smooth=curve("reward", 0.0, 0.5, 0.5)), curve("rollout_reward", 0.2, 0.3, 0.4)]
    figure = curves(*shown, options=Window(smooth=0.9))
    faint, average, other = figure.data
    assert faint.opacity < 1 and faint.showlegend is False and list(faint.y) == [0.0, 1.0, 0.5]
    assert average.opacity is None and list(average.y) == [0.0, 0.5, 0.5]
    assert faint.line.color == average.line.color != other.line.color


@pytest.mark.parametrize(("axis", "end", "every"), [("step", 3, 1), ("step", 300, None), ("samples", 3, None)])
def test_axes_of_whole_numbers_have_no_fractions(axis: Axis, end: float, every: int | None) -> None:
    found = x_axis(axis, end)
    assert found["tickformat"] == ",d" and found.get("dtick") == every
    assert "tickformat" not in x_axis("time", end)
