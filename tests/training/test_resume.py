"""The driver answers --ckpt.load_enable with one Note, or one sentence and exit code 2."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace as NS
from typing import Any

import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.cli import train_ppo_ray
from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.run.directory_lock import held
from rhyme_openrlhf.training.checkpoint_directory import LATEST, CheckpointDirectory, write_json
from rhyme_openrlhf.training.resume import STATE_FILE, STATE_VERSION, ResumeError, bound_settings, prepare

PROMPTS = 8
ACTOR_GPUS = "--actor.num_nodes x --actor.num_gpus_per_node"


def run_arguments(path: Path, **changes: Any) -> NS:
    args = NS(
        ckpt=NS(path=str(path), load_enable=True, max_num=3, disable_ds=False),
        actor=NS(model_name_or_path=str(embedded.MODEL), num_nodes=1, num_gpus_per_node=2, optim="adam"),
        critic=NS(model_name_or_path=None, num_nodes=1, num_gpus_per_node=1),
        rollout=NS(batch_size=4, n_samples_per_prompt=4),
        train=NS(batch_size=16, enable_ema=False),
        ds=NS(zero_stage=2, param_dtype="bf16", tensor_parallel_size=1, ring_attn_size=1, use_universal_ckpt=False,
              lora=NS(rank=0)),
    )  # fmt: skip
    for name, value in changes.items():
        group, _, leaf = name.partition("__")
        setattr(getattr(args, group), leaf, value)
    return args


def save(args: NS, step: int, models: tuple[str, ...] = ("_actor",), version: int = STATE_VERSION) -> None:
    path = Path(args.ckpt.path)
    directory = CheckpointDirectory(path, critic=len(models) == 2)
    ours = directory.begin(f"global_step{step}")
    for model in models:
        (path / model / f"global_step{step}").mkdir(parents=True)
        (path / model / f"global_step{step}" / "states.pt").write_text("weights")
        (path / model / LATEST).write_text(f"global_step{step}")
    (ours / "history-0-of-1").write_text("history")
    content = {
        "version": version,
        "step": step,
        "settings": bound_settings(args, PROMPTS),
        "history": ["history-0-of-1"],
    }
    write_json(ours / STATE_FILE, content)
    assert directory.commit(f"global_step{step}")


def test_the_newest_complete_checkpoint_is_named_and_loaded(tmp_path: Path) -> None:
    args = run_arguments(tmp_path)
    save(args, 3)
    save(args, 6)
    (tmp_path / "_actor" / "global_step6" / "states.pt").write_text("torn")
    checkpoints, notes = prepare(args, PROMPTS)
    assert checkpoints.resume is not None and args.ckpt.load_enable
    assert (checkpoints.resume.tag, checkpoints.resume.step) == ("global_step3", 3)
    assert checkpoints.resume.history == (tmp_path / "_rhyme" / "global_step3" / "history-0-of-1",)
    (note,) = notes
    assert note == (
        f"resumes from checkpoint global_step3 in {tmp_path}, after step 3 "
        "(deleted what was half-written: global_step6)"
    )
    assert (tmp_path / "_actor" / LATEST).read_text() == "global_step3"


def test_without_a_checkpoint_training_starts_at_the_beginning(tmp_path: Path) -> None:
    args = run_arguments(tmp_path)
    save(args, 1)
    (tmp_path / "_rhyme" / "global_step1" / "complete.json").unlink()
    checkpoints, (note,) = prepare(args, PROMPTS)
    # Upstream fails on an `_actor` that has no checkpoint, so it is not asked to load one.
    assert checkpoints.resume is None and not args.ckpt.load_enable
    assert note.startswith(f"no complete checkpoint in {tmp_path}: training starts at the beginning (deleted")
    assert not (tmp_path / "_actor" / "global_step1").exists()


def test_plain_openrlhfs_checkpoint_says_what_starts_fresh(tmp_path: Path) -> None:
    args = run_arguments(tmp_path)
    (tmp_path / "_actor" / "global_step5").mkdir(parents=True)
    (tmp_path / "_actor" / LATEST).write_text("global_step5")
    checkpoints, (note,) = prepare(args, PROMPTS)
    assert checkpoints.resume is not None and args.ckpt.load_enable
    assert (checkpoints.resume.step, checkpoints.resume.ours, checkpoints.resume.history) == (5, None, ())
    assert "OpenRLHF's own checkpoint global_step5" in note and "history" in note and "start fresh" in note
    with pytest.raises(ResumeError, match="not of the critic"):
        prepare(run_arguments(tmp_path, critic__model_name_or_path=str(embedded.MODEL)), PROMPTS)


def plain(path: Path, model: str, tag: str, **named: str) -> None:
    """Make the checkpoint of another program: a directory of that name, and files that name one."""
    (path / model / tag).mkdir(parents=True)
    (path / model / tag / "states.pt").write_text("weights")
    for file, name in named.items():
        (path / model / file).write_text(name)


@pytest.mark.parametrize(
    ("tag", "named", "said"),
    [
        ("step_100", {"latest": "step_100"}, "_actor/latest names 'step_100', which is no checkpoint of OpenRLHF's"),
        ("global_step5", {"latest": ""}, "_actor/latest names '', which is no checkpoint of OpenRLHF's"),
        ("global_step5", {"latest": "global_step5_universal"}, "names 'global_step5_universal'"),
        ("global_step5", {}, "_actor has global_step5, but latest there names none that exists"),
        ("epoch3", {"latest": "global_step6"}, "_actor has epoch3, but latest there names none that exists"),
        ("global_step5", {"latest": "global_step6"}, "_actor has global_step5, but latest there names none"),
        ("global_step5", {"latest_universal": "global_step5"}, "_actor has global_step5, but latest there names none"),
    ],
)
def test_a_policy_whose_checkpoint_is_not_recognised_is_refused_and_never_started_at_step_0(
    tmp_path: Path, tag: str, named: dict[str, str], said: str
) -> None:
    plain(tmp_path, "_actor", tag, **named)
    args = run_arguments(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ResumeError) as refused:
        prepare(args, PROMPTS)
    assert said in str(refused.value) and "choose another --ckpt.path to start anew" in str(refused.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    # Without --ckpt.load_enable nobody asked for it.
    assert prepare(run_arguments(tmp_path, ckpt__load_enable=False), PROMPTS)[0].resume is None


def test_a_latest_file_that_is_not_recognised_is_refused_beside_complete_checkpoints_too(tmp_path: Path) -> None:
    """OpenRLHF would load what it names."""
    args = run_arguments(tmp_path)
    save(args, 3)
    plain(tmp_path, "_actor", "merged", latest="merged")
    with pytest.raises(ResumeError, match="names 'merged'"):
        prepare(args, PROMPTS)
    (tmp_path / "_actor" / LATEST).write_text("global_step3")
    checkpoints, _ = prepare(run_arguments(tmp_path), PROMPTS)
    assert checkpoints.resume is not None and checkpoints.resume.step == 3


def test_a_universal_checkpoint_is_the_one_that_latest_universal_names(tmp_path: Path) -> None:
    args = run_arguments(tmp_path, ds__use_universal_ckpt=True)
    assert prepare(args, PROMPTS)[0].resume is None
    save(args, 3)
    args = run_arguments(tmp_path, ds__use_universal_ckpt=True)
    with pytest.raises(ResumeError, match="latest_universal names no checkpoint there"):
        prepare(args, PROMPTS)
    (tmp_path / "_actor" / "latest_universal").write_text("global_step2_universal")
    with pytest.raises(ResumeError, match="latest_universal names no checkpoint there"):
        prepare(args, PROMPTS)
    (tmp_path / "_actor" / "global_step2_universal").mkdir()
    checkpoints, (note,) = prepare(args, PROMPTS)
    assert checkpoints.resume is not None and args.ckpt.load_enable
    assert (checkpoints.resume.tag, checkpoints.resume.step) == ("global_step2_universal", 2)
    assert "OpenRLHF's own checkpoint global_step2_universal" in note and "start fresh" in note
    critics = {"critic__model_name_or_path": str(embedded.MODEL), "ds__use_universal_ckpt": True}
    with pytest.raises(ResumeError, match="not of the critic"):
        prepare(run_arguments(tmp_path, **critics), PROMPTS)
    plain(tmp_path, "_critic", "global_step2_universal", latest_universal="global_step2_universal")
    assert prepare(run_arguments(tmp_path, **critics), PROMPTS)[0].resume is not None


@pytest.mark.parametrize(
    ("changes", "prompts", "said"),
    [
        ({"rollout__batch_size": 8}, PROMPTS, "--rollout.batch_size 4, this run has 8"),
        ({"rollout__n_samples_per_prompt": 8}, PROMPTS, "--rollout.n_samples_per_prompt 4, this run has 8"),
        ({"train__batch_size": 32}, PROMPTS, "--train.batch_size 16, this run has 32"),
        ({"actor__optim": "muon"}, PROMPTS, "--actor.optim adam, this run has muon"),
        ({"ds__zero_stage": 3}, PROMPTS, "--ds.zero_stage 2, this run has 3"),
        ({"ds__param_dtype": "fp32"}, PROMPTS, "--ds.param_dtype bf16, this run has fp32"),
        ({"ds__tensor_parallel_size": 2}, PROMPTS, "--ds.tensor_parallel_size 1, this run has 2"),
        ({"ds__ring_attn_size": 2}, PROMPTS, "--ds.ring_attn_size 1, this run has 2"),
        ({"ds__lora": NS(rank=8)}, PROMPTS, "--ds.lora.rank 0, this run has 8"),
        *(
            ({f"actor__{name}": 4}, PROMPTS, f"{ACTOR_GPUS} 2, this run has")
            for name in ("num_nodes", "num_gpus_per_node")
        ),
        ({"actor__model_name_or_path": "other/model"}, PROMPTS, "this run has other/model"),
        (
            {"critic__model_name_or_path": "other/model"},
            PROMPTS,
            "--critic.model_name_or_path none, this run has other/model",
        ),
        ({}, 9, "prompts in --data.prompt_dataset: 8, this run has 9"),
    ],
)
def test_settings_that_contradict_the_checkpoint_are_refused(
    tmp_path: Path, changes: dict[str, Any], prompts: int, said: str
) -> None:
    save(run_arguments(tmp_path), 3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ResumeError) as refused:
        prepare(run_arguments(tmp_path, **changes), prompts)
    assert said in str(refused.value) and "global_step3" in str(refused.value) and "\n" not in str(refused.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_model_that_lies_elsewhere_now_is_the_same(tmp_path: Path) -> None:
    args = run_arguments(tmp_path / "ckpt")
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "config.json").write_bytes((embedded.MODEL / "config.json").read_bytes())
    save(args, 3)
    checkpoints, _ = prepare(run_arguments(tmp_path / "ckpt", actor__model_name_or_path=str(moved)), PROMPTS)
    assert checkpoints.resume is not None


def test_another_format_is_refused(tmp_path: Path) -> None:
    args = run_arguments(tmp_path)
    save(args, 3, version=9)
    with pytest.raises(ResumeError, match="its format is 9, this one reads 2"):
        prepare(args, PROMPTS)


def test_a_new_run_changes_nothing(tmp_path: Path) -> None:
    args = run_arguments(tmp_path, ckpt__load_enable=False)
    save(args, 3)
    same = copy.deepcopy(args)
    checkpoints, notes = prepare(args, PROMPTS)
    assert checkpoints.resume is None and notes == [] and args == same


def test_one_checkpoint_is_never_deleted_before_the_next_is_there(tmp_path: Path) -> None:
    args = run_arguments(tmp_path, ckpt__max_num=1, ckpt__load_enable=False)
    _, notes = prepare(args, PROMPTS)
    assert args.ckpt.max_num == 2 and notes[0].startswith("--ckpt.max_num is 2:")


@pytest.mark.usefixtures("starts_python")
def test_the_command_refuses_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ckpt"
    save(run_arguments(path), 3)
    rows = (embedded.DATA / "mixed_train.jsonl").read_text().splitlines()[:PROMPTS]
    (tmp_path / "small.jsonl").write_text("\n".join(json.dumps(json.loads(row)) for row in rows))
    argv = [*arguments(str(path)), "--data.prompt_dataset", str(tmp_path / "small.jsonl"), "--ckpt.load_enable"]
    code = train_ppo_ray.main([*argv, "--run.dir", str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert code == 2 and "--rollout.batch_size 4, this run has 12" in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()
    # Another run's directory, under either flag; nothing in it is looked at.
    (path / "_rhyme" / "global_step3" / "complete.json").unlink()
    for flag, saved_to in (("--ckpt.path", path), ("--ckpt.output_dir", path / "trained")):
        with held({"--ckpt.path": str(saved_to)}, "first"):
            code = train_ppo_ray.main([*argv, "--run.dir", str(tmp_path / "run")])
        error = capsys.readouterr().err
        assert code == 2 and f"{flag} {saved_to} is in use by run first (process " in error
        assert error.count("\n") == 1 and not (tmp_path / "run").exists()
    assert (path / "_actor" / "global_step3").exists()
