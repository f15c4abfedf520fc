"""What a run records of its start: everything but its secrets, which the run itself still has."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openrlhf")

from rhyme_openrlhf.config import RhymeSettings
from rhyme_openrlhf.training import launch

SECRET = "hunter2secret"


def test_neither_the_record_nor_the_first_event_has_a_secret() -> None:
    args: Any = SimpleNamespace(
        logger=SimpleNamespace(wandb=SimpleNamespace(key=SECRET)),
        data=SimpleNamespace(input_key="question"),
        vllm=SimpleNamespace(num_engines=1, tensor_parallel_size=1),
        train=SimpleNamespace(num_episodes=1, async_enable=False),
        rollout=SimpleNamespace(batch_size=1, n_samples_per_prompt=1),
    )
    command = ["rhyme", "train", f"--logger.wandb.key={SECRET}", "--data.input_key", "question"]
    job = SimpleNamespace(args=args, settings=RhymeSettings(), command=command)
    recorded = launch._config(job)  # type: ignore[arg-type]
    event = launch._run_started(job, SimpleNamespace(steps_per_epoch=1))  # type: ignore[arg-type]
    assert SECRET not in json.dumps(recorded) and SECRET not in str(event)
    assert recorded["arguments"]["data"]["input_key"] == "question"
    assert recorded["command"] == event.command == ["rhyme", "train", "--logger.wandb.key=***", *command[3:]]
    assert args.logger.wandb.key == SECRET
