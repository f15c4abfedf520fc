"""Patches of vLLM, one a module: each names the version it was checked against, and a test fails when vLLM changes.

1. `core_channel` adds a method to the engine core, so that an actor can call its scheduler.
2. `resumed_requests` lets a new request bring response tokens and a generator's state.
3. `resumed_outputs` begins an output with what was generated elsewhere.
4. `rejection_sampling` takes log-probabilities of the computed rows alone, and reserves memory for all of them.

Corrections of vLLM's CPU build are in `platform/`.
"""
