"""Runs that this service starts: from a checked spec to a job of a Ray cluster.

What a run is started with: `schema.py` (every option), `spec.py`, `spec_paths.py`, `spec_command.py`,
`gain_estimate.py`. Rows: `actions.py` (start, stop, resume, clone), `queue_state.py`. What runs them: `dispatcher.py`
(the loop), `queueing.py` (its decisions, pure), `lease.py` (one service of all dispatches), `job_file.py`,
`ray_jobs.py` (the one module that imports ray), `cluster_state.py`, `local_cluster.py`.
"""
