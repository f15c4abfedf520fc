"""Figures: pure functions from rows or curves to `plotly.graph_objects.Figure`, one module a subject.

Invariant: a figure carries no theme (no fonts, no background, no template): `static/js/figures.js` lays it over.
Values are Python lists, not arrays: Plotly sends arrays as base64, which the page's CSV export could not read.
"""
