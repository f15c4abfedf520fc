"""OpenRLHF's single-turn executor, whose reward must come, in time, and be a number.

Upstream logs an error of the reward function and goes on without a reward, waits for ever for one that hangs, and
trains on NaN. Checked against OpenRLHF 0.11.2 `utils/agent.py`.

Invariant: a sample leaves with a finite reward, or generating it fails with a RewardError that names the reward
function and the prompt. What a right reward function returns is not changed.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextvars import ContextVar
from typing import Any

from openrlhf.utils.agent import SingleTurnAgentExecutor

# As much of a prompt as tells it from others, on one line.
SHOWN_PROMPT = 60
# How often a reward function is asked for the reward of a response. OpenRLHF asks a server five times by itself.
ATTEMPTS = 2


class RewardError(RuntimeError):
    """A sample has no usable reward; the message names the reward function, the prompt, and what to do."""


class RewardLateError(RewardError):
    """A reward that did not come in time, also when it was asked for again; the streaming pipeline does without it."""


class _LateError(TimeoutError):
    """A reward function was given up. (Its own code may raise TimeoutError.)"""


_failure: ContextVar[list[RewardError]] = ContextVar("reward_failure")


class CheckedExecutor(SingleTurnAgentExecutor):
    """Generates one response and has it rewarded within `limit_s` seconds.

    A reward function's clock starts when the function does: upstream runs it in one of asyncio's few threads, and
    waiting for a thread while others use them is no fault. One that hangs keeps a thread of its own, none of those.
    """

    def __init__(self, remote_rm_url: Any, limit_s: float) -> None:
        super().__init__(remote_rm_url)
        self._limit_s = limit_s
        # Upstream leaves it None where the reward comes from elsewhere than a Python function.
        self.reward_func: Any = self.reward_func and given_up_after(limit_s, self.reward_func)

    async def execute(self, prompt: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the response, as upstream. Raises RewardError."""
        failures: list[RewardError] = []
        # Each sample runs in an asyncio task, so in a context of its own.
        _failure.set(failures)
        output: dict[str, Any] = await super().execute(prompt, *args, **kwargs)
        if not failures and self.reward_endpoints and output["reward"] is None:
            failures.append(RewardError("returned no 'rewards'"))
        if failures:
            raise type(failures[0])(f"the reward function {self.reward_endpoints[0]} {failures[0]} for {shown(prompt)}")
        return output

    async def _fetch_rewards_via_func(self, *args: Any) -> Any:
        return await self._noted(super()._fetch_rewards_via_func(*args), asyncio.timeout(None))

    async def _fetch_rewards_via_http(self, *args: Any) -> Any:
        return await self._noted(super()._fetch_rewards_via_http(*args), asyncio.timeout(self._limit_s))

    async def _noted(self, rewards: Awaitable[Any], limit: asyncio.Timeout) -> Any:
        try:
            async with limit:
                return await rewards
        except Exception as error:  # a user's code may raise anything; upstream would go on without a reward
            if limit.expired() or isinstance(error, _LateError):
                late = f"did not answer within {self._limit_s:g} s (--limits.reward_s)"
                _failure.get().append(RewardLateError(late))
            else:
                _failure.get().append(RewardError(f"raised {type(error).__name__}: {error}"))
            raise


def given_up_after(limit_s: float, reward_func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function with a limit: after `limit_s` seconds it is asked again, for the same response.

    The first answer counts. After as long once more it raises _LateError and leaves the hanging calls behind.
    """

    @functools.wraps(reward_func)
    def call(*args: Any, **kwargs: Any) -> Any:
        answers = []
        for _ in range(ATTEMPTS):
            thread = ThreadPoolExecutor(1, "reward")
            answers.append(thread.submit(contextvars.copy_context().run, reward_func, *args, **kwargs))
            thread.shutdown(wait=False)
            done, _ = wait(answers, limit_s, FIRST_COMPLETED)
            if done:
                return done.pop().result()
        raise _LateError

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
    """Return the prompt as messages show it."""
    line = " ".join(prompt.split())
    return f"prompt {line[:SHOWN_PROMPT]!r}" + ("..." if len(line) > SHOWN_PROMPT else "")
