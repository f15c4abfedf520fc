"""Settings of each vLLM engine: how much it computes at once, and what it takes on a machine without a GPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from rhyme_openrlhf.settings.options import Settings, SettingsError, option

# What vLLM 0.29.0 takes for an engine in a Ray actor, of any size of GPU (engine/arg_utils.py).
VLLM_SAMPLES, VLLM_STEP_TOKENS = 128, 2048


@dataclass(frozen=True)
class EngineSettings(Settings):
    """Size of one engine's batches."""

    group: ClassVar[str] = "engine"
    title: ClassVar[str] = "Size of each vLLM engine: samples it runs at once, and tokens of a step."

    max_num_seqs: int = option(
        0,
        f"Samples an engine runs at once; 0: {VLLM_SAMPLES}, vLLM's choice. More need more memory beside the KV "
        "cache: a step's logits grow with them.",
        low=0,
        high=4096,
    )
    max_num_batched_tokens: int = option(
        0,
        f"Tokens an engine computes in a decode step; 0: {VLLM_STEP_TOKENS}, vLLM's choice. Those of prompts, "
        "samples and drafts together. More let prompts start sooner.",
        low=0,
        high=1 << 20,
    )

    def check(self) -> None:
        if self.step_tokens < self.samples:
            raise SettingsError(
                f"--engine.max_num_batched_tokens must be at least --engine.max_num_seqs ({self.samples}), a token "
                f"for each sample, got {self.step_tokens}"
            )

    @property
    def samples(self) -> int:
        """Samples that an engine runs at once."""
        return self.max_num_seqs or VLLM_SAMPLES

    @property
    def step_tokens(self) -> int:
        """Tokens that an engine computes in a decode step."""
        return self.max_num_batched_tokens or VLLM_STEP_TOKENS

    def arguments(self) -> dict[str, int]:
        """Return vLLM's arguments for what is given."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value}


@dataclass(frozen=True)
class CpuSettings(Settings):
    """Options that are read only on a machine without a GPU."""

    group: ClassVar[str] = "cpu"
    title: ClassVar[str] = "Without a GPU only (embedded model, trials): ignored where a GPU is."

    kv_cache_mb: int = option(256, "KV cache of each engine in MB of host memory.", low=16, high=1048576, expert=True)
    dtype: str = option(
        "float32",
        "Number format of policy and engines, in place of --ds.param_dtype: most CPUs train in bfloat16 ten times "
        "slower.",
        choices=("bfloat16", "float32"),
        expert=True,
    )
