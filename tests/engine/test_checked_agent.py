"""An agent's error names its file and the prompt, and ends neither the engine's loop nor hides what engines raise."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.engine.checked_agent import OF_ENGINES, AgentError, CheckedAgent, executor_of
from rhyme_openrlhf.engine.checked_reward import CheckedExecutor


class Agent:
    def __init__(self, does: Any) -> None:
        self._does = does

    async def execute(self, prompt: str, **_: Any) -> Any:
        if isinstance(self._does, BaseException):
            raise self._does
        return self._does


def execute(does: Any) -> Any:
    async def run() -> Any:
        # In a task, as samples are: there asyncio would end the loop.
        return await asyncio.gather(CheckedAgent(Agent(does), "agent.py").execute("6*7=", label="42"))

    return asyncio.run(run())[0]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (KeyError("tool server said no"), "raised KeyError: 'tool server said no' for prompt '6*7='"),
        (SystemExit(3), "raised SystemExit: 3 for prompt '6*7='"),
        (KeyboardInterrupt(), "raised KeyboardInterrupt for prompt '6*7='"),
        (RuntimeError("first line\nsecond line"), "raised RuntimeError: first line for prompt '6*7='"),
    ],
)
def test_whatever_an_agent_raises_is_one_sentence(error: BaseException, says: str) -> None:
    with pytest.raises(AgentError) as found:
        execute(error)
    assert str(found.value) == f"the agent agent.py {says}"


@pytest.mark.parametrize("kind", OF_ENGINES)
def test_what_engines_raise_is_not_the_agents(kind: type[Exception]) -> None:
    with pytest.raises(kind, match="engine 0 is gone"):
        execute(kind("engine 0 is gone"))


def test_a_cancelled_sample_stays_cancelled() -> None:
    with pytest.raises(asyncio.CancelledError):
        execute(asyncio.CancelledError())


@pytest.mark.parametrize("returned", [None, 1.0, ["a response"]])
def test_a_response_is_a_dictionary(returned: Any) -> None:
    with pytest.raises(AgentError, match=r"agent.py returned .* for prompt '6\*7='"):
        execute(returned)
    assert execute({"prompt": "6*7="}) == {"prompt": "6*7="}


AGENT = """
from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, **_):
        return {"prompt": prompt, "reward": 2.0}
"""


def test_an_executor_outside_of_an_engine_is_the_one_inside(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from rhyme_openrlhf.engine.actor import PlainRolloutActor

    # What upstream's engine does, in its own words.
    words = " ".join(inspect.getsource(PlainRolloutActor.__init__).split())
    assert (
        "if agent_func_path: self.executor = _load_agent_executor(agent_func_path) "
        "else: self.executor = SingleTurnAgentExecutor(remote_rm_url)"
    ) in words
    assert type(executor_of(None, None, 1.0)) is CheckedExecutor
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    executor = executor_of(str(path), None, 1.0)
    assert isinstance(executor, CheckedAgent)
    assert asyncio.run(executor.execute("p")) == {"prompt": "p", "reward": 2.0}
