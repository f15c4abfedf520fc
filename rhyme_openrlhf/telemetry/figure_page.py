"""Plotly figures as one HTML page that needs nothing beside it, light or dark as the reader's system is.

Invariants: Plotly's script is in the page, once; all text is escaped here but `body`, which is markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --page: #ffffff; --line: #d9dee3 }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --page: #14181d; --line: #333a42 } }
body { font: 16px/1.5 system-ui; max-width: 1200px; margin: 1rem auto; padding: 0 1rem;
  color: var(--text); background: var(--page) }
.wide { overflow-x: auto }
table { border-collapse: collapse }
th, td { padding: .4rem .6rem; border-bottom: 1px solid var(--line); text-align: left }
"""
# Figures are drawn in the page's colours, again when the system changes between light and dark.
_COLOURS = """
const drawn = document.querySelectorAll(".plotly-graph-div");
function colour() {
  const of = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  for (const figure of drawn) {
    const found = { "font.color": of("--text"), paper_bgcolor: of("--page"), plot_bgcolor: of("--page") };
    for (const axis of ["xaxis", "yaxis"])
      Object.assign(found, { [axis + ".gridcolor"]: of("--line"), [axis + ".zerolinecolor"]: of("--line") });
    Plotly.relayout(figure, found);
  }
}
colour();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", colour);
"""


def page(title: str, heading: str, body: str, figures: Sequence[go.Figure]) -> str:
    """Return the page: `heading`, the markup of `body`, and the figures below each other."""
    drawn = "".join(
        figure.to_html(
            full_html=False, include_plotlyjs="inline" if number == 0 else False, config={"responsive": True}
        )
        for number, figure in enumerate(figures)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(heading)}</h1>"
        f"{body}{drawn}<script>{_COLOURS}</script></body></html>"
    )
