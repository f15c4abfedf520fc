"""A user's agent (--train.agent_func_path), whose errors name it and the prompt and never end an actor's event loop.

asyncio ends the whole loop on SystemExit and KeyboardInterrupt of a task, and the run would wait for its samples.
An agent that hangs is ended by --limits.rollout_s.
"""

from __future__ import annotations

from typing import Any

from rhyme_openrlhf.engine.checked_reward import CheckedExecutor, RewardError, named, shown
from rhyme_openrlhf.engine_errors import EngineCallError, EngineCoreError, EngineLost, RefusedParameterError

# Not the agent's: what an engine tells the samples that it ran.
OF_ENGINES = (EngineCallError, EngineCoreError, EngineLost, RefusedParameterError, RewardError)


class AgentError(RuntimeError):
    """An agent failed; the message names its file, the prompt and what it raised."""


class CheckedAgent:
    """Upstream's executor interface around the executor of an agent file."""

    def __init__(self, executor: Any, path: str) -> None:
        self._executor = executor
        self._path = path

    async def execute(self, prompt: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the response, as the agent. Raises AgentError, and what engines raise."""
        try:
            response: dict[str, Any] = await self._executor.execute(prompt, *args, **kwargs)
        except OF_ENGINES:
            raise
        # A user's code may raise anything. CancelledError and GeneratorExit are asyncio's.
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise AgentError(f"the agent {self._path} raised {named(error)} for {shown(prompt)}") from error
        if not isinstance(response, dict):
            raise AgentError(
                f"the agent {self._path} returned {repr(response)[:60]} for {shown(prompt)}: it must be a dictionary "
                "like that of OpenRLHF's executors"
            )
        return response


def executor_of(agent: str | None, reward: Any, limit_s: float) -> CheckedAgent | CheckedExecutor:
    """Return the executor of a run's samples, as OpenRLHF's engine actor chooses it (`trainer/ray/vllm_engine.py`).

    `agent`: --train.agent_func_path; `reward`: --reward.remote_url; `limit_s`: --limits.reward_s.
    """
    if not agent:
        return CheckedExecutor(reward, limit_s)
    from openrlhf.trainer.ray.vllm_engine import _load_agent_executor

    return CheckedAgent(_load_agent_executor(agent), agent)
