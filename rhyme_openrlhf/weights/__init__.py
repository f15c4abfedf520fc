"""From the trainer to the engines: one weight version on its way, from the policy's ranks to vLLM's workers.

Read in this order, which is the way of the weights:

1. `buckets` cuts a version into buckets and says where each parameter lies.
2. `publisher` writes a policy rank's buckets into the segment of its node.
3. `node` is the actor that keeps a node's segments, one for each of two versions.
4. `segment_file` is a segment as one process sees it: mapped, pinned, with marks of what has arrived.
5. `sync` publishes a version, brings it to each node once and has every engine load it.
6. `offers` does the same for the streaming pipeline, where each engine loads when its turn ends.
7. `check` compares log-probabilities of policy and engines, before and after.

vLLM's side of the load is `engine/worker.py`.
"""
