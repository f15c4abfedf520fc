"""What runs report, on its way into the store: checked, then written all or nothing.

A batch goes through `workers.py` (processes beside the service), `decoding.py` (bytes to JSON), `validation.py` (JSON
to events), `store_batch.py` (events into their table), and `derived_rows.py` (what follows from them) with `rollup.py`,
`totals.py` and `system_rows.py`. `announce.py` makes runs known that were not started here, `importer.py` takes a whole
run directory in, `deletion.py` takes a run or an attempt out again. A refusal is a plain exception of these modules.
"""
