"""Parts of a real run that hang: the limit of what is under way ends it, and the newest checkpoint stays.

A process that is stopped (SIGSTOP) answers nothing and dies of nothing, so only the limits can end its run.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rhyme_openrlhf.telemetry.events import (
    RolloutProgress,
    RolloutStarted,
    RunFinished,
    RunStarted,
    StageStarted,
    SystemSample,
)
from tests.e2e.runs import RUN_TIMEOUT_S, FinishedRun, KilledRun, actors

pytestmark = pytest.mark.timeout(2 * RUN_TIMEOUT_S)

ENGINE, POLICY, TRAINER = "RhymeRolloutActor", "RhymePolicyModelActor", "RhymePPOTrainer"
# Longer than any start-up without an event on a busy machine, where stages and start-up have one limit.
ROLLOUT_S, STAGE_S = 30, 90
OPTIONS = (
    "--vllm.num_engines", "1", "--ckpt.save_steps", "1", "--train.num_episodes", "3", "--limits.sigterm_s", "5",
    "--limits.rollout_s", str(ROLLOUT_S), "--limits.stage_s", str(STAGE_S),
)  # fmt: skip
Start = Callable[..., KilledRun]

NEVER = """
import time


def reward_func(queries, prompts, labels):
    while True:
        try:
            time.sleep(3600)
        except BaseException:
            pass
"""
AGENT = """
import asyncio

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self):
        pass

    async def step(self, states, **_):
        await asyncio.sleep(3600)


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def stop_at(run: KilledRun, folder: Path, actor: str, stage: str) -> None:
    """Stop an actor's processes as soon as a stage of step 2 is recorded."""

    def begins(event: object) -> bool:
        if stage == "rollout":
            return isinstance(event, RolloutStarted) and event.step == 2
        return isinstance(event, StageStarted) and (event.step, event.stage) == (2, stage)

    run.wait_for(begins, f"the {stage} of step 2")
    stopped = actors(folder, actor)
    assert stopped
    for process in stopped:
        os.kill(process, signal.SIGSTOP)


def check_limit(ended: FinishedRun, waited_for: str, option: str, limit: int) -> None:
    """The last line says what was waited for, and that for no less than the limit; samples of the system flowed."""
    assert ended.code == 1, ended.output
    last = ended.output.strip().splitlines()[-1]
    said = re.match(r"rhyme train: failed: waited (\d+) s for (.*) without any progress; .*?(--limits\.\w+)", last)
    assert said and said[2] == waited_for and said[3] == f"--limits.{option}" and int(said[1]) >= limit, ended.output
    assert len(ended.of(SystemSample)) > 3


def check_saved(folder: Path, step: int = 1) -> None:
    assert (folder / "ckpt" / "_actor" / "latest").read_text() == f"global_step{step}"


def test_an_engine_that_hangs_in_a_rollout(start: Start, tmp_path: Path) -> None:
    run = start("run", *OPTIONS)
    stop_at(run, tmp_path, ENGINE, "rollout")
    ended = run.wait()
    check_limit(ended, "the rollout of step 2", "rollout_s", ROLLOUT_S)
    assert "engine 0 has not answered for" in ended.output.splitlines()[-1]
    check_saved(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("actor", "at", "waited_for"),
    [
        # Idle while samples are generated; the stage after needs it.
        (POLICY, "rollout", "the experience of step 2"),
        (POLICY, "train", "the training of step 2"),
        # Idle while the policy trains.
        (ENGINE, "train", "the weight sync of step 2"),
        (POLICY, "checkpoint", "the checkpoint of step 2"),
        (TRAINER, "train", "the training of step 2"),
    ],
)
def test_a_stage_that_hangs(start: Start, tmp_path: Path, actor: str, at: str, waited_for: str) -> None:
    run = start("run", *OPTIONS)
    stop_at(run, tmp_path, actor, at)
    check_limit(run.wait(), waited_for, "stage_s", STAGE_S)
    check_saved(tmp_path)


@pytest.mark.slow
def test_an_agent_that_hangs(start: Start, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    run = start("run", *OPTIONS, "--train.agent_func_path", str(agent))
    check_limit(run.wait(), "the rollout of step 1", "rollout_s", ROLLOUT_S)


@pytest.fixture
def silent_judge() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/reward"


@pytest.mark.slow
def test_a_judge_that_never_answers(start: Start, silent_judge: str) -> None:
    run = start("run", *OPTIONS, "--reward.remote_url", silent_judge)
    check_limit(run.wait(), "the rollout of step 1", "rollout_s", ROLLOUT_S)


@pytest.mark.slow
def test_sigterm_ends_a_run_whose_reward_swallows_everything(start: Start, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(NEVER)
    run = start("run", *OPTIONS, "--limits.rollout_s", "3600", "--reward.remote_url", str(reward))
    run.wait_for(lambda event: isinstance(event, RolloutProgress), "the rollout of step 1")
    time.sleep(5)
    run.terminate()
    asked = time.monotonic()
    ended = run.wait()
    print(f"ended {time.monotonic() - asked:.0f} s after SIGTERM")
    assert ended.code == 143 and "rhyme train: stopped: " in ended.output.splitlines()[-1], ended.output


@pytest.mark.slow
def test_sigterm_for_ray_too_while_a_run_starts(start: Start) -> None:
    """Without Ray's store a process that asks Ray waits, and Ray ends it after a minute."""
    run = start("run", *OPTIONS)
    run.wait_for(lambda event: isinstance(event, RunStarted), "the run to start")
    run.terminate(all_processes=True)
    ended = run.wait()
    assert ended.code == 143 and "rhyme train: stopped: ended by SIGTERM" in ended.output.splitlines()[-1], ended.output
    (finished,) = ended.of(RunFinished)
    assert finished.status == "stopped"
