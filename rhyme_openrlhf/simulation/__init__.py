"""Simulated engines under the live run's decisions: what a feature would give on a cluster (docs/simulator.md).

Read in this order:

1. `workload` is what is generated: `presets` of the papers, a `trace` from a file, a `recorded_run`.
2. `settings` says which cluster and which features; `engine_kinds` makes engines of a profile (`shipped`).
3. `job` is a sample; `engine` is one engine in its `slot`; `step_times` are its decode steps.
4. `speculating` paces engines that draft, by `speculation_rates` or `recorded_drafts`.
5. `planner` gives prompts to engines; `interventions` moves samples; `layout_changes` switches layouts.
6. `run` joins them, as events in time: `accounts`, `sharing`, `conditions`, `cycles`; `result` is what it finds.
7. `study` compares runs; `replay` simulates a recorded run again; `recommendation` names the settings to use.
8. `report` and `page` show results.
"""
