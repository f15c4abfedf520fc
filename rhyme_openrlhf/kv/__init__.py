"""A sample's KV cache outside of its engine: its layout, and the ways it is copied from one engine to another.

Read in this order:

1. `heads` says which KV heads a tensor-parallel rank has.
2. `buffer` is the contiguous buffer between two engines, in the host's shared memory.
3. `handover` is what the source writes behind the blocks: all that the destination needs to go on.
4. `pinned_copies` copies blocks between a GPU and the host's memory.
5. `device_rows` shares blocks between two engines of a node without leaving the devices.

Orders come from `moves/`; `engine/kv_copies.py` copies the blocks out and in.
"""
