"""GPUs that the driver lists and torch cannot use: read through a stand-in NVML, and refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rhyme_openrlhf.cli import demo, preflight, train_arguments, train_ppo_ray
from rhyme_openrlhf.embedded.demo import demo_arguments
from rhyme_openrlhf.platform import gpu_present, nvidia
from tests import nvml

torch = pytest.importorskip("torch")
GIB = 2**30
pytestmark = pytest.mark.skipif(gpu_present(), reason="here torch sees a GPU")


def old_driver(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    nvml.install(monkeypatch, folder, gpus=2, driver="535.104.05")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(preflight, "check", lambda args, on_gpus: pytest.fail("the run goes on without a GPU"))


def test_a_driver_too_old_for_torch_is_refused_by_train_and_demo_and_never_a_cpu_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old_driver(monkeypatch, tmp_path)
    for command in (lambda: train_ppo_ray.main(demo_arguments()), lambda: demo.main([])):
        assert command() == 2
        said = capsys.readouterr()
        assert "driver 535.104.05 lists 2 GPU(s) (Pretended GPU), but torch sees none" in said.err
        assert "too old for torch's CUDA 13.0: install driver 580 or newer" in said.err
        assert "no GPU" not in said.out


def test_what_only_starts_engines_refuses_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`rhyme verify` and `rhyme profile` check their arguments here."""
    old_driver(monkeypatch, tmp_path)
    with pytest.raises(train_arguments.BadInputError, match="install driver 580 or newer"):
        train_arguments.check(demo_arguments(), lambda sentence: None)


def test_each_reason_has_its_remedy() -> None:
    said = {
        "old": nvidia.unusable(["A"], "525.85", "13.0"),
        "cpu": nvidia.unusable(["A"], "580.65", ""),
        "else": nvidia.unusable(["A"], "580.65", "13.0"),
    }
    assert "580 or newer" in said["old"] and "CPU build" in said["cpu"] and "torch.cuda.init()" in said["else"]
    assert all("set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU" in sentence for sentence in said.values())
    assert nvidia.too_old("525.85", "13.0") and not nvidia.too_old("525.85", "12.9") and not nvidia.too_old("", "13.0")


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 3), ("", 0), ("-1", 0), ("1", 1), ("2,0", 2), ("GPU-2000", 1), ("0,7,1", 1)]
)
def test_only_visible_gpus_count(
    visible: str | None, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvml.install(monkeypatch, tmp_path, gpus=3, memory=40 * GIB)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = nvidia.read()
    assert [gpu.memory for gpu in found.gpus] == [40 * GIB] * count


def test_peer_access_and_nvlink_are_read_pair_by_pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml.install(monkeypatch, tmp_path, gpus=3, apart=[[0, 2]])
    found = nvidia.read()
    assert found.apart == ((0, 2),) and not found.nvlinked


def test_without_a_driver_the_answer_is_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml.install(monkeypatch, tmp_path, gpus=0)
    assert nvidia.read() == nvidia.Driver()
