"""A sample's KV cache outside of its engine: its layout, and the ways it is copied from one engine to another.

Read in this order:

1. `buffer` is the contiguous buffer between two engines, in the host's shared memory. Each rank has its heads in it.
   Behind the blocks the source writes all that the destination needs to go on.
2. `pinned_copies` copies blocks between a GPU and the host's memory.

Orders come from `moves/`; `engine/kv_copies.py` copies the blocks out and in.
"""
