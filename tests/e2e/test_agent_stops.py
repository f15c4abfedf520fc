"""An agent that stops at a string in three rounds: the same is trained with drafts and without."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.telemetry.events import EngineStep, TrainStep
from tests.e2e.runs import RUN_TIMEOUT_S, SAME_LOG_PROBABILITY, Train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * RUN_TIMEOUT_S)]

# Greedy, because drafts decide which random numbers a sample draws. A reward that differs from prompt to prompt.
AGENT = """
import json

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.round = 0

    async def step(self, states, **_):
        self.round += 1
        reward = torch.tensor(float(len(states["action_text"]) % 5))
        return {{
            "rewards": reward, "scores": reward, "environment_feedback": "" if self.round == 3 else ",",
            "done": self.round == 3, "sampling_params": states["sampling_params"], "extra_logs": {{}},
        }}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        parameters = sampling_params.clone()
        parameters.temperature, parameters.logprobs, parameters.stop = 0, 1, [";"]
        parameters.output_text_buffer_length = 0
        response = await super().execute(prompt, label, parameters, max_length, hf_tokenizer, llm_engine, images)
        noted = [response[name] for name in ("observation_tokens", "action_ranges", "rollout_log_probs")]
        with open({path!r}, "a") as file:
            file.write(json.dumps([prompt, *noted]) + "\\n")
        return response
"""


def test_three_rounds_that_stop_at_a_string_train_the_same_with_drafts_and_without(
    train: Train, tmp_path: Path
) -> None:
    def run(name: str, *options: str) -> tuple[Any, dict[str, list[Any]]]:
        path, agent = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.py"
        agent.write_text(AGENT.format(path=str(path)))
        done = train(
            "--train.agent_func_path", str(agent), "--algo.advantage.estimator", "reinforce", "--vllm.num_engines", "1",
            "--ckpt.path", str(tmp_path / f"{name}-ckpt"), *options, name=name,
        )  # fmt: skip
        assert done.code == 0, done.output
        responses = defaultdict(list)
        for prompt, *noted in map(json.loads, path.read_text().splitlines()):
            responses[prompt].append(noted)
        return done, responses

    plain, expected = run("plain", "--no-histospec.enable")
    drafted, found = run("drafted")
    assert sum(event.counters.accepted for event in drafted.of(EngineStep)) > 100
    assert found.keys() == expected.keys()
    rounds = 0
    for prompt, samples in expected.items():
        for (tokens, ranges, log_probs), (others, other_ranges, other_log_probs) in zip(
            samples, found[prompt], strict=True
        ):
            assert (others, other_ranges) == (tokens, ranges)
            assert other_log_probs == pytest.approx(log_probs, abs=SAME_LOG_PROBABILITY)
            rounds += len(ranges)
    assert rounds > 2 * sum(map(len, expected.values()))
    losses = [[event.metrics["policy_loss"] for event in run.of(TrainStep)] for run in (plain, drafted)]
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-3, abs=1e-6) and any(losses[0])
