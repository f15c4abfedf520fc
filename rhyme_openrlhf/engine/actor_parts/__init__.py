"""Parts of the engine's actor: the process that OpenRLHF, the trainer and the home of samples call.

Read in this order:

1. `draft_arguments` says how vLLM's own draft methods are asked for.
2. `history_feed` brings a prompt's draft index to the engine; `histories_in_flight` knows which are needed.
3. `timeline` is the engine's time as intervals; `caused_timeline` knows why it was idle in the pipeline.
4. `turns` is the engine of the streaming pipeline.
5. `moves` lets samples move: `arrivals` (they come), `orders_lock` (one order a sample), `node_buffers` (their blocks).
6. `moves_in_turns` joins turns and moves.
7. `measuring` runs decode steps to be timed; `carrying_measuring` times KV transfers and weight loads.
"""
