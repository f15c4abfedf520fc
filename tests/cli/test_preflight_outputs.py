"""Room on the disks of checkpoints and model is compared with their sizes before anything is started."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("openrlhf")

from rhyme_openrlhf import embedded
from rhyme_openrlhf.cli import preflight, upstream
from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.cli.preflight_models import PreflightError
from rhyme_openrlhf.cli.preflight_outputs import check_outputs

# The embedded model's parameters.
PARAMETERS = 1_016_960
# Those of its output layer, which a critic has not.
HEAD = 16_384
CRITIC = f"--critic.model_name_or_path {embedded.MODEL} --algo.advantage.estimator gae --critic.num_gpus_per_node 1"
# DeepSpeed's files of a checkpoint of the embedded model, written by a run in fp32 (0.19.6).
SAVED = 4_090_289 + 12_215_679


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the free space of every disk by `free.bytes`."""
    disk = SimpleNamespace(bytes=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=disk.bytes))
    return disk


def args(folder: Path, flags: str = "", param_dtype: str = "bf16") -> SimpleNamespace:
    parsed = upstream.parse([*arguments(str(folder)), "--ckpt.save_steps", "1", *flags.split()])
    parsed.ds.param_dtype = param_dtype
    return parsed


@pytest.mark.parametrize(
    ("flags", "each"),
    [
        ("", 14),
        ("--actor.optim muon", 10),
        ("--ds.lora.rank 8", 2),
        (CRITIC, 28 - 14 * HEAD / PARAMETERS),
    ],
)
def test_a_disk_without_room_for_one_checkpoint_is_refused(
    tmp_path: Path, free: SimpleNamespace, flags: str, each: int
) -> None:
    free.bytes = round(each * PARAMETERS) - 1
    with pytest.raises(PreflightError, match=r"^--ckpt.path: a checkpoint takes at least .* MiB, but there is room"):
        check_outputs(args(tmp_path, flags))
    free.bytes += 1
    assert "--ckpt.max_num" in check_outputs(args(tmp_path, flags))


def test_the_least_size_of_a_checkpoint_is_that_of_one_that_a_run_wrote(tmp_path: Path, free: SimpleNamespace) -> None:
    free.bytes = round(0.99 * SAVED)
    with pytest.raises(PreflightError):
        check_outputs(args(tmp_path, param_dtype="fp32"))
    free.bytes = SAVED
    check_outputs(args(tmp_path, param_dtype="fp32"))


def test_room_for_fewer_checkpoints_than_are_kept_is_said_before_the_run(
    tmp_path: Path, free: SimpleNamespace, starts_python: None
) -> None:
    free.bytes = 3 * 14 * PARAMETERS - 1
    sentence = preflight.check(args(tmp_path, "--ckpt.max_num 3")).said[-1]
    assert sentence.startswith("--ckpt.max_num 3: 3 checkpoints of at least 13.6 MiB do not fit into ")
    assert check_outputs(args(tmp_path, "--ckpt.max_num 2")) == ""
    # After 0.01 GiB no further one is kept beside the next.
    assert check_outputs(args(tmp_path, "--ckpt.max_num 3 --ckpt.max_mem 0.01")) == ""
    free.bytes += 1
    assert check_outputs(args(tmp_path, "--ckpt.max_num 3")) == ""


def test_the_trained_model_needs_room_also_without_checkpoints(tmp_path: Path, free: SimpleNamespace) -> None:
    for flags in ("--ckpt.disable_ds", "--ckpt.save_steps -1"):
        free.bytes = 2 * PARAMETERS - 1
        with pytest.raises(PreflightError, match=r"^--ckpt.output_dir: the trained model takes at least 1.9 MiB"):
            check_outputs(args(tmp_path, flags))
        free.bytes += 1
        assert check_outputs(args(tmp_path, flags)) == ""


def test_what_a_run_before_wrote_there_is_room(tmp_path: Path, free: SimpleNamespace) -> None:
    (tmp_path / "_actor").mkdir()
    (tmp_path / "_actor" / "states.pt").write_bytes(b"\0" * PARAMETERS)
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "model.safetensors").write_bytes(b"\0" * PARAMETERS)
    free.bytes = 13 * PARAMETERS
    assert "--ckpt.max_num" in check_outputs(args(tmp_path))
    free.bytes -= 1
    with pytest.raises(PreflightError, match=r"^--ckpt.path"):
        check_outputs(args(tmp_path))


def test_nothing_is_said_of_the_disks_of_a_cluster_or_of_a_model_of_unknown_shape(
    tmp_path: Path, free: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_outputs(args(tmp_path, "--actor.model_name_or_path not/downloaded")) == ""
    monkeypatch.setenv("RAY_ADDRESS", "cluster:6379")
    assert check_outputs(args(tmp_path)) == ""
