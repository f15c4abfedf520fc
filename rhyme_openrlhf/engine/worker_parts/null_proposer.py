"""The worker's half of speculation: nothing.

vLLM asks a proposer in the worker process for drafts. Ours come from the scheduler (`engine/scheduler.py`), which
knows prompts and requests; this class only fills the official place for a custom proposer
(`speculative_config={"method": "custom_class", ...}`, vLLM 0.29.0 v1/worker/gpu_model_runner.py).
"""

from __future__ import annotations

from typing import Any


class NullProposer:
    """Proposes no draft token, for every request."""

    def __init__(self, vllm_config: Any) -> None:
        """vLLM passes its whole config; nothing of it is needed."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is no draft model."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """An empty draft for each of the [batch] requests."""
        return [[] for _ in sampled_token_ids]
