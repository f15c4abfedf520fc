"""`rhyme verify`: whether what is promised holds on this machine, with this model and these flags.

Read in this order:

1. `bench` is what every check works on; `outcome` is what a check found.
2. `engines` starts two engines, of which one speculates, or those that `rhyme profile` measures.
3. The checks: `greedy`, `sampled` (judged by `chi_square`), `weights`, `memory`, `speed`.
4. What they need: `histories`, `training_arguments`, `varied_reward`.
5. `report` runs the checks and shows what they found; `record` keeps what was proved. `cli/preflight_runner.py`
   chooses by it which model runner of vLLM drafts run in (`--drafting.runner auto`).
"""
