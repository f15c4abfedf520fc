"""The streaming pipeline (RhymeRL 4.2 and 6): engines generate the next steps while the trainer trains this one.

Read in this order, which is the way of a step:

1. `trainer` runs the generator beside the training actor.
2. `generator` draws steps ahead from `prompt_stream` and hands each engine its turn.
3. `controller` hands out steps and collects what engines finish.
4. `step_planner` asks `scheduling/` where the prompts of a step go.
5. `step_in_flight` is a step that engines have; `step_buffer` is the batch that comes together.
6. `prompt_filter` leaves out prompt groups that teach nothing; `outlier_watch` finds responses far too long.
7. `engine_loss` settles what a lost engine owed.
8. `experience` makes experiences while the rest of the step is generated.
9. `events` and `watch` record engines and steps.

Turns and deferral are decided in `scheduling/`; the engine's side is `engine/actor_parts/turns.py`.
"""
