"""From history to drafts: how far to look, how much to draft. Pure: imports neither ray, vllm nor torch."""
