"""Rows of an engine's decode step on a GPU: how many there may be, and the CUDA graphs for them.

A row is one token whose logits a step computes: one for each running sample, and one for each draft token. Memory is
reserved for all rows that there may be (patches/rejection_sampling.py, patches/second_runner.py), and they decide how
many drafts a step has room for (scheduler_parts/drafting.py).

Invariant: a step with drafts never has more rows than memory is reserved for, or than its largest graph has.
"""

from __future__ import annotations

from typing import Any

from rhyme_openrlhf.platform import gpu_present
from rhyme_openrlhf.settings.engine import reserved_rows


def most_rows(vllm_config: Any) -> int | None:
    """Return the rows a verifying step may compute on a GPU; None without a GPU."""
    if not gpu_present():
        return None
    scheduler = vllm_config.scheduler_config
    drafts = int(vllm_config.num_speculative_tokens)
    return reserved_rows(int(scheduler.max_num_seqs), drafts, int(scheduler.max_num_batched_tokens))


def graph_sizes(rows: int) -> list[int]:
    """Return the tokens of each CUDA graph of an engine whose drafts fill up to `rows` rows.

    Up to 512 these are vLLM 0.29.0's own (config/vllm.py, _set_cudagraph_sizes). Beyond, 64 rows are at most 4 % of a
    step (0.3 of 8 ms on an H200 with 1.4 B parameters). Each graph takes a tenth of a second of the start. The largest
    one decides on the buffers of FlashAttention 3 in V2 (v1/attention/backends/flash_attn.py, max_num_splits): by
    arithmetic 0.5 GB for 1,024 rows of a model with 32 heads of 128.
    """
    return sorted({1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, rows, 64), max(rows, 512)})
