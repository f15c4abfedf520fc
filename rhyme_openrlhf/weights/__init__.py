"""The way of one weight version from the trainer to the engines, from the policy's ranks to vLLM's workers.

Read in this order, which is the way of the weights from `training/trainer.py::broadcast_to_vllm` on:

1. `sync` is what the trainer calls: it publishes a version, brings it to each node once and has every engine load it.
   `stores` are the nodes' stores as it sees them, some of which may be lost.
2. `buckets` cuts a version into buckets and says where each parameter lies, and which rank writes it.
3. `publisher` writes a policy rank's buckets into the segment of its node.
4. `node` is the actor that keeps a node's segments, one for each of two versions.
5. `segment_file` is a segment as one process sees it: mapped, pinned, with marks of what has arrived.
6. `offers` does as `sync` for the streaming pipeline, where each engine loads when its turn ends.
7. `check` compares log-probabilities of policy and engines, before and after.

The last step, from the segment into vLLM's model, is `engine/worker.py`.
"""
