"""What is profiled, in the words by which a profile is found again: model architecture, hardware, number format, TP."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

from rhyme_openrlhf.latency.profile import Subject
from rhyme_openrlhf.settings.drafting import HISTORY, DraftingSettings
from rhyme_openrlhf.user_cache import user_cache

CPU_INFO = Path("/proc/cpuinfo")
# Bytes of a number in the KV cache, which has the engine's number format.
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def model_name(config: Any, drafting: DraftingSettings) -> str:
    """A Hugging Face configuration in short: what decides how long a step takes, and nothing that training changes.

    What vLLM's own methods propose drafts with is part of every step, so it is part of the name.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return (
        f"{config.architectures[0]} {config.num_hidden_layers}x{config.hidden_size} "
        f"heads {config.num_attention_heads}/{heads} vocabulary {config.vocab_size}{_drafter(drafting)}"
    )


def _drafter(drafting: DraftingSettings) -> str:
    if drafting.source == HISTORY:
        return ""
    return " ".join(filter(None, (f", {drafting.tokens} drafts by", drafting.source, Path(drafting.model).name)))


def kv_bytes_per_token(config: Any, dtype: str, tensor_parallel_size: int) -> int:
    """Keys and values of a token in all layers, on one rank (grouped-query heads; replicated where ranks are more).

    Latent attention has one compressed row for all heads, on every rank.
    """
    if latent := getattr(config, "kv_lora_rank", None):
        return int(config.num_hidden_layers) * (int(latent) + int(config.qk_rope_head_dim)) * BYTES[dtype]
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    on_rank = max(heads // tensor_parallel_size, 1)
    return 2 * int(config.num_hidden_layers) * on_rank * int(size) * BYTES[dtype]


def hardware_name(gpus: tuple[str, ...]) -> str:
    """The GPU's name, or the CPU's with the number of its cores."""
    if gpus:
        return gpus[0]
    text = CPU_INFO.read_text(encoding="utf-8", errors="replace") if CPU_INFO.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores"


def file_name(subject: Subject) -> str:
    """A file name for its profile."""
    words = f"{subject.model} {subject.hardware} {subject.dtype} tp{subject.tensor_parallel_size}"
    return re.sub(r"[^A-Za-z0-9.]+", "-", words).strip("-").lower() + ".json"


def folder() -> Path:
    """Where profiles are kept if not told otherwise."""
    return user_cache() / "profiles"
