"""Agents of a run whose samples move run in a front: two rounds each; and one that ends its process ends the run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rhyme_openrlhf.telemetry.events import ProcessDied, RolloutFinished, RunFinished
from tests.e2e.runs import RUN_TIMEOUT_S, FinishedRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * RUN_TIMEOUT_S)]

# Notes its process and the tokenizer's identity; in round `ends`, if there is one, it ends its process.
AGENT = """
import os

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.round = 0

    async def step(self, states, **_):
        self.round += 1
        if self.round == {ends}:
            os._exit(3)
        reward = torch.tensor(float(len(states["action_text"]) % 5))
        return {{
            "rewards": reward, "scores": reward, "environment_feedback": ",", "done": self.round == 2,
            "sampling_params": states["sampling_params"], "extra_logs": {{}},
        }}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        response = await super().execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images)
        with open({path!r}, "a") as file:
            file.write(f"{{os.getpid()}} {{id(hf_tokenizer)}} {{len(response['action_ranges'])}}\\n")
        return response
"""
OPTIONS = (
    "--vllm.num_engines", "2", "--no-histospec.enable", "--move.enable", "--algo.advantage.estimator", "reinforce",
)  # fmt: skip


def test_agents_run_in_one_front_with_one_tokenizer(train: Callable[..., FinishedRun], tmp_path: Path) -> None:
    path, agent = tmp_path / "noted", tmp_path / "agent.py"
    agent.write_text(AGENT.format(path=str(path), ends=0))
    run = train(*OPTIONS, "--train.agent_func_path", str(agent))
    assert run.code == 0, run.output
    assert [event.samples for event in run.of(RolloutFinished)] == [16] * 4
    noted = [line.split() for line in path.read_text().splitlines()]
    assert len(noted) == 64 and len({(process, tokenizer) for process, tokenizer, _ in noted}) == 1
    assert max(int(rounds) for *_, rounds in noted) == 2


def test_an_agent_that_ends_its_process_ends_the_run_with_one_sentence(
    train: Callable[..., FinishedRun], tmp_path: Path
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT.format(path=os.devnull, ends=1))
    run = train(*OPTIONS, "--train.agent_func_path", str(agent))
    assert run.code != 0
    (finished,) = run.of(RunFinished)
    assert finished.status == "failed" and "the last process that runs its agent and rewards" in finished.message
    assert [event.name for event in run.of(ProcessDied)][0] == "front of samples"
