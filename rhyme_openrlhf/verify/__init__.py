"""`rhyme verify`: whether what is promised holds on this machine, with this model and these flags.

Read in this order:

1. `bench` is what every check works on; `outcome` is what a check found.
2. `engines` starts two engines, of which one speculates, or those that `rhyme profile` measures.
3. The checks: `greedy`, `sampled` and `proof` (by what is in `rhyme_openrlhf/proof`), `weights`, `memory`, `speed`.
4. What `weights` needs: `training_arguments`, `varied_reward`.
5. `report` runs the checks and shows what they found; `record` keeps what was proved, for `rhyme doctor`.
"""
