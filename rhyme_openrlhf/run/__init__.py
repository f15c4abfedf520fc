"""A run's life on a cluster: what it needs, how it starts, who watches it, how it ends.

Read in this order:

1. `resources` plans what a run needs: how many GPUs, and how much memory of each; `model_shape` reads its models.
2. `launch` is one run from checked arguments to summary; `directory_lock` keeps other runs out of its checkpoints, and
   `source_code` says which code it is made with.
3. `placement` points OpenRLHF's launcher at our classes.
4. `reporting` starts the reporter, and records what the machines do.
5. `supervisor` watches the run: which process died; `process_logs` has its last words; `stage_watch` says which stage
   is stuck; `live_logs` copies what the processes print.
6. `termination` turns SIGTERM into a stop with a checkpoint; `reaper` ends what is left, however the driver ended.

`resources`, `model_shape`, `process_logs` and `stage_watch` import neither ray, vllm nor torch.
"""
