"""Figures: `queries/` reads rows from the store; `drawing/` turns rows into Plotly figures and is pure.

`run_figure.py` defines a figure of a run; `one_run.py` and `several_runs.py` are the registries.
"""
