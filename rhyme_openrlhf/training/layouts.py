"""The layouts of a run, from OpenRLHF's arguments and the policy's configuration.

Invariant: what is planned here, before anything starts, is what is started: engines, their devices, their KV caches.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.config import RhymeSettings
from rhyme_openrlhf.scheduling.layouts import LayoutPlan, Model, check_memory, plan_layouts, plan_memory

KV_FLAG = "--cpu.kv_cache_mb"
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Files of weights as Hugging Face names them; a directory has one kind or the other.
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def layout_plan(args: SimpleNamespace, config: Any) -> LayoutPlan | None:
    """The layouts that the arguments ask for; None for one. Raises LayoutError."""
    if not args.tp_switch.enable:
        return None
    vllm, asked = args.vllm, args.tp_switch
    model = _model(config, 0)
    return plan_layouts(
        vllm.num_engines, vllm.tensor_parallel_size, asked.size, model, args.cpu.kv_cache_mb, asked.kv_cache_mb
    )


def memory_sentence(args: SimpleNamespace, config: Any, plan: LayoutPlan) -> str:
    """What the layouts take of this machine's memory, in one sentence. Raises LayoutError if they do not fit."""
    model = _model(config, weight_bytes(config, args.actor.model_name_or_path, args.cpu.dtype))
    return check_memory(plan_memory(plan, model, args.cpu.kv_cache_mb), plan, free_bytes(), KV_FLAG)


def tail_settings(settings: RhymeSettings, plan: LayoutPlan) -> RhymeSettings:
    """What the tail engines run with: their own KV cache."""
    return dataclasses.replace(settings, cpu=dataclasses.replace(settings.cpu, kv_cache_mb=plan.tail_kv_mb))


def weight_bytes(config: Any, path: str, dtype: str) -> int:
    """Bytes of the model's weights in the engines' number format, from its files; 0 if they are not on this machine."""
    files = [file for pattern in WEIGHT_FILES for file in Path(path).glob(pattern)]
    stored = str(getattr(config, "dtype", None) or "").removeprefix("torch.")
    return sum(file.stat().st_size for file in files) * NUMBER_BYTES[dtype] // NUMBER_BYTES.get(stored, 4)


def free_bytes() -> int:
    """Memory that this machine can give."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo names no MemAvailable")


def _model(config: Any, weights: int) -> Model:
    text = config.get_text_config()
    heads = text.num_attention_heads
    return Model(heads, getattr(text, "num_key_value_heads", None) or heads, weights)
