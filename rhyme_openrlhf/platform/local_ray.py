"""A Ray cluster on this machine alone, with pretended GPUs.

OpenRLHF asks Ray for bundles of {"GPU": 1, "CPU": 1}. Without a GPU, "GPU" is a mere scheduling resource, so Ray is
started with as many as the run needs. Invariant: never used on a machine that has a GPU, nor to change an existing
cluster: with RAY_ADDRESS set, that cluster is used as it is.
"""

from __future__ import annotations

import os
from typing import Any

import ray

from rhyme_openrlhf.engine_errors import first_line
from rhyme_openrlhf.platform import require_no_gpu
from rhyme_openrlhf.platform.job_variables import job_variables

# Enough for the sequences and experience of small runs; weights of the embedded model are 4 MB, of SmolLM2 270 MB.
OBJECT_STORE_BYTES = 1024**3

# What every process of the run needs where there is no GPU.
CPU_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    # vLLM and torch each start one thread per core and process by default; two engines and a trainer on a small
    # machine then spend their time switching.
    "OMP_NUM_THREADS": "1",
    # With eager models all that is left to compile are small sampling functions, which takes longer (16 s at first
    # use) than it saves.
    "TORCH_COMPILE_DISABLE": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


class LocalRayError(RuntimeError):
    """Ray does not start here; the message says what it said."""


def start_local_ray(pretended_gpus: int, cpus: int, variables: dict[str, str], log_to_driver: bool) -> Any:
    """Start Ray on this machine with `pretended_gpus` scheduling slots named GPU; returns Ray's context.

    With RAY_ADDRESS set it connects to that cluster (of pretended GPUs) instead of starting one. `variables` and
    CPU_ENVIRONMENT are set in every worker process; this process's own values win. Raises LocalRayError.
    """
    require_no_gpu("a Ray cluster with pretended GPUs")
    runtime_env = {
        "env_vars": job_variables(variables | CPU_ENVIRONMENT, os.environ),
        "worker_process_setup_hook": "rhyme_openrlhf.platform.shims.install",
    }
    if os.environ.get("RAY_ADDRESS"):
        return ray.init(log_to_driver=log_to_driver, logging_level="ERROR", runtime_env=runtime_env)
    # Ray would start a worker process for each CPU ahead of time; our actors, whose environment differs, cannot use
    # them, and each imports torch.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    try:
        return _start(pretended_gpus, cpus, runtime_env, log_to_driver)
    except LocalRayError:
        # A busy machine was too slow; by now Ray's programs are in memory.
        return _start(pretended_gpus, cpus, runtime_env, log_to_driver)


def _start(pretended_gpus: int, cpus: int, runtime_env: dict[str, Any], log_to_driver: bool) -> Any:
    try:
        return ray.init(
            num_cpus=cpus,
            num_gpus=pretended_gpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=log_to_driver,
            runtime_env=runtime_env,
        )
    except Exception as error:  # Ray raises a bare Exception when its own processes are not up within 30 s
        ray.shutdown()
        raise LocalRayError(f"Ray did not start on this machine: {first_line(error)}") from error
