"""Benchmarks where a GPU is: engines get GPU arguments and a share of its memory, and CUDA graphs can be measured."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("openrlhf")

# All of these import the stand-ins for a machine without a GPU, before the tests pretend that there is one.
import engine_in_process
import movable_engines
import rollout
import step_overhead
import vllm

from rhyme_openrlhf import platform
from rhyme_openrlhf.settings.config import RhymeSettings

CPU_ONLY = {"kv_cache_memory_bytes", "enable_sleep_mode"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, as far as torch says; variables of the process are put back."""
    monkeypatch.setattr(platform, "gpu_present", lambda: True)
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_an_engine_in_process_starts_with_gpu_arguments(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(vllm, "AsyncEngineArgs", lambda **arguments: arguments)
    monkeypatch.setattr(vllm.AsyncLLMEngine, "from_engine_args", found.append)
    engine_in_process.RunningEngine(RhymeSettings(), "engine_in_process.PolicyScheduler")
    (arguments,) = found
    assert not CPU_ONLY & set(arguments)
    assert arguments["gpu_memory_utilization"] == 0.9 and arguments["dtype"] == "bfloat16"
    assert arguments["speculative_config"]["num_speculative_tokens"] == engine_in_process.MOST_DRAFTS


def test_movable_engines_share_the_memory_of_a_gpu(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Any]] = []

    async def start(self: Any, **arguments: Any) -> None:
        found.append(arguments)

    monkeypatch.setattr(movable_engines.RhymeRolloutActor, "__init__", start)
    for index in range(2):
        engine = movable_engines.LocalEngine(index, RhymeSettings(), 1024, 8, engines=2)
        engine._loop.call_soon_threadsafe(engine._loop.stop)
    assert sum(arguments["gpu_memory_utilization"] for arguments in found) == pytest.approx(0.9)


def test_the_step_overhead_needs_no_cpu_engine(gpu: None) -> None:
    scheduler = step_overhead.scheduler_of("rules", 4)
    assert scheduler.vllm_config.cache_config.kv_cache_memory_bytes is None
    assert scheduler.max_num_running_reqs == 4


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("arm", ["on", "openrlhf"])
def test_rollouts_with_cuda_graphs_or_without_fit_one_gpu(
    arm: str, cuda_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(rollout, "run_gpus", lambda: 1)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: commands.append(command))
    monkeypatch.setattr(rollout, "from_events", lambda path: [])
    monkeypatch.setattr(rollout, "from_status", lambda path: [])
    assert rollout.run_arm(arm, 1, tmp_path / "prompts.jsonl", (), tmp_path, cuda_graphs) == []
    (command,) = commands
    assert ("--vllm.enforce_eager" in command) != cuda_graphs
    assert "--train.colocate_all" in command
