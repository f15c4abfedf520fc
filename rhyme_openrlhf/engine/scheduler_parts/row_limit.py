"""How many rows a verifying step may compute, and the one place where every scheduler keeps to it.

A row is one token whose logits a step computes: one for each running sample, and one for each draft token. Logits,
probabilities and log-probabilities are all [rows, vocabulary], so rows decide what the sampler needs beside the KV
cache. On a GPU the worker reserves that memory for `most_rows` rows before vLLM sizes the KV cache
(`engine/patches/rejection_sampling.py`). Without a GPU nothing is reserved, and vLLM's own limit of tokens a step holds
alone.

Invariants: every draft reaches a request through `set_drafts`, whoever made it (history, vLLM's methods, measuring), so
no step verifies more; a draft is only ever cut at its end. Checked against vLLM 0.29.0 `v1/core/sched/scheduler.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from rhyme_openrlhf.drafting.budget import share
from rhyme_openrlhf.platform import gpu_present
from rhyme_openrlhf.settings.engine import reserved_rows

# Key of DraftingSettings in vLLM's additional_config.
DRAFTING_KEY = "rhyme_drafting"


def most_rows(vllm_config: Any) -> int | None:
    """Return the rows a verifying step may compute on a GPU; None without a GPU.

    With `--drafting.within_graphs` no more than the largest CUDA graph has.
    """
    if not gpu_present():
        return None
    samples = int(vllm_config.scheduler_config.max_num_seqs)
    rows = reserved_rows(samples, int(vllm_config.num_speculative_tokens))
    largest = vllm_config.compilation_config.max_cudagraph_capture_size
    within_graphs = vllm_config.additional_config[DRAFTING_KEY]["within_graphs"]
    return min(rows, largest) if within_graphs and largest else rows


class RowLimit(Scheduler):
    """A vLLM scheduler that verifies drafts. Mixed in below everything that makes drafts."""

    CALLABLE: tuple[str, ...] = ("row_limit",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most_rows = most_rows(self.vllm_config)
        # vLLM pads a request that joins a decode batch with one token to the longest draft, for FULL CUDA graphs,
        # unless draft lengths are looked up: one arrival would add rows that nobody proposed.
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    def row_limit(self) -> int | None:
        """Return the rows that memory is reserved for; None where none is."""
        return self._most_rows

    def most_drafts(self) -> int:
        """Return the draft tokens that fit into the next step beside its running samples."""
        # Past its tokens a step vLLM leaves running requests out of the step.
        tokens: int = self.max_num_scheduled_tokens
        if self._most_rows is not None:
            tokens = min(tokens, self._most_rows)
        return max(tokens - len(self.running), 0)

    def set_drafts(self, requests: Iterable[Any], drafts: Sequence[list[int]]) -> None:
        """Give each request its draft for the next step, cut so that all of them fit."""
        lengths, most = [len(draft) for draft in drafts], self.most_drafts()
        if sum(lengths) > most:
            drafts = [draft[:length] for draft, length in zip(drafts, share(lengths, most), strict=True)]
        for request, draft in zip(requests, drafts, strict=True):
            request.spec_token_ids = draft
