"""Code that knows vLLM's insides, one idea a module: each names the versions it was checked against and has a contract
test.

1. `core_channel` adds a method to the engine core, so that an actor can call its scheduler.
2. `resumed_requests` lets a new request bring response tokens and a generator's state.
3. `resumed_outputs` begins an output with what was generated elsewhere.
4. `single_tokens` ends a response with a stop string at the token that completes it, however many a step gives.
5. `queues` takes requests out of the scheduler's queues, puts them back and holds seats.
6. `rejection_sampling` takes log-probabilities of the computed rows alone, reserves memory for all of them, and counts
   drafts towards a response's minimum length.
7. `second_runner` has vLLM's second model runner verify the scheduler's drafts.
8. `late_drafts` has that runner ask for them when a step is scheduled already.

Corrections of vLLM's CPU build are in `platform/`.
"""
