"""OpenRLHF's DeepSpeed strategy on gloo and the CPU accelerator.

Only what names CUDA is different; everything that decides what is learned (optimizer, schedule, clipping, gradient
accumulation) is upstream's. Checked against OpenRLHF 0.11.2 `utils/deepspeed/deepspeed.py`.
"""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.platform import require_no_gpu, shims

shims.install()

import deepspeed  # noqa: E402  (the shims must be in place before anything imports OpenRLHF)
import openrlhf.utils.utils as openrlhf_utils  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from openrlhf.utils.deepspeed import DeepspeedStrategy  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

# DeepSpeed 0.19.6, op_builder/cpu/comm.py: ShareMemCommBuilder.NAME.
SHARED_MEMORY_OP = "deepspeed_shm_comm"


class CpuStrategy(DeepspeedStrategy):
    """DeepspeedStrategy with a gloo backend and a device mesh of CPUs; no ring attention, no DeepSpeed TP."""

    def setup_distributed(self, timeout: timedelta = timedelta(minutes=60)) -> None:
        """Seed this process and join the training group (one rank per pretended GPU)."""
        require_no_gpu("CpuStrategy")
        allow_float32()
        if self.full_determinism:
            transformers.enable_full_determinism(self.seed)
        else:
            transformers.set_seed(self.seed)
        # DeepSpeed would compile its shared-memory collectives here, which takes up to a minute at first use and serves
        # inference only; gloo does what training needs.
        deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False
        deepspeed.init_distributed(dist_backend="gloo", timeout=timeout)
        self.world_size = dist.get_world_size()
        torch.set_num_threads(training_threads(self.args.train.async_enable, self.world_size, os.cpu_count() or 1))
        self.ds_device_mesh = init_device_mesh("cpu", (self.world_size, 1, 1), mesh_dim_names=("dp", "sp", "tp"))
        self.setup_ring_attn(self.ds_device_mesh)
        self.accumulated_gradient = self.train_batch_size // self.micro_train_batch_size // self.world_size

    def get_ds_train_config(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Upstream's DeepSpeed config with torch's AdamW (DeepSpeed's own is a C++ op that takes a minute to build)."""
        config = super().get_ds_train_config(*args, **kwargs)
        if "optimizer" in config:
            config["optimizer"]["params"]["torch_adam"] = True
        config["zero_optimization"]["offload_optimizer"]["pin_memory"] = False
        return config

    def moving_average(self, model: Any, model_ema: Any, beta: float = 0.992, device: str = "cpu") -> Any:
        """Upstream's EMA update; its callers name "cuda" as the device."""
        return super().moving_average(model, model_ema, beta, "cpu")


def training_threads(asynchronous: bool, ranks: int, cores: int) -> int:
    """Threads of one rank: all cores are free while a synchronous trainer trains, none while engines generate too."""
    return 1 if asynchronous else max(1, cores // ranks)


def allow_float32() -> None:
    """Let OpenRLHF load models in fp32 (`cpu_arguments` asks for it with the dtype name "fp32").

    Upstream knows bf16 and fp16 only; DeepSpeed trains in fp32 when neither is given. Idempotent.
    """
    upstream = openrlhf_utils.convert_to_torch_dtype
    if getattr(upstream, "knows_float32", False):
        return

    def convert_to_torch_dtype(param_dtype: str) -> torch.dtype:
        return torch.float32 if param_dtype == "fp32" else upstream(param_dtype)

    convert_to_torch_dtype.knows_float32 = True  # type: ignore[attr-defined]
    openrlhf_utils.convert_to_torch_dtype = convert_to_torch_dtype


def cpu_strategy(args: SimpleNamespace) -> CpuStrategy:
    """Return what `openrlhf.utils.get_strategy` returns, for this machine."""
    return CpuStrategy(
        seed=args.train.seed,
        full_determinism=args.train.full_determinism_enable,
        max_norm=getattr(args, "max_norm", 1.0),
        micro_train_batch_size=args.train.micro_batch_size,
        train_batch_size=args.train.batch_size,
        zero_stage=args.ds.zero_stage,
        args=args,
    )
