"""One vLLM engine, and everything that knows vLLM: its actor, its scheduler, its workers, its patches.

An engine runs in three kinds of processes, so each part belongs to exactly one of them. Read in this order:

1. `factory` stands where OpenRLHF creates engine actors.
2. `actor` is the actor's class; `seeded_actor` is its base without anything of ours but seeds.
3. `actor_parts/` is what the actor does: turns, moves, measuring, history.
4. `request_keys`, `seeding` and `messages` say what a request and an order tell an engine.
5. `checked_reward` awaits a sample's reward within its limit.
6. `scheduler` plugs into vLLM's scheduler; `scheduler_parts/` is what it does in a decode step.
7. `worker` extends vLLM's worker; `kv_copies` copies KV blocks there, and `proposers` proposes drafts.
8. `patches/` changes vLLM where no plug-in reaches.
9. `profiling_connector` fills contexts without computing them, for measured steps alone.
10. `port`, `measured_engine` and `lost_engines` are how other processes call an engine, or do without it.

`moves/`, `weights/` and `kv/` say what moves and loads mean. An upgrade of vLLM is work in this folder.
"""
