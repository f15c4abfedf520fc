"""Specs: every fault at once with its field, and no path, secret or setting that is not the client's to give."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rhyme_openrlhf import embedded
from rhyme_openrlhf.api.launch.spec import Arguments, RunSpec, SpecError, check, gpus_needed, merged, resolved
from rhyme_openrlhf.api.launch.spec_command import from_command


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a reward, an agent, data, a model, and ways out of it."""
    place = tmp_path / "root"
    for folder in ("model", "scripted"):
        (place / folder).mkdir(parents=True)
    for name in ("reward.py", "agent.py", "data.jsonl", "scripted/scripted.py", "notes.txt"):
        (place / name).write_text("")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "evil.py").write_text("")
    (place / "link.py").symlink_to(outside / "evil.py")
    (place / "linked").symlink_to(outside)
    (place / "loop").symlink_to(place / "loop")
    (place / "within.py").symlink_to(place / "reward.py")
    return place


def spec(root: Path, **changes: dict[str, Any]) -> Arguments:
    base: Arguments = {
        "actor": {"model_name_or_path": "org/model"},
        "data": {"prompt_dataset": str(root / "data.jsonl")},
        "reward": {"remote_url": str(root / "reward.py")},
        "vllm": {"num_engines": 2},
    }
    return merged(base, changes)


def faults(arguments: dict[str, Any], root: Path) -> dict[str, str]:
    with pytest.raises(SpecError) as refused:
        check(arguments, [root])
    return {fault.field: fault.message for fault in refused.value.faults}


def test_a_good_spec_passes_in_normal_form(root: Path) -> None:
    checked = check(spec(root, actor={"adam.lr": 1, "freeze_visual_encoder": False}), [root])
    assert checked["actor"] == {"model_name_or_path": "org/model", "adam.lr": 1.0}
    assert type(checked["actor"]["adam.lr"]) is float
    assert check(checked, [root]) == checked


def test_an_option_of_the_version_before_is_left_out(root: Path) -> None:
    _, pasted = from_command("rhyme train --history.nice 5 --history.workers=3")
    assert check(merged(spec(root), pasted), [root])["history"] == {"workers": 3}


def test_all_faults_come_at_once(root: Path) -> None:
    found = faults(
        spec(
            root,
            actor={"adam.lr": "fast"},
            histospec={"window_max": 1000, "windows": 3},
            nowhere={"x": 1},
            run={"dir": "/tmp/x"},
            control={"url": "http://elsewhere"},
            logger={"wandb.key": "abc"},
        ),
        root,
    )
    assert set(found) == {
        "arguments.actor.adam.lr",
        "arguments.histospec.window_max",
        "arguments.histospec.windows",
        "arguments.nowhere.x",
        "arguments.run.dir",
        "arguments.control.url",
        "arguments.logger.wandb.key",
    }
    assert "from 1 to 128" in found["arguments.histospec.window_max"]
    assert "window_max" in found["arguments.histospec.windows"]
    assert "did you mean histospec.window_step?" in found["arguments.histospec.windows"]
    assert "the service sets it" in found["arguments.run.dir"]
    assert "abc" not in str(found)


def test_names_that_are_all_wrong_take_no_more_time_than_a_hundred(root: Path) -> None:
    wrong = {f"histospec{number}": {"widow_max" * 1000: 1} for number in range(20_000)}
    began = time.process_time()
    assert len(faults({**spec(root), **wrong}, root)) == 100
    # All of them take minutes.
    assert time.process_time() - began < 20


