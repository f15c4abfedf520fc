"""A run's life on a cluster: what it needs, how it starts, who watches it, how it ends.

Read in this order:

1. `resources` counts the GPUs that a run asks for; `memory_plan` says whether its models fit.
2. `launch` is one run from checked arguments to summary; `source_code` says which code it is made with.
3. `placement` points OpenRLHF's launcher at our classes.
4. `reporting` starts the reporter; `system_watch` records what the machines do.
5. `supervisor` watches the run: `actor_table` (who died), `stage_watch` (who is stuck), `process_log` (last words).
6. `termination` turns SIGTERM into a stop with a checkpoint; `reaper` ends what is left, however the driver ended.

`resources`, `memory_plan` and `stage_watch` import neither ray, vllm nor torch.
"""
