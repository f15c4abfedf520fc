"""GPUs that do not do cost one sentence before anything is started: too few, too small, over nodes, no compiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf import platform
from rhyme_openrlhf.cli import demo, preflight, preflight_gpus, train_ppo_ray, upstream
from rhyme_openrlhf.cli.preflight_models import PreflightError
from rhyme_openrlhf.platform import nvidia
from rhyme_openrlhf.platform.cluster import Node, Reply
from rhyme_openrlhf.run import launch
from tests import nvml

torch = pytest.importorskip("torch")
pytest.importorskip("openrlhf")
GIB = 2**30


@pytest.fixture(autouse=True)
def a_machine_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CUDA 13.0 in torch and in a toolkit, no cluster; a test adds the GPUs."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda-13.0", "13.0")))


def toolkit(folder: Path, release: str) -> Path:
    """A folder as a CUDA toolkit's, whose nvcc only names its release."""
    (folder / "bin").mkdir(parents=True)
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.48'\n")
    nvcc.chmod(0o755)
    return folder


def parsed(tmp_path: Path, *flags: str) -> SimpleNamespace:
    return upstream.parse([*demo.arguments(str(tmp_path)), *flags])


def refused(args: SimpleNamespace, on_gpus: bool = True) -> str:
    with pytest.raises(PreflightError) as error:
        preflight_gpus.check_gpus(args, on_gpus)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_enough_of_everything_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml.install(monkeypatch, tmp_path, gpus=3)
    assert preflight_gpus.check_gpus(parsed(tmp_path), True) == ""


def test_without_gpus_nothing_of_them_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_HOME")
    assert preflight_gpus.check_gpus(parsed(tmp_path, "--vllm.num_engines", "40"), False) == ""


def test_more_gpus_than_there_are_are_refused_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nvml.install(monkeypatch, tmp_path, gpus=2)
    monkeypatch.setattr(platform, "gpu_present", lambda: True)
    monkeypatch.setattr(preflight, "check", lambda args, on_gpus: preflight.Checked(1))
    monkeypatch.setattr("rhyme_openrlhf.run.launch.run_training", lambda *_: pytest.fail("a run was started"))
    assert train_ppo_ray.main(demo.arguments(str(tmp_path))) == 2
    said = capsys.readouterr().err
    assert "the run asks for 3 GPUs" in said and "but there are 2: lower --*.num_gpus_per_node" in said


def test_too_little_memory_names_the_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml.install(monkeypatch, tmp_path, gpus=3, memory=12 * 2**20)
    said = refused(parsed(tmp_path, "--ds.zero_stage", "1"))
    assert "has 12.0 MiB" in said and "--ds.adam_offload would make it fit" in said and "rhyme train --plan" in said


def test_gpus_that_other_programs_use_are_refused_where_too_few_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    args = parsed(tmp_path)
    nvml.install(monkeypatch, tmp_path, gpus=3, used=int((1 - args.vllm.gpu_memory_utilization) * 80 * GIB) - GIB)
    assert preflight_gpus.check_gpus(args, True) == ""
    (tmp_path / "more").mkdir()
    nvml.install(monkeypatch, tmp_path / "more", gpus=3, used=60 * GIB)
    said = refused(args)
    assert "GPU 0 (Pretended GPU): other programs hold 60.0 GiB of 80.0 GiB" in said and "CUDA_VISIBLE_DEVICES" in said


def test_gpus_of_two_kinds_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml.install(monkeypatch, tmp_path, gpus=4, names=("NVIDIA H100", "NVIDIA A100"))
    assert "of 2 kinds (NVIDIA A100, NVIDIA H100)" in preflight_gpus.check_gpus(parsed(tmp_path), True)


def test_no_nvcc_and_another_nvcc_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml.install(monkeypatch, tmp_path, gpus=3)
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda-12.8", "12.8")))
    assert "has CUDA 12.8: install the CUDA toolkit 13.0" in refused(parsed(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert f"{tmp_path}/bin/nvcc does not run" in refused(parsed(tmp_path))
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nvidia, "_DEFAULT_TOOLKIT", tmp_path / "nowhere")
    assert "CUDA_HOME is not set and there is no nvcc" in refused(parsed(tmp_path))
    # A DeepSpeed that was compiled when it was installed needs none.
    monkeypatch.setattr(nvidia, "deepspeed_is_compiled", lambda: True)
    assert preflight_gpus.check_gpus(parsed(tmp_path), True) == ""


def test_a_ring_that_does_not_divide_the_policys_gpus(tmp_path: Path) -> None:
    args = parsed(tmp_path)
    args.ds.ring_attn_size = 2
    assert "--ds.ring_attn_size 2 times --ds.tensor_parallel_size 1 does not divide the policy's 1 GPUs" in refused(
        args
    )


@pytest.fixture(scope="module")
def two_nodes(starts_ray: None, starts_cluster: None) -> Iterator[str]:
    """A Ray of two nodes with four pretended GPUs each; its address."""
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 4})
    cluster.add_node(num_cpus=1, num_gpus=4)
    yield cluster.address
    cluster.shutdown()


