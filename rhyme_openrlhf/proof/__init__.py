"""Proof that drafts change nothing: what is compared, how it is judged, and where a machine keeps what was proved.

Read in this order:

1. `histories` makes drafts of every kind of a known response: right, stale and wrong ones.
2. `judgement` compares an engine's responses with drafts with those without, by their log-probabilities.
3. `chi_square` compares what was sampled.
4. `kept` is the file of a proof on the node of the engine that made it.

A run's engine proves its drafts before its first sample (engine/actor_parts/proving.py). `rhyme verify` does so with
the same code. No file here imports ray, vllm or torch.
"""
