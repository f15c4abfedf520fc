"""Simulated engines under the live run's decisions: what a feature would give on a cluster (docs/simulator.md).

Read in this order:

1. `workload` is what is generated: drawn, from a `trace` file, or from a `recorded_run`.
2. `settings` says which cluster and which features; `engine_kinds` makes engines of profiles.
3. `engine` is an engine with its samples; `speculation` paces engines that draft; `slot` is an engine's place in a run.
4. `planner` gives prompts to engines; `interventions` moves samples; `layout_changes` switches layouts.
5. `run` joins them, as events in time; `result` is what it finds.
6. `study` compares runs; `recommendation` names the settings to use; `right_size` chooses engines and features for a
   recorded run; `report` and `page` show results.
"""
