"""Drafts: the tokens that a decode step proposes for each sample, and how many of them it verifies.

Read in this order:

1. `source` is the protocol of every source of drafts, and those of bare tokens, as vLLM's own methods propose them.
2. `drafter` is the source "history": it turns names of requests into numbers and asks the compiled core for drafts.
3. `acceptance` learns how likely a draft token is accepted.
4. `budget` chooses how many tokens of which samples a step verifies: by step times, or by RhymeRL's window.
5. `planner` joins step times, acceptance and budget, and sums what was decided.
6. `combined` is history together with a model: each sample drafts from one of them.
7. `gain` measures what drafts gain in the run itself, and leaves drafts out where that is nothing.

No file here imports ray, vllm or torch. The compiled core is `csrc/`, reached through `drafting_core.py`.
"""
