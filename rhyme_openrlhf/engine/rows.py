"""Rows of an engine's decode step on a GPU: how many there may be, the memory for them, and their CUDA graphs.

A row is one token whose logits a step computes: one for each running sample, and one for each draft token. Memory is
reserved for all rows that there may be (patches/rejection_sampling.py, patches/second_runner.py), and they decide how
many drafts a step has room for (scheduler_parts/drafting.py).

Invariants:
- A step with drafts never has more rows than memory is reserved for, or than its largest graph has.
- A run's memory plan (run/resources.py) has `reserved_bytes`, and an engine's profile run takes that many:
  `tests/engine/test_rows.py` counts the bytes that both model runners allocate.
"""

from __future__ import annotations

from typing import Any

from rhyme_openrlhf.platform import gpu_present
from rhyme_openrlhf.settings.drafting import V1

# Rows that a sample may have when all run, as far as MOST_ROWS allow. On an H200 samples got 4 to 8 tokens a step where
# 8 to 128 ran, and with 512 of them 512 rows left no room for drafts (docs/gpu.md). A
# vocabulary of 152,000 tokens takes 0.6 GB for each array of 1,024 rows.
ROWS_EACH, MOST_ROWS = 8, 2048
# Rows that are worth their memory with few samples: the largest CUDA graph that vLLM 0.29.0 captures by default.
LEAST_ROWS = 512
# A model computes a logit in 16 bits, and a sampler works on it in 32.
LOGIT_BYTES, SAMPLER_BYTES = 2, 4
# The second runner verifies rows in chunks of at most these bytes in 32 bits: vLLM 0.29.0's MAX_CHUNK_BYTES
# (v1/worker/gpu/spec_decode/rejection_sampler.py).
CHUNK_BYTES = 2**30


def reserved_rows(samples: int, drafts: int, step_tokens: int) -> int:
    """Return the rows of logits that an engine on a GPU reserves memory for, with drafts of up to `drafts` tokens.

    That is at least a draft token for each sample, and LEAST_ROWS where that many rows are possible. A step computes
    `step_tokens` tokens at most.
    """
    rows = max(2 * samples, LEAST_ROWS, min(ROWS_EACH * samples, MOST_ROWS))
    return min(samples * (1 + drafts), rows, step_tokens)


def profiled_rows(rows: int, samples: int, drafts: int) -> int:
    """Return the rows that a profile run computes: `rows`, and one for each sample that joins behind their drafts."""
    return min(rows + samples, samples * (1 + drafts))


def reserved_bytes(rows: int, samples: int, vocabulary: int, runner: str) -> int:
    """Return the memory of a profile run's logits; `rows` of `samples`, by `profiled_rows`.

    The second model runner keeps all logits in 16 bits, and a chunk of them in 32. The first keeps all logits, those of
    drafts in 32 bits, and their probabilities. It also keeps, for each sample, the logits behind its drafts in both
    formats, random numbers and their reciprocals.
    """
    logits = rows * LOGIT_BYTES
    if runner == V1:
        sampled = (rows - samples) * 2 * SAMPLER_BYTES + samples * (LOGIT_BYTES + 3 * SAMPLER_BYTES)
    else:
        sampled = min(rows, max(1, CHUNK_BYTES // (vocabulary * SAMPLER_BYTES))) * SAMPLER_BYTES
    return (logits + sampled) * vocabulary


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
