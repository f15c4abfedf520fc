"""Parts of the worker extension: the processes of vLLM's tensor-parallel ranks.

Read in this order:

1. `null_proposer` proposes nothing, because drafts come from the scheduler; `ngram` looks up vLLM's n-grams.
2. `moves` copies KV blocks and a generator's state out and in.
3. `sleep` gives up the KV cache's memory and takes it again.
"""
