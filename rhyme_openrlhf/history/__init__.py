"""Earlier responses of each prompt, with rewards and lengths, kept by workers and indexed for drafts.

Read in this order:

1. `record` is one prompt's responses of one rollout, as an object and as bytes.
2. `index` is the draft index of one prompt: it finds what followed the same tokens before.
3. `shard` holds the last rollouts of one worker's prompts; `ranks` compares their lengths between two epochs.
4. `journal` writes a shard to a file and reads it back after a restart.
5. `index_store` keeps built indexes within the worker's share of memory.
6. `archive` is what a run leaves for other runs, `store` finds theirs, `earlier` chooses from them, and `lineage` says
   which they are.
7. `work_queue` runs one thread's work by urgency.
8. `worker` is the Ray actor that owns some of the prompts and uses all of the above.

All but `worker` import neither ray, vllm nor torch.
"""
