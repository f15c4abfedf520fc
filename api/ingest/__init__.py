"""Ingestion: checks the reports of runs and stores each batch completely or not at all.

A batch passes through these modules:

- `workers.py`: worker processes of the service
- `decoding.py`: bytes to JSON
- `validation.py`: JSON to events
- `store_batch.py`: events to their table
- `derived_rows.py`, with `rollup.py` and `totals.py`: rows derived from events

`announce.py` creates runs that were not started here, and `deletion.py` deletes a run or an attempt. `importer.py`
imports a whole run directory, which `imported_files.py` reads; `replacement.py` replaces stored events by those of the
directory. These modules refuse by raising plain exceptions.
"""
