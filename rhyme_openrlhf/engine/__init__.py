"""One vLLM engine, and everything that knows vLLM: its actor, its scheduler, its workers, its patches.

An engine runs in three kinds of processes, so each part belongs to exactly one of them. Read in this order:

1. `calls` says what is called across the borders of these processes; `messages` what travels with the calls.
2. `factory` stands where OpenRLHF creates engine actors, and says which parts each has.
3. `actor` is the actor's class; `actor_parts/` is what it has: turns, samples that move, measuring, answers.
4. `arguments` are vLLM's for our plug-ins; `requests` makes every request.
5. `checked_reward` awaits a sample's reward within its limit.
6. `scheduler` plugs into vLLM's scheduler; `scheduler_parts/` is what it does in a decode step.
7. `worker` extends vLLM's worker; `kv_copies` copies KV blocks there, and `proposers` proposes drafts.
8. `patches/` changes vLLM where no plug-in reaches.
9. `profiling_connector` fills contexts without computing them, for measured steps alone.
10. `port` is how other processes call an engine.

`moves/`, `weights/` and `kv/` say what moves and loads mean. An upgrade of vLLM is work in this folder.
"""
