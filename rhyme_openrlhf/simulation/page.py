"""A simulation as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from rhyme_openrlhf.simulation.report import HEADINGS, rows
from rhyme_openrlhf.simulation.result import STATES, Result
from rhyme_openrlhf.simulation.study import Variant
from rhyme_openrlhf.telemetry.figure_page import page


def draw(heading: str, notes: Sequence[str], variants: Sequence[Variant], results: Sequence[Result]) -> str:
    """Return the page: the table, throughput, where the devices' time goes, and the time of each step."""
    figures = [_throughput(variants, results), _states(variants, results), _steps(variants, results)]
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADINGS)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows(variants, results)
    )
    said = "".join(f"<p>{escape(note)}</p>" for note in notes)
    table = f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
    return page("simulated run", "Simulated, not measured", f"<p>{escape(heading)}</p>{said}{table}", figures)


def _throughput(variants: Sequence[Variant], results: Sequence[Result]) -> go.Figure:
    figure = go.Figure(go.Bar(x=[v.name for v in variants], y=[r.samples_per_second for r in results]))
    return figure.update_layout(title="Throughput (simulated)", yaxis={"title": "samples a second"})


def _states(variants: Sequence[Variant], results: Sequence[Result]) -> go.Figure:
    figure = go.Figure()
    for state in STATES:
        figure.add_bar(
            name=state,
            x=[variant.name for variant in variants],
            y=[100 * result.accounts.bubble_fraction(state) for result in results],
        )
    return figure.update_layout(
        barmode="stack", title="Where the devices' time goes (simulated)", yaxis={"title": "% of device time"}
    )


def _steps(variants: Sequence[Variant], results: Sequence[Result]) -> go.Figure:
    figure = go.Figure()
    for variant, result in zip(variants, results, strict=True):
        ends = [0.0, *(step.trained for step in result.steps)]
        figure.add_scatter(
            name=variant.name,
            x=list(range(1, len(ends))),
            y=[after - before for before, after in zip(ends, ends[1:], strict=False)],
        )
    return figure.update_layout(
        title="From one trained step to the next (simulated)", xaxis={"title": "step"}, yaxis={"title": "seconds"}
    )
