"""Kinds of series, the chart that draws them by declaration, and figures that are no chart. All pure.

Invariant: a figure carries no theme (no fonts, background or template), because `static/js/figures.js` applies it in
the browser. Values are Python lists, not arrays: Plotly sends arrays as base64, which the page's CSV export cannot
read.
"""
