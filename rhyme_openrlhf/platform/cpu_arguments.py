"""Arguments of OpenRLHF and vLLM that mean nothing without a GPU, and their substitutes.

Checked against vLLM 0.29.0's CPU build:

- The KV cache is sized in bytes, and there is no sleep mode.
- Tensor parallelism runs in local processes, because the Ray executor needs a device key that the CPU platform lacks.
- Without tensor parallelism the model runs inside the engine-core process.

Invariant: every substitution in OpenRLHF's arguments is reported in one sentence; an option that has no CPU
counterpart is refused.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.platform import PlatformError, require_no_gpu
from rhyme_openrlhf.settings.engine import CpuSettings


def adapt_arguments(args: SimpleNamespace) -> list[str]:
    """Change `args` in place for this machine; returns a sentence for each change.

    Raises PlatformError for options that need a GPU.
    """
    require_no_gpu("adapt_arguments")
    for flag, value, only in (
        ("--ds.packing_samples", args.ds.packing_samples, False),
        ("--ds.load_in_4bit", args.ds.load_in_4bit, False),
        ("--ds.use_liger_kernel", args.ds.use_liger_kernel, False),
        ("--ds.ring_attn_size", args.ds.ring_attn_size, 1),
        ("--ds.tensor_parallel_size", args.ds.tensor_parallel_size, 1),
    ):
        if value != only:
            raise PlatformError(f"{flag} needs a GPU, and this machine has none: leave it out")
    changes = []
    if "flash" in args.ds.attn_implementation:
        changes.append(f"no GPU here: --ds.attn_implementation {args.ds.attn_implementation} becomes sdpa")
        args.ds.attn_implementation = "sdpa"
    if args.cpu.dtype == "float32":
        args.ds.param_dtype = "fp32"
    return changes


def cpu_engine_arguments(arguments: dict[str, Any], settings: CpuSettings) -> dict[str, Any]:
    """Return OpenRLHF's keyword arguments for an engine, changed where the CPU build needs it.

    Also sets how vLLM binds the threads of the processes it is about to start: one core for each tensor-parallel rank.
    Its
    own "auto" asserts when ranks outnumber NUMA nodes. `keep_openmp_threads` sets their number.
    """
    require_no_gpu("cpu_engine_arguments")
    # Imported here, because it imports torch. The class, because the CPU platform turns the name "uni" into "mp" to
    # bind threads itself. That is one more process, which spins on a core that the others need while it waits for each
    # step.
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    ranks = arguments.get("tensor_parallel_size", 1)
    changed = dict(
        arguments,
        dtype=settings.dtype,
        kv_cache_memory_bytes=settings.kv_cache_mb * 1024**2,
        enable_sleep_mode=False,
        distributed_executor_backend="mp" if ranks > 1 else UniProcExecutor,
    )
    if "bundle_indices" in changed:
        # OpenRLHF names Ray bundles for its Ray executor; local processes take none.
        changed["bundle_indices"] = None
    cores = os.cpu_count() or 1
    binding = "|".join(str(rank % cores) for rank in range(ranks)) if ranks > 1 else "nobind"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = binding
    keep_openmp_threads()
    return changed


def keep_openmp_threads() -> None:
    """Keep OpenMP threads of engines at OMP_NUM_THREADS (Ray sets it for every actor), instead of one a core.

    vLLM's n-gram lookup starts Numba's threads, which sets the process's number of OpenMP threads to theirs. The model
    would then run on all cores, and its threads would spin on them while waiting for each other.
    """
    if threads := os.environ.get("OMP_NUM_THREADS"):
        # One number for each level of nesting.
        os.environ["NUMBA_NUM_THREADS"] = threads.split(",")[0]
