"""Queries of the store. Nothing here writes.

- Runs: `runs.py`, `run_query.py` (the language of filters), `run_values.py` (their names), `run_json.py` (a run in a
  response), `phases.py` (what it does now), `pagination.py`, `comparison.py`.
- Curves: `curves.py`, `curve_points.py` (one statement for blocks and rows), `downsampling.py`, `step_buckets.py`.
- Other tables: `timeline.py`, `system.py`, `events.py`, `export.py`.
- Files of run directories: `log_files.py`, `log_search.py`, `sample_files.py`.
"""
