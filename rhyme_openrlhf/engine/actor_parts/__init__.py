"""Parts of an engine's actor, one idea each; the run's settings attach them (`engine/factory.py`).

1. `part` is the base of parts, and the protocol of the engine that they see.
2. `turns` runs the streaming pipeline's turns one after the other.
3. `moves` keeps an engine's samples where samples can move; `devices` keeps KV buffers and shared devices.
4. `measuring` times decode steps and transfers; `unspeculated_steps` times an engine without drafts.
5. `proving` lets an engine on a GPU prove its drafts before its first sample.
6. `answers` responds to checks, in token ids.

`histories` (draft indexes for the engine core) and `timeline` (activity of the actor, and causes of waiting) belong to
the actor itself.
"""
