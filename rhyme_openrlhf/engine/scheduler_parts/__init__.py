"""Parts of the scheduler plug-in: the process of vLLM's engine core, one decode step after the other.

Read in this order:

1. `clock` says how long decode steps take; `timing` reads it at vLLM's scheduler; `pacing` waits for a profile.
2. `meter` counts what steps did.
3. `row_limit` keeps every step within the rows that memory was reserved for.
4. `vllm_methods` plans the drafts of vLLM's own methods (history's are drafted in `engine/scheduler.py`).
5. `moves` is what a move needs at its source, `arrivals` what it needs at its destination.
6. `status_figures` counts what an engine reports of itself.
"""