def test_numbers_and_nodes_of_a_cluster_are_checked(
    two_nodes: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", two_nodes)
    args = parsed(tmp_path, "--vllm.num_engines", "1")
    args.vllm.tensor_parallel_size = 8
    # The cluster may grow: OpenRLHF's placement group waits.
    waits = "the run asks for 9 GPUs, but the cluster has 8 now: it waits until 1 more join"
    assert preflight_gpus.check_gpus(args, True).startswith(waits)
    launch._check_gpus(args)
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(launch.ray, "cluster_resources", lambda: {"GPU": 8.0})
    with pytest.raises(launch.LaunchError, match="asks for 9 GPUs .* but there are 8"):
        launch._check_gpus(args)
    monkeypatch.setenv("RAY_ADDRESS", two_nodes)
    # Seven GPUs are there, and no node has them.
    args.vllm.tensor_parallel_size = 7
    said = preflight_gpus.check_gpus(args, True)
    assert "--vllm.tensor_parallel_size 7: 1 of 1 engines will span nodes" in said and "largest has 4 GPUs" in said
    # Two engines of three leave one GPU on each node.
    args.vllm.tensor_parallel_size, args.vllm.num_engines = 3, 2
    assert preflight_gpus.check_gpus(args, True) == ""


def test_a_cluster_without_any_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(preflight_gpus, "_cluster_gpus", lambda: ([0, 0], 0))
    assert "asks for 3 GPUs" in refused(parsed(tmp_path)) and "there are 0" in refused(parsed(tmp_path))


def test_a_node_that_does_not_do_ends_no_run_that_waits_for_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(preflight_gpus, "_cluster_gpus", lambda: ([2], 2))
    broken = preflight_gpus.NodeFacts("the driver is too old", 80 * 2**30, 2**40)
    reply = Reply(Node("key", "10.0.0.7", 2, 0, here=False), broken, "", 0.0, 0.0)
    monkeypatch.setattr(preflight_gpus, "_answers", lambda timeout_s: [reply])
    said = preflight_gpus.check_gpus(parsed(tmp_path), True)
    assert "waits until 1 more join" in said and "node 10.0.0.7: the driver is too old (if Ray places" in said


def test_a_critic_of_unknown_size_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml.install(monkeypatch, tmp_path, gpus=4)
    monkeypatch.setattr(preflight_gpus, "_check_compiler", lambda: None)
    args = parsed(tmp_path)
    args.critic.model_name_or_path, args.critic.num_gpus_per_node = "nobody/nothing", 1
    assert preflight_gpus.check_gpus(args, True).startswith("the memory plan leaves out the critic: ")
    args.actor.model_name_or_path = "nobody/nothing"
    assert preflight_gpus.check_gpus(args, True).startswith("there is no memory plan of nobody/nothing")


@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        (["--plan"], 0, "policy, 1 GPU: at least"),
        (["--plan", "80"], 0, "80.0 GiB are there"),
        (["--plan", "0.005"], 2, "does not fit"),
    ],
)
def test_train_prints_the_plan_and_starts_nothing(
    arguments: list[str], code: int, shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(preflight, "check", lambda *_: pytest.fail("a run would start"))
    assert train_ppo_ray.main([*demo.arguments(str(tmp_path)), *arguments]) == code
    said = capsys.readouterr()
    assert shown in said.out and "engine: rows of the sampler" in said.out and "/dev/shm" in said.out
    assert ("rhyme train: error: a GPU of the" in said.err) == bool(code)


def test_a_plan_without_engines_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*demo.arguments(str(tmp_path)), "--plan", "--vllm.num_engines", "0"]
    with pytest.raises(SystemExit) as ended:
        train_ppo_ray.main(argv)
    assert ended.value.code == 2
    assert "--vllm.num_engines must be at least 1" in capsys.readouterr().err


def test_a_model_that_cannot_be_read_has_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*demo.arguments(str(tmp_path)), "--plan", "--actor.model_name_or_path", "nobody/nothing"]
    assert train_ppo_ray.main(argv) == 2
    assert "there is no memory plan of nobody/nothing" in capsys.readouterr().err
