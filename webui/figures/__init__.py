"""Figures: `queries/` asks the store for rows, `drawing/` makes Plotly figures of rows and is pure.

`run_figure.py` says what a figure of a run is; `one_run.py` and `several_runs.py` are the registries.
"""
