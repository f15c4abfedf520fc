"""vLLM's engine configuration for an H100, made on a machine without a GPU: which runner, scheduling and CUDA graphs.

`install()` puts a stand-in in place of vLLM's platform: its own CUDA platform, which is told capability 9.0, 80 GiB and
132 multiprocessors. Everything that vLLM decides from that is its own code; nothing is computed. Modules are imported
as without a GPU and then meet the stand-in, because their compiled kernels are missing. Only in a process of its own.
Checked against vLLM 0.29.0 and 0.32.0 `platforms/cuda.py`.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

MODEL_LENGTH = 4096


def install() -> None:
    """Make vLLM, and this package, take this machine for one with an H100."""
    os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"})
    import rhyme_openrlhf.engine.factory  # noqa: F401  (first: installs the shims)

    # The compiled kernels of vLLM's CUDA build.
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
    import vllm.platforms.cuda
    import vllm.v1.cudagraph_dispatcher
    import vllm.v1.worker.gpu.model_runner
    import vllm.v1.worker.gpu_model_runner
    from vllm.platforms.interface import DeviceCapability

    answers = {
        "get_device_capability": DeviceCapability(9, 0),
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "get_device_total_memory": 80 << 30,
        "num_compute_units": 132,
        "is_fully_connected": True,
        "get_global_graph_pool": None,
    }
    methods = {name: classmethod(lambda cls, *_, answer=answer, **__: answer) for name, answer in answers.items()}
    platform = type("StandIn", (vllm.platforms.cuda.NonNvmlCudaPlatform,), methods)()
    names = {"current_platform": platform, "_current_platform": platform, "HAS_TRITON": True}
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"]:
        for name in names.keys() & vars(module).keys():
            setattr(module, name, names[name])
    # One rank, which nobody started.
    vllm.v1.worker.gpu.cudagraph_utils.get_pp_group = lambda: types.SimpleNamespace(
        is_first_rank=True, is_last_rank=True
    )
    for module in [module for name, module in sys.modules.items() if name.startswith("rhyme_openrlhf.")]:
        if "gpu_present" in vars(module):
            module.gpu_present = lambda: True  # type: ignore[attr-defined]


def engine_config(settings: Any, moving: bool = False, **arguments: Any) -> Any:
    """Return the VllmConfig of one of our engines, whose samples may move; `arguments`: vLLM's beside OpenRLHF's."""
    import vllm
    from vllm.usage.usage_lib import UsageContext

    from rhyme_openrlhf import embedded
    from rhyme_openrlhf.engine.arguments import moving_arguments, speculation_arguments

    ours = speculation_arguments(settings) | (moving_arguments(settings) if moving else {})
    of_openrlhf = {
        "model": str(embedded.MODEL),
        "dtype": "bfloat16",
        "max_model_len": MODEL_LENGTH,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
        "hf_overrides": {"max_position_embeddings": MODEL_LENGTH},
    }
    engine = vllm.AsyncEngineArgs(**{**of_openrlhf, **ours, **arguments})
    return engine.create_engine_config(UsageContext.ENGINE_CONTEXT)


def resolve_graphs(config: Any) -> None:
    """Change the graphs' mode and sizes as a worker does whose attention takes all of them (FlashAttention 3)."""
    from vllm.v1.attention.backend import AttentionCGSupport

    config.compilation_config.resolve_cudagraph_mode_and_sizes(
        AttentionCGSupport.ALWAYS,
        "FLASH_ATTN",
        1 + config.num_speculative_tokens,
        config.use_v2_model_runner,
        max_num_reqs=config.scheduler_config.max_num_seqs,
    )
