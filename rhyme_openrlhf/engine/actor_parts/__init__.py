"""What an engine's actor does beside itself, each idea a part that the run's settings attach (`engine/factory.py`).

1. `part` says what a part is, and what it sees of its engine.
2. `turns` are those of the streaming pipeline; the actor goes from one to the next.
3. `moves` are an engine's samples where samples can move; `devices` is what its node and devices keep for others.
4. `measuring` times decode steps and carrying; `unspeculated_steps` those of an engine without drafts.
5. `rehearsal` generates texts to draft from while the engine has nothing to run.
6. `answers` are those to checks, in token ids.

`histories` (draft indexes for the engine core) and `timeline` (what the actor did, and why it waited) are the actor's
own.
"""