def test_rules_that_tie_options_together(root: Path) -> None:
    assert (
        "must be at most"
        in faults(spec(root, histospec={"window_start": 64}), root)["arguments.histospec.window_start"]
    )
    assert "arguments.rollout.n_samples_per_prompt" in faults(
        spec(root, algo={"advantage.estimator": "group_norm"}), root
    )
    assert set(faults({"vllm": {"num_engines": 1}}, root)) == {
        "arguments.actor.model_name_or_path",
        "arguments.data.prompt_dataset",
        "arguments.reward.remote_url",
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reward.remote_url", "{root}/link.py"),
        ("reward.remote_url", "{root}/linked/evil.py"),
        ("reward.remote_url", "{root}/../outside/evil.py"),
        ("reward.remote_url", "{root}/loop"),
        ("reward.remote_url", "{root}/missing.py"),
        ("reward.remote_url", "{root}/notes.txt"),
        ("reward.remote_url", "reward.py"),
        ("reward.remote_url", "file:///etc/passwd"),
        ("reward.remote_url", "http://user:secret@host/score"),
        ("reward.remote_url", "http://host/evil.py"),
        ("reward.remote_url", "http://ok/score,{root}/link.py"),
        ("reward.remote_url", "/proc/self/environ"),
        ("train.agent_func_path", "/usr/lib/python3/evil.py"),
        ("train.agent_func_path", "{root}/link.py"),
        ("actor.model_name_or_path", "../model"),
        ("actor.model_name_or_path", "./model"),
        ("actor.model_name_or_path", "~/model"),
        ("actor.model_name_or_path", "org/../model"),
        ("actor.model_name_or_path", "/etc"),
        ("actor.model_name_or_path", "{root}/linked"),
        ("actor.model_name_or_path", "{root}"),
        ("data.prompt_dataset", "/etc/passwd"),
        ("data.prompt_dataset", "data.jsonl"),
        ("data.prompt_dataset", "{root}/data.jsonl,/etc/hosts.json"),
        ("data.prompt_dataset", "{root}/scripted"),
        ("data.prompt_dataset", "{root}/scripted/scripted.py"),
        ("data.prompt_dataset", "json@/etc"),
        ("data.prompt_dataset", "org/data@../.."),
        ("data.prompt_dataset", "https://host/data.jsonl"),
        ("data.prompt_dataset", ""),
        ("eval.dataset", "{root}/notes.txt"),
        ("ckpt.path", "/tmp/elsewhere"),
        ("ckpt.path", "{root}"),
        ("ckpt.path", "{root}/data.jsonl"),
        ("ckpt.path", "{root}/linked/new"),
        ("ckpt.output_dir", "./ckpt"),
        ("logger.tensorboard_dir", "/var/log"),
        ("reward.remote_url", "http://host/score?api_key=abc"),
        ("history.spill_dir", "/tmp/elsewhere"),
        ("history.spill_dir", "{root}/linked/new"),
        ("history.spill_dir", "spilled"),
        ("emulate.profile", "/etc/passwd"),
        ("emulate.profile", "{root}/missing.json"),
        ("emulate.profile", "auto"),
        ("latency.profile", "/etc/passwd"),
        ("latency.profile", "{root}/link.py"),
        ("latency.profile", "profile.json"),
        ("tp_switch.profile", "/etc/passwd"),
        ("tp_switch.profile", "{root}/data.jsonl,/etc/passwd"),
        ("tp_switch.profile", "auto,{root}/link.py"),
    ],
)
def test_no_path_leads_out_of_the_roots(root: Path, field: str, value: str) -> None:
    group, name = field.split(".")
    found = faults(spec(root, **{group: {name: value.format(root=root)}}), root)
    assert set(found) == {f"arguments.{field}"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reward.remote_url", "{root}/within.py"),
        ("reward.remote_url", "https://rewards.example:8000/score,http://10.0.0.2/score"),
        ("reward.remote_url", str(embedded.REWARD)),
        ("train.agent_func_path", "{root}/agent.py"),
        ("actor.model_name_or_path", "Qwen/Qwen3-4B"),
        ("actor.model_name_or_path", "{root}/model"),
        ("actor.model_name_or_path", str(embedded.MODEL)),
        ("data.prompt_dataset", "openai/gsm8k@main,{root}/data.jsonl"),
        ("ckpt.path", "{root}/checkpoints/new"),
        ("history.spill_dir", "{root}/spilled"),
        ("history.spill_dir", ""),
        ("emulate.profile", "{root}/data.jsonl"),
        ("emulate.profile", ""),
        ("latency.profile", "{root}/data.jsonl"),
        ("latency.profile", "auto"),
        ("latency.profile", "none"),
        ("tp_switch.profile", "auto"),
        ("tp_switch.profile", "{root}/data.jsonl"),
        ("drafting.model", ""),
    ],
)
def test_what_lies_below_the_roots_and_names_of_the_hub_pass(root: Path, field: str, value: str) -> None:
    group, name = field.split(".")
    check(spec(root, **{group: {name: value.format(root=root)}}), [root])


@pytest.mark.parametrize("model", ["/etc", "{root}/linked", "./model", "{root}/data.jsonl"])
def test_a_draft_model_is_a_model_below_the_roots(root: Path, model: str) -> None:
    drafting = {"source": "draft_model", "model": model.format(root=root)}
    assert set(faults(spec(root, drafting=drafting), root)) == {"arguments.drafting.model"}


def test_profiles_of_several_layouts_and_a_draft_model_pass(root: Path) -> None:
    several = {"sizes": "2,4", "profile": f"{root}/data.jsonl, {root}/within.py"}
    checked = check(spec(root, tp_switch=several, drafting={"source": "draft_model", "model": f"{root}/model"}), [root])
    found = resolved(checked, [root])
    assert found["tp_switch"]["profile"] == f"{root.resolve()}/data.jsonl,{root.resolve()}/reward.py"
    assert found["drafting"]["model"] == str((root / "model").resolve())


def test_resolved_follows_links(root: Path) -> None:
    arguments = check(spec(root, reward={"remote_url": str(root / "within.py")}), [root])
    assert resolved(arguments, [root])["reward"]["remote_url"] == str((root / "reward.py").resolve())
    (root / "within.py").unlink()
    (root / "within.py").symlink_to(root.parent / "outside" / "evil.py")
    with pytest.raises(ValueError, match="below one of the service's roots"):
        resolved(arguments, [root])


def test_gpus_are_counted_as_the_run_will(root: Path) -> None:
    one_each = {"actor": {"num_gpus_per_node": 1}, "ref": {"num_gpus_per_node": 1}, "critic": {"num_gpus_per_node": 1}}
    assert gpus_needed(check(spec(root, **one_each), [root])) == 2 + 1 + 1 + 1
    _, demo = from_command("rhyme demo")
    assert gpus_needed(check(demo, [])) == 3


def test_edits_change_add_and_take_back(root: Path) -> None:
    edited = merged(
        spec(root), {"vllm": {"num_engines": 4}, "reward": {"remote_url": None}, "run": {"progress": "off"}}
    )
    assert edited["vllm"] == {"num_engines": 4} and "reward" not in edited and edited["run"] == {"progress": "off"}


@pytest.mark.parametrize("name", ["", "-x", "a b", "../x", "a" * 101, "x\n", "$(id)"])
def test_names_are_plain(name: str) -> None:
    with pytest.raises(ValidationError):
        RunSpec(name=name)
