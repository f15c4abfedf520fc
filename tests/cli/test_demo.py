"""`rhyme demo`: the placement follows from the GPUs that a run can have."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from rhyme_openrlhf import platform
from rhyme_openrlhf.cli import demo, train_ppo_ray


@pytest.mark.parametrize(("gpus", "engines"), [(0, "2"), (1, "1"), (2, "1"), (4, "2")])
def test_the_placement_fits_the_machine_and_the_users_options_come_last(
    gpus: int, engines: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(train_ppo_ray, "main", lambda argv: started.append(argv) or 0)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(platform, "gpu_present", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)

    assert demo.main(["--train.num_episodes", "1"]) == 0
    (argv,) = started
    assert argv[argv.index("--vllm.num_engines") + 1] == engines
    assert ("--train.colocate_all" in argv) == (gpus == 1)
    assert argv[-2:] == ["--train.num_episodes", "1"]


def test_demos_that_start_at_the_same_time_save_to_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    folders = set()
    for process in (7, 8):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        folders.add(demo.checkpoints())
    assert len(folders) == 2


@pytest.mark.parametrize(
    ("resources", "gpus"),
    [({"GPU": 2.0, "accelerator_type:H100": 1.0}, 2), ({"GPU": 4.0}, 0), ({"CPU": 4.0}, 0)],
)
def test_on_a_cluster_its_gpus_count_but_not_pretended_ones(
    resources: dict[str, float], gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import contextlib

    import ray

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(ray, "init", lambda **options: contextlib.nullcontext())
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    assert platform.run_gpus() == gpus


@pytest.mark.usefixtures("starts_python")
def test_the_first_words_are_ours_and_no_librarys() -> None:
    """`rhyme demo` imports torch, which warns of the package that it asks for GPUs."""
    command = [sys.executable, "-m", "rhyme_openrlhf.cli.main", "demo", "--histospec.window_max", "900"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("rhyme train: error: --histospec.window_max") and len(done.stderr.splitlines()) == 1
