"""Figures: `subjects/` declares them beside their queries; `drawing/` draws declarations and is pure.

`run_figure.py` defines a figure of a run; `one_run.py` and `several_runs.py` are the registries.
"""
