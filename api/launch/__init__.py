"""Runs that this service starts: from a checked spec to a job of a Ray cluster.

- Specs: `schema.py` (every option), `spec.py`, `spec_paths.py`, `spec_command.py`, `gain_estimate.py`, `sweep.py`
- Rows: `actions.py` (start, stop, resume, clone), `queue_state.py`
- Dispatch: `dispatcher.py` (the loop), `queueing.py` (its decisions, pure), `lease.py` (one service dispatches),
  `job_file.py`
- Ray: `ray_jobs.py` (the only module that imports ray), `cluster_state.py`, `local_cluster.py`
"""
