"""OpenRLHF's single-turn executor, whose reward must come, in time, and be a number.

Upstream logs an error of the reward function and goes on without a reward, waits for ever for one that hangs, and
trains on NaN. Checked against OpenRLHF 0.11.2 `utils/agent.py`.

Invariant: a sample leaves with a finite reward, or generating it fails with a RewardError that names the reward
function and the prompt. What a right reward function returns is not changed.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from openrlhf.utils.agent import SingleTurnAgentExecutor

# As much of a prompt as tells it from others, on one line.
SHOWN_PROMPT = 60

_failure: ContextVar[list[str]] = ContextVar("reward_failure")
# Called in the thread that runs a reward function, when it starts to.
_begin: ContextVar[Callable[[], object]] = ContextVar("reward_begin")


class RewardError(RuntimeError):
    """A sample has no usable reward; the message names the reward function, the prompt, and what to do."""


class CheckedExecutor(SingleTurnAgentExecutor):
    """Generates one response and has it rewarded within `limit_s` seconds.

    A reward function's clock starts when the function does: upstream runs it in one of asyncio's few threads, and
    waiting for a thread while others use them is no fault. (One that never gives its thread back meets its own limit.)
    """

    def __init__(self, remote_rm_url: Any, limit_s: float) -> None:
        super().__init__(remote_rm_url)
        self._limit_s = limit_s
        # Upstream leaves it None where the reward comes from elsewhere than a Python function.
        self.reward_func: Any = self.reward_func and announced(self.reward_func)

    async def execute(self, prompt: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The response, as upstream. Raises RewardError."""
        failures: list[str] = []
        # Each sample runs in an asyncio task, so in a context of its own.
        _failure.set(failures)
        output: dict[str, Any] = await super().execute(prompt, *args, **kwargs)
        if not failures and self.reward_endpoints and output["reward"] is None:
            failures.append("returned no 'rewards'")
        if failures:
            raise RewardError(f"the reward function {self.reward_endpoints[0]} {failures[0]} for {shown(prompt)}")
        return output

    async def _fetch_rewards_via_func(self, *args: Any) -> Any:
        loop, limit = asyncio.get_running_loop(), asyncio.timeout(None)

        def start_clock() -> None:
            if not finished:
                limit.reschedule(loop.time() + self._limit_s)

        _begin.set(lambda: loop.call_soon_threadsafe(start_clock))
        finished = False
        try:
            return await self._limited(super()._fetch_rewards_via_func(*args), limit)
        finally:
            finished = True

    async def _fetch_rewards_via_http(self, *args: Any) -> Any:
        return await self._limited(super()._fetch_rewards_via_http(*args), asyncio.timeout(self._limit_s))

    async def _limited(self, rewards: Awaitable[Any], limit: asyncio.Timeout) -> Any:
        try:
            async with limit:
                return await rewards
        except Exception as error:  # a user's code may raise anything; upstream would go on without a reward
            late = f"did not answer within {self._limit_s:g} s (--limits.reward_s)"
            _failure.get().append(late if limit.expired() else f"raised {type(error).__name__}: {error}")
            raise


def announced(reward_func: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which says in its thread when it starts."""

    @functools.wraps(reward_func)
    def call(*args: Any, **kwargs: Any) -> Any:
        _begin.get()()
        return reward_func(*args, **kwargs)

    return call


def check_finite(response: dict[str, Any]) -> None:
    """Raise RewardError if a response's reward or score is not a finite number (None: a model rewards it later)."""
    for field in ("reward", "scores"):
        value = response[field]
        if value is None:
            continue
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise RewardError(
                f"the reward ({field}) for {shown(response['prompt'])} is {value!r}: it must be one number"
            ) from None
        if not math.isfinite(number):
            raise RewardError(
                f"the reward ({field}) for {shown(response['prompt'])} is {number}: it must be a finite number"
            )


def shown(prompt: str) -> str:
    """The prompt as messages show it."""
    line = " ".join(prompt.split())
    return f"prompt {line[:SHOWN_PROMPT]!r}" + ("..." if len(line) > SHOWN_PROMPT else "")
