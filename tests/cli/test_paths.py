"""Relative paths of a run's options: absolute before anything starts, or refused where Ray would delete them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rhyme_openrlhf.cli import paths, train_arguments, upstream
from rhyme_openrlhf.platform.job_variables import JOB_CONFIG

pytest.importorskip("openrlhf")
COPIED = {JOB_CONFIG: json.dumps({"runtime_env": {"working_dir": "gcs://_ray_pkg_ab.zip"}, "metadata": {}})}
FILES = ("reward.py", "other.py", "train.jsonl", "test.jsonl", "auto")
OPTIONS = [
    "--actor.model_name_or_path", "models/policy", "--data.prompt_dataset", "train.jsonl@part, Org/name,test.jsonl",
    "--vllm.num_engines", "1", "--reward.remote_url", "reward.py,http://h:1/get", "--ckpt.path", "ckpt/resume",
    "--ckpt.output_dir", "ckpt", "--history.earlier", "auto",
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with files."""
    (tmp_path / "models" / "policy").mkdir(parents=True)
    for name in FILES:
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parsed(*more: str) -> SimpleNamespace:
    return upstream.parse([*OPTIONS, *more])


def test_what_is_there_is_made_absolute_and_names_stay(folder: Path) -> None:
    args = parsed("--eval.dataset", "Org/evaluation", "--critic.model_name_or_path", "Qwen/Qwen3-8B")
    paths.make_absolute(args, {})
    assert args.actor.model_name_or_path == f"{folder}/models/policy"
    assert args.data.prompt_dataset == f"{folder}/train.jsonl@part,Org/name,{folder}/test.jsonl"
    assert args.reward.remote_url == [f"{folder}/reward.py", "http://h:1/get"]
    assert (args.ckpt.path, args.ckpt.output_dir) == (f"{folder}/ckpt/resume", f"{folder}/ckpt")
    assert (args.eval.dataset, args.critic.model_name_or_path) == ("Org/evaluation", "Qwen/Qwen3-8B")
    # A file of that name means nothing, and an option that was not given stays so.
    assert args.history.earlier == "auto" and args.run.dir == "" and args.history.spill_dir == ""
    assert paths.read_by_nodes(args) == {
        f"{folder}/models/policy": "--actor.model_name_or_path",
        f"{folder}/train.jsonl": "--data.prompt_dataset",
        f"{folder}/test.jsonl": "--data.prompt_dataset",
        f"{folder}/reward.py": "--reward.remote_url",
    }


def test_an_at_sign_is_of_a_paths_own_but_for_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "user@corp").mkdir()
    for name in ("reward.py", "train.jsonl"):
        (folder / "user@corp" / name).touch()
    monkeypatch.chdir(folder / "user@corp")
    args = upstream.parse(["--reward.remote_url", "reward.py", "--data.prompt_dataset", "train.jsonl"])
    paths.make_absolute(args, {})
    assert args.reward.remote_url == [f"{folder}/user@corp/reward.py"]
    # Its reader would take the part behind the sign for a split.
    assert args.data.prompt_dataset == "train.jsonl"


def test_rhyme_train_reads_them_so(folder: Path) -> None:
    args, settings = train_arguments.parse([*OPTIONS, "--run.dir", "here"])
    assert settings.run.dir == f"{folder}/here" and args.ckpt.path == f"{folder}/ckpt/resume"


def test_in_rays_copy_what_is_read_stays_and_what_is_written_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parsed("--run.dir", "/shared/run")
    with pytest.raises(
        paths.RelativePathError, match=r"^--ckpt.path ckpt/resume would be in Ray's copy .*: give an abs"
    ):
        paths.make_absolute(args, COPIED)
    args = parsed("--ckpt.path", "/shared/resume", "--ckpt.output_dir", "/shared")
    with pytest.raises(paths.RelativePathError, match=r"^--run.dir \(not given\) would be in Ray's copy"):
        paths.make_absolute(args, COPIED)
    args = parsed("--ckpt.path", "/shared/resume", "--ckpt.output_dir", "/shared", "--run.dir", "/shared/run")
    paths.make_absolute(args, COPIED)
    # Every node has a copy, perhaps in another place.
    assert (
        args.reward.remote_url == ["reward.py", "http://h:1/get"] and args.actor.model_name_or_path == "models/policy"
    )
    # `rhyme train` says so in one sentence.
    monkeypatch.setenv(JOB_CONFIG, COPIED[JOB_CONFIG])
    with pytest.raises(train_arguments.BadInputError, match="would be in Ray's copy"):
        train_arguments.parse(OPTIONS)


def test_a_folder_whose_name_upstream_would_split_leaves_paths_as_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = folder / "a,b"
    odd.mkdir()
    (odd / "train.jsonl").touch()
    monkeypatch.chdir(odd)
    args = parsed("--data.prompt_dataset", "train.jsonl")
    paths.make_absolute(args, {})
    assert args.data.prompt_dataset == "train.jsonl"
