"""Questions about what is stored. Nothing here writes.

- Runs: `runs.py`, `run_json.py` (how a run looks in an answer), `pagination.py`, `comparison.py`.
- Curves: `curves.py`, `curve_points.py` (one statement for blocks and rows), `downsampling.py`, `step_buckets.py`.
- Other tables: `timeline.py`, `system.py`, `events.py`, `export.py`.
- Files of run directories: `log_files.py`, `log_search.py`, `sample_files.py`.
"""
