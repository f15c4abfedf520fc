"""Pure decisions: which engine generates which sample, with which weights, and when a sample moves.

The live run and the simulator ask the same files (docs/scheduling.md). Read in this order:

1. Before a step: `length_prior` (prompts never seen), `rank_groups`, `engine_shares`, and `step_plan`, which joins them
   or takes the engine with least work.
2. From step to step: `turns` (an engine's next turn and weights), `deferral` (who trains a step later).
3. A move: `move` (its state machine) and `move_costs` (how the KV cache gets there, and what that costs).
4. Who moves: `engine_status` (what an engine reports), `outliers` and `reallocation`.
5. More devices for the last samples: `layouts`, `stage_course` and `tp_switch`; for the longest: `first_layouts`.

No file here imports ray, vllm or torch.
"""
