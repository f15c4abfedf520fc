"""The store: one SQLite file or PostgreSQL database, its tables, and the rules that every writer keeps.

Read in this order: `base.py` and `bounds.py` (column types; values that fit them), `models.py` (what people handle),
`record.py` (what runs report), `database.py` (sessions, upgrade), `readiness.py`, `lookup.py` (rows by name),
`status.py` and `run_status.py` (the legal lives of a run), `credentials.py` (tokens, sessions, codes), `read_cache.py`,
`json_values.py` (which JSON is kept), `bulk.py` (many rows in one statement), `step_figures.py`, `curve_blocks.py` and
`curve_stretches.py` (curves, kept value beside value).
"""
