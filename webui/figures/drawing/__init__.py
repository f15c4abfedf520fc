"""Figures: pure functions from rows or curves to `plotly.graph_objects.Figure`, one module per subject.

Invariant: a figure carries no theme (no fonts, background or template), because `static/js/figures.js` applies it in
the browser. Values are Python lists, not arrays: Plotly sends arrays as base64, which the page's CSV export cannot
read.
"""
