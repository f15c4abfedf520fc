"""Templates say what `examples/`, the demo and `rhyme fetch-model` say."""

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from rhyme_openrlhf.api.launch.spec import Arguments, SpecError, check, gpus_needed, merged
from rhyme_openrlhf.api.launch.spec_command import from_argv, from_command
from rhyme_openrlhf.cli.fetch_model import training_command
from rhyme_openrlhf.webui.new_run.templates import SMOLLM2_FOLDER, templates
from tests import nvml

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPTS = {
    "grpo": "grpo_qwen3_8b_8gpu.sh",
    "ppo": "ppo_critic_16gpu.sh",
    "async": "async_partial_rollout.sh",
}
# What the scripts leave to the user, and what the service sets.
USERS = {("data", "prompt_dataset"), ("reward", "remote_url"), ("ckpt", "path"), ("ckpt", "output_dir"), ("run", "dir")}


def options_of_script(script: Path, tmp_path: Path) -> Arguments:
    """The script's options, as the programs at its end get them."""
    for program in ("python", "ray"):
        stub = tmp_path / program
        stub.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@"\n')
        stub.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "DATA": "D",
        "REWARD": "R",
        "REWARD_MODEL": "M",
        "OUTPUT": "O",
    }
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=True, env=environment)
    words = done.stdout.split("\0")[:-1]
    first = next(i for i, word in enumerate(words) if word.endswith("train_ppo_ray")) + 1
    _, arguments = from_argv(words[first:])
    return arguments


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_template_is_its_example(name: str, tmp_path: Path) -> None:
    said = options_of_script(EXAMPLES / SCRIPTS[name], tmp_path)
    template = templates([tmp_path])[name].arguments
    left = {
        (group, option): value
        for group, values in said.items()
        for option, value in values.items()
        if (group, option) not in USERS and value not in ("M",)
    }
    assert {(g, o): value for g, values in template.items() for o, value in values.items()} == left


def test_smollm2_is_what_fetch_model_prints(tmp_path: Path) -> None:
    folder = tmp_path / SMOLLM2_FOLDER
    name, said = from_command(training_command(folder))
    assert templates([tmp_path])["smollm2"].arguments == said and name == "smollm2"


def test_smollm2_is_looked_for_below_every_root(tmp_path: Path) -> None:
    there = tmp_path / "b" / SMOLLM2_FOLDER
    there.mkdir(parents=True)
    found = templates([tmp_path / "a", tmp_path / "b"])["smollm2"]
    assert found.arguments["actor"]["model_name_or_path"] == str(there) and str(there) in found.needs


@pytest.mark.parametrize("name, gpus", [("demo", 3), ("grpo", 8), ("ppo", 16), ("async", 8)])
def test_a_template_can_be_started_with_data_and_reward(name: str, gpus: int, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("")
    own = {"data": {"prompt_dataset": "openai/gsm8k"}, "reward": {"remote_url": str(reward)}}
    if name == "ppo":
        own["reward"] = {"model_name_or_path": "org/name"}
    given = templates([tmp_path])[name].arguments
    assert gpus_needed(check(given if name == "demo" else merged(given, own), [tmp_path])) == gpus


def test_the_demo_shares_the_one_gpu_of_a_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml.install(monkeypatch, tmp_path)
    found = templates([tmp_path])["demo"].arguments
    assert found["train"]["colocate_all"] and gpus_needed(check(found, [tmp_path])) == 1


@pytest.mark.parametrize("name", ["grpo", "ppo", "async"])
def test_what_is_missing_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        check(templates([tmp_path])[name].arguments, [tmp_path])
    missing = {"arguments.data.prompt_dataset", "arguments.reward.remote_url"}
    assert {fault.field for fault in caught.value.faults} == missing
