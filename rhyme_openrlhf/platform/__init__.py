"""Differences of a machine without a GPU; they stand in no other room.

`gpu_present()` decides once per process; `nvidia` reads what NVML lists, so that GPUs which torch cannot use are
refused. `cpu_share` is for every machine: it holds a process within its share of the CPUs. So are `job_variables`,
which Ray sets on all nodes, and `cluster`, which asks the nodes of the Ray cluster in RAY_ADDRESS. The other modules
are for machines without a GPU, and each raises `PlatformError` when used where a GPU is:

- `shims` lets OpenRLHF import and run.
- `cpu_strategy` is its strategy on gloo, `gloo_sync` its own weight broadcast on gloo.
- `cpu_arguments` changes arguments that need a GPU.
- `cpu_memory` gives a KV cache's memory back.
- `cpu_sampling` corrects vLLM's CPU sampling.
- `local_ray` is a local Ray with pretended GPUs.
"""

from __future__ import annotations

import functools
import os

from rhyme_openrlhf.platform.error import PlatformError


@functools.cache
def gpu_present() -> bool:
    """Return whether this process sees a CUDA device (torch decides; asked once)."""
    import torch

    return torch.cuda.is_available()


def run_has_gpus() -> bool:
    """Return whether a run started from this process has GPUs: this machine's, or those of the cluster in RAY_ADDRESS.

    The driver may sit on a node without a GPU. Ray names the type of every GPU it has found itself
    ("accelerator_type:H200"); pretended ones have none. Raises PlatformError where this machine has GPUs that torch
    cannot use, because the run would otherwise train silently on the CPU.
    """
    if gpu_present():
        return True
    import torch

    from rhyme_openrlhf.platform import nvidia

    found = nvidia.read()
    if found.gpus:
        raise PlatformError(nvidia.unusable([gpu.name for gpu in found.gpus], found.version, torch.version.cuda or ""))
    return bool(os.environ.get("RAY_ADDRESS")) and _cluster_gpus() > 0


def run_gpus() -> int:
    """Return how many GPUs a run started here can have: the cluster's in RAY_ADDRESS, or this machine's."""
    if os.environ.get("RAY_ADDRESS"):
        return _cluster_gpus()
    import torch

    return torch.cuda.device_count() if gpu_present() else 0


def _cluster_gpus() -> int:
    """GPUs that Ray has found itself; 0 where all of them are pretended."""
    import ray

    from rhyme_openrlhf.platform.cluster import connected

    with connected():
        resources = ray.cluster_resources()
    found = any(name.startswith("accelerator_type:") for name in resources)
    return int(resources.get("GPU", 0)) if found else 0


def require_no_gpu(what: str) -> None:
    """Raise PlatformError if a GPU is there: `what` is only for machines without one."""
    if gpu_present():
        raise PlatformError(f"{what} is only for machines without a GPU, but torch sees one here; do not use it.")
