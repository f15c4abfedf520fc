"""The streaming pipeline (RhymeRL 4.2 and 6): engines generate the next steps while the trainer trains this one.

Read in this order, which is the way of a step:

1. `step` is the one record of a step, and draws its prompts.
2. `generator` draws steps ahead and hands each engine its turn.
3. `controller` hands out steps and collects what engines finish.
4. `step_planner` asks `scheduling/` where the prompts of a step go.
5. `outlier_watch` finds responses far too long.
6. `engines` settles what a lost engine owed, and records what engines did.
7. `batch` is what the trainer gets of a step, and what may get into its batch.
8. `trainer` puts all this into OpenRLHF's asynchronous training.

Turns and deferral are decided in `scheduling/`; the engine's side is `engine/actor_parts/turns.py`.
"""
