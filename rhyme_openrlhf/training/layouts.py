"""The layouts of a run, from OpenRLHF's arguments and the policy's configuration.

Invariant: what is planned here, before anything starts, is what is started: engines, their devices, their KV caches.
The way on GPUs has never been run on one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rhyme_openrlhf.latency.profile import kv_bytes_per_token
from rhyme_openrlhf.scheduling.layouts import (
    MB,
    Asked,
    LayoutError,
    LayoutPlan,
    Model,
    Offer,
    memory_sentence,
    plan_layouts,
    plan_memory,
    with_caches,
)
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.tp_switch import tail_sizes
from rhyme_openrlhf.telemetry.system_sample import Gpus

if TYPE_CHECKING:
    # It imports Ray, which the checks before a run and the doctor do without.
    from rhyme_openrlhf.telemetry.services import Layouts

# OpenRLHF's engines on GPUs; without GPUs it is --cpu.dtype.
GPU_DTYPE = "bfloat16"
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Files of weights as Hugging Face names them; a directory has one kind or the other.
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
NEVER_RUN = "adaptive tensor parallelism has never been run on a GPU: it is written from vLLM's and Ray's source"


def planned_layouts(args: SimpleNamespace, config: Any, on_gpus: bool) -> tuple[LayoutPlan, list[str]]:
    """Return the layouts that the arguments ask for, and sentences about them. Raises LayoutError.

    The sentences say what the layouts take of the memory, and on GPUs that nobody has tried that.
    """
    asked, vllm, model = args.tp_switch, args.vllm, _model(args, config, on_gpus)
    shape = plan_layouts(vllm.num_engines, vllm.tensor_parallel_size, tail_sizes(asked.size, asked.sizes), model)
    device = _device_bytes(args) if on_gpus else 0
    offer = _gpu_offer(args, device) if on_gpus else _cpu_offer(shape.devices)
    kv_mb = asked.aligned_kv_cache_mb if on_gpus else args.cpu.kv_cache_mb
    plan = with_caches(shape, model, Asked(kv_mb, asked.kv_cache_mb, asked.kv_caches), offer)
    said = memory_sentence(plan, model, offer)
    if not on_gpus:
        return plan, [said]
    taken = (share.weights + share.kv_cache + share.reserve for share in plan_memory(plan, model, offer).shares)
    shares = tuple(round(part / device, 4) for part in taken)
    return dataclasses.replace(plan, device_shares=shares), [said, NEVER_RUN]


def layout_settings(settings: RhymeSettings, plan: Layouts, layout: int) -> RhymeSettings:
    """Return the settings that engines of a layout run with: without GPUs, their own KV cache."""
    if plan.device_shares:
        return settings
    return dataclasses.replace(settings, cpu=dataclasses.replace(settings.cpu, kv_cache_mb=plan.kv_sizes[layout]))


def engine_arguments(plan: Layouts, layout: int) -> dict[str, Any]:
    """Return vLLM's arguments for the engines of a layout on GPUs, in place of OpenRLHF's; none without.

    With a KV cache of given size vLLM 0.29.0 measures nothing. It still wants `gpu_memory_utilization` of the device
    free when it starts (v1/worker/utils.py, request_memory); here that is what this engine is to take. A KV cache can
    be put to sleep by itself if vLLM's own allocator holds it, which tags it (v1/worker/gpu_worker.py).
    """
    if not plan.device_shares:
        return {}
    found: dict[str, Any] = {
        "kv_cache_memory_bytes": plan.kv_sizes[layout] * MB,
        "gpu_memory_utilization": min(plan.device_shares[layout], 1.0),
    }
    if not plan.both_awake:
        found["enable_cumem_allocator"] = True
    return found


def weight_bytes(config: Any, path: str, dtype: str) -> int:
    """Return the bytes of the model's weights in the engines' number format, by its files or else its configuration."""
    files = [file for pattern in WEIGHT_FILES for file in Path(path).glob(pattern)]
    if not files:
        return _parameters(config) * NUMBER_BYTES[dtype]
    stored = str(getattr(config, "dtype", None) or "").removeprefix("torch.")
    return sum(file.stat().st_size for file in files) * NUMBER_BYTES[dtype] // NUMBER_BYTES.get(stored, 4)


def free_bytes() -> int:
    """Return the memory that this machine can give."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo names no MemAvailable")


def _parameters(config: Any) -> int:
    """Return how many parameters such a model has."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    return sum(parameter.numel() for parameter in model.parameters())


def _model(args: SimpleNamespace, config: Any, on_gpus: bool) -> Model:
    text, dtype = config.get_text_config(), GPU_DTYPE if on_gpus else args.cpu.dtype
    heads = text.num_attention_heads
    return Model(
        heads,
        getattr(text, "num_key_value_heads", None) or heads,
        weight_bytes(config, args.actor.model_name_or_path, dtype),
        # On one rank, so of all heads.
        kv_bytes_per_token(text, dtype, 1) * args.data.max_len,
    )


def _cpu_offer(devices: int) -> Offer:
    free = free_bytes()
    return Offer(free // devices, f"{free / MB:,.0f} MB are free", "--cpu.kv_cache_mb")


def _gpu_offer(args: SimpleNamespace, device: int) -> Offer:
    free = int(args.vllm.gpu_memory_utilization * device)
    said = f"{free / MB:,.0f} MB of each GPU's {device / MB:,.0f} MB are for engines (--vllm.gpu_memory_utilization)"
    more = "raise --vllm.gpu_memory_utilization or lower --tp_switch.reserve_mb"
    return Offer(free, said, "--tp_switch.aligned_kv_cache_mb", args.tp_switch.reserve_mb, more)


def _device_bytes(args: SimpleNamespace) -> int:
    """Return the memory of a GPU of the run. Raises LayoutError where nobody says."""
    if args.tp_switch.device_mb:
        return int(args.tp_switch.device_mb) * MB
    gpus = Gpus()
    total = [] if gpus.missing else gpus.look()[2]
    if not total:
        raise LayoutError(
            f"this machine does not say how much memory the run's GPUs have ({gpus.missing or 'it has none'}): give "
            "--tp_switch.device_mb"
        )
    return min(total)
