"""The store: one SQLite file or PostgreSQL database, its tables, and the rules of every writer.

Modules in reading order:

- `base.py`, `bounds.py`: column types, and types of values that fit them
- `models.py`: tables of runs, attempts, tokens and so on
- `record.py`: tables of reported data
- `database.py`, `readiness.py`: sessions, upgrade, readiness
- `races.py`: constraints that two requests may meet at once
- `lookup.py`: rows by name
- `status.py`, `run_status.py`: legal changes of a run's status
- `credentials.py`: tokens, sessions, codes
- `read_cache.py`, `json_values.py`, `bulk.py`: cached values, valid JSON, bulk inserts
- `parameters.py`: settings of runs as rows
- `step_figures.py`, `curve_blocks.py`: curves, stored as arrays
"""
