"""From history to drafts: which tokens are proposed in a decode step, and how many of them are verified.

Read in this order:

1. `drafter` turns names of requests into numbers, asks the compiled core for drafts, and counts the outcome.
2. `window` is the fixed rule of RhymeRL: how far one sample may draft.
3. `acceptance` learns how likely a draft token is accepted; `position_acceptance` learns it by place in the draft.
4. `budget` chooses how many tokens of which samples a step verifies.
5. `planner` joins step times, acceptance and budget; `decision_log` sums what it decided.
6. `vllm_methods` does the same for drafts of vLLM's own methods; `replanning` says which steps are planned anew.
7. `off_switch` says above which batch nothing is drafted; `gain` measures what drafts gain in the run itself.
8. `draft_trace` notes which tokens of chosen responses came from drafts.

No file here imports ray, vllm or torch. The compiled core is `csrc/`, reached through `drafting_core.py`.
"""
